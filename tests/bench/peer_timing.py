"""Shared by the programs that time peers. They run as files in the peers' own environments, without
cflow, so this module needs Python alone."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence

SIZES = {"threads": 2, "prompt": 512, "gen": 128, "streams": 1, "runs": 3}


def parser(description: str) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=description)
    for name, default in SIZES.items():
        found.add_argument(f"--{name}", type=int, default=default)
    return found


def measure(
    args: argparse.Namespace,
    prefill: Callable[[int], float],
    decode: Callable[[int, int], float],
) -> dict[str, dict[str, float]]:
    """prefill(n): tokens a second of a prompt of n tokens. decode(streams, n): of n tokens a stream."""
    runs = range(args.runs)
    found = {
        "prefill": _spread([prefill(args.prompt) for _ in runs]),
        "decode": _spread([decode(1, args.gen) for _ in runs]),
    }
    if args.streams > 1:
        found["streams"] = _spread([decode(args.streams, args.gen) for _ in runs])
    return found


def _spread(rates: Sequence[float]) -> dict[str, float]:
    return {"min": min(rates), "median": statistics.median(rates), "max": max(rates)}
