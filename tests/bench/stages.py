"""Where the time of decode goes: a token's stages by what they compute, beside the memory probe.

    python -m bench.stages x.cflow          a table; with --json, the form that `make bench` stores

Each round decodes a few tokens between two probes of memory; figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.records import RECORDS
from cflow.engine import native
from cflow.engine.base import machine
from cflow.engine.lab.page import table
from cflow.engine.measure.bare import decode, open_stream
from cflow.engine.measure.bench import PROBE_PASSES
from cflow.engine.native import Context, Model, const

ROUND_BYTES, ROUND_TOKENS = 8e9, 32  # limits of a round
TILE = 128 * 256
HEAD, REST = "head", "streams, norms"
KINDS = {  # by name of op: what it computes, and with which matrices
    "qkv": ("attention projections", ("Q", "K", "V")),
    "o": ("attention projections", ("O",)),
    "kv": ("attention", ()),
    "attend": ("attention", ()),
    "gate_up": ("dense FFN", ("GATE", "UP")),
    "down": ("dense FFN", ("DOWN",)),
    "expert_gate_up": ("experts", ("EXPERT_GATE", "EXPERT_UP")),
    "expert_down": ("experts", ("EXPERT_DOWN",)),
    "shared_gate_up": ("experts", ("SHARED_GATE", "SHARED_UP")),
    "shared_down": ("experts", ("SHARED_DOWN",)),
    "route": ("router", ()),
    "select": ("router", ()),
}


@dataclass
class Kind:
    """Stages that compute the same thing, and what a token reads in them."""

    stages: list[int] = field(default_factory=list)
    bytes: int = 0
    tiles: float = 0  # of 128 x 256 weights
    model_cycles: float = 0  # of all tiles, by llvm-mca


@dataclass(frozen=True)
class Part:
    """Figures of a kind of stages, for one token. cycles: of one thread for a tile, by the time stamp
    counter. model_cycles: llvm-mca's estimate of that tile's inner loop, by the processor's clock.
    idle_us: mean time in a stage that a thread waits for the others or to notice that they are done."""

    kind: str
    stages: int
    bytes: int
    ms: float
    of_probe: float
    cycles: float | None
    model_cycles: float | None
    idle_us: float


@dataclass(frozen=True)
class Profile:
    threads: int
    bytes: int
    probe_gb_s: float  # the best of several passes
    pass_gb_s: float  # of a single pass
    ms: float
    of_probe: float
    parts: list[Part]


# ---- what a token computes ----


class Tiles:
    """The number and cost of the tiles in a model's matrices."""

    def __init__(self, model: Model, isa: str) -> None:
        self._model = model
        self._tensors = {(t.block, t.role): t for t in model.tensors}
        cycles: dict[str, float] = json.loads(RECORDS.read_text())["cycles"]
        self._cycles = {name: cycles.get(f"{isa} {name} 1") for name in _ENCODINGS.values()}

    def add(self, kind: Kind, block: int, role: str, copies: int = 1) -> None:
        tensor = self._tensors[block, const.Role[role]]
        tiles = copies * tensor.n_rows * tensor.n_cols / TILE
        kind.tiles += tiles
        kind.model_cycles += tiles * (self._cycles[_ENCODINGS[tensor.encoding]] or float("nan"))


_ENCODINGS = {int(encoding): encoding.name.lower() for encoding in const.Encoding}


def kinds_of(model: Model, isa: str) -> dict[str, Kind]:
    """Kinds by name, in the order of their first stage. A stage is named after its ops that read weights."""
    plan, layers, tiles = model.plan, model.layers, Tiles(model, isa)
    ops = [(op, *KINDS.get(op.name.partition(".")[2], (REST, ()))) for op in model.ops]
    found: dict[str, Kind] = {}
    for stage in range(plan.n_stages):
        ours = [one for one in ops if one[0].stage == stage]
        names = {name for op, name, _ in ours if op.bytes} or {name for _, name, _ in ours}
        kind = found.setdefault(" + ".join(sorted(names)), Kind())
        kind.stages.append(stage)
        for op, _, roles in ours:
            kind.bytes += op.bytes
            for role in roles:
                layer = layers[op.layer]
                tiles.add(kind, layer.block, role, layer.top_k if role.startswith("EXPERT") else 1)
    head = Kind([plan.n_stages, plan.n_stages + 1], plan.bytes_per_token - plan.layer_bytes)
    tiles.add(head, const.CFLOW_MODEL_LEVEL, "EMBEDDING" if model.header.tied else "HEAD")
    return {**found, HEAD: head}


# ---- measuring ----


def time_stamp_hz() -> float:
    """Rate of the time stamp counter, which Linux reports as bogomips of two cycles each."""
    found = re.search(r"bogomips\s*:\s*([\d.]+)", Path("/proc/cpuinfo").read_text())
    return float(found[1]) * 1e6 / 2 if found else float("nan")


