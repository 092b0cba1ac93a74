"""Pictures of training: the loss of one run, and all arms side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import msgspec
import numpy as np

matplotlib.use("agg")

from matplotlib import pyplot

SMOOTH = 20  # steps


def draw_curve(log: Path, picture: Path, title: str) -> None:
    """log: JSON lines with step, loss and, at some steps, valid_loss, in nats a token."""
    records = _records(log)
    loss = np.array([record["loss"] for record in records])
    width = min(SMOOTH, len(loss))
    smooth = np.convolve(loss, np.ones(width) / width, mode="valid")
    valid = _valid(records)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(np.arange(width, len(loss) + 1), smooth, label=f"training, mean of {width} steps")
    axes.plot(*zip(*valid, strict=True), "o-", label="validation")
    axes.set(xlabel="step", ylabel="loss, nats a token", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def draw_arms(
    logs: Mapping[str, Sequence[Path]], perplexities: Mapping[str, Sequence[float]], picture: Path
) -> None:
    """Mean validation loss of each arm over its seeds, and final perplexities, the best arm first.

    logs, perplexities: by arm, one for each seed."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    arms = sorted(logs, key=lambda arm: float(np.mean(perplexities[arm])))
    for at, arm in enumerate(arms):
        runs = [_valid(_records(log)) for log in logs[arm]]
        steps, losses = np.mean(runs, axis=0).T
        colour = pyplot.get_cmap("tab20")(at % 20)
        left.plot(steps, losses, color=colour, label=arm)
        right.plot(perplexities[arm], [at] * len(perplexities[arm]), "o", color=colour, alpha=0.7)
        right.plot(np.mean(perplexities[arm]), at, "|", color=colour, markersize=16)
    left.set(xlabel="step", ylabel="validation loss, nats a token", title="on the way (a part)")
    right.set(xlabel="validation perplexity", title="at the end, each seed and their mean")
    right.set_yticks(range(len(arms)), arms)
    right.invert_yaxis()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(fontsize="small")
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def _records(log: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]


def _valid(records: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(r["step"], r["valid_loss"]) for r in records if "valid_loss" in r]
