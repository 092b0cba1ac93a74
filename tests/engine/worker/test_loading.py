"""What a server says about the machine that it loads a model on."""

from typing import Any

from cflow.engine.base import machine
from cflow.engine.base.cgroup import CpuQuota
from cflow.engine.worker.loading import _thread_notes


def test_threads_that_cannot_run_well_are_noted() -> None:
    def notes(threads: int, **fields: Any) -> list[str]:
        usual: dict[str, Any] = {"threads": 1, "reason": "", "physical": 8, "nodes": 1}
        cores = machine.Cores(**(usual | fields))
        return _thread_notes(threads, cores)

    quota = CpuQuota(1.5, "the file")
    assert notes(8, quota=None) == notes(1, quota=quota) == []
    assert notes(1, quota=CpuQuota(0.5, "")) == []  # there have to be some
    [spread] = notes(8, nodes=2, quota=None)
    assert spread.startswith("2 memory nodes: bind")
    [stopped] = notes(2, quota=quota)
    assert "2 threads and a CPU quota of 1.5 (the file)" in stopped
