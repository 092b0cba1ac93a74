"""The lab: trains pipeline-native models and measures what their delays and our engine are worth.

It sits on top of the other rooms of `cflow.engine` and nothing imports it but the command `cflow lab`.
Training needs the extra `lab` (PyTorch, matplotlib).

Training
    arms.py           sizes, arms and training settings, without PyTorch
    architectures.py  the models in PyTorch
    corpus.py         text, its tokenizer, and batches
    train.py          every run of a configuration, resumable
    curves.py         training as pictures
    export.py         a trained model as a Hugging Face folder, for `cflow convert`
    bundle.py         the bundled model `tinystories` from a trained run

Measuring
    claims.py         docs/claims.md: each claim of the published design beside our figures
    committed.py      claims that rest on committed figures
    page.py           the layout of that page
    measurements.py   figures taken on the spot
    storage.py        layers from disk, in both orders of the file
    overlap/          compute beside reads of experts from disk
    results.py        the files of docs/results

    errors.py         LabError
"""
