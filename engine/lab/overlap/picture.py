"""The overlap of compute and reads as a picture: times of the arms, and errors of the two laws."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

from cflow.engine.lab.overlap.figures import ARMS, Cell, Overlap

COLOURS = {"none": "#c44e52", "layer": "#dd8452", "delay": "#4c72b0"}


def draw(found: Overlap, picture: Path) -> None:
    cells = found.cells
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(14, 1.5 + 0.75 * len(cells)), layout="constrained", sharey=True
    )
    for at, cell in enumerate(cells):
        _draw_times(left, at, cell, is_first=at == 0)
    _draw_nets(right, cells)
    left.set_yticks(range(len(cells)), [_name(cell) for cell in cells])
    left.invert_yaxis()
    left.set(xlabel="ms a token", title="measured, and what the schedule recursion says (|)")
    right.set(xlabel="times faster than synchronous reads", title="the delay's net, and two laws")
    right.axvline(2, color="grey", linestyle=":")
    for axes in (left, right):
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3, axis="x")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3, fontsize="small")
    right.set_xlim(left=0.8)
    figure.suptitle(f"{found.machine}, {found.date}", fontsize=9)
    figure.savefig(picture, dpi=100)
    pyplot.close(figure)


def _name(cell: Cell) -> str:
    return (
        f"{cell.routing}, {cell.experts} experts\n"
        f"{cell.threads} threads, {cell.slots} of {cell.records} slots, {cell.read_rate / 1e9:.2f} GB/s"
    )


def _draw_times(axes: Axes, at: int, cell: Cell, *, is_first: bool) -> None:
    def label(text: str) -> str | None:
        return text if is_first else None

    height = 0.18
    axes.barh(at - 2 * height, cell.c, height, color="#8c8c8c", label=label("C"))
    axes.barh(
        at - 2 * height, cell.io, height, left=cell.c, color="#c7c7c7", label=label("IO, behind C")
    )
    for place, (window, text) in enumerate(ARMS.items()):
        y = at + (place - 1) * height
        axes.barh(y, cell.ms(window), height, color=COLOURS[window], label=label(text))
        axes.plot(cell.predicted(window), y, "|", color="black", markersize=11, mew=2)


def _draw_nets(axes: Axes, cells: tuple[Cell, ...]) -> None:
    at = np.arange(len(cells))
    for window in ("layer", "delay"):
        colour, text = COLOURS[window], ARMS[window]
        axes.plot([c.net(window) for c in cells], at, "o", color=colour, label=text)
        axes.plot([c.recursion(window) for c in cells], at, "k|", markersize=16)
    axes.plot([], [], "k|", markersize=16, label="recursion")
    axes.plot([c.law for c in cells], at, "x", color="#55a868", label="(C + IO) / max(C, IO_eff)")
