"""Drafts: what they are, when they are run, and that nobody can tell from an answer."""

from array import array
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.limits import MAX_DRAFTS
from cflow.engine.base.messages import SamplingParams
from cflow.engine.client.card import read_card
from cflow.engine.files import hub
from cflow.engine.native import Context, Model
from cflow.engine.worker.drafts import Lookup, count_drafts, may_pay
from cflow.engine.worker.pace import Pace
from oracles.machine import MAX_LOGITS, Machine

# ---- what is drafted ----


def draft(tokens: list[int], n: int, n_prompt: int = 1) -> tuple[int, ...]:
    lookup = Lookup(array("i", tokens), n_prompt)
    return lookup.draft(n) if lookup.follow() else ()


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], (4, 5, 6, 1)),
        ([1, 2, 3, 4, 9, 2, 3, 8, 1, 2, 3], (4, 9, 2, 3)),  # three tokens before two
        ([1, 2, 7, 5, 1, 2, 8, 5, 1, 2], (8, 5, 1, 2)),  # the last place
        ([5, 6, 7, 8, 9, 6, 7], (8, 9, 6, 7)),  # two where three are not to be had
        ([1, 2, 3, 1, 2, 3], (1, 2, 3, 1)),  # the end repeats itself
        ([4, 4, 4, 4], (4, 4, 4, 4)),
        ([1, 2, 3, 4, 5, 6, 3], ()),
        ([1, 2], ()),
        ([1], ()),
    ],
)
def test_what_followed_is_drafted_to_follow(tokens: list[int], expected: tuple[int, ...]) -> None:
    assert draft(tokens, 4) == expected


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 59))
def test_taken_in_at_once_or_bit_by_bit_it_is_the_same(tokens: list[int], n_first: int) -> None:
    bits, whole = array("i", tokens[:n_first]), array("i", tokens)
    ones, once = Lookup(bits, 1), Lookup(whole, 1)
    for token in tokens[n_first:]:
        ones.follow()
        bits.append(token)
    assert ones.follow() == once.follow()
    assert ones.odds == once.odds
    assert ones.draft(5) == once.draft(5) or not once.follow()


def test_odds_follow_how_often_drafts_are_right() -> None:
    random = Random(1)
    tokens = array("i", [random.randrange(9) for _ in range(300)])
    lookup = Lookup(tokens, 300)
    lookup.follow()
    assert lookup.odds == 0.5  # the prompt says nothing of the answer
    for _ in range(100):
        tokens.append(random.randrange(9))
    lookup.follow()
    assert lookup.odds < 0.3
    tokens.extend(tokens[:100])
    lookup.follow()
    assert lookup.odds > 0.95


def test_a_long_text_is_taken_in_from_its_end_and_in_bounded_memory() -> None:
    lookup = Lookup(array("i", [*range(20000), 1, 2, 3]), 20003)
    assert not lookup.follow()
    lookup = Lookup(array("i", [*range(20000), 19990, 19991, 19992]), 20003)
    assert lookup.follow()
    assert lookup.draft(2) == (19993, 19994)


# ---- how many are run ----


