"""Choices and scores of a running model against numpy on its own logits."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cflow.engine.native import Context, Pick, Row, const
from oracles.random_model import VOCAB_SIZE, RandomModel
from oracles.running import opened, rows, step

N_TOKENS = 150  # the model's rows past it name no token
N_DRAWS = 4096
BATCH = 64

Floats = NDArray[np.float64]


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Context]:
    path = tmp_path_factory.mktemp("sampling") / "tiny.cflow"
    with opened(RandomModel([{}], n_tokens=N_TOKENS).write(path)) as context:
        yield context


@pytest.fixture
def logits(context: Context) -> Floats:
    """Row 0 of the last step."""
    return np.asarray(step(context, rows([7]))[0], np.float64)


def draws(context: Context, **parameters: Any) -> NDArray[np.int64]:
    """N_DRAWS tokens, of output indices 0, 1, ..."""
    tokens: list[int] = []
    for first in range(0, N_DRAWS, BATCH):
        picks = [Pick(0, index=first + i, **parameters) for i in range(BATCH)]
        choices = context.sample(picks)
        assert all(choice.status == const.Status.OK for choice in choices)
        tokens += [choice.token for choice in choices]
    return np.array(tokens)


def softmax(x: Floats) -> Floats:
    weights = np.exp(x - x.max())
    return np.asarray(weights / weights.sum())


def check_distribution(tokens: NDArray[np.int64], expected: Floats) -> None:
    """Pearson's statistic within 4 deviations; rare tokens pooled."""
    counts = np.bincount(tokens, minlength=len(expected))
    assert not counts[expected == 0].any()
    wanted = expected * len(tokens)
    common = wanted >= 5
    counts_of = np.append(counts[common], counts[~common].sum())
    wanted_of = np.append(wanted[common], wanted[~common].sum())
    filled = wanted_of > 0
    terms = (counts_of[filled] - wanted_of[filled]) ** 2 / wanted_of[filled]
    degrees = len(terms) - 1
    assert degrees > 0
    assert abs(terms.sum() - degrees) < 4 * np.sqrt(2 * degrees)


def allowed(logits: Floats) -> Floats:
    """Logits with the rows that name no token taken out."""
    return np.where(np.arange(VOCAB_SIZE) < N_TOKENS, logits, -np.inf)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_temperature(context: Context, logits: Floats, temperature: float) -> None:
    tokens = draws(context, seed=1, temperature=temperature)
    check_distribution(tokens, softmax(allowed(logits) / temperature))


def test_top_k(context: Context, logits: Floats) -> None:
    best = np.argsort(-allowed(logits))[:7]
    only = np.full(VOCAB_SIZE, -np.inf)
    only[best] = logits[best]
    check_distribution(draws(context, seed=2, top_k=7), softmax(only))


@pytest.mark.parametrize("top_p", [0.3, 0.9])
def test_top_p(context: Context, logits: Floats, top_p: float) -> None:
    probability = softmax(allowed(logits))
    order = np.argsort(-probability)
    before = np.cumsum(probability[order]) - probability[order]
    kept = np.zeros(VOCAB_SIZE)
    kept[order[before < top_p]] = probability[order[before < top_p]]
    check_distribution(draws(context, seed=3, top_p=top_p), kept / kept.sum())


def test_min_p(context: Context, logits: Floats) -> None:
    probability = softmax(allowed(logits))
    kept = np.where(probability >= 0.1 * probability.max(), probability, 0)
    check_distribution(draws(context, seed=4, min_p=0.1), kept / kept.sum())


def test_penalties_and_bias(context: Context, logits: Floats) -> None:
    history = np.array([3, 5, 5, 9, 9, 9, 20, int(logits.argmax())], np.int32)
    bias = {30: 1.5, 31: -2.0, 32: -100.0}
    x = logits.copy()
    for token in set(history.tolist()):
        x[token] = x[token] / 1.3 if x[token] > 0 else x[token] * 1.3
    for token in history[3:]:
        x[token] -= 0.4
    for token in set(history[3:].tolist()):
        x[token] -= 0.7
    for token, value in bias.items():
        x[token] += value if value > -100 else -np.inf
    tokens = draws(
        context,
        seed=5,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.7,
        n_prompt=3,
        history=history,
        bias_ids=np.array(list(bias), np.int32),
        bias=np.array(list(bias.values()), np.float32),
    )
    check_distribution(tokens, softmax(allowed(x)))


