"""Waiting for an engine to load, and saying what it runs with."""

from __future__ import annotations

import asyncio

from cflow.engine.base.messages import Ready
from cflow.engine.client.engine import Engine
from cflow.server.commands.progress import byte_progress, say

POLL_S = 0.2
LOADING = {"weights": "loading {}", "experts": "warming the expert cache of {}"}


async def wait_ready(engine: Engine) -> Ready:
    """Wait for the engine to be ready, with a bar of the bytes read. EngineError if it cannot be."""
    watcher = asyncio.create_task(_show_loading(engine))
    try:
        return await engine.wait_ready()
    finally:
        watcher.cancel()
        await asyncio.wait([watcher])


async def _show_loading(engine: Engine) -> None:
    with byte_progress() as report:
        while True:
            if (loading := engine.status.loading) is not None and loading.total_bytes:
                what = LOADING[loading.what].format(engine.card.name)
                report(what, loading.done_bytes, loading.total_bytes)
            await asyncio.sleep(POLL_S)


def announce(engine: Engine, ready: Ready, address: str) -> None:
    """Say where the server answers, what the model takes, and why it has this many threads."""
    say(
        f"{engine.card.name} is served at {address} ({ready.isa}, {ready.n_threads} threads, "
        f"context {ready.max_context}, "
        f"{(ready.resident_bytes - ready.expert_bytes) / 1e6:.0f} MB of weights, "
        f"{ready.kv_bytes / 1e6:.0f} MB of KV, {_tiers(ready)}"
        f"loaded in {ready.load_s:.1f} s)"
    )
    say(f"{ready.n_threads} threads: {ready.threads_reason}")


def _tiers(ready: Ready) -> str:
    """What of experts and layers is in memory, and what is read from disk."""
    text = f"{ready.n_deferred} experts a token deferred, " if ready.n_deferred else ""
    if ready.n_experts:
        reads = "direct reads" if ready.expert_io == "direct" else "reads through the page cache"
        text += f"{ready.n_expert_slots} of {ready.n_experts} experts in "
        text += f"{ready.expert_bytes / 1e6:.0f} MB, {reads}, "
    if ready.n_layers:
        text += f"{ready.n_layers_kept} of {ready.n_layers} layers stay in memory, the rest share "
        text += f"{ready.n_layer_slots - ready.n_layers_kept} slots, "
        text += f"{ready.layer_bytes / 1e6:.0f} MB in all, "
        text += f"{ready.layer_step_bytes / 1e6:.0f} MB read in every step, "
    return text
