"""Cores, memory, huge pages and disk space of this machine, read from the kernel.

Functions take the root of the file system, so that tests can simulate other machines.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from cflow.engine.base.cgroup import CpuQuota, cpu_quota, memory_limits

ROOT = Path("/")
CPUS = "sys/devices/system/cpu"
ONE_NODE = "bind the server to one, e.g. numactl -N 0 -m 0 cflow serve"


@dataclass(frozen=True)
class Cores:
    """threads: the number of compute threads to use; reason: why not more."""

    threads: int
    reason: str
    physical: int  # cores that this process may run on
    nodes: int  # memory nodes they belong to
    quota: CpuQuota | None


@dataclass(frozen=True)
class Memory:
    """Memory within every limit, in bytes. Page cache counts as available."""

    total: int
    available: int
    limited_by: str  # the file that sets `available`


@dataclass(frozen=True)
class Cpu:
    model: str
    flags: frozenset[str]
    l3_bytes: int  # of all caches the process can use


def cores(root: Path = ROOT) -> Cores:
    """Cores that this process can use. One thread a physical core in the affinity mask, but no more
    than whole CPUs in the quota, and at least 1: two threads on a core share its multipliers, and
    when the quota stops one thread the others wait at the next barrier."""
    allowed = _allowed_cpus(root)
    physical = len({_siblings(root, cpu) for cpu in allowed})
    quota = cpu_quota(root)
    threads = physical
    reason = f"{physical} physical cores"
    if physical < len(allowed):
        reason += f", {len(allowed)} logical CPUs in the affinity mask"
    elif len(allowed) < _n_online(root):
        reason += f" in the affinity mask, {_n_online(root)} CPUs online"
    if quota and quota.cpus < physical:
        threads = max(1, int(quota.cpus))
        reason = f"CPU quota of {quota.cpus:g} ({quota.source}); {reason}"
    return Cores(threads, reason, physical, _n_nodes(root, allowed), quota)


def memory(root: Path = ROOT) -> Memory:
    """Memory that can be allocated without swapping or being killed."""
    info = _pairs(root / "proc/meminfo")
    total, free = (1024 * int(info[key].split()[0]) for key in ("MemTotal", "MemAvailable"))
    source = "/proc/meminfo"
    for level in memory_limits(root):
        total = min(total, level.limit)
        left = max(level.limit - level.used, 0)
        if left < free:
            free, source = left, level.source
    return Memory(total, free, source)


def cpu(root: Path = ROOT) -> Cpu:
    info = _pairs(root / "proc/cpuinfo")
    flags = frozenset(info.get("flags", "").split())
    return Cpu(info.get("model name", "unknown"), flags, _l3_bytes(root))


def beyond_caches(available: int) -> int:
    """Bytes to measure main memory with: four times the caches, since less gives too high a rate,
    but at most half of what is available, since a control group kills a process that exceeds it."""
    wanted = max(1 << 30, 4 * cpu().l3_bytes)
    return max(min(wanted, available // 2), 16 << 20)


def huge_pages(root: Path = ROOT) -> str:
    """The transparent huge page setting: "always", "madvise", "never", or "unavailable"."""
    chosen = re.search(r"\[(\w+)\]", _read(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return chosen[1] if chosen else "unavailable"


def disk_free(path: Path) -> int:
    """Free bytes on the disk that holds path, or would hold it."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


# ---- readers ----


def _allowed_cpus(root: Path) -> set[int]:
    """The affinity mask, which the kernel keeps within the cpuset."""
    listed = _pairs(root / "proc/self/status").get("Cpus_allowed_list")
    return _cpu_list(listed) if listed else os.sched_getaffinity(0)


def _siblings(root: Path, cpu: int) -> frozenset[int]:
    """The logical CPUs of one core. Without information from the kernel, each CPU is a core."""
    topology = root / CPUS / f"cpu{cpu}/topology"
    listed = _read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list")
    return frozenset(_cpu_list(listed) or {cpu})


def _n_online(root: Path) -> int:
    return len(_cpu_list(_read(root / CPUS / "online")))


def _n_nodes(root: Path, allowed: set[int]) -> int:
    lists = (root / "sys/devices/system/node").glob("node*/cpulist")
    return max(1, sum(1 for path in lists if _cpu_list(_read(path)) & allowed))


def _l3_bytes(root: Path) -> int:
    """Bytes of all caches, each counted once although every CPU that shares it lists it."""
    sizes = {}
    for cpu in _allowed_cpus(root):
        for index in (root / CPUS / f"cpu{cpu}/cache").glob("index*"):
            if _read(index / "level").strip() == "3":
                sizes[_read(index / "shared_cpu_list")] = _size(_read(index / "size"))
    return sum(sizes.values())


def _size(text: str) -> int:
    """ "32768K" in bytes."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text.strip())
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]] if match else 0


def _cpu_list(text: str) -> set[int]:
    """ "0-3,8" as a set."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _pairs(path: Path) -> dict[str, str]:
    """Lines of "name : value". The first of several lines with one name counts."""
    pairs: dict[str, str] = {}
    for line in _read(path).splitlines():
        name, _, value = line.partition(":")
        pairs.setdefault(name.strip(), value.strip())
    return pairs


def _read(path: Path) -> str:
    """The text of a file, "" if it is missing: kernels and containers differ."""
    try:
        return path.read_text()
    except OSError:
        return ""
