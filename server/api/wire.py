"""Parts that answers of all routes share: ids, usage, and chunks."""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

import msgspec

from cflow.engine.base.messages import DiskUsage
from cflow.server.api.generation import Generation
from cflow.server.api.schemas import Sampling, StreamOptions

encode = msgspec.json.encode


def usage(generation: Generation) -> dict[str, Any]:
    """The usage object: prompt tokens summed over prompts, the rest over all choices."""
    return {
        "prompt_tokens": generation.n_prompt,
        "completion_tokens": generation.n_completion,
        "total_tokens": generation.n_prompt + generation.n_completion,
        "prompt_tokens_details": {"cached_tokens": generation.n_cached},
        "completion_tokens_details": {"reasoning_tokens": generation.n_reasoning},
        **_disk_usage(generation.disk),
        **({"moe_top_k": generation.n_experts} if generation.n_experts else {}),
        **({"deferred_experts": generation.n_deferred} if generation.n_deferred else {}),
    }


def _disk_usage(disk: DiskUsage | None) -> dict[str, Any]:
    """Usage of the disk, for a model with weights on disk."""
    if disk is None:
        return {}
    fields = msgspec.structs.asdict(disk)
    stall_ms = fields.pop("stall_ns") / 1e6
    return fields | {"stall_ms": stall_ms}


class Envelope:
    """The fields that all objects of one answer share."""

    def __init__(self, prefix: str, kind: str, model: str, generation: Generation) -> None:
        """kind: the object type of a whole answer, such as "chat.completion"."""
        self._generation = generation
        self._fields = {
            "id": f"{prefix}-{uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def answer(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """The whole answer. more: its other fields."""
        end = {"usage": usage(self._generation), "timings": self._generation.timings()}
        return encode(self._fields | {"choices": choices} | end | more)


class Chunks(Envelope):
    """Chunks of a stream, written as JSON without building objects.

    The last chunk has the timings. If usage was requested, one more chunk brings it, and in all
    others it is null or the usage so far."""

    def __init__(
        self, prefix: str, kind: str, model: str, generation: Generation, ask: Sampling
    ) -> None:
        super().__init__(prefix, kind, model, generation)
        options = ask.stream_options or StreamOptions()
        self.with_usage = bool(options.include_usage)
        self._is_counting = self.with_usage and bool(options.continuous_usage_stats)
        self._is_timing = ask.timings_per_token
        self._head = b"data: " + encode(self._fields)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if self.with_usage else b"]}\n\n"

    def chunk(self, choice: bytes, *, ends: bool = False, **more: Any) -> bytes:
        """One chunk. choice: JSON of its one choice. ends: it is the last of that choice. more:
        other fields of the chunk."""
        is_last = ends and self._generation.is_over and not self.with_usage
        if not (is_last or more or self._is_counting or self._is_timing):
            return self._head + choice + self._tail
        if self.with_usage:
            more["usage"] = usage(self._generation) if self._is_counting else None
        if is_last or self._is_timing:
            more["timings"] = self._generation.timings()
        return self._close(choice, more)

    def usage_chunk(self) -> bytes:
        more = {"usage": usage(self._generation), "timings": self._generation.timings()}
        return self._close(b"", more)

    def _close(self, choice: bytes, more: dict[str, Any]) -> bytes:
        return self._head + choice + b"]," + encode(more)[1:] + b"\n\n"
