"""What this machine offers for running models, and what slows it down."""

from __future__ import annotations

from dataclasses import dataclass

from cflow.engine.base import machine
from cflow.engine.base.cache_folder import cache_folder
from cflow.engine.base.cgroup import cpu_throttling
from cflow.engine.native import best_isa

SMALL_MEMORY_BYTES = 2 << 30
SMALL_DISK_BYTES = 4 << 30
THROTTLED_PART = 0.1  # of the periods; a larger part shows in latency


@dataclass(frozen=True)
class Finding:
    """A fact about this machine. advice: what to change, "" if nothing."""

    name: str
    value: str
    advice: str = ""


def run() -> list[Finding]:
    """All findings. Changes nothing."""
    return [
        _processor(), _kernels(), _threads(), _throttling(), _memory(), _huge_pages(), _disk(),
    ]  # fmt: skip


def _processor() -> Finding:
    cpu = machine.cpu()
    return Finding("processor", f"{cpu.model}, {cpu.l3_bytes / 2**20:.0f} MiB of L3")


def _kernels() -> Finding:
    isa = best_isa()
    advice = {
        "scalar": "no AVX2 here: the engine runs, but some fifty times slower",
        "avx2": "without AVX-512 VNNI expect about two thirds of the decode speed",
    }
    return Finding("kernels", isa, advice.get(isa, ""))


def _threads() -> Finding:
    cores = machine.cores()
    advice = ""
    if cores.quota and cores.quota.cpus < cores.physical:
        advice = f"the CPU quota in {cores.quota.source} is below the number of cores; raise it"
    elif cores.nodes > 1:
        advice = f"several memory nodes: {machine.ONE_NODE}"
    return Finding("threads", f"{cores.threads} ({cores.reason})", advice)


def _throttling() -> Finding:
    found = cpu_throttling()
    if not found.periods:
        return Finding("throttling", "no CPU quota has stopped this group")
    share = found.throttled / found.periods
    value = f"CPU quotas stopped this group in {share:.0%} of {found.periods} periods"
    advice = "more threads run here than the quota has CPUs: lower --threads or raise the quota"
    return Finding("throttling", value, advice if share > THROTTLED_PART else "")


def _memory() -> Finding:
    memory = machine.memory()
    value = f"{memory.available / 1e9:.1f} GB of {memory.total / 1e9:.1f} GB is available"
    value += f" ({memory.limited_by})"
    is_small = memory.available < SMALL_MEMORY_BYTES
    return Finding("memory", value, "room for small models only" if is_small else "")


def _huge_pages() -> Finding:
    setting = machine.huge_pages()
    advice = ""
    if setting in ("never", "unavailable"):
        advice = (
            "weights in 4 KiB pages are read about a third slower; run as root: "
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        )
    return Finding("huge pages", setting, advice)


def _disk() -> Finding:
    folder = cache_folder()
    free = machine.disk_free(folder)
    advice = "little room for models; set XDG_CACHE_HOME to a larger disk"
    return Finding(
        "disk", f"{free / 1e9:.1f} GB free in {folder}", advice if free < SMALL_DISK_BYTES else ""
    )
