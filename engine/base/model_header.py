"""What the front end knows of a model before it is loaded: the header of its file.

`engine.worker.read_header` reads it with the C library in a process of its own, so that a file that
crashes the reader does not take the server down. It crosses to the front end, and on to the process
that checks grammars, as msgpack.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from cflow.engine.base.errors import ModelError
from cflow.engine.base.native_types import TokenBytes


class ModelHeader(msgspec.Struct, frozen=True, kw_only=True, tag="header"):
    """digest: identifies the file. created: seconds since 1970. n_experts, top_k: of a layer.
    bytes_per_token: weights read for one token. The last three fields are sections of the file
    (docs/format.md)."""

    path: str
    digest: str
    context: int
    created: int
    vocab_size: int
    n_layers: int
    n_experts: int
    top_k: int
    bytes_per_token: int
    metadata_json: bytes
    tokenizer_json: bytes
    token_table: bytes

    @property
    def metadata(self) -> dict[str, Any]:
        return parse_metadata_json(self.path, self.metadata_json)

    @property
    def token_bytes(self) -> TokenBytes:
        return TokenBytes.parse(self.token_table)


class HeaderError(msgspec.Struct, frozen=True, tag="error"):
    """Why the header could not be read: an EngineError's code and text."""

    code: str
    message: str


encode_header = msgspec.msgpack.Encoder().encode
decode_header = msgspec.msgpack.Decoder(ModelHeader | HeaderError).decode


def parse_metadata_json(path: str, section: bytes) -> dict[str, Any]:
    """The metadata section as an object. Raises ModelError."""
    try:
        metadata = json.loads(section)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: the metadata is not JSON: {error}") from error
    if not isinstance(metadata, dict):
        raise ModelError(f"{path}: the metadata is not a JSON object")
    return metadata
