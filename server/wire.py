"""What answers of both APIs share: ids, usage, and chunks written without building objects."""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

import msgspec

from cflow.engine.messages import ExpertUsage
from cflow.server.generation import Generation
from cflow.server.schemas import Sampling

encode = msgspec.json.encode


def usage(n_prompt: int, generation: Generation) -> dict[str, Any]:
    """The usage object; n_prompt is summed over the prompts, all else over all choices."""
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": generation.n_completion,
        "total_tokens": n_prompt + generation.n_completion,
        "prompt_tokens_details": {"cached_tokens": generation.n_cached},
        "completion_tokens_details": {"reasoning_tokens": 0},
        **_expert_usage(generation.experts),
        **({"deferred_experts": generation.n_deferred} if generation.n_deferred else {}),
    }


def _expert_usage(experts: ExpertUsage | None) -> dict[str, Any]:
    """Where experts come from disk."""
    if experts is None:
        return {}
    return {
        "expert_hits": experts.hits,
        "expert_misses": experts.misses,
        "disk_bytes": experts.disk_bytes,
        "stall_ms": experts.stall_ns / 1e6,
    }


def wants_usage(ask: Sampling) -> bool:
    return bool(ask.stream_options and ask.stream_options.include_usage)


class Envelope:
    """The fields that every object of one reply has alike."""

    def __init__(self, prefix: str, kind: str, model: str) -> None:
        """kind: the object type of a whole answer, e.g. "chat.completion"."""
        self._fields = {
            "id": f"{prefix}-{uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def answer(self, choices: list[dict[str, Any]], use: dict[str, Any]) -> bytes:
        return encode(self._fields | {"choices": choices, "usage": use})


class Chunks(Envelope):
    """Chunks of a stream. With usage asked for, all but the last say usage is null."""

    def __init__(self, prefix: str, kind: str, model: str, *, with_usage: bool) -> None:
        super().__init__(prefix, kind, model)
        self._head = b"data: " + encode(self._fields)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"

    def chunk(self, choice: bytes) -> bytes:
        """choice: the JSON of the one choice in it."""
        return self._head + choice + self._tail

    def usage_chunk(self, use: dict[str, Any]) -> bytes:
        return self._head + b'],"usage":' + encode(use) + b"}\n\n"
