"""Machine truth, on laid-out trees of other machines and in real control groups."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cflow.engine.base import machine
from cflow.engine.base.cgroup import Throttling, cpu_throttling

GIB = 1 << 30


class Tree:
    """Writes what the kernel of some machine would show below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.file("proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {48 << 20} kB\n")

    def file(self, path: str, text: str | int) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(f"{text}\n")

    def cpus(self, cores: Iterable[Iterable[int]], allowed: str = "") -> None:
        """cores: the logical CPUs of each; allowed: the affinity mask, default all."""
        listed = [list(core) for core in cores]
        last = max(max(core) for core in listed)
        self.file("sys/devices/system/cpu/online", f"0-{last}")
        self.file("proc/self/status", f"Name: x\nCpus_allowed_list:\t{allowed or f'0-{last}'}")
        for core in listed:
            for cpu in core:
                name = f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list"
                self.file(name, ",".join(map(str, core)))

    def cgroup2(self, group: str = "/", mount_root: str = "/") -> None:
        self.file("proc/self/cgroup", f"0::{group}")
        mount = f"35 24 0:30 {mount_root} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup rw"
        self.file("proc/self/mountinfo", mount)

    def cgroup1(self, group: str = "/", mount_root: str = "/") -> None:
        self.file("proc/self/cgroup", f"4:memory:{group}\n3:cpu,cpuacct:{group}\n1:name=systemd:/")
        mounts = [
            f"31 30 0:1 {mount_root} /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct",
            f"32 30 0:2 {mount_root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
        ]
        self.file("proc/self/mountinfo", "\n".join(mounts))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def smt(n_cores: int) -> list[tuple[int, int]]:
    """The usual numbering: CPU c and c + n_cores share core c."""
    return [(c, c + n_cores) for c in range(n_cores)]


def test_a_thread_per_core_not_per_logical_cpu(tree: Tree) -> None:
    tree.cpus(smt(16))
    cores = machine.cores(tree.root)
    assert (cores.threads, cores.physical) == (16, 16)
    assert "16 physical cores" in cores.reason
    assert "32 logical CPUs" in cores.reason


def test_two_sockets_count_their_cores_and_nodes(tree: Tree) -> None:
    tree.cpus(smt(48))
    tree.file("sys/devices/system/node/node0/cpulist", "0-23,48-71")
    tree.file("sys/devices/system/node/node1/cpulist", "24-47,72-95")
    assert (machine.cores(tree.root).threads, machine.cores(tree.root).nodes) == (48, 2)
    tree.cpus(smt(48), allowed="0-23")
    assert (machine.cores(tree.root).threads, machine.cores(tree.root).nodes) == (24, 1)


@pytest.mark.parametrize(
    ("allowed", "threads"),
    [("0-3", 4), ("0-1,16-17", 2), ("5", 1), ("16-31", 16), ("0,16", 1)],
)
def test_a_cpuset_bounds_the_cores(tree: Tree, allowed: str, threads: int) -> None:
    tree.cpus(smt(16), allowed)
    assert machine.cores(tree.root).threads == threads


def test_older_kernels_name_siblings_otherwise(tree: Tree) -> None:
    tree.cpus([(0,), (1,)])
    for cpu in (0, 1):
        topology = tree.root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        (topology / "core_cpus_list").rename(topology / "thread_siblings_list")
        (topology / "thread_siblings_list").write_text("0-1\n")
    assert machine.cores(tree.root).threads == 1


def test_without_a_topology_each_cpu_is_a_core(tree: Tree) -> None:
    tree.file("proc/self/status", "Cpus_allowed_list:\t0-2,6")
    assert machine.cores(tree.root).threads == 4


@pytest.mark.parametrize(
    ("quota", "threads"),
    [
        ("50000 100000", 1),
        ("200000 100000", 2),
        ("765000 100000", 7),
        ("20000 10000", 2),
        ("max 100000", 16),
        ("9900000 100000", 16),
    ],
)
def test_the_quota_of_version_2_is_rounded_down(tree: Tree, quota: str, threads: int) -> None:
    tree.cpus(smt(16))
    tree.cgroup2()
    tree.file("sys/fs/cgroup/cpu.max", quota)
    cores = machine.cores(tree.root)
    assert cores.threads == threads
    assert ("quota" in cores.reason) == (threads < 16)


