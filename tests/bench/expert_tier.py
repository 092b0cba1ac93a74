"""Models larger than their memory: speed, beside what the disk allows, and memory used.

    make bench-experts                            every case, 22 GB of files in build/experts
    make bench-experts FLAGS=qwen3-30b-a3b-6GiB   one model and limit; the other figures stay
    make bench-experts FLAGS="--folder /data"     keep the files in another folder

Models have random weights and route evenly, which is the worst case. A case with a limit runs in a
memory control group, which needs root and version 1 of control groups. The peak memory of a serving
worker is read from outside. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from cflow.engine import native
from cflow.engine.base import machine
from cflow.engine.base.config import EngineConfig
from cflow.engine.base.messages import SamplingParams
from cflow.engine.client.local import LocalEngine
from cflow.engine.files.synth import synth
from cflow.engine.memory.experts import ExpertBank, asked_cache
from cflow.engine.native import Model
from harness.asking import submit

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "docs" / "results" / "expert_tier.json"
GROUPS = Path("/sys/fs/cgroup/memory")
CACHE = "25%"
KV_BYTES = 256 << 20
MORE_BYTES = 300_000_000  # that a worker may use besides weights, cache, keys and values
PROMPT = 64


@dataclass(frozen=True)
class Case:
    shape: str
    gen: int  # tokens of a run
    limit: int | None = None  # bytes of memory for the whole process
    fits: bool = False  # also runs with all experts in memory, for the speed of compute alone

    @property
    def name(self) -> str:
        return self.shape + (f"-{self.limit >> 30}GiB" if self.limit else "")

    @property
    def command(self) -> str:
        """The command as typed, inside the limit."""
        return f"cflow bench {self.shape}.cflow {' '.join(self.flags(CACHE))}"

    def flags(self, cache: str) -> list[str]:
        return [f"--prompt={PROMPT}", f"--gen={self.gen}", "--batch=1", f"--expert-cache={cache}"]


CASES = (
    Case("arch2_4_8k_4l", gen=64, fits=True),
    Case("qwen3-30b-a3b", gen=32),
    Case("qwen3-30b-a3b", gen=32, limit=6 << 30),
)


def measure(case: Case, path: Path) -> dict[str, Any]:
    with _group(case.limit) as group:
        found = _bench(case, path, CACHE, group)
        group_bytes = None if group is None else _peak(group)
    return {
        "case": case.name,
        "model": case.shape,
        "command": case.command,
        "memory_limit_bytes": case.limit,
        "group_peak_bytes": group_bytes,
        "file_bytes": path.stat().st_size,
        "expert_slots": found["expert_slots"],
        "expert_records": found["expert_records"],
        "expert_io": found["expert_io"],
        "threads": found["threads"],
        "decode": _phase(found, "decode", "", 3 * case.gen),
        "prefill": _phase(found, "prefill", "prefill_", 3 * PROMPT),
        "in_memory": _in_memory(case, path) if case.fits else None,
        "memory": asyncio.run(_worker_memory(path)) if case.limit is None else None,
    }


def _bench(case: Case, path: Path, cache: str, group: Path | None = None) -> dict[str, Any]:
    job = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "cflow.server",
            "bench",
            str(path),
            "--json",
            *case.flags(cache),
        ],
        preexec_fn=None if group is None else partial(_enter, group),
        stdout=subprocess.PIPE,
        check=True,
    )
    return dict(json.loads(job.stdout))


def _in_memory(case: Case, path: Path) -> dict[str, float]:
    found = _bench(case, path, "100%")
    return {name: found[name] for name in ("decode_tok_s", "prefill_tok_s")}


def _phase(found: dict[str, Any], name: str, prefix: str, n_tokens: int) -> dict[str, Any]:
    """Figures of prefill or decode. n_tokens: of all three runs."""
    floor = found[f"{prefix}disk_floor_tok_s"]
    return {
        "tok_s": found["runs"][f"{name}_tok_s"],
        "disk_probe_gb_s": found[f"{prefix}disk_probe_gb_s"],
        "disk_floor_tok_s": floor,
        "of_floor": found[f"{name}_tok_s"] / floor if floor else None,
        "hits": found[f"{prefix}expert_hits"],
        "misses": found[f"{prefix}expert_misses"],
        "disk_bytes_per_token": found[f"{prefix}disk_bytes"] / n_tokens,
    }


async def _worker_memory(path: Path) -> dict[str, int]:
    """Peak resident memory of a serving worker, and its bound."""
    config = EngineConfig(model=str(path), expert_cache=CACHE, kv_memory=KV_BYTES)
    with tempfile.TemporaryDirectory() as uses:
        os.environ["XDG_CACHE_HOME"] = uses
        engine = await LocalEngine.start(config)
        try:
            ready = await engine.wait_ready()
            sampling = SamplingParams(max_tokens=16, temperature=1, seed=1, ignore_eos=True)
            prompt = [(37 * i + 11) % 256 for i in range(PROMPT)]
            async for _ in await submit(engine, prompt, sampling=sampling):
                pass
            status = Path(f"/proc/{ready.pid}/status").read_text()
        finally:
            await engine.close()
    bank = ExpertBank.of(Model(str(path), header_only=True))
    weights, cache = path.stat().st_size - bank.n_bytes, asked_cache(CACHE, bank)
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
    return {
        "peak_bytes": 1024 * int(peak),
        "weights_bytes": weights,
        "expert_cache_bytes": cache,
        "kv_bytes": KV_BYTES,
        "bound_bytes": weights + cache + KV_BYTES + MORE_BYTES,
    }


@contextmanager
def _group(limit: int | None) -> Iterator[Path | None]:
    """A control group limited to `limit` bytes of memory; None without a limit."""
    if limit is None:
        yield None
        return
    group = GROUPS / f"cflow-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        yield group
    finally:
        group.rmdir()


def _enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _peak(group: Path) -> int:
    return int((group / "memory.max_usage_in_bytes").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description="measure models larger than their memory")
    names = list(dict.fromkeys(case.name for case in CASES))
    parser.add_argument("cases", nargs="*", default=names, choices=names, help="default: all")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "experts")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    old = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []
    runs = {run["case"]: run for run in old}
    for case in CASES:
        if case.name not in args.cases:
            continue
        path = args.folder / f"{case.shape}.cflow"
        if not path.exists():
            synth(case.shape, path)
        run = runs[case.name] = measure(case, path)
        print(json.dumps(run, indent=2))
        RESULTS.write_text(json.dumps(_results(list(runs.values())), indent=2) + "\n")


def _results(runs: list[dict[str, Any]]) -> dict[str, Any]:
    cpu, cores = machine.cpu(), machine.cores()
    return {
        "machine": f"{cpu.model}, {cores.threads} cores, {cpu.l3_bytes >> 20} MiB of L3, "
        f"{machine.memory().total / 2**30:.0f} GiB of RAM, {native.best_isa()}",
        "date": date.today().isoformat(),
        "runs": runs,
    }


if __name__ == "__main__":
    main()
