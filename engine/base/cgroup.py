"""Limits that control groups, version 1 and 2, set for this process.

A process obeys the limits of its group and of all parents, so every level is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

UNLIMITED_V1_BYTES = 1 << 60  # version 1 writes a number above it for "no limit"


@dataclass(frozen=True)
class CpuQuota:
    cpus: float  # CPU seconds a second
    source: str  # the file that sets it


@dataclass(frozen=True)
class Throttling:
    """How often CPU quotas stopped the process's groups, since the groups were made."""

    periods: int = 0  # quota periods in which something ran
    throttled: int = 0  # periods whose quota ran out
    seconds: float = 0.0  # time stopped, summed over CPUs


@dataclass(frozen=True)
class MemoryLimit:
    """One level's limit, and the memory in use that cannot be reclaimed, in bytes."""

    limit: int
    used: int
    source: str


def cpu_quota(root: Path = Path("/")) -> CpuQuota | None:
    """The tightest CPU quota; None without one."""
    quotas = [*_quotas_v1(root), *_quotas_v2(root)]
    return min(quotas, key=lambda quota: quota.cpus, default=None)


def cpu_throttling(root: Path = Path("/")) -> Throttling:
    """Throttling summed over all levels; levels without a quota add nothing."""
    stats = [_stat(level / "cpu.stat") for kind in ("cpu", "") for level in _levels(root, kind)]

    def total(name: str) -> int:
        return sum(stat.get(name, 0) for stat in stats)

    seconds = total("throttled_time") / 1e9 + total("throttled_usec") / 1e6
    return Throttling(total("nr_periods"), total("nr_throttled"), seconds)


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """The memory limit of every level that has one."""
    return [*_memory_v1(root), *_memory_v2(root)]


def _quotas_v1(root: Path) -> Iterator[CpuQuota]:
    for level in _levels(root, "cpu"):
        quota = _number(level / "cpu.cfs_quota_us")
        period = _number(level / "cpu.cfs_period_us")
        if quota is not None and period and quota > 0:
            yield CpuQuota(quota / period, _name(root, level / "cpu.cfs_quota_us"))


def _quotas_v2(root: Path) -> Iterator[CpuQuota]:
    for level in _levels(root, ""):
        match _read(level / "cpu.max").split():
            case [quota, period] if quota.isdigit() and period.isdigit() and int(period):
                yield CpuQuota(int(quota) / int(period), _name(root, level / "cpu.max"))


def _memory_v1(root: Path) -> Iterator[MemoryLimit]:
    for level in _levels(root, "memory"):
        stat = _stat(level / "memory.stat")
        limit = _number(level / "memory.limit_in_bytes")
        if limit is None:
            continue
        # The hierarchical limit includes parents that a container cannot see.
        limit = min(limit, stat.get("hierarchical_memory_limit", limit))
        cache = stat.get("total_active_file", 0) + stat.get("total_inactive_file", 0)
        used = (_number(level / "memory.usage_in_bytes") or 0) - cache
        if limit < UNLIMITED_V1_BYTES:
            yield MemoryLimit(limit, max(used, 0), _name(root, level / "memory.limit_in_bytes"))


def _memory_v2(root: Path) -> Iterator[MemoryLimit]:
    for level in _levels(root, ""):
        stat = _stat(level / "memory.stat")
        reclaimable = ("active_file", "inactive_file", "slab_reclaimable")
        cache = sum(stat.get(name, 0) for name in reclaimable)
        used = (_number(level / "memory.current") or 0) - cache
        for name in ("memory.max", "memory.high"):
            limit = _number(level / name)
            if limit is not None:
                yield MemoryLimit(limit, max(used, 0), _name(root, level / name))


# ---- where the groups lie ----


def _levels(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the process's group and its parents that are mounted here. controller: "" for
    version 2."""
    group = _group(root, controller)
    if group is None:
        return
    for mount_root, mount_point in _mounts(root, controller):
        top = root / mount_point.lstrip("/")
        # Inside a container the mount may begin below the host's path, or the path may leave it.
        inside = group.is_relative_to(mount_root) and ".." not in group.parts
        level = top / group.relative_to(mount_root) if inside else top
        while True:
            yield level
            if level == top:
                break
            level = level.parent


def _group(root: Path, controller: str) -> PurePosixPath | None:
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return PurePosixPath(path)
    return None


def _mounts(root: Path, controller: str) -> Iterator[tuple[str, str]]:
    """(root of the mount within the hierarchy, mount point)."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        mount_root, mount_point = before.split(" ")[3:5]
        is_v2 = kind == "cgroup2"
        is_v1 = kind == "cgroup" and controller in options.split(",")
        if is_v2 if controller == "" else is_v1:
            yield mount_root, mount_point


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.removeprefix("-").isdigit() else None


def _stat(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _read(path).splitlines())
    return {key: int(value) for key, value in pairs}


def _name(root: Path, path: Path) -> str:
    return f"/{path.relative_to(root)}"
