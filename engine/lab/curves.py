"""Loss curves as pictures."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import msgspec
import numpy as np

matplotlib.use("agg")

from matplotlib import pyplot

SMOOTH = 20  # steps


def draw_curve(log: Path, picture: Path, title: str) -> None:
    """log: JSON lines with step, loss and now and then valid_loss, in nats a token."""
    records = [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]
    loss = np.array([record["loss"] for record in records])
    width = min(SMOOTH, len(loss))
    smooth = np.convolve(loss, np.ones(width) / width, mode="valid")
    valid = [(r["step"], r["valid_loss"]) for r in records if "valid_loss" in r]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(np.arange(width, len(loss) + 1), smooth, label=f"training, mean of {width} steps")
    axes.plot(*zip(*valid, strict=True), "o-", label="validation")
    axes.set(xlabel="step", ylabel="loss, nats a token", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