def test_the_reason_names_quota_and_file(tree: Tree) -> None:
    tree.cpus(smt(16))
    tree.cgroup2()
    tree.file("sys/fs/cgroup/cpu.max", "250000 100000")
    assert "quota of 2.5 (/sys/fs/cgroup/cpu.max)" in machine.cores(tree.root).reason


def test_the_tightest_parent_counts(tree: Tree) -> None:
    tree.cpus(smt(16))
    tree.cgroup2("/kube/pod/box")
    tree.file("sys/fs/cgroup/kube/cpu.max", "800000 100000")
    tree.file("sys/fs/cgroup/kube/pod/cpu.max", "300000 100000")
    tree.file("sys/fs/cgroup/kube/pod/box/cpu.max", "max 100000")
    assert machine.cores(tree.root).threads == 3


@pytest.mark.parametrize(("quota", "threads"), [(-1, 16), (400000, 4), (50000, 1)])
def test_the_quota_of_version_1(tree: Tree, quota: int, threads: int) -> None:
    tree.cpus(smt(16))
    tree.cgroup1("/docker/abc", mount_root="/docker/abc")
    tree.file("sys/fs/cgroup/cpu/cpu.cfs_quota_us", quota)
    tree.file("sys/fs/cgroup/cpu/cpu.cfs_period_us", 100000)
    assert machine.cores(tree.root).threads == threads


def test_version_1_parents_count_as_well(tree: Tree) -> None:
    tree.cpus(smt(16))
    tree.cgroup1("/slice/unit")
    for group, quota in (("", -1), ("/slice", 500000), ("/slice/unit", 900000)):
        tree.file(f"sys/fs/cgroup/cpu{group}/cpu.cfs_quota_us", quota)
        tree.file(f"sys/fs/cgroup/cpu{group}/cpu.cfs_period_us", 100000)
    assert machine.cores(tree.root).threads == 5


def test_a_group_path_of_the_host_falls_back_to_the_mount(tree: Tree) -> None:
    """A container may see its host's path, or one that leads out of its namespace."""
    tree.cpus(smt(16))
    for group in ("/kubepods/pod1/abc", "/../../other"):
        tree.cgroup2(group)
        tree.file("sys/fs/cgroup/cpu.max", "200000 100000")
        assert machine.cores(tree.root).threads == 2


def test_memory_without_limits_is_what_the_kernel_calls_available(tree: Tree) -> None:
    memory = machine.memory(tree.root)
    assert (memory.total, memory.available) == (64 * GIB, 48 * GIB)
    assert memory.limited_by == "/proc/meminfo"


def test_version_2_page_cache_counts_as_free(tree: Tree) -> None:
    tree.cgroup2("/box")
    tree.file("sys/fs/cgroup/box/memory.max", 8 * GIB)
    tree.file("sys/fs/cgroup/box/memory.current", 7 * GIB)
    stat = f"anon {2 * GIB}\nactive_file {GIB}\ninactive_file {3 * GIB}\nslab_reclaimable 4096"
    tree.file("sys/fs/cgroup/box/memory.stat", stat)
    memory = machine.memory(tree.root)
    assert memory.total == 8 * GIB
    assert memory.available == 5 * GIB + 4096
    assert memory.limited_by == "/sys/fs/cgroup/box/memory.max"


def test_version_2_soft_limit_and_parents_hold_too(tree: Tree) -> None:
    tree.cgroup2("/a/b")
    tree.file("sys/fs/cgroup/a/memory.max", 10 * GIB)
    tree.file("sys/fs/cgroup/a/memory.current", 9 * GIB)
    tree.file("sys/fs/cgroup/a/b/memory.max", "max")
    tree.file("sys/fs/cgroup/a/b/memory.high", 6 * GIB)
    tree.file("sys/fs/cgroup/a/b/memory.current", GIB)
    memory = machine.memory(tree.root)
    assert (memory.total, memory.available) == (6 * GIB, GIB)


