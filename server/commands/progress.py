"""Progress bars and status lines, on stderr; plain lines where it is not a terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from cflow.engine.base.messages import Ready
from cflow.engine.client.engine import Engine

if TYPE_CHECKING:
    from cflow.engine.lab.train import Report as TrainingReport

POLL_S = 0.2
LOADING = {"weights": "loading {}", "experts": "warming the expert cache of {}"}

console = Console(stderr=True, highlight=False, soft_wrap=True)

Report = Callable[[str, int, int], None]


def _bars(*columns: ProgressColumn) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextmanager
def byte_progress() -> Iterator[Report]:
    """report(what, done bytes, all bytes): a bar for each thing that is done."""
    with _bars(DownloadColumn(binary_units=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
                if not console.is_terminal:
                    console.print(f"cflow: {what} ({total / 1e6:.0f} MB)")
            bars.update(tasks[what], completed=done, total=total)

        yield report


@contextmanager
def count_progress() -> Iterator[Report]:
    """report(what, how much is done, how much it is), of anything."""
    with _bars() as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report


@contextmanager
def training_progress() -> Iterator[Callable[[TrainingReport], None]]:
    """watch(report): a bar a run, with loss, speed and time left; else a line every hundred steps."""
    with _bars(TextColumn("{task.fields[state]}"), MofNCompleteColumn()) as bars:
        tasks: dict[str, TaskID] = {}

        def watch(report: TrainingReport) -> None:
            name = report.run.folder
            state = f"loss {report.loss:.3f}, {report.tokens_per_s:,.0f} tok/s"
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=report.n_steps, state=state)
            bars.update(tasks[name], completed=report.step, state=state)
            if report.step == report.n_steps:
                console.print(f"cflow: {name} is trained: {state}")
            elif not console.is_terminal and report.step % 100 == 0:
                console.print(f"cflow: {name}: step {report.step} of {report.n_steps}, {state}")

        yield watch


async def wait_ready(engine: Engine) -> Ready:
    """Until the engine is ready, with a bar of what has been read. EngineError if it cannot be."""
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
    """When the server answers: where, what it took, and why not more threads."""
    console.print(
        f"cflow: {engine.card.name} is served at {address} ({ready.isa}, {ready.n_threads} threads, "
        f"context {ready.max_context}, "
        f"{(ready.resident_bytes - ready.expert_bytes) / 1e6:.0f} MB of weights, "
        f"{ready.kv_bytes / 1e6:.0f} MB of KV, {_experts(ready)}"
        f"loaded in {ready.load_s:.1f} s)",
        markup=False,
    )
    console.print(f"cflow: {ready.n_threads} threads: {ready.threads_reason}", markup=False)


def _experts(ready: Ready) -> str:
    """How many, where, and what is done differently; layers as well."""
    text = f"{ready.n_deferred} experts a token deferred, " if ready.n_deferred else ""
    if ready.n_experts:
        reads = "direct reads" if ready.expert_io == "direct" else "reads through the page cache"
        text += f"{ready.n_expert_slots} of {ready.n_experts} experts in "
        text += f"{ready.expert_bytes / 1e6:.0f} MB, {reads}, "
    if ready.n_layers:
        text += f"{ready.n_layers_kept} of {ready.n_layers} layers stay in memory, the others pass "
        text += f"through room for {ready.n_layer_slots - ready.n_layers_kept}, "
        text += f"{ready.layer_bytes / 1e6:.0f} MB in all and "
        text += f"{ready.layer_step_bytes / 1e6:.0f} MB read in every step, "
    return text