@dataclass
class Round:
    """ns and idle_ns: (n_stages + 2,), of all its tokens."""

    gb_s: float  # mean of the probes before and after it
    pass_gb_s: float  # of a single pass
    seconds: float
    ns: Any
    idle_ns: Any


def _times(context: Context) -> Any:
    return np.array([(t.ns, t.idle_ns) for t in context.stage_times])


def measure(model: Model, context: Context, threads: int, n: int, rounds: int) -> Iterator[Round]:
    choose = random.Random(0)
    size = machine.beyond_caches(machine.memory().available)
    probe = native.probe_bandwidth(size, threads, PROBE_PASSES)
    for _ in range(rounds):
        before, start = _times(context), time.perf_counter()
        for _ in decode(context, ([choose.randrange(model.header.n_tokens)] for _ in range(n))):
            pass
        seconds, took = time.perf_counter() - start, _times(context) - before
        last, probe = probe, native.probe_bandwidth(size, threads, PROBE_PASSES)
        alone = native.probe_bandwidth(size, threads, 1)
        yield Round((last + probe) / 2e9, alone / 1e9, seconds, *took.T)


def profile(path: Path, threads: int, rounds: int) -> Profile:
    model = Model(str(path), threads=threads)
    plan = model.plan
    n = min(-int(-ROUND_BYTES // plan.bytes_per_token), ROUND_TOKENS)
    context = open_stream(model, n, threads=threads)
    for _ in decode(context, [[1]]):  # touches everything once
        pass
    found = list(measure(model, context, threads, n, rounds))
    kinds = kinds_of(model, context.isa)
    return Profile(
        threads,
        plan.bytes_per_token,
        float(np.median([r.gb_s for r in found])),
        float(np.median([r.pass_gb_s for r in found])),
        float(np.median([r.seconds for r in found]) * 1e3 / n),
        float(np.median([plan.bytes_per_token * n / r.seconds / r.gb_s / 1e9 for r in found])),
        [_part(name, kind, threads, n, found) for name, kind in kinds.items()],
    )


def _part(name: str, kind: Kind, threads: int, n: int, rounds: list[Round]) -> Part:
    seconds = np.array([r.ns[kind.stages].sum() for r in rounds]) / 1e9 / n
    idle = np.array([r.idle_ns[kind.stages].sum() for r in rounds]) / 1e3 / n / threads
    probes = np.array([r.gb_s for r in rounds]) * 1e9
    took = float(np.median(seconds))
    has_model = kind.tiles > 0 and not math.isnan(kind.model_cycles)
    return Part(
        kind=name,
        stages=len(kind.stages),
        bytes=kind.bytes,
        ms=took * 1e3,
        of_probe=float(np.median(kind.bytes / seconds / probes)),
        cycles=took * threads * time_stamp_hz() / kind.tiles if kind.tiles else None,
        model_cycles=kind.model_cycles / kind.tiles if has_model else None,
        idle_us=float(np.median(idle)) / len(kind.stages),
    )


# ---- showing ----

COLUMNS = (
    "stages",
    "a token",
    "MB",
    "ms",
    "of the time",
    "GB/s",
    "of the probe",
    "cycles a tile",
    "by llvm-mca",
    "idle µs a stage",
)


def rows(found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows under COLUMNS: the parts, then the whole token. found: a Profile as JSON."""
    for part in found["parts"]:
        cycles, model = part["cycles"], part["model_cycles"]
        yield (
            part["kind"],
            f"{part['stages']:,}",
            *_figures(part, found["ms"]),
            f"{cycles:,.0f}" if cycles else "",
            f"{model:,.0f}" if model else "",
            f"{part['idle_us']:.1f}",
        )
    yield ("all", "", *_figures(found, found["ms"]), "", "", "")


def _figures(part: Mapping[str, Any], all_ms: float) -> tuple[str, ...]:
    mb, ms = part["bytes"] / 1e6, part["ms"]
    if not mb:
        return "", f"{ms:.2f}", f"{ms / all_ms:.3f}", "", ""
    share = f"{part['of_probe']:.2f}"
    return f"{mb:,.1f}", f"{ms:.2f}", f"{ms / all_ms:.3f}", f"{mb / ms:.1f}", share


def main() -> None:
    parser = argparse.ArgumentParser(description="where the time of decode goes")
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=machine.cores().threads)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = asdict(profile(args.model, args.threads, args.rounds))
    if args.json:
        print(json.dumps(found))
        return
    probe = f"{found['probe_gb_s']:.1f} GB/s, {found['pass_gb_s']:.1f} a pass alone"
    print(f"{args.model.name}: memory probe {probe}, {args.threads} threads")
    print(table(COLUMNS, rows(found)))


if __name__ == "__main__":
    main()