def test_a_level_over_its_limit_leaves_nothing(tree: Tree) -> None:
    tree.cgroup2()
    tree.file("sys/fs/cgroup/memory.max", GIB)
    tree.file("sys/fs/cgroup/memory.current", 2 * GIB)
    assert machine.memory(tree.root).available == 0


def test_version_1_memory(tree: Tree) -> None:
    tree.cgroup1("/docker/abc", mount_root="/docker/abc")
    tree.file("sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
    tree.file("sys/fs/cgroup/memory/memory.usage_in_bytes", 5 * GIB)
    tree.file("sys/fs/cgroup/memory/memory.stat", f"total_inactive_file {GIB}")
    assert machine.memory(tree.root).available == 48 * GIB
    tree.file("sys/fs/cgroup/memory/memory.limit_in_bytes", 6 * GIB)
    assert machine.memory(tree.root).available == 2 * GIB


def test_version_1_counts_the_limit_of_parents_out_of_sight(tree: Tree) -> None:
    tree.cgroup1("/docker/abc", mount_root="/docker/abc")
    tree.file("sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
    tree.file("sys/fs/cgroup/memory/memory.usage_in_bytes", GIB)
    tree.file("sys/fs/cgroup/memory/memory.stat", f"hierarchical_memory_limit {4 * GIB}")
    memory = machine.memory(tree.root)
    assert (memory.total, memory.available) == (4 * GIB, 3 * GIB)


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("always [madvise] never", "madvise"),
        ("[always] madvise never", "always"),
        ("", "unavailable"),
    ],
)
def test_huge_page_setting(tree: Tree, text: str, setting: str) -> None:
    if text:
        tree.file("sys/kernel/mm/transparent_hugepage/enabled", text)
    assert machine.huge_pages(tree.root) == setting