def test_mask(context: Context, logits: Floats) -> None:
    bits = np.random.default_rng(0).random(VOCAB_SIZE) < 0.3
    mask = np.packbits(bits, bitorder="little").view(np.uint32)
    tokens = draws(context, seed=6, mask=mask)
    check_distribution(tokens, softmax(np.where(bits, allowed(logits), -np.inf)))


def test_a_mask_of_nothing_fails_its_pick_only(context: Context, logits: Floats) -> None:
    empty = np.zeros(VOCAB_SIZE // 32, np.uint32)
    greedy = Pick(0, temperature=0.0)
    failed, fine = context.sample([Pick(0, mask=empty, n_top=1), greedy])
    assert (failed.status, failed.token, failed.score) == (const.Status.EINVAL, -1, None)
    assert (fine.status, fine.token) == (const.Status.OK, int(allowed(logits).argmax()))


def test_a_reused_pick_slot_forgets_the_mask_before(context: Context, logits: Floats) -> None:
    token = int(logits[:N_TOKENS].argmin())
    mask = np.zeros(VOCAB_SIZE // 32, np.uint32)
    mask[token // 32] = 1 << token % 32
    assert context.sample([Pick(0, mask=mask)])[0].token == token
    assert context.sample([Pick(0, temperature=0.0)])[0].token != token


def test_tokens_depend_on_seed_choice_and_index_alone(context: Context) -> None:
    step(context, rows([7]))
    alone = [context.sample([Pick(0, seed=9, choice=1, index=i)])[0].token for i in range(8)]
    others = [Pick(0, seed=9, index=i) for i in range(8)]
    step(context, [Row(1, 11, 0, const.CFLOW_ROW_LOGITS), *rows([7])])
    mixed = [Pick(1, seed=9, choice=1, index=i) for i in reversed(range(8))]
    for other in others:
        other.row = 1
    together = context.sample([*others, *mixed])
    assert [choice.token for choice in together[:7:-1]] == alone
    assert [choice.token for choice in together[:8]] != alone


def test_negative_seeds_are_seeds(context: Context) -> None:
    step(context, rows([7]))
    tokens = {context.sample([Pick(0, seed=seed)])[0].token for seed in (-1, -2, -3, 1 << 63)}
    assert len(tokens) > 1


def test_scores_of_choices_are_raw_log_probabilities(context: Context, logits: Floats) -> None:
    logprobs = np.log(softmax(logits))
    choice = context.sample([Pick(0, seed=3, temperature=2.0, top_k=30, n_top=5)])[0]
    assert choice.score is not None
    assert choice.score.token == choice.token
    assert choice.score.logprob == pytest.approx(logprobs[choice.token], abs=1e-5)
    assert choice.score.rank == (logits > logits[choice.token]).sum()
    assert [token for token, _ in choice.score.top] == np.argsort(-logits)[:5].tolist()
    best = np.sort(logprobs)[::-1][:5]
    np.testing.assert_allclose([logprob for _, logprob in choice.score.top], best, atol=1e-5)
    assert context.sample([Pick(0)])[0].score is None
    bare = context.sample([Pick(0, n_top=0)])[0].score
    assert bare is not None
    assert bare.top == ()


def test_prompt_scores_are_raw_log_probabilities(context: Context) -> None:
    prompt = [7, 20, 33, 12, 90, 41, 5]
    want = np.log([softmax(row.astype(np.float64)) for row in step(context, rows(prompt))])
    scored = [
        Row(1, token, i, const.CFLOW_ROW_SCORE, target=prompt[i + 1], n_top=i % 3)
        for i, token in enumerate(prompt[:-1])
    ]
    last = Row(1, prompt[-1], len(prompt) - 1, const.CFLOW_ROW_LOGITS)
    result = context.step([*scored, last])
    assert len(result.scores) == len(scored)
    for i, score in enumerate(result.scores):
        assert score.token == prompt[i + 1]
        assert score.logprob == pytest.approx(want[i, prompt[i + 1]], abs=1e-5)
        assert score.rank == (want[i] > want[i, prompt[i + 1]]).sum()
        assert [token for token, _ in score.top] == np.argsort(-want[i])[: i % 3].tolist()
