"""What is known of a model before it is loaded: read from its file's header."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.metadata import Metadata, parse_metadata
from cflow.engine.memory.capacity import check_context
from cflow.engine.native import Model, const
from cflow.engine.text.dialect import Dialect
from cflow.engine.text.grammar import GrammarChecker
from cflow.engine.text.template import ChatTemplate
from cflow.engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelCard:
    name: str  # as clients call it
    path: str
    digest: str  # of the file
    context: int  # positions a sequence may have; the worker may have to lower it
    n_params: int
    created: int  # of the file, in seconds since 1970
    metadata: dict[str, Any]
    tokenizer: Tokenizer
    template: ChatTemplate | None
    dialect: Dialect
    grammars: GrammarChecker
    vocab_size: int
    n_layers: int
    n_experts: int  # of a layer
    top_k: int
    bytes_per_token: int  # of weights


def read_card(config: EngineConfig) -> ModelCard:
    """ModelError if the file cannot be used, EngineError if the config asks too much of it."""
    model = Model(config.model, header_only=True)
    header, layers, metadata = model.header, model.layers, model.metadata
    known = parse_metadata(metadata, header.n_tokens)
    tokenizer = Tokenizer(model.section(const.SectionId.TOKENIZER), model.token_bytes, metadata)
    n_params = metadata.get("parameters")
    return ModelCard(
        name=config.served_name or known.name,
        path=config.model,
        digest=model.digest,
        context=check_context(config, header.context),
        n_params=n_params if isinstance(n_params, int) else 0,
        created=int(Path(config.model).stat().st_mtime),
        metadata=metadata,
        tokenizer=tokenizer,
        template=_template(known, tokenizer),
        dialect=Dialect.of(known.chat_template or ""),
        grammars=GrammarChecker(config.model),
        vocab_size=header.vocab_size,
        n_layers=len(layers),
        n_experts=max((layer.n_experts for layer in layers), default=0),
        top_k=max((layer.top_k for layer in layers), default=0),
        bytes_per_token=model.plan.bytes_per_token,
    )


def _template(known: Metadata, tokenizer: Tokenizer) -> ChatTemplate | None:
    if known.chat_template is None:
        return None
    names = {"bos_token": known.bos_id, "eos_token": next(iter(known.eos_ids), None)}
    special = {
        name: tokenizer.token_bytes(id).decode(errors="replace")
        for name, id in names.items()
        if id is not None
    }
    return ChatTemplate(known.chat_template, special)