def paced(fixed: float, row: float, n: int = 1) -> Pace:
    """On a machine where a step takes so long, and so much for each row."""
    pace = Pace(0.25, 512)
    for rows in (n, n + 4, n, n + 8, n + max(4, n // 2), n, n + 8) * 3:
        pace.observe(rows, 0, fixed + rows * row)
    return pace


def counts(pace: Pace, odds: list[float], room: int = 64) -> list[int]:
    return count_drafts(odds, [MAX_DRAFTS] * len(odds), room, pace)


def rate(fixed: float, row: float, odds: float, n: int) -> float:
    """Tokens a second of one stream with n drafts, each right with the same odds."""
    return sum(odds**i for i in range(n + 1)) / (fixed + (n + 1) * row)


@pytest.mark.parametrize("odds", [0.05, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97])
@pytest.mark.parametrize("row", [0.001, 0.01, 0.03, 0.1, 0.5])
def test_a_stream_alone_runs_as_many_as_are_fastest(odds: float, row: float) -> None:
    best = max(range(MAX_DRAFTS + 1), key=lambda n: rate(0.1, row, odds, n))
    (n,) = counts(paced(0.1, row), [odds])
    assert rate(0.1, row, odds, n) >= 0.99 * rate(0.1, row, odds, best)


def test_where_every_row_costs_as_much_as_a_token_nothing_is_run_or_looked_up() -> None:
    pace = paced(0.001, 1.0)
    assert not may_pay(1, pace)
    assert may_pay(1, paced(1.0, 0.1))
    assert not may_pay(16, paced(0.1, 1.0, 16))


def test_others_wait_a_tenth_of_a_step_at_most_for_drafts_they_have_no_part_in() -> None:
    assert counts(paced(1.0, 0.01, 2), [0.99, 0.0]) == [MAX_DRAFTS, 0]
    assert counts(paced(1.0, 0.05, 2), [0.99, 0.0]) == [2, 0]
    assert counts(paced(1.0, 0.2, 2), [0.99, 0.0]) == [0, 0]
    assert min(counts(paced(1.0, 0.2, 2), [0.99, 0.99])) >= 4


def test_there_are_no_more_than_there_is_room_for() -> None:
    assert counts(paced(1.0, 0.001, 4), [0.99] * 4, room=11) == [8, 3, 0, 0]


def test_what_a_row_costs_is_tried_at_first_and_then_seldom() -> None:
    pace = Pace(0.25, 512)
    tried = []
    for step in range(3000):
        (n,) = counts(pace, [0.01])
        if n:
            tried.append(step)
        pace.observe(1 + n, 0, 0.1 + 0.09 * (1 + n))
    assert tried[:4] == [1, 2, 3, 4]
    assert all(b - a > 400 for a, b in pairwise(tried[4:]))
    assert 4 < len(tried) < 12


def test_a_wrong_price_is_found_out() -> None:
    pace = paced(0.1, 0.1)
    assert counts(pace, [0.6]) == [1]
    for _ in range(1200):
        (n,) = counts(pace, [0.6])
        pace.observe(1 + n, 0, 0.1 + 0.01 * (1 + n))
    assert counts(pace, [0.6]) == [3]


def prose(random: Random, n: int) -> list[int]:
    """Words as often as in a language: some pairs come again, few go on as before."""
    return [int(random.paretovariate(0.7)) % 5000 for _ in range(n)]


def simulated_s(texts: list[list[int]], fixed: float, row: float, *, drafts: bool) -> float:
    """What steps take that say the second halves of texts, all at once. Steps take 10 % more or less
    now and then."""
    random, pace, total = Random(4), Pace(0.25, 512), 0.0
    said = [array("i", text[: len(text) // 2]) for text in texts]
    lookups = [Lookup(tokens, len(tokens)) for tokens in said]
    while live := [i for i, text in enumerate(texts) if len(said[i]) < len(text)]:
        run = [0] * len(live)
        if drafts and may_pay(len(live), pace):
            odds = [lookups[i].follow() for i in live]
            limits = [min(MAX_DRAFTS, len(texts[i]) - len(said[i]) - 1) for i in live]
            run = count_drafts(odds, limits, 64 - len(live), pace)
        step_s = (fixed + (len(live) + sum(run)) * row) * random.lognormvariate(0, 0.1)
        pace.observe(len(live) + sum(run), 0, step_s)
        total += step_s
        for i, n in zip(live, run, strict=True):
            draft, rest = lookups[i].draft(n) if n else (), texts[i][len(said[i]) :]
            right = next((k for k, g in enumerate(draft) if g != rest[k]), len(draft))
            said[i].extend(rest[: right + 1])
    return total


@pytest.mark.parametrize("n", [1, 4, 16])
@pytest.mark.parametrize(("fixed", "row"), [(5, 2), (2, 0.25), (10, 0.5), (8, 8), (1, 99)])
def test_drafting_is_worth_its_time_whatever_rows_take(fixed: float, row: float, n: int) -> None:
    random = Random(n)
    texts = [prose(random, 1600) for _ in range(n)]
    without = simulated_s(texts, fixed, row, drafts=False)
    assert simulated_s(texts, fixed, row, drafts=True) < 1.02 * without
    quotes = [text[:800] * 2 for text in texts]
    assert simulated_s(quotes, fixed, row, drafts=True) < 1.02 * without


@pytest.mark.parametrize(
    ("fixed", "row", "n", "gain"),
    [(5, 2, 1, 2.3), (2, 0.25, 1, 3.5), (10, 0.5, 1, 5), (8, 8, 1, 1.5), (10, 0.5, 16, 1.4)],
)
def test_quotes_come_as_much_sooner_as_rows_allow(
    fixed: float, row: float, n: int, gain: float
) -> None:
    random = Random(n)
    quotes = [prose(random, 800) * 2 for _ in range(n)]
    without = simulated_s(quotes, fixed, row, drafts=False)
    assert gain * simulated_s(quotes, fixed, row, drafts=True) < without


# ---- answers ----

PROMPTS = [
    "One day, a girl named Lily went to the park. She saw a big red ball. " * 3,
    "Tom and Sam had a dog. The dog had a bone. Tom and Sam",
    "The the the the the the",
    "Once",
]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.7},
    "top_p": {"temperature": 0.6, "top_p": 0.8, "top_k": 20, "min_p": 0.01},
    "penalties": {
        "temperature": 0.3,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.1,
    },
    "bias": {"temperature": 0, "logit_bias": {13: 2.0, 14: -100.0, 300: 1.5}},
    "min_tokens": {"temperature": 0.4, "min_tokens": 30, "ignore_eos": False},
    "stop": {"temperature": 0, "stop": ("park", "bone"), "ignore_eos": False},
    "choices": {"temperature": 0.5},
}


@pytest.fixture(scope="module")
def bundled() -> Path:
    return hub.resolve("tinystories")


def answers(path: Path, way: str, *, drafts: bool, n_blocks: int) -> tuple[Any, Any, Machine]:
    """Tokens and log-probabilities of all choices to all prompts at once."""
    card = read_card(EngineConfig(model=str(path)))
    model = Model(str(path), threads=2)
    context = Context(
        model,
        threads=2,
        max_rows=64,
        max_sequences=MAX_LOGITS,
        max_context=160,
        n_kv_blocks=n_blocks,
    )
    machine = Machine(
        n_blocks=n_blocks,
        max_sequences=6,
        max_context=160,
        drafts=drafts,
        context=context,
        token_bytes=model.token_bytes,
        eos_ids=tuple(card.tokenizer.eos_ids),
    )
    sampling = {"max_tokens": 90, "ignore_eos": True, "n_logprobs": 2, "seed": 5} | WAYS[way]
    for prompt in PROMPTS:
        ids = card.tokenizer.encode(prompt)
        machine.submit(ids, SamplingParams(**sampling), n_choices=3 if way == "choices" else 1)
    machine.run()
    assert len(machine.finished) == len(machine.answers)
    context.close()
    model.close()
    return machine.answers, machine.scores, machine


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_the_same_to_the_bit(bundled: Path, way: str) -> None:
    """Also where there is memory for one at a time, and others are set back."""
    said, scores, _ = answers(bundled, way, drafts=False, n_blocks=60)
    for n_blocks in (60, 5):
        got, got_scores, machine = answers(bundled, way, drafts=True, n_blocks=n_blocks)
        assert got == said
        assert got_scores == scores
        counters = machine.scheduler.counters
        assert 0 < sum(counters.accepted_at) < counters.drafts
        assert n_blocks == 60 or counters.preemptions > 0 or way == "stop"
