"""Prefill beside decodes keeps to the time a step may take."""

from random import Random

import pytest

from cflow.engine.worker.pace import MIN_ROWS, UNKNOWN_ROWS, Pace


def measured(*, decode_s: float, row_s: float, max_step_s: float = 0.25) -> Pace:
    """On a machine with fixed times."""
    pace = Pace(max_step_s, 512)
    for _ in range(50):
        pace.observe(4, 0, decode_s)
        pace.observe(4, 100, decode_s + 100 * row_s)
    return pace


def test_alone_prefill_has_the_whole_step_or_four_times_the_limit() -> None:
    """Who comes during a step waits for its end."""
    assert measured(decode_s=0.1, row_s=0.001).n_prefill_rows(0) == 512
    assert abs(measured(decode_s=0.1, row_s=0.01).n_prefill_rows(0) - 90) <= 1


@pytest.mark.parametrize("row_s", [0.02, 0.0003])
def test_the_first_step_alone_is_small_and_teaches_the_next(row_s: float) -> None:
    """512 rows of 20 ms would be ten seconds."""
    pace = Pace(0.25, 512)
    chunks = []
    for _ in range(3):
        chunks.append(pace.n_prefill_rows(0))
        pace.observe(0, chunks[-1], row_s * chunks[-1])
    assert chunks == [UNKNOWN_ROWS, *[min(512, round(1 / row_s))] * 2]


@pytest.mark.parametrize("decode_s", [0.0, 0.8])
def test_alone_what_costs_seconds_however_small_has_the_whole_step(decode_s: float) -> None:
    """As experts, or layers, that come from disk do. One small step is how it is found out."""
    pace = Pace(0.25, 512, reads_disk=True)
    if decode_s:
        pace.observe(1, 0, decode_s)
    chunks = []
    for _ in range(300):
        chunks.append(pace.n_prefill_rows(0))
        pace.observe(0, chunks[-1], 3 + 0.01 * chunks[-1])
    assert sum(n < 512 for n in chunks) <= 1


def test_beside_decodes_it_has_the_time_they_leave() -> None:
    n = measured(decode_s=0.05, row_s=0.002).n_prefill_rows(4)
    assert abs(n - 100) <= 1


def test_the_rows_of_a_step_are_never_exceeded() -> None:
    pace = measured(decode_s=0.001, row_s=1e-6)
    for _ in range(30):
        n = pace.n_prefill_rows(12)
        pace.observe(12, n, 0.001 + 1e-6 * n)
    assert n == 500


@pytest.mark.parametrize("by_position", [0.0, 1e-6, 2e-6])
@pytest.mark.parametrize(("noise", "bound"), [(0.0, 1.1), (0.4, 1.4)])
def test_rows_that_get_dearer_keep_to_the_limit(
    by_position: float, noise: float, bound: float
) -> None:
    """Later rows attend to more. Chunks shrink then while they take the same time, which looks as if
    rows cost nothing."""
    random = Random(1)
    for prompt in range(40):
        pace = Pace(0.25, 512)
        position = 0
        steps = []
        while position < 4000:
            pace.observe(1, 0, 0.01)
            n = min(pace.n_prefill_rows(1), 4000 - position)
            row_s = (0.002 + by_position * position) * (1 + noise * random.random())
            steps.append(0.01 + n * row_s)
            pace.observe(1, n, steps[-1])
            position += n
        assert max(steps) < bound * 0.25, prompt
        assert sum(steps) / len(steps) > 0.1


def test_prefill_goes_on_however_slow() -> None:
    assert measured(decode_s=0.5, row_s=0.1).n_prefill_rows(4) == MIN_ROWS


def test_a_chunk_that_costs_seconds_however_small_is_large_and_leaves_as_much_to_decodes() -> None:
    """As one that reads most experts from disk: 3 s and 10 ms a row, beside decodes of 0.1 s."""
    pace = Pace(0.25, 512)
    chunks: list[int] = []
    chunk_s = decode_s = 0.0
    for _ in range(2000):
        n = pace.n_prefill_rows(4)
        seconds = 0.1 + (3 + 0.01 * n if n else 0)
        pace.observe(4, n, seconds)
        if n:
            chunks.append(n)
            chunk_s += seconds
        else:
            decode_s += seconds
    assert chunks[:2] == [UNKNOWN_ROWS, MIN_ROWS]
    assert all(200 <= n <= 400 for n in chunks[2:])
    assert abs(chunks[-1] - 300) <= 30
    assert 0.45 < decode_s / (chunk_s + decode_s) < 0.55


def test_what_decodes_are_owed_ends_with_them() -> None:
    pace = Pace(0.25, 512)
    for n in (64, 16):
        pace.observe(4, n, 3 + 0.01 * n)
    assert pace.n_prefill_rows(4) == 0
    assert pace.n_prefill_rows(0) == 512


def test_slow_rows_are_no_fixed_cost() -> None:
    """All weights in memory: 50 ms a row beside decodes that exceed the limit by themselves."""
    pace = Pace(0.25, 512)
    for n in (64, 16, 16, 40, 16, 16):
        pace.observe(4, 0, 0.6)
        pace.observe(4, n, 0.6 + 0.05 * n)
        assert pace.n_prefill_rows(4) == MIN_ROWS


def test_before_anything_is_known_it_is_careful() -> None:
    assert Pace(0.25, 512).n_prefill_rows(3) == UNKNOWN_ROWS
    slow = Pace(0.25, 512)
    slow.observe(1, 0, 0.01)
    assert slow.n_prefill_rows(1) == 25  # if a row takes what a whole step of one does


def test_a_machine_that_gets_busy_is_found_out_at_once() -> None:
    pace = measured(decode_s=0.01, row_s=0.001)
    n = pace.n_prefill_rows(4)
    pace.observe(4, n, 0.5)
    assert pace.n_prefill_rows(4) < 0.55 * n
    for _ in range(60):
        m = pace.n_prefill_rows(4)
        pace.observe(4, m, 0.01 + 0.001 * m)
    assert pace.n_prefill_rows(4) >= n


def test_small_chunks_do_not_spoil_the_measurement() -> None:
    pace = measured(decode_s=0.05, row_s=0.002)
    before = pace.n_prefill_rows(4)
    for _ in range(50):
        pace.observe(4, 1, 0.2)
    assert pace.n_prefill_rows(4) == before
