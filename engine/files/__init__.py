"""Model files: finding, downloading, converting, writing and describing them.

Only this room knows foreign formats and architectures by name. What it writes, a .cflow or .vflow
file, is all that the other rooms and the C library read. Imports: native, base.

    hub        a reference (name, path, hf:org/repo) becomes a model file
    catalogue  models known by name: where they come from, their checksums
    convert    GGUF files and Hugging Face folders into model files
    synth      models of a given shape with random weights
    target     the encoding and order that a file is written in, checked before a download
    inspect    describes a model file and checks that it is complete
    formats/   reading and writing files: GGUF, safetensors, .cflow, tiles, quantisation
    models/    what architectures and vocabularies mean, by family
"""
