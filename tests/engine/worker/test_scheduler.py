"""Scheduling on a toy model whose answers show every mistake in its KV memory."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cflow.engine.base.messages import DiskUsage, SamplingParams
from cflow.engine.worker.scheduler import share_rows
from cflow.engine.worker.sequence import Request
from oracles.machine import GREEDY, MAX_LOGITS, Machine
from oracles.toy_model import (
    EIO,
    EOS,
    N_TOKENS,
    NO_EXPERT,
    NOT_FINITE,
    NUMERIC,
    REPEATS,
    continuation,
    logprob,
    next_token,
)


def prompt(n: int, first: int = 10) -> list[int]:
    return [first + i % 50 for i in range(n)]


def expected(request: Request, choice: int) -> list[int]:
    return continuation(request.submit.prompt, request.submit.sampling, choice)


def check_answers(machine: Machine) -> None:
    for id, choice in machine.finished:
        assert machine.answers[id, choice] == expected(machine.requests[id], choice)


# ---- steps ----


def test_decodes_come_first_and_prefill_fills_the_rest() -> None:
    machine = Machine(max_rows=40)
    machine.submit(prompt(5), SamplingParams(max_tokens=50, ignore_eos=True))
    machine.step()
    machine.submit(prompt(70, first=90))
    batch = machine.step()
    assert [(chunk.sequence.request.id, chunk.n) for chunk in batch.chunks] == [(0, 1), (1, 39)]
    batch = machine.step()
    assert [(chunk.sequence.request.id, chunk.n) for chunk in batch.chunks] == [(0, 1), (1, 31)]
    machine.run()
    assert machine.answers[1, 0] == expected(machine.requests[1], 0)


@pytest.mark.parametrize("max_rows", [8, 13, 200])
def test_answers_do_not_depend_on_the_size_of_chunks(max_rows: int) -> None:
    machine = Machine(max_rows=max_rows)
    for i in range(5):
        machine.submit(prompt(20 + 30 * i, first=10 + i))
    machine.run()
    assert len(machine.finished) == 5
    check_answers(machine)


def test_an_idle_scheduler_has_no_rows() -> None:
    assert Machine().step().n_rows == 0


def test_a_failed_row_ends_its_request_alone() -> None:
    machine = Machine()
    machine.submit(prompt(40))
    machine.submit([*prompt(10), NOT_FINITE, *prompt(30)], n_choices=2)
    machine.submit(prompt(50, first=20))
    machine.run()
    assert machine.failed == {1: NUMERIC}
    assert machine.finished == {(0, 0), (2, 0)}
    check_answers(machine)


# ---- who runs ----


def order_of_admission(machine: Machine) -> list[int]:
    order = []
    while machine.scheduler.requests:
        order += [sequence.request.id for sequence in machine.step().admitted]
    return order


def test_keys_take_turns() -> None:
    machine = Machine(max_sequences=1)
    for key in "aaaabc":
        machine.submit(prompt(3), key=key)
    assert order_of_admission(machine) == [0, 4, 5, 1, 2, 3]


def test_a_smaller_priority_number_goes_first() -> None:
    machine = Machine(max_sequences=1)
    for priority in (5, 0, -3, 0):
        machine.submit(prompt(3), priority=priority)
    assert order_of_admission(machine) == [2, 1, 3, 0]


LONG = SamplingParams(max_tokens=150, ignore_eos=True)


def steps_until(machine: Machine, condition: Callable[[], bool]) -> int:
    for n in range(500):
        if condition():
            return n
        machine.step()
    raise AssertionError("never")


def is_running(machine: Machine, id: int) -> bool:
    return machine.requests[id].sequences[0].slot >= 0


def test_keys_are_served_the_same_number_of_tokens() -> None:
    """One key has long prompts and the other short ones, both without end."""
    machine = Machine(max_sequences=2, n_blocks=200, max_rows=16)
    one = SamplingParams(max_tokens=1)
    lengths, n_tokens = {"a": 120, "b": 8}, {"a": 0, "b": 0}
    for i in range(200):
        for key, n in lengths.items():
            for _ in range(120 // n):
                machine.submit([10 + i % 50, 10 + i // 50, *prompt(n - 2)], one, key=key)
    for _ in range(1000):
        machine.step()
    for id, _ in machine.finished:
        submit = machine.requests[id].submit
        n_tokens[submit.key] += len(submit.prompt) + 1
    assert n_tokens["a"] > 2000
    assert abs(n_tokens["a"] - n_tokens["b"]) <= 2 * 120


def test_a_key_that_was_away_has_saved_up_nothing() -> None:
    machine = Machine(max_sequences=1, n_blocks=200)
    for i in range(10):
        machine.submit(prompt(100, first=10 + i), SamplingParams(max_tokens=1), key="a")
    assert order_of_admission(machine) == list(range(10))
    for key in "aabbbb":  # had it, all of b would go before the second of a
        machine.submit(prompt(30, first=40), SamplingParams(max_tokens=1), key=key)
    assert order_of_admission(machine)[:3] in ([10, 12, 11], [12, 10, 13])


def test_another_key_gets_its_part_of_the_slots_at_once() -> None:
    machine = Machine(max_sequences=4, n_blocks=200, max_context=256)
    for i in range(12):
        machine.submit(prompt(10, first=10 + i), LONG, key="batch")
    steps_until(machine, lambda: machine.scheduler.n_running == 4)
    ids = [machine.submit(prompt(10, first=50 + i), LONG, key="other") for i in range(3)]
    assert steps_until(machine, lambda: is_running(machine, ids[0])) <= 3
    assert steps_until(machine, lambda: is_running(machine, ids[1])) <= 30
    for _ in range(20):
        machine.step()
    assert machine.scheduler.counters.preemptions == 2  # and not to and fro
    assert machine.scheduler.counters.preemptions_memory == 0
    assert not is_running(machine, ids[2])
    machine.run()
    for id, request in machine.requests.items():
        assert machine.answers[id, 0] == _no_eos(request)


@pytest.mark.parametrize(("priority", "preempted"), [(-1, 1), (0, 0), (1, 0)])
def test_an_urgent_request_takes_the_slot_of_another(priority: int, preempted: int) -> None:
    machine = Machine(max_sequences=2)
    for i in range(3):
        machine.submit(prompt(10, first=10 + i), LONG)
    machine.step()
    id = machine.submit(prompt(10, first=60), LONG, priority=priority)
    for _ in range(5):
        machine.step()
    assert machine.scheduler.counters.preemptions == preempted
    assert is_running(machine, id) == bool(preempted)


def test_a_question_passes_the_batch_of_its_own_key() -> None:
    machine = Machine(max_sequences=4, n_blocks=200)
    for i in range(80):  # two of them
        machine.submit(prompt(10, first=10 + i), LONG, place=i % 40)
    steps_until(machine, lambda: machine.scheduler.n_running == 4)
    id = machine.submit(prompt(10, first=100), LONG)
    assert steps_until(machine, lambda: is_running(machine, id)) <= 3
    assert [is_running(machine, i) for i in (0, 40, 1, 41)] == [True, True, True, False]


def test_questions_without_end_do_not_starve_a_batch() -> None:
    machine = Machine(max_sequences=1, n_blocks=200)
    batch = [machine.submit(prompt(4), GREEDY, place=place) for place in range(4)]
    for _ in range(3000):
        if not machine.scheduler.find(batch[-1]):
            break
        if machine.scheduler.n_waiting < 6:
            machine.submit(prompt(4), GREEDY)
        machine.step()
    assert 32 * 3 < len(machine.finished) < 35 * 4


def test_the_line_is_told_in_the_order_it_goes() -> None:
    machine = Machine(max_sequences=1, n_blocks=200)
    asked = (("a", 100), ("a", 100), ("a", 5), ("b", 50), ("b", 50), ("b", 50))
    for i, (key, n) in enumerate(asked):
        machine.submit(prompt(n, first=10 + i), SamplingParams(max_tokens=1), key=key)
    told = machine.scheduler.line()
    assert told == [0, 3, 4, 1, 5, 2]
    assert order_of_admission(machine) == told
    assert machine.scheduler.line() == []


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    machine = Machine(max_rows=32, n_blocks=200, max_context=4096)
    for i in range(3):
        machine.submit(prompt(1000, first=10 + i), GREEDY)
    machine.step()
    id = machine.submit(prompt(8, first=60), GREEDY)
    assert steps_until(machine, lambda: bool(machine.answers[id, 0])) <= 5
    n_steps = steps_until(machine, lambda: not machine.scheduler.requests)
    assert n_steps < 3000 / 32 + 20  # and all rows were used
    check_answers(machine)


@pytest.mark.parametrize(
    ("wanted", "room", "shares"),
    [
        ([], 8, []),
        ([100], 8, [8]),
        ([100, 100], 8, [4, 4]),
        ([100, 100, 100], 8, [4, 2, 2]),
        ([100, 3], 8, [5, 3]),
        ([2, 1], 8, [2, 1]),
        ([100, 100], 1, [1, 0]),
        ([100, 100], 0, [0, 0]),
        ([1, 100, 2], 16, [1, 13, 2]),
    ],
)
def test_rows_are_shared_between_prompts(wanted: list[int], room: int, shares: list[int]) -> None:
    assert share_rows(wanted, room) == shares


def test_no_more_run_than_there_are_slots() -> None:
    machine = Machine(max_sequences=3)
    for i in range(10):
        machine.submit(prompt(4, first=10 + i), n_choices=2)
    while machine.scheduler.requests:
        machine.step()
        assert machine.scheduler.n_running <= 3
    assert len(machine.finished) == 20
    check_answers(machine)


# ---- the prefix cache ----


def n_cached(machine: Machine, tokens: list[int], **changes: Any) -> int:
    id = machine.submit(tokens, SamplingParams(max_tokens=12, temperature=0, **changes))
    machine.run()
    assert machine.answers[id, 0] == expected(machine.requests[id], 0)
    return machine.requests[id].n_cached


@pytest.mark.parametrize(
    ("n", "cached"), [(31, 0), (32, 0), (33, 32), (64, 32), (65, 64), (100, 96)]
)
def test_whole_blocks_are_found_again_but_never_the_last_token(n: int, cached: int) -> None:
    machine = Machine()
    assert n_cached(machine, prompt(n)) == 0
    assert n_cached(machine, prompt(n)) == cached
    assert machine.scheduler.counters.prefix_queries == 2 * n
    assert machine.scheduler.counters.prefix_hits == cached


def test_prompts_share_what_they_begin_with() -> None:
    machine = Machine()
    assert n_cached(machine, prompt(100)) == 0
    assert n_cached(machine, [*prompt(70), 99, *prompt(29)]) == 64
    assert n_cached(machine, [99, *prompt(99)]) == 0


def test_an_answer_is_found_as_part_of_the_next_prompt() -> None:
    machine = Machine()
    sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    machine.submit(prompt(40), sampling)
    machine.run()
    assert n_cached(machine, prompt(40) + machine.answers[0, 0] + [50]) == 96


def test_another_number_of_experts_shares_nothing() -> None:
    machine = Machine()
    assert n_cached(machine, prompt(70)) == 0
    assert n_cached(machine, prompt(70), n_experts=1) == 0
    assert n_cached(machine, prompt(70), n_experts=1) == 64


def test_a_cancelled_prefill_leaves_only_blocks_it_computed() -> None:
    machine = Machine(max_rows=40)
    machine.submit(prompt(120))
    machine.step()
    assert machine.cancel(0) == "prefill"
    assert n_cached(machine, prompt(120)) == 32


def test_a_row_that_failed_is_not_cached() -> None:
    machine = Machine()
    tokens = [*prompt(10), NOT_FINITE, *prompt(40)]
    machine.submit(tokens)
    machine.run()
    machine.submit(tokens)
    machine.run()
    assert machine.failed == {0: NUMERIC, 1: NUMERIC}


def test_evicted_prefixes_are_computed_again() -> None:
    machine = Machine(n_blocks=8)
    for first in (10, 60, 110, 10):
        assert n_cached(machine, prompt(130, first=first)) == 0


# ---- choices ----


@pytest.mark.parametrize("n", [32, 40, 63, 64])
def test_choices_share_the_prompt_and_differ_in_their_tokens(n: int) -> None:
    machine = Machine()
    id = machine.submit(prompt(n), SamplingParams(max_tokens=40, seed=5), n_choices=4)
    machine.step()
    assert machine.scheduler.pool.n_used == n // 32 + (4 if n % 32 else 0)
    machine.run()
    assert sum(machine.context.n_rows) < n + 4 * 40
    assert len({tuple(machine.answers[id, choice]) for choice in range(4)}) == 4
    check_answers(machine)


def test_choices_without_a_slot_wait_and_get_the_same_tokens() -> None:
    machine = Machine(max_sequences=2)
    machine.submit(prompt(50), SamplingParams(max_tokens=20, seed=1), n_choices=5)
    machine.run()
    assert len(machine.finished) == 5
    check_answers(machine)


def test_a_first_choice_that_ends_at_once_leaves_the_others_their_prompt() -> None:
    seed = next(s for s in range(1000) if _first(prompt(40), s) == EOS)
    machine = Machine(n_blocks=8)
    machine.submit(prompt(40), SamplingParams(max_tokens=30, seed=seed), n_choices=3)
    machine.submit(prompt(60, first=99))
    machine.run()
    assert machine.answers[0, 0] == [EOS]
    check_answers(machine)


def _first(tokens: list[int], seed: int) -> int:
    return continuation(tokens, SamplingParams(max_tokens=1, seed=seed))[0]


# ---- experts that cannot be read ----


@pytest.mark.parametrize("n_choices", [1, 3])
def test_a_fault_ends_its_request_and_nothing_wrong_is_shared(n_choices: int) -> None:
    machine = Machine(max_rows=70)
    going_on = SamplingParams(max_tokens=40, ignore_eos=True)
    other = machine.submit(prompt(5, first=70), going_on)
    machine.step()
    tokens = [*prompt(100), NO_EXPERT, *prompt(60, first=30)]
    bad = machine.submit(tokens, n_choices=n_choices)
    machine.step()
    before = machine.requests[bad].sequences[0].n_computed
    assert 0 < before < 100
    machine.step()
    assert machine.failed == {bad: EIO}
    machine.context.is_disk_broken = False
    again = machine.submit(tokens, n_choices=n_choices)
    machine.run()
    assert machine.requests[again].n_cached == before // 32 * 32
    assert {(again, choice) for choice in range(n_choices)} < machine.finished
    assert machine.answers[other, 0] == _no_eos(machine.requests[other])
    for choice in range(n_choices):
        assert machine.answers[again, choice] == expected(machine.requests[again], choice)


def test_a_fault_while_decoding_leaves_only_what_was_right_in_the_cache() -> None:
    """The 70th token, itself sampled, needs the expert: the block it lies in is not shared."""
    machine = Machine()
    forced = SamplingParams(max_tokens=40, ignore_eos=True, logit_bias={NO_EXPERT: 100})
    bad = machine.submit(prompt(69), forced)
    machine.run()
    assert machine.failed == {bad: EIO}
    machine.context.is_disk_broken = False
    again = machine.submit([*prompt(69), NO_EXPERT, *prompt(30)])
    machine.run()
    assert machine.requests[again].n_cached == 64
    assert machine.answers[again, 0] == expected(machine.requests[again], 0)


def test_an_answer_is_charged_for_its_rows() -> None:
    """The toy's rows hit as often as their position says, miss once, read two layers, and
    stall 1000 ns."""
    machine = Machine(max_rows=16)
    id = machine.submit(prompt(40), SamplingParams(max_tokens=3, ignore_eos=True))
    sequence = machine.requests[id].sequences[0]
    machine.run()
    assert sequence.disk == DiskUsage(sum(range(42)), 42, 84, 42 * 4096, 42 * 1000)


# ---- memory runs out ----


def test_preemption_does_not_show_in_answers() -> None:
    machine = Machine(n_blocks=8, max_context=256)
    sampling = SamplingParams(max_tokens=100, ignore_eos=True, seed=3)
    for i in range(4):
        machine.submit(prompt(40, first=10 + i), sampling)
    machine.run()
    counters = machine.scheduler.counters
    assert counters.preemptions == counters.preemptions_memory > 0
    for id in range(4):
        assert machine.answers[id, 0] == _no_eos(machine.requests[id])


def _no_eos(request: Request) -> list[int]:
    """The right answer where the end token does not end it."""
    tokens = list(request.submit.prompt)
    sampling = request.submit.sampling
    for index in range(sampling.max_tokens):
        tokens.append(next_token(tokens, sampling.seed, 0, index))
    return tokens[len(request.submit.prompt) :]


def test_the_youngest_of_the_least_urgent_is_set_back() -> None:
    machine = Machine(n_blocks=6, max_context=192)
    sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    for priority in (0, 1, 0):
        machine.submit(prompt(30), sampling, priority=priority)
    machine.step()
    assert machine.scheduler.n_running == 3
    while not machine.scheduler.counters.preemptions:
        machine.step()
    assert machine.requests[1].sequences[0].is_waiting
    assert machine.requests[0].sequences[0].slot >= 0
    assert machine.requests[2].sequences[0].slot >= 0
    machine.run()


def test_a_sequence_can_fill_the_whole_memory() -> None:
    machine = Machine(n_blocks=4, max_context=128)
    sampling = SamplingParams(max_tokens=98, ignore_eos=True)
    machine.submit(prompt(30), sampling)
    machine.submit(prompt(30, first=11), sampling)
    machine.run()
    assert len(machine.finished) == 2


# ---- prompt scores ----


def test_prompt_scores_are_complete_however_the_prompt_is_cut_and_cached() -> None:
    machine = Machine(max_rows=16)
    tokens = prompt(70)
    machine.submit(tokens)
    machine.run()
    id = machine.submit(tokens, SamplingParams(max_tokens=3, n_prompt_logprobs=2))
    machine.run()
    request = machine.requests[id]
    assert request.n_cached == 0
    assert [score.token for score in request.prompt_scores] == tokens[1:]
    assert [score.logprob for score in request.prompt_scores] == [
        logprob(tuple(tokens[:i]), tokens[i]) for i in range(1, 70)
    ]
    assert all(len(score.top) == 2 for score in request.prompt_scores)


def test_a_request_for_no_tokens_ends_with_its_prompt() -> None:
    machine = Machine()
    id = machine.submit(prompt(70), SamplingParams(max_tokens=0, n_prompt_logprobs=0), n_choices=2)
    machine.run()
    assert machine.finished == {(id, 0), (id, 1)}
    assert machine.answers[id, 0] == []
    assert len(machine.requests[id].prompt_scores) == 69


def test_scores_of_a_prompt_that_was_set_back_count_once() -> None:
    machine = Machine(n_blocks=9, max_context=256, max_rows=4)
    machine.submit(prompt(90), SamplingParams(max_tokens=100, ignore_eos=True))
    while not machine.answers[0, 0]:
        machine.step()
    scored = machine.submit(
        prompt(160, first=60), SamplingParams(max_tokens=2, n_prompt_logprobs=0)
    )
    request = machine.requests[scored]
    while not machine.scheduler.counters.preemptions:
        n_scores = len(request.prompt_scores)
        machine.step()
    assert 0 < n_scores < 159
    machine.run()
    assert [score.token for score in request.prompt_scores] == prompt(160, first=60)[1:]


# ---- drafts ----


def drafting(**options: Any) -> Machine:
    return Machine(drafts=True, **options)


def repeating(n: int, first: int = 10) -> list[int]:
    return [REPEATS, *prompt(n - 1, first=first)]


def test_right_drafts_save_steps_and_change_nothing() -> None:
    machine = drafting()
    id = machine.submit(repeating(40), SamplingParams(max_tokens=150, ignore_eos=True))
    machine.run()
    assert machine.answers[id, 0] == _no_eos(machine.requests[id])
    counters = machine.scheduler.counters
    assert len(machine.context.n_rows) == 150 - sum(counters.accepted_at)
    assert len(machine.context.n_rows) < 60
    assert counters.accepted_at == sorted(counters.accepted_at, reverse=True)
    assert counters.drafts > sum(counters.accepted_at)


def test_what_was_drafted_right_is_found_as_part_of_the_next_prompt() -> None:
    machine = drafting()
    machine.submit(repeating(40), SamplingParams(max_tokens=57, ignore_eos=True))
    machine.run()
    assert n_cached(machine, repeating(40) + machine.answers[0, 0] + [50]) == 96


def test_drafts_go_on_where_they_were_after_a_sequence_was_set_back() -> None:
    machine = drafting(n_blocks=8, max_context=256)
    sampling = SamplingParams(max_tokens=100, ignore_eos=True, seed=3)
    for i in range(4):
        machine.submit(repeating(40, first=10 + i), sampling)
    machine.run()
    assert machine.scheduler.counters.preemptions > 0
    assert sum(machine.scheduler.counters.accepted_at) > 100
    for id in range(4):
        assert machine.answers[id, 0] == _no_eos(machine.requests[id])


def test_drafts_take_no_block_that_another_needs() -> None:
    """Of four blocks one is free. The first answer drafts beyond its own, in vain, and ends before
    it would need another; the second needs the last one meanwhile."""
    machine = drafting(n_blocks=4, max_context=128)
    tokens = [29, 30, 120, *range(40, 64), 30]
    saying_x: dict[str, Any] = {"logit_bias": {120: 100}, "stop": ("xxxx",), "ignore_eos": True}
    first = machine.submit(tokens, SamplingParams(max_tokens=50, **saying_x))
    machine.submit(prompt(64), SamplingParams(max_tokens=10, ignore_eos=True))
    machine.run()
    assert machine.answers[first, 0] == [120] * 4
    assert machine.scheduler.counters.drafts >= 3
    assert machine.scheduler.counters.preemptions == 0


@pytest.mark.parametrize("max_tokens", [1, 2, 9, 10, 200])
@pytest.mark.parametrize("max_context", [60, 64, 65])
def test_no_draft_goes_beyond_what_may_be_said(max_tokens: int, max_context: int) -> None:
    machine = drafting(max_context=max_context)
    machine.submit(repeating(50), SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    end = min(50 + max_tokens, max_context)
    while machine.scheduler.requests:
        for chunk in machine.step().chunks:
            assert chunk.first + chunk.n_rows < end
    assert len(machine.answers[0, 0]) == end - 50


@pytest.mark.parametrize("max_rows", [40, 200])
def test_logits_and_rows_suffice_for_drafts_and_everybody_else(max_rows: int) -> None:
    machine = drafting(max_sequences=16, max_rows=max_rows, n_blocks=200)
    for i in range(24):
        sampling = SamplingParams(max_tokens=30, ignore_eos=True)
        machine.submit(repeating(50, first=10 + i), sampling)
    while machine.scheduler.requests:
        batch = machine.step()
        assert batch.n_rows <= max_rows
        kept = sum(1 + len(chunk.drafts) for chunk in batch.chunks)
        assert kept <= MAX_LOGITS
    for id in range(24):
        assert machine.answers[id, 0] == _no_eos(machine.requests[id])


def test_a_draft_whose_row_fails_fails_nobody() -> None:
    """The answer comes to the token again that needs a lost expert, but then says another."""
    machine = drafting()
    machine.context.is_disk_broken = False
    tokens = [7, 8, 9, NO_EXPERT, *prompt(30), 7, 8]
    nine = SamplingParams(max_tokens=3, ignore_eos=True, logit_bias={9: 100})
    id = machine.submit(tokens, nine)
    machine.step()
    machine.context.is_disk_broken = True
    batch = machine.step()
    assert NO_EXPERT in batch.chunks[0].drafts
    machine.run()
    assert machine.failed == {}
    assert machine.answers[id, 0] == [9, 9, 9]


def test_a_right_draft_whose_row_fails_ends_its_request_in_the_next_step() -> None:
    machine = drafting()
    machine.context.is_disk_broken = False
    tokens = [7, 8, NO_EXPERT, NO_EXPERT, NO_EXPERT, *prompt(30), 7, 8]
    forced = SamplingParams(max_tokens=9, ignore_eos=True, logit_bias={NO_EXPERT: 100})
    id = machine.submit(tokens, forced)
    machine.step()
    machine.context.is_disk_broken = True
    machine.run()
    assert machine.failed == {id: EIO}


# ---- the end of requests ----


def test_cancelling_says_in_which_phase_it_was() -> None:
    machine = Machine(max_sequences=2, max_rows=32)
    sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    machine.submit(prompt(4), sampling)
    machine.step()
    machine.submit(prompt(100), sampling)
    machine.submit(prompt(100), sampling, n_choices=3)
    machine.step()
    assert [machine.cancel(id) for id in (2, 1, 0)] == ["queue", "prefill", "decode"]
    assert machine.scheduler.pool.n_used == 0
    assert machine.step().n_rows == 0


# ---- everything at once ----

events = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"),
            st.integers(1, 120),  # prompt length
            st.integers(0, 3),  # which prompt
            st.integers(0, 60),  # max_tokens
            st.integers(1, 3),  # choices
            st.integers(0, 1),  # priority
            st.sampled_from("ab"),  # key
            st.sampled_from([0, 5]),  # place
        ),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("step"), st.integers(1, 10)),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=150)
@given(events=events, n_blocks=st.integers(6, 20), max_rows=st.sampled_from([4, 17, 64]))
def test_any_history_of_requests_gives_right_answers_and_leaves_nothing(
    events: list[tuple[str, *tuple[Any, ...]]], n_blocks: int, max_rows: int
) -> None:
    machine = Machine(n_blocks=n_blocks, max_sequences=4, max_context=181, max_rows=max_rows)
    for name, *numbers in events:
        if name == "submit":
            n, which, max_tokens, n_choices, priority, key, place = numbers
            scores = 0 if which == 3 or not max_tokens else None
            sampling = SamplingParams(max_tokens=max_tokens, seed=which, n_prompt_logprobs=scores)
            tokens = prompt(n, first=10 + which) if which else repeating(n)
            machine.submit(
                tokens, sampling, n_choices=n_choices, priority=priority, key=key, place=place
            )
        elif name == "cancel":
            if machine.scheduler.find(numbers[0]):
                machine.cancel(numbers[0])
        else:
            for _ in range(numbers[0]):
                machine.step()
    machine.run()
    check_answers(machine)
    for id, request in machine.requests.items():
        assert max(request.submit.prompt) < N_TOKENS
        if (id, 0) in machine.finished and request.submit.sampling.n_prompt_logprobs is not None:
            assert len(request.prompt_scores) == len(request.submit.prompt) - 1
