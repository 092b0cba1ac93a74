"""What is known of a model before it is loaded, read from its file by a process that may crash."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import msgspec

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import EngineError, ModelError
from cflow.engine.base.metadata import Metadata, parse_metadata
from cflow.engine.base.model_header import HeaderError, ModelHeader, decode_header
from cflow.engine.client.worker_process import describe_exit
from cflow.engine.text.dialect import Dialect
from cflow.engine.text.grammar import GrammarChecker
from cflow.engine.text.probes import dialect_of
from cflow.engine.text.template import ChatTemplate
from cflow.engine.text.tokenizer import Tokenizer

READER = (sys.executable, "-P", "-m", "cflow.engine.worker.read_header")


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Facts of a model. created: time of the file, Unix seconds. n_experts, top_k: of a layer."""

    name: str  # for clients
    path: str
    digest: str  # of the file
    context: int  # positions of a sequence; the worker may have to lower it
    trained_context: int  # the model's own limit
    n_params: int
    created: int
    metadata: dict[str, Any]
    tokenizer: Tokenizer
    template: ChatTemplate | None
    dialect: Dialect
    grammars: GrammarChecker
    vocab_size: int
    n_layers: int
    n_experts: int
    top_k: int
    bytes_per_token: int  # weights read for one token
    pooling: Literal["last", "mean"] | None = None  # None: the model is not for embeddings
    normalise: bool = False  # embeddings have length 1
    end_id: int | None = None  # behind a text to embed
    tool_card: ModelCard | None = None  # see for_tools

    @property
    def for_tools(self) -> ModelCard:
        """The card for requests with tools, for which some models have a template of their own."""
        return self.tool_card or self

    def close(self) -> None:
        """End the processes of templates and grammars."""
        self.grammars.close()
        for card in (self, self.tool_card):
            if card is not None and card.template is not None:
                card.template.close()


def read_card(config: EngineConfig) -> ModelCard:
    """Read the card of config.model.

    Raises ModelError if the file cannot be used, EngineError if the config does not fit the model.
    """
    header = read_header(config.model)
    metadata = header.metadata
    known = parse_metadata(metadata, len(header.token_bytes))
    tokenizer = Tokenizer.of(header)
    n_params = metadata.get("parameters")
    card = ModelCard(
        name=config.served_name or known.name,
        path=config.model,
        digest=header.digest,
        context=config.check_context(header.context),
        trained_context=header.context,
        n_params=n_params if isinstance(n_params, int) else 0,
        created=header.created,
        metadata=metadata,
        tokenizer=tokenizer,
        template=(template := _template(known.chat_template, known, tokenizer)),
        dialect=_dialect(template),
        grammars=GrammarChecker(header),
        vocab_size=header.vocab_size,
        n_layers=header.n_layers,
        n_experts=header.n_experts,
        top_k=header.top_k,
        bytes_per_token=header.bytes_per_token,
        pooling=cast('Literal["last", "mean"] | None', known.pooling),
        normalise=known.normalise,
        end_id=known.end_id,
    )
    if (source := known.tool_template) is None:
        return card
    tool_template = _template(source, known, tokenizer)
    tool_card = replace(card, template=tool_template, dialect=_dialect(tool_template))
    return replace(card, tool_card=tool_card)


def read_header(path: str) -> ModelHeader:
    """The header of a model file. Raises EngineError, also if the reading process dies."""
    try:
        done = subprocess.run((*READER, path), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    except OSError as error:
        raise EngineError(
            "internal", f"the process that reads {path} cannot be started: {error.strerror}"
        ) from error
    if done.returncode:
        how = describe_exit(done.returncode)
        raise ModelError(f"{path}: the process that reads its header died ({how})")
    try:
        message = decode_header(done.stdout)
    except msgspec.DecodeError as error:
        raise ModelError(f"{path}: its header was not read completely: {error}") from error
    if isinstance(message, HeaderError):
        kind = ModelError(message.message)
        raise kind if message.code == kind.code else EngineError(message.code, message.message)
    return message


def _dialect(template: ChatTemplate | None) -> Dialect:
    return Dialect() if template is None else dialect_of(template)


def _template(source: str | None, known: Metadata, tokenizer: Tokenizer) -> ChatTemplate | None:
    if source is None:
        return None
    names = {"bos_token": known.bos_id, "eos_token": next(iter(known.eos_ids), None)}
    special = {
        name: tokenizer.token_bytes(id).decode(errors="replace")
        for name, id in names.items()
        if id is not None
    }
    return ChatTemplate(source, special)
