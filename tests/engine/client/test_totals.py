"""Counters over several workers."""

from cflow.engine.base.messages import DiskStats, Stats
from cflow.engine.client.totals import Totals


def test_totals_go_on_where_the_last_worker_ended() -> None:
    totals = Totals()
    totals.update(Stats(steps=5, step_s=0.5, n_running=2, n_kv_blocks=64))
    totals.update(Stats(steps=9, step_s=0.75, n_running=3, n_kv_blocks=64))
    totals.end_worker()
    assert totals.stats == Stats(steps=9, step_s=0.75)
    totals.update(Stats(steps=1, n_running=1, n_kv_blocks=64))
    assert totals.stats == Stats(steps=10, step_s=0.75, n_running=1, n_kv_blocks=64)
    totals.end_worker()
    totals.end_worker()
    assert totals.stats.steps == 10


def test_what_disks_did_counts_on_as_well() -> None:
    totals = Totals()
    totals.update(Stats(disk={"experts": DiskStats(hits=4, n_resident=9, latencies=(1, 2))}))
    totals.end_worker()
    assert totals.stats == Stats(disk={"experts": DiskStats(hits=4, latencies=(1, 2))})
    totals.update(Stats(steps=1))
    assert totals.stats == Stats(steps=1, disk={"experts": DiskStats(hits=4, latencies=(1, 2))})
    experts = DiskStats(hits=1, n_resident=3, latencies=(0, 5, 7))
    totals.update(Stats(disk={"experts": experts, "layers": DiskStats(misses=2, n_loading=1)}))
    assert totals.stats.disk["experts"] == DiskStats(hits=5, n_resident=3, latencies=(1, 7, 7))
    assert totals.stats.disk["layers"] == DiskStats(misses=2, n_loading=1)
