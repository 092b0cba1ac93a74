"""Progress bars and status lines on stderr; plain lines where stderr is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from cflow.engine.base.reports import Report

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Columns = Literal["bytes", "count", "steps"]


def say(text: str) -> None:
    """Print a status line. Progress bars stay below it."""
    print(f"cflow: {text}", file=sys.stderr, flush=True)


class Bars:
    """Progress bars, one for each thing that is reported; none where stderr is not a terminal.

    They are set up at the first report: an error before it does not wait for rich."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID | None] = {}

    def __enter__(self) -> Bars:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def update(self, what: str, done: int, total: int, **fields: Any) -> bool:
        """Show `done` of `total`. Returns whether `what` is reported for the first time."""
        is_new = what not in self._tasks
        if sys.stderr.isatty():
            bars = self._bars = self._bars or _start(self._columns)
            if is_new:
                self._tasks[what] = bars.add_task(what, total=total, **fields)
            task = self._tasks[what]
            assert task is not None
            bars.update(task, completed=done, total=total, **fields)
        else:
            self._tasks[what] = None
        return is_new


def _start(columns: Columns) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    extra: dict[Columns, list[ProgressColumn]] = {
        "bytes": [DownloadColumn(binary_units=True)],
        "count": [],
        "steps": [TextColumn("{task.fields[state]}"), MofNCompleteColumn()],
    }
    bars = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *extra[columns],
        TimeRemainingColumn(),
        console=Console(stderr=True, highlight=False, soft_wrap=True),
        transient=True,
    )
    bars.start()
    return bars


@contextmanager
def byte_progress() -> Iterator[Report]:
    """Yields report(what, bytes done, bytes in all)."""
    with Bars("bytes") as bars:

        def report(what: str, done: int, total: int) -> None:
            if bars.update(what, done, total) and not sys.stderr.isatty():
                say(f"{what} ({total / 1e6:.0f} MB)")

        yield report


@contextmanager
def count_progress() -> Iterator[Report]:
    """Yields report(what, units done, units in all)."""
    with Bars("count") as bars:

        def report(what: str, done: int, total: int) -> None:
            bars.update(what, done, total)

        yield report
