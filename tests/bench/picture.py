"""The benchmark table as a picture: the share of the ceiling that each engine reaches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.patches import Rectangle

matplotlib.use("agg")

from matplotlib import pyplot

COLOURS = {"cflow": "#4c72b0", "llama.cpp": "#dd8452", "ik_llama.cpp": "#55a868", "vLLM": "#c44e52"}


def draw(results: Mapping[str, Any], path: Path) -> None:
    """A peer's share is cflow's share times their ratio in the run in which they alternated."""
    rows = {
        name: row
        for name, row in results["rows"].items()
        if row.get("ceiling") and row["ratio"] and not row["steps"]
    }
    bars = [
        (name, list(_shares(name, row["ratio"], results["peers"]))) for name, row in rows.items()
    ]
    n_bars = sum(len(shares) for _, shares in bars)
    figure, axes = pyplot.subplots(figsize=(10, 1.5 + 0.25 * n_bars), layout="constrained")
    at, ticks = 0.0, []
    for name, shares in bars:
        ticks.append((at + (len(shares) - 1) / 2, name))
        for engine, share in shares:
            axes.barh(at, share, 0.9, color=COLOURS[engine])
            axes.text(share, at, f" {share:.2f}", va="center", fontsize=7)
            at += 1
        at += 0.7
    axes.set_yticks([y for y, _ in ticks], [name for _, name in ticks], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color="grey", linestyle=":")
    axes.set(xlabel="share of what the machine allows")
    axes.grid(alpha=0.3, axis="x")
    shown = [engine for engine in COLOURS if any(engine in dict(shares) for _, shares in bars)]
    handles = [Rectangle((0, 0), 1, 1, color=COLOURS[engine]) for engine in shown]
    axes.legend(handles, shown, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _shares(name: str, ratio: float, peers: Mapping[str, Any]) -> list[tuple[str, float]]:
    rates = peers.get("rows", {}).get(name, {})
    beside = rates.get("cflow", {}).get("median")
    others = [(e, ratio * r["median"] / beside) for e, r in rates.items() if e != "cflow"]
    return [("cflow", ratio), *others]
