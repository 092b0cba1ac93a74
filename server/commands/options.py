"""The engine's flags, written once and the same on every command that runs a model."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from cflow.engine.base.config import EngineConfig
from cflow.server.config import engine_config, gather_settings

Command = Callable[..., None]


def _flag(name: str, text: str) -> Any:
    return typer.Option(f"--{name}", help=text, rich_help_panel="Engine", show_default=False)


ENGINE_FLAGS: dict[str, Any] = {
    "threads": Annotated[
        int | None, _flag("threads", "Compute threads; default: what cores and cgroup allow.")
    ],
    "context": Annotated[
        int | None, _flag("context", "Positions a sequence can have; default: the model's own.")
    ],
    "kv_memory": Annotated[
        str | None, _flag("kv-memory", "Memory for keys and values, such as 2GiB.")
    ],
    "kv": Annotated[str | None, _flag("kv", "How they are stored: f16, f32, bf16 or q8.")],
    "precision": Annotated[
        str | None, _flag("precision", "int8 activations, or f32 throughout for debugging.")
    ],
    "expert_cache": Annotated[
        str | None,
        _flag(
            "expert-cache",
            "Memory for experts, such as 8GiB or 25% of them, the others are read from the file as "
            "they are wanted. Default: all if they fit, or else what fits.",
        ),
    ],
    "weights_memory": Annotated[
        str | None,
        _flag(
            "weights-memory",
            "Memory for layers, such as 8GiB or 25% of them, the others are read from the file in "
            "every step: slow, but a dense model may be larger than memory. Default: all.",
        ),
    ],
    "expert_io": Annotated[
        str | None,
        _flag("expert-io", "How both are read: direct, or cached in the kernel's page cache."),
    ],
    "defer_experts": Annotated[
        int | None,
        _flag(
            "defer-experts",
            "So many of a token's experts, those with the least weight, join a layer late: their "
            "reads have longer, and answers change. Default: 0.",
        ),
    ],
    "expert_reads": Annotated[
        int | None, _flag("expert-reads", "Reads of both in flight at most. Default: 3.")
    ],
    "expert_read_rate": Annotated[
        str | None,
        _flag("expert-read-rate", "Bytes a second they may read, such as 500M. Default: no bound."),
    ],
    "speculation": Annotated[
        str | None,
        _flag(
            "speculation",
            "ngram: tokens guessed from what an answer and its prompt repeat are checked several in a "
            "step where that is faster; answers do not change. Or off. Default: ngram.",
        ),
    ],
    "isa": Annotated[
        str | None, _flag("isa", "Force an instruction set: scalar, avx2 or avx512vnni.")
    ],
}


def engine_flags(*names: str) -> Callable[[Command], Command]:
    """Adds engine flags (none named: all) to a command that takes them as one dict, `engine`."""

    def decorate(command: Command) -> Command:
        chosen = {name: ENGINE_FLAGS[name] for name in names or ENGINE_FLAGS}
        hints = get_type_hints(command, include_extras=True)
        own = [
            p.replace(annotation=hints[name])
            for name, p in inspect.signature(command).parameters.items()
            if name != "engine"
        ]
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in chosen.items()
        ]

        def wrapper(**arguments: Any) -> None:
            engine = {name: arguments.pop(name) for name in chosen}
            command(**arguments, engine=engine)

        wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
        parameters = sorted([*own, *added], key=lambda p: p.kind)
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def read_settings(file: Path | None, flags: dict[str, Any]) -> dict[str, Any]:
    return gather_settings(file, os.environ, flags)


def read_engine(model: str, flags: dict[str, Any]) -> EngineConfig:
    """The engine's settings of a command without a config file."""
    return replace(engine_config(read_settings(None, flags)), model=model)
