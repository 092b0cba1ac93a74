"""Asking an engine for one answer."""

from __future__ import annotations

from collections.abc import Sequence

from cflow.engine.base.messages import SamplingParams
from cflow.engine.client.answer import LocalAnswer
from cflow.engine.client.engine import GenerateRequest
from cflow.engine.client.local import LocalEngine


async def submit(
    engine: LocalEngine,
    prompt: Sequence[int],
    *,
    sampling: SamplingParams,
    n_choices: int = 1,
    key: str = "",
    shares_queue: bool = False,
    priority: int = 0,
    timeout_s: float | None = None,
) -> LocalAnswer:
    """The answer to a request of one prompt."""
    request = GenerateRequest(
        prompts=[prompt],
        sampling=[sampling],
        n_choices=n_choices,
        key=key,
        shares_queue=shares_queue,
        priority=priority,
        timeout_s=timeout_s,
    )
    (answer,) = await engine.submit(request)
    return answer
