"""Read the header of a model file: `python -m cflow.engine.worker.read_header PATH`.

Writes a ModelHeader or a HeaderError to stdout, as msgpack.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cflow.engine.base.errors import EngineError
from cflow.engine.base.model_header import HeaderError, ModelHeader, encode_header
from cflow.engine.native import Model, const
from cflow.engine.text.jail import ignore_signals


def header_of(model: Model) -> ModelHeader:
    layers = model.layers
    return ModelHeader(
        path=model.path,
        digest=model.digest,
        context=model.header.context,
        created=int(Path(model.path).stat().st_mtime),
        vocab_size=model.header.vocab_size,
        n_layers=len(layers),
        n_experts=max((layer.n_experts for layer in layers), default=0),
        top_k=max((layer.top_k for layer in layers), default=0),
        bytes_per_token=model.plan.bytes_per_token,
        metadata_json=model.section(const.SectionId.METADATA),
        tokenizer_json=model.section(const.SectionId.TOKENIZER),
        token_table=model.section(const.SectionId.TOKEN_BYTES),
    )


def main(path: str) -> None:
    ignore_signals()
    message: ModelHeader | HeaderError
    try:
        message = header_of(Model(path, header_only=True))
    except EngineError as error:
        message = HeaderError(error.code, str(error))
    sys.stdout.buffer.write(encode_header(message))


if __name__ == "__main__":
    main(sys.argv[1])