def test_cpu_flags_and_shared_caches(tree: Tree) -> None:
    tree.cpus(smt(4))
    tree.file("proc/cpuinfo", "model name\t: Made Up 1\nflags\t\t: fpu avx2\n\nmodel name\t: other")
    for cpu, shared in [(0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3")]:
        cache = f"sys/devices/system/cpu/cpu{cpu}/cache"
        for index, (level, size) in enumerate([(1, "48K"), (2, "1M"), (3, "32768K")]):
            tree.file(f"{cache}/index{index}/level", level)
            tree.file(f"{cache}/index{index}/size", size)
            tree.file(f"{cache}/index{index}/shared_cpu_list", shared)
    cpu_info = machine.cpu(tree.root)
    assert cpu_info.model == "Made Up 1"
    assert cpu_info.flags == {"fpu", "avx2"}
    assert cpu_info.l3_bytes == 64 << 20


def test_disk_space_of_a_folder_not_made_yet(tmp_path: Path) -> None:
    assert machine.disk_free(tmp_path / "no" / "such") > 0


def test_this_machine_can_be_read() -> None:
    assert machine.cores().threads >= 1
    memory = machine.memory()
    assert 0 < memory.available <= memory.total
    assert machine.cpu().flags


def test_throttling_is_summed_over_the_levels_of_either_version(tree: Tree) -> None:
    assert cpu_throttling(tree.root) == Throttling()
    tree.cgroup2("/a/b")
    usage = "usage_usec 9\nuser_usec 9\nsystem_usec 0"
    tree.file("sys/fs/cgroup/cpu.stat", usage)  # of the top: no quota, no periods
    for group, n in (("a", 10), ("a/b", 1)):
        periods = f"nr_periods {4 * n}\nnr_throttled {2 * n}\nthrottled_usec {500_000 * n}"
        tree.file(f"sys/fs/cgroup/{group}/cpu.stat", f"{usage}\n{periods}")
    assert cpu_throttling(tree.root) == Throttling(44, 22, 5.5)
    tree.cgroup1("/box", mount_root="/box")
    tree.file(
        "sys/fs/cgroup/cpu/cpu.stat", "nr_periods 8\nnr_throttled 3\nthrottled_time 1500000000"
    )
    assert cpu_throttling(tree.root) == Throttling(8, 3, 1.5)


CGROUPS = Path("/sys/fs/cgroup")
IMPORTS = """
import json, os, sys, time
from pathlib import Path
from cflow.engine.base import machine
from cflow.engine.base.cgroup import cpu_throttling
"""


class Group:
    """A real control group of version 1 below that of this process."""

    def __init__(self, controller: str) -> None:
        """OSError where none can be made."""
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = {
            name: line.split(":", 2)[2] for line in lines for name in line.split(":")[1].split(",")
        }
        top = CGROUPS / controller / own.get(controller, "/").lstrip("/")
        self.path = top / f"cflow-test-{os.getpid()}"
        self.path.mkdir()

    def write(self, name: str, value: str | int) -> None:
        (self.path / name).write_text(str(value))

    def run(self, code: str, *arguments: object) -> Any:
        """What the code, run by a Python process in the group, prints as JSON."""
        enter = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        command = ["sh", "-c", enter, str(self.path), sys.executable, "-c", IMPORTS + code]
        done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def group() -> Iterator[Callable[[str], Group]]:
    made: list[Group] = []

    def make(controller: str) -> Group:
        try:
            made.append(Group(controller))
        except OSError as error:
            pytest.skip(f"no {controller} group of version 1 can be made here: {error}")
        return made[-1]

    yield make
    for group in made:
        group.path.rmdir()


def test_a_real_quota_bounds_the_threads_and_counts_what_it_stops(
    group: Callable[[str], Group],
) -> None:
    box = group("cpu")
    box.write("cpu.cfs_period_us", 100_000)
    box.write("cpu.cfs_quota_us", 20_000)
    code = """
cores, end = machine.cores(), time.monotonic() + 120
while not (found := cpu_throttling()).throttled and time.monotonic() < end: pass
print(json.dumps([cores.threads, cores.reason, found.periods, found.throttled, found.seconds]))
"""
    threads, reason, periods, throttled, seconds = box.run(code)
    assert threads == 1
    assert reason.startswith(f"CPU quota of 0.2 ({box.path}/cpu.cfs_quota_us); ")
    assert 0 < throttled <= periods
    assert seconds > 0


def test_a_real_cpuset_bounds_the_threads(group: Callable[[str], Group]) -> None:
    box = group("cpuset")
    box.write("cpuset.mems", 0)
    box.write("cpuset.cpus", 0)
    threads, reason = box.run(
        "cores = machine.cores(); print(json.dumps([cores.threads, cores.reason]))"
    )
    assert (threads, reason.split(", ")[0].split(" in ")[0]) == (1, "1 physical cores")


def test_in_a_real_group_page_cache_is_not_used_up_memory(
    group: Callable[[str], Group], tmp_path: Path
) -> None:
    box = group("memory")
    box.write("memory.limit_in_bytes", 256 << 20)
    code = """
file = Path(sys.argv[1])
file.write_bytes(bytes(100 << 20))
kept = bytearray(os.urandom(1 << 20) * 50)
with file.open("rb+") as f: os.fsync(f.fileno())
file.read_bytes()
memory = machine.memory()
usage = int(Path(memory.limited_by).with_name("memory.usage_in_bytes").read_text())
print(json.dumps([memory.total, memory.available, memory.limited_by, usage]))
"""
    total, available, source, usage = box.run(code, tmp_path / "file")
    assert (total, source) == (256 << 20, f"{box.path}/memory.limit_in_bytes")
    assert usage > 150 << 20  # the file is charged to the group,
    assert 140 << 20 < available < 206 << 20  # and only the 50 MiB and the interpreter are used up


def test_a_model_larger_than_a_real_limit_is_refused_by_its_name(
    group: Callable[[str], Group],
) -> None:
    box = group("memory")
    box.write("memory.limit_in_bytes", 512 << 20)
    code = """
from cflow.engine import native
from cflow.engine.base.config import EngineConfig
from cflow.engine.measure.plan import run_shape
native.probe_bandwidth = lambda *_: 1e9
print(json.dumps([run_shape(EngineConfig(model=shape)).problem for shape in ("smollm2-135m", "qwen2.5-3b")]))
"""
    fits, problem = box.run(code)
    assert fits is None
    assert re.match(r"the weights need [\d,]+ bytes, [\d,]+ are available", problem)
    assert f"({box.path}/memory.limit_in_bytes)" in problem
