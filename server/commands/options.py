"""The engine's flags, the same on every command that runs a model."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from cflow.engine.base.config import EngineConfig
from cflow.server.config import engine_config, gather_settings

Command = Callable[..., None]


def _flag(name: str, text: str) -> Any:
    return typer.Option(f"--{name}", help=text, show_default=False)


ENGINE_FLAGS: dict[str, Any] = {
    "threads": Annotated[
        int | None,
        _flag(
            "threads",
            "Compute threads. Default: one for each physical core that affinity and cgroup quota allow.",
        ),
    ],
    "context": Annotated[
        int | None,
        _flag(
            "context",
            "Longest sequence in tokens, prompt and answer together. Default: the model's own limit, "
            "or what --kv-memory holds if that is less.",
        ),
    ],
    "kv_memory": Annotated[
        str | None,
        _flag(
            "kv-memory",
            "Memory for keys and values in bytes, as in 2GiB. Default: four full contexts, but at "
            "most a quarter of the available memory.",
        ),
    ],
    "kv": Annotated[
        str | None,
        _flag(
            "kv",
            "Type of keys and values: f16, f32, bf16, or q8 (half the memory of f16, slightly less "
            "accurate). Default: f16.",
        ),
    ],
    "precision": Annotated[
        str | None,
        _flag(
            "precision", "Type of activations: int8, or f32 (slow, for debugging). Default: int8."
        ),
    ],
    "expert_cache": Annotated[
        str | None,
        _flag(
            "expert-cache",
            "Memory for experts, as in 8GiB, or a share of them, as in 25%. The rest are read from the "
            "file when a token needs them. Default: all experts, or as many as fit.",
        ),
    ],
    "weights_memory": Annotated[
        str | None,
        _flag(
            "weights-memory",
            "Memory for layers, as in 8GiB, or a share of them, as in 25%. The rest are read from the "
            "file in every step, which is slow but runs models larger than memory. Default: all "
            "layers.",
        ),
    ],
    "expert_io": Annotated[
        str | None,
        _flag(
            "expert-io",
            "How experts and layers are read: direct (bypassing the page cache) or cached. Default: "
            "direct.",
        ),
    ],
    "defer_experts": Annotated[
        int | None,
        _flag(
            "defer-experts",
            "Add the N lowest-weighted experts of each token one layer late, giving their reads more "
            "time. Changes the output. Default: 0.",
        ),
    ],
    "expert_reads": Annotated[
        int | None,
        _flag(
            "expert-reads",
            "Most reads of experts and layers in flight at the same time. Default: 3.",
        ),
    ],
    "expert_read_rate": Annotated[
        str | None,
        _flag(
            "expert-read-rate",
            "Limit on reads of experts and layers in bytes a second, as in 500M. Default: no limit.",
        ),
    ],
    "speculation": Annotated[
        str | None,
        _flag(
            "speculation",
            "ngram: guess the next tokens from repetitions in prompt and answer, and check several in "
            "one step where that is faster; answers stay the same. off: one token a step. Default: "
            "ngram.",
        ),
    ],
    "isa": Annotated[
        str | None,
        _flag(
            "isa",
            "Instruction set of the kernels: scalar, avx2 or avx512vnni. Default: the fastest one that "
            "the processor has.",
        ),
    ],
}


def engine_flags(*names: str) -> Callable[[Command], Command]:
    """Give a command the named engine flags, by default all, as one dict argument, `engine`."""

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
    """Settings of a config file, the environment and flags, checked. CflowError names a wrong one."""
    return gather_settings(file, os.environ, flags)


def read_engine(flags: dict[str, Any]) -> EngineConfig:
    """The engine's settings for a command without a config file. The model is the default one."""
    return engine_config(read_settings(None, flags))
