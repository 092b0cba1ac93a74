"""The engine handle over a real worker process that runs a toy model."""

import asyncio
import gc
import os
import re
import resource
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.errors import EngineError
from cflow.engine.base.messages import TIMED_OUT, Delta, Finish, Progress, SamplingParams, Submit
from cflow.engine.client.answer import LocalAnswer
from cflow.engine.client.card import ModelCard
from cflow.engine.client.engine import Engine, GenerateRequest, State
from cflow.engine.client.local import FAULTS, LocalEngine
from cflow.engine.text.dialect import Dialect
from cflow.engine.text.grammar import GrammarChecker, from_json_schema, from_regex
from cflow.engine.text.tokenizer import Tokenizer
from harness import waiting
from harness.asking import submit
from harness.fake_engine import NO_HEADER
from harness.waiting import LIMIT_S
from harness.waiting import until_async as until
from oracles.toy_model import (
    EOS,
    HANGS,
    NO_EXPERT,
    NOT_FINITE,
    RAISES,
    TOKEN_BYTES,
    continuation,
    logprob,
)

TESTS = Path(__file__).parents[2]
COMMAND = (sys.executable, str(TESTS / "oracles" / "toy_worker.py"))
CARD = ModelCard(
    name="toy",
    path="toy",
    digest="",
    context=1024,
    trained_context=1024,
    n_params=0,
    created=0,
    metadata={},
    tokenizer=Tokenizer(b"", TOKEN_BYTES, {"eos_ids": [EOS]}),
    template=None,
    dialect=Dialect(),
    grammars=GrammarChecker(NO_HEADER),
    vocab_size=len(TOKEN_BYTES),
    n_layers=0,
    n_experts=0,
    top_k=0,
    bytes_per_token=0,
)
PROMPT = [10 + i % 50 for i in range(40)]
SHORT = SamplingParams(max_tokens=12, seed=1)
LONG = SamplingParams(max_tokens=900, ignore_eos=True)
pytestmark = pytest.mark.anyio


UVLOOP, ASYNCIO = (("asyncio", {"use_uvloop": use}) for use in (True, False))
# What hangs on the loop: processes and their sockets.
on_both_loops = pytest.mark.parametrize(
    "anyio_backend", [UVLOOP, ASYNCIO], ids=["uvloop", "asyncio"]
)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The loop of the server; the commands run on asyncio's own."""
    return UVLOOP


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker finds the toy model."""
    paths = [str(TESTS), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@asynccontextmanager
async def running(
    model: str = "", *, wait: bool = True, **options: Any
) -> AsyncIterator[LocalEngine]:
    """model: the toy worker's settings."""
    engine = LocalEngine(EngineConfig(model=model, **options), CARD, COMMAND)
    engine.launch()
    try:
        if wait:
            await engine.wait_ready()
        yield engine
    finally:
        await engine.close()


async def read(answer: LocalAnswer) -> dict[int, list[Delta]]:
    """All deltas, by choice."""
    deltas: dict[int, list[Delta]] = defaultdict(list)
    async with asyncio.timeout(LIMIT_S):
        async for event in answer:
            if isinstance(event, Delta):
                deltas[event.choice].append(event)
    return deltas


async def error_of(answer: LocalAnswer) -> EngineError:
    with pytest.raises(EngineError) as caught:
        await read(answer)
    return caught.value


async def first_delta(answer: LocalAnswer) -> Delta:
    async with asyncio.timeout(LIMIT_S):
        async for event in answer:
            if isinstance(event, Delta):
                return event
    raise AssertionError("no delta")


def tokens_of(deltas: Sequence[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


def text_of(tokens: Sequence[int]) -> str:
    return bytes(token for token in tokens if token != EOS).decode()


def is_gone(pid: int) -> bool:
    """No process, or one that only waits for its parent to notice."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


# ---- answers ----


async def test_an_answer_arrives_token_by_token_and_ends_once() -> None:
    async with running() as engine:
        deltas = (await read(await submit(engine, PROMPT, sampling=SHORT)))[0]
        expected = continuation(PROMPT, SHORT)
        assert tokens_of(deltas) == expected
        assert "".join(delta.text for delta in deltas) == text_of(expected)
        assert [delta.finish is not None for delta in deltas] == [False] * (len(deltas) - 1) + [
            True
        ]
        assert [delta.n_cached for delta in deltas] == [0] + [None] * (len(deltas) - 1)


@on_both_loops
async def test_many_requests_at_once_get_the_answers_they_get_alone() -> None:
    async with running("n_blocks=40", max_sequences=6, max_step_tokens=32) as engine:
        prompts = [[10 + i, *PROMPT] for i in range(12)]
        answers = [await submit(engine, p, sampling=SHORT, n_choices=2) for p in prompts]
        for prompt, deltas in zip(prompts, await asyncio.gather(*map(read, answers)), strict=True):
            for choice in (0, 1):
                assert tokens_of(deltas[choice]) == continuation(prompt, SHORT, choice)


async def test_logprobs_of_answer_and_prompt_come_along() -> None:
    async with running() as engine:
        sampling = SamplingParams(max_tokens=3, n_logprobs=0, n_prompt_logprobs=1, seed=2)
        deltas = (await read(await submit(engine, PROMPT, sampling=sampling)))[0]
        history = list(PROMPT)
        for delta in deltas:
            assert delta.logprobs[0].token == delta.tokens[0]
            assert delta.logprobs[0].logprob == logprob(tuple(history), delta.tokens[0])
            history += delta.tokens
        scores = deltas[0].prompt_logprobs
        assert scores is not None
        assert scores[0] is None
        values = [score.logprob for score in scores[1:] if score is not None]
        assert values == [logprob(tuple(PROMPT[:i]), PROMPT[i]) for i in range(1, len(PROMPT))]


async def test_scoring_alone_gives_one_delta_without_tokens() -> None:
    async with running() as engine:
        sampling = SamplingParams(max_tokens=0, n_prompt_logprobs=0)
        (delta,) = (await read(await submit(engine, PROMPT, sampling=sampling)))[0]
        assert delta.tokens == ()
        assert delta.finish is not None
        assert delta.finish.reason == "length"
        assert delta.prompt_logprobs is not None
        assert len(delta.prompt_logprobs) == len(PROMPT)


async def test_progress_tells_when_the_prompt_is_begun_and_how_far_it_is() -> None:
    async with running(max_step_tokens=16, max_sequences=4) as engine:
        answer = await submit(engine, PROMPT, sampling=SHORT)
        events = [event async for event in answer]
        done = [event.n_done for event in events if isinstance(event, Progress)]
        assert done == [0, 16, 32]
        assert all(isinstance(event, Progress) for event in events[:3])
        answer = await submit(engine, PROMPT, sampling=SHORT)
        events = [event async for event in answer]
        assert [e.n_done for e in events if isinstance(e, Progress)] == [32]
        assert next(e.n_cached for e in events if isinstance(e, Delta)) == 32


async def test_an_answer_ends_where_the_context_ends() -> None:
    async with running(context=64) as engine:
        deltas = (await read(await submit(engine, PROMPT, sampling=LONG)))[0]
        assert len(tokens_of(deltas)) == 64 - len(PROMPT)
        assert deltas[-1].finish is not None
        assert deltas[-1].finish.reason == "length"


async def test_end_tokens_are_banned_before_min_tokens() -> None:
    forced = SamplingParams(max_tokens=9, min_tokens=4, logit_bias={EOS: 100.0})
    async with running() as engine:
        deltas = (await read(await submit(engine, PROMPT, sampling=forced)))[0]
        tokens = tokens_of(deltas)
        assert EOS not in tokens[:4]
        assert tokens[4:] == [EOS]


# ---- refusals ----

BAD = [
    ([], SHORT, "at least one"),
    ([1, 257], SHORT, r"0\.\.256"),
    ([-1], SHORT, r"0\.\.256"),
    (PROMPT, SamplingParams(max_tokens=1, logit_bias={257: 1.0}), "logit_bias"),
    (PROMPT, SamplingParams(max_tokens=1, stop_token_ids=(-5,)), "stop_token_ids"),
    ([10] * 1024, SHORT, "no room"),
]


@pytest.mark.parametrize(("prompt", "sampling", "named"), BAD, ids=range(len(BAD)))
async def test_a_request_that_would_harm_others_is_refused(
    prompt: list[int], sampling: SamplingParams, named: str
) -> None:
    async with running() as engine:
        with pytest.raises(EngineError, match=named) as caught:
            await submit(engine, prompt, sampling=sampling)
        assert caught.value.code == "invalid_request"


async def test_a_model_for_embeddings_generates_nothing() -> None:
    async with running() as engine:
        engine.card = replace(CARD, pooling="last")
        with pytest.raises(EngineError, match="toy is a model for embeddings") as caught:
            await submit(engine, PROMPT, sampling=SHORT)
        assert caught.value.code == "invalid_request"


async def test_the_queue_is_bounded() -> None:
    async with running("step_s=0.01", max_sequences=2, max_queue=3) as engine:
        answers = [await submit(engine, PROMPT, sampling=LONG) for _ in range(5)]
        assert engine.queue_depth == 3
        with pytest.raises(EngineError) as caught:
            await submit(engine, PROMPT, sampling=LONG)
        assert caught.value.code == "queue_full"
        answers[0].cancel()
        await error_of(answers[0])
        answers.append(await submit(engine, PROMPT, sampling=LONG))


async def test_a_key_among_several_leaves_as_much_room_as_it_takes() -> None:
    async with running("step_s=0.01", max_sequences=2, max_queue=10) as engine:
        kept: list[LocalAnswer] = []

        async def put(key: str) -> None:
            answer = await submit(engine, PROMPT, sampling=LONG, key=key, shares_queue=True)
            kept.append(answer)

        async def fill(key: str) -> int:
            """How many answers of this key are accepted, one by one."""
            n_before = len(kept)
            refused: EngineError | None = None
            while refused is None:
                try:
                    await put(key)
                except EngineError as error:
                    refused = error
            assert (refused.code, "leave" in str(refused)) == ("key_queue_full", True)
            return len(kept) - n_before

        with pytest.raises(EngineError, match="room for 6 for one of several") as caught:
            await submit(engine, PROMPT, sampling=LONG, n_choices=7, shares_queue=True)
        assert caught.value.code == "too_many_answers"
        assert [await fill(key) for key in "abc"] == [6, 3, 2]
        await put("d")
        with pytest.raises(EngineError, match="answers are waiting") as caught:
            await put("e")
        assert caught.value.code == "queue_full"
        kept[0].cancel()
        await error_of(kept[0])
        await put("e")


async def test_all_prompts_of_a_request_are_accepted_or_none() -> None:
    async with running("step_s=0.01", max_sequences=2, max_queue=3) as engine:
        for prompts, code in (
            ([PROMPT] * 6, "too_many_answers"),
            ([PROMPT, PROMPT, [-1]], "invalid_request"),
        ):
            request = GenerateRequest(prompts=prompts, sampling=[SHORT] * len(prompts))
            with pytest.raises(EngineError) as caught:
                await engine.submit(request)
            assert caught.value.code == code
        running_one = await submit(engine, PROMPT, sampling=LONG)
        with pytest.raises(EngineError) as caught:
            await engine.submit(GenerateRequest(prompts=[PROMPT] * 5, sampling=[SHORT] * 5))
        assert caught.value.code == "queue_full"
        assert engine.queue_depth == 0
        running_one.cancel()
        await error_of(running_one)
        answers = await engine.submit(GenerateRequest(prompts=[PROMPT] * 5, sampling=[SHORT] * 5))
        for answer in answers:
            assert tokens_of((await read(answer))[0]) == continuation(PROMPT, SHORT)


async def test_each_prompt_of_a_batch_knows_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as engine:
        sent: list[Submit] = []
        monkeypatch.setattr(engine._worker, "send", sent.append)
        prompts, sampling = [PROMPT] * 3, [SHORT] * 3
        await engine.submit(GenerateRequest(prompts=prompts, sampling=sampling, n_choices=2))
        assert [submit.place for submit in sent[:3]] == [0, 2, 4]


async def test_it_keeps_the_interface() -> None:
    engine: Engine = LocalEngine(EngineConfig(model=""), CARD, COMMAND)
    assert engine.status.state == "loading"


async def test_who_waits_is_told_how_many_go_first() -> None:
    async with running("step_s=0.01", max_sequences=1) as engine:
        runs, *waiting = [await submit(engine, PROMPT, sampling=LONG) for _ in range(3)]
        urgent = await submit(engine, PROMPT, sampling=SHORT, priority=1)
        await until(lambda: urgent.n_ahead == 2)
        assert [answer.n_ahead for answer in (runs, *waiting)] == [None, 0, 1]
        waiting[0].cancel()
        await until(lambda: urgent.n_ahead == 1)


async def test_it_is_choices_that_fill_the_queue() -> None:
    async with running("step_s=0.01", max_sequences=2, max_queue=3) as engine:
        assert engine.capacity == 5
        many = await submit(engine, PROMPT, sampling=LONG, n_choices=4)
        assert engine.queue_depth == 2
        with pytest.raises(EngineError, match="2 more are requested"):
            await submit(engine, PROMPT, sampling=LONG, n_choices=2)
        few = await submit(engine, PROMPT, sampling=SHORT)
        assert engine.queue_depth == 3
        many.cancel()
        await error_of(many)
        await read(few)
        assert engine.queue_depth == 0
        await read(await submit(engine, PROMPT, sampling=SHORT, n_choices=5))


async def test_nothing_is_taken_while_the_model_loads() -> None:
    async with running("load_s=1", wait=False) as engine:
        assert engine.state == "loading"
        with pytest.raises(EngineError) as caught:
            await submit(engine, PROMPT, sampling=SHORT)
        assert caught.value.code == "loading"
        await until(lambda: engine.loading)
        await engine.wait_ready()
        assert (engine.state, engine.loading) == ("ready", None)
        await read(await submit(engine, PROMPT, sampling=SHORT))


@on_both_loops
async def test_a_model_that_cannot_be_loaded_says_why() -> None:
    async with running("fail=damaged", wait=False) as engine:
        with pytest.raises(EngineError, match="damaged") as caught:
            await engine.wait_ready()
        assert caught.value.code == "model_error"
        await until(lambda: engine.state == "restarting")


# ---- requests that end early ----


@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
async def test_a_cancelled_request_stops_and_frees_its_place(phase: str) -> None:
    options: dict[str, Any] = {"max_sequences": 1, "max_step_tokens": 16}
    async with running("step_s=0.03 n_blocks=32", **options) as engine:
        first = await submit(engine, [10] * 500, sampling=LONG)
        await until(lambda: engine.stats.n_running)
        victim = await submit(engine, PROMPT, sampling=LONG) if phase == "queue" else first
        if phase == "decode":
            await first_delta(first)
        if phase == "queue":
            await until(lambda: engine.stats.n_waiting)
        victim.cancel()
        victim.cancel()
        assert (await error_of(victim)).code == "cancelled"
        if phase == "queue":
            first.cancel()
        await until(lambda: not engine.stats.n_running and not engine.stats.n_kv_used)
        assert getattr(engine.stats, f"cancelled_{phase}") >= 1
        victim.cancel()
        n_before = engine.stats.generation_tokens
        tokens = tokens_of((await read(await submit(engine, PROMPT, sampling=SHORT)))[0])
        await until(lambda: not engine.stats.n_running)
        assert engine.stats.generation_tokens == n_before + len(tokens)


async def test_a_long_step_is_cut_short_when_nobody_waits_for_it() -> None:
    async with running("step_s=600") as engine:
        answer = await submit(engine, PROMPT, sampling=LONG)
        assert isinstance(await anext(answer), Progress)
        answer.cancel()
        await error_of(answer)


async def test_a_step_is_not_cut_short_while_another_request_is_in_it() -> None:
    async with running("step_s=0.2") as engine:
        first = await submit(engine, PROMPT, sampling=LONG)
        second = await submit(engine, PROMPT, sampling=SHORT)
        await first_delta(first)
        first.cancel()
        tokens = tokens_of((await read(second))[0])
        assert tokens == continuation(PROMPT, SHORT)


@pytest.mark.parametrize("n_choices", [1, 3])
async def test_an_answer_out_of_time_ends_with_what_it_has(n_choices: int) -> None:
    """The worker's clock jumps past the deadline after five steps."""
    sampling = SamplingParams(max_tokens=900, ignore_eos=True, stop=("\x00never",))
    async with running("late_after=5") as engine:
        answer = await submit(
            engine, PROMPT, sampling=sampling, n_choices=n_choices, timeout_s=3600
        )
        choices = await read(answer)
        for choice in range(n_choices):
            tokens, deltas = tokens_of(choices[choice]), choices[choice]
            assert deltas[-1].finish == TIMED_OUT
            assert 0 < len(tokens) < 900
            assert "".join(delta.text for delta in deltas) == text_of(tokens)
        await until(lambda: not engine.stats.n_running and not engine.stats.n_kv_used)


async def test_out_of_time_in_the_queue_and_in_a_long_step() -> None:
    """The step is cut short: nobody in it has time left."""
    async with running("step_s=600", max_sequences=1) as engine:
        answers = [await submit(engine, PROMPT, sampling=LONG, timeout_s=0.5) for _ in range(2)]
        for answer in answers:
            (deltas,) = (await read(answer)).values()
            assert deltas == [Delta(answer.request_id, 0, finish=TIMED_OUT)]


async def test_time_enough_changes_nothing() -> None:
    async with running() as engine:
        deltas = await read(await submit(engine, PROMPT, sampling=SHORT, timeout_s=3600))
        assert tokens_of(deltas[0]) == continuation(PROMPT, SHORT)


@on_both_loops
async def test_an_answer_nobody_holds_cancels_itself() -> None:
    async with running("step_s=0.01") as engine:
        answer = await submit(engine, PROMPT, sampling=LONG)
        await first_delta(answer)
        del answer
        gc.collect()
        await until(lambda: engine.stats.cancelled_decode == 1)


async def test_a_request_that_breaks_its_step_does_not_break_the_worker() -> None:
    async with running() as engine:
        assert (await error_of(await submit(engine, [RAISES], sampling=SHORT))).code == "internal"
        assert (
            await error_of(await submit(engine, [NOT_FINITE], sampling=SHORT))
        ).code == "numeric"
        deltas = await read(await submit(engine, PROMPT, sampling=SHORT))
        assert tokens_of(deltas[0]) == continuation(PROMPT, SHORT)
        assert engine.restarts == 0


async def test_output_that_is_not_finite_fails_one_request_of_a_step() -> None:
    async with running("step_s=0.01") as engine:
        good = await submit(engine, PROMPT, sampling=SHORT)
        bad = await submit(engine, [*PROMPT, NOT_FINITE], sampling=SHORT, n_choices=3)
        assert (await error_of(bad)).code == "numeric"
        assert tokens_of((await read(good))[0]) == continuation(PROMPT, SHORT)


async def test_an_expert_that_cannot_be_read_fails_its_request_by_name() -> None:
    async with running("step_s=0.01") as engine:
        sampling = SamplingParams(max_tokens=12, seed=2, ignore_eos=True)
        good = await submit(engine, PROMPT, sampling=sampling, n_choices=2)
        error = await error_of(await submit(engine, [*PROMPT, NO_EXPERT, *PROMPT], sampling=SHORT))
        assert error.code == "io_error"
        assert str(error).endswith("disk: layer 3, expert 17: the file ends inside it")
        deltas = await read(good)
        for choice in (0, 1):
            *unfinished, last = deltas[choice]
            assert tokens_of(deltas[choice]) == continuation(PROMPT, sampling, choice)
            assert not any(delta.disk for delta in unfinished)
            usage = last.disk
            assert usage is not None
            n_computed = 11 + (len(PROMPT) if choice == 0 else 0)
            assert (usage.expert_misses, usage.disk_bytes) == (n_computed, 4096 * n_computed)


async def test_requests_that_the_disk_fails_in_a_row_show(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = [*PROMPT, NO_EXPERT, *PROMPT]
    async with running() as engine:
        for n in range(FAULTS):
            assert not engine.is_failing, n
            await error_of(await submit(engine, bad, sampling=SHORT))
        assert engine.is_failing
        with monkeypatch.context() as patch:
            patch.setattr("cflow.engine.client.local.FAULT_S", 0.0)
            assert not engine.is_failing
        assert engine.is_failing
        await read(await submit(engine, PROMPT, sampling=SHORT))
        assert not engine.is_failing


# ---- workers that end early ----


@on_both_loops
@pytest.mark.parametrize("busy", [False, True])
async def test_a_killed_worker_fails_what_runs_and_is_replaced(busy: bool) -> None:
    async with running("step_s=0.01") as engine:
        ready = await engine.wait_ready()
        await read(await submit(engine, PROMPT, sampling=SHORT))
        await until(lambda: engine.stats.prompt_tokens == len(PROMPT))
        answers = [await submit(engine, PROMPT, sampling=LONG) for _ in range(4 if busy else 0)]
        if busy:
            await first_delta(answers[0])
        before = engine.stats
        os.kill(ready.pid, signal.SIGKILL)
        for answer in answers:
            assert (await error_of(answer)).code == "worker_died"
        await until(lambda: engine.state == "restarting")
        with pytest.raises(EngineError) as caught:
            await submit(engine, PROMPT, sampling=SHORT)
        assert caught.value.code == "worker_died"
        assert (await engine.wait_ready()).pid != ready.pid
        assert engine.restarts == 1
        deltas = await read(await submit(engine, PROMPT, sampling=SHORT))
        assert tokens_of(deltas[0]) == continuation(PROMPT, SHORT)
        await until(lambda: engine.stats.prompt_tokens >= before.prompt_tokens + len(PROMPT))
        assert engine.stats.steps > before.steps


@on_both_loops
async def test_a_worker_starts_beside_a_thousand_connections() -> None:
    """It inherits the number of its socket: select() would refuse one above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("no more than a thousand descriptors allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while opened[-1] < 1024:
            opened.append(os.dup(opened[0]))
        async with asyncio.timeout(LIMIT_S), running() as engine:
            deltas = await read(await submit(engine, PROMPT, sampling=SHORT))
            assert tokens_of(deltas[0]) == continuation(PROMPT, SHORT)
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@on_both_loops
async def test_a_hanging_worker_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[str] = []
    set_state = LocalEngine._set_state

    def note(engine: LocalEngine, state: State) -> None:
        states.append(state)
        set_state(engine, state)

    monkeypatch.setattr(LocalEngine, "_set_state", note)
    async with running(stuck_s=5.0) as engine:
        answer = await submit(engine, [HANGS], sampling=SHORT)
        assert (await error_of(answer)).code == "worker_stuck"
        await until(lambda: engine.restarts)
        assert states == ["ready", "stuck", "restarting"]
        await engine.wait_ready()
        await read(await submit(engine, PROMPT, sampling=SHORT))


async def test_waits_between_restarts_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def wait(delay_s: float) -> None:
        waits.append(delay_s)
        if len(waits) == 4:
            await asyncio.Event().wait()

    without_waits = SimpleNamespace(**(vars(asyncio) | {"sleep": wait}))
    monkeypatch.setattr("cflow.engine.client.local.asyncio", without_waits)
    async with running("fail=x", wait=False) as engine:
        await until(lambda: len(waits) == 4)
        assert engine.restarts == 4
    assert waits == [0.5, 1, 2, 4]


# ---- the end ----


@on_both_loops
async def test_draining_finishes_what_runs_and_takes_no_more() -> None:
    async with running("step_s=0.02") as engine:
        ready = await engine.wait_ready()
        answers = [await submit(engine, PROMPT, sampling=SHORT) for _ in range(3)]
        draining = asyncio.create_task(engine.drain(LIMIT_S))
        await until(lambda: engine.state == "draining")
        with pytest.raises(EngineError) as caught:
            await submit(engine, PROMPT, sampling=SHORT)
        assert caught.value.code == "draining"
        for answer in answers:
            assert tokens_of((await read(answer))[0]) == continuation(PROMPT, SHORT)
        await draining
        assert engine.state == "closed"
        assert engine.restarts == 0
        assert is_gone(ready.pid)


@on_both_loops
async def test_draining_fails_what_does_not_finish_in_time() -> None:
    async with running("step_s=0.02") as engine:
        answer = await submit(engine, PROMPT, sampling=LONG)
        await first_delta(answer)
        await engine.drain(0.2)
        assert (await error_of(answer)).code == "draining"


@on_both_loops
@pytest.mark.parametrize("model", ["step_s=0.01", "step_s=600", "load_s=600"])
async def test_closing_leaves_no_worker(model: str) -> None:
    async with running(model, wait="load_s" not in model) as engine:
        await until(lambda: engine._worker)
        assert engine._worker is not None
        pid = engine._worker.pid
        answer = await submit(engine, PROMPT, sampling=LONG) if engine.ready else None
        if answer is not None:
            assert isinstance(await anext(answer), Progress)
        await engine.close()
        await engine.close()
        assert is_gone(pid)
        if answer is not None:
            assert (await error_of(answer)).code == "draining"


FRONT_END = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from test_local import COMMAND, CARD, LONG, PROMPT
from cflow.engine.base.config import EngineConfig
from cflow.engine.client.local import LocalEngine
from harness.asking import submit

async def main():
    engine = LocalEngine(EngineConfig(model={model!r}), CARD, COMMAND)
    engine.launch()
    ready = await engine.wait_ready()
    answer = await submit(engine, PROMPT, sampling=LONG)
    print(ready.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("model", ["step_s=0.01", "step_s=600"])
def test_a_worker_ends_when_its_front_end_is_killed(model: str) -> None:
    code = FRONT_END.format(tests=str(Path(__file__).parent), model=model)
    with subprocess.Popen((sys.executable, "-c", code), stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        pid = int(front.stdout.readline())
        front.kill()
    waiting.until(lambda: is_gone(pid))


async def test_signals_of_the_terminal_do_not_reach_the_worker() -> None:
    async with running() as engine:
        ready = await engine.wait_ready()
        os.kill(ready.pid, signal.SIGINT)
        await read(await submit(engine, PROMPT, sampling=SHORT))
        assert engine.restarts == 0


# ---- grammars ----

WORD = SamplingParams(max_tokens=40, seed=3, grammar=from_regex("[b-d]{8}-x?"))


def assert_follows(deltas: Sequence[Delta], pattern: str) -> None:
    """The text is whole, and ends where the grammar does."""
    text = text_of(tokens_of(deltas))
    assert re.fullmatch(pattern, text), text
    assert deltas[-1].finish == Finish("stop")


async def test_answers_follow_their_grammar_each_in_its_own_way() -> None:
    async with running() as engine:
        choices = await read(await submit(engine, PROMPT, sampling=WORD, n_choices=5))
        for deltas in choices.values():
            assert_follows(deltas, "[b-d]{8}-x?")
        assert len({text_of(tokens_of(deltas)) for deltas in choices.values()}) > 1
        free = (await read(await submit(engine, PROMPT, sampling=SHORT)))[0]
        assert tokens_of(free) == continuation(PROMPT, SHORT)


async def test_being_set_back_changes_nothing_in_a_constrained_answer() -> None:
    sampling = structs.replace(WORD, max_tokens=300, grammar=from_regex("([a-m]{7}-){20,30}"))
    prompts = [PROMPT[i:] for i in range(6)]
    async with running("n_blocks=64") as engine:
        calm = [await read(await submit(engine, p, sampling=sampling)) for p in prompts]
    async with running("n_blocks=12", context=350) as engine:
        answers = [await submit(engine, p, sampling=sampling) for p in prompts]
        crowded = [await read(answer) for answer in answers]
        await until(lambda: engine.stats.preemptions)
    assert [tokens_of(d[0]) for d in crowded] == [tokens_of(d[0]) for d in calm]
    for deltas in calm:
        assert_follows(deltas[0], "([a-m]{7}-){20,30}")


@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_the_end_comes_only_where_the_grammar_is_whole(ignore_eos: bool) -> None:
    """The toy ends one answer in forty tokens on average, whatever it has said."""
    grammar = from_regex("([a-z]{9} )*")
    n_stopped = 0
    async with running() as engine:
        for seed in range(12):
            sampling = structs.replace(
                WORD, grammar=grammar, seed=seed, max_tokens=400, ignore_eos=ignore_eos
            )
            deltas = (await read(await submit(engine, PROMPT, sampling=sampling)))[0]
            text = text_of(tokens_of(deltas))
            if deltas[-1].finish == Finish("stop"):
                n_stopped += 1
                assert re.fullmatch("([a-z]{9} )*", text), text
            else:
                assert len(tokens_of(deltas)) == 400
    assert n_stopped > 0


async def test_min_tokens_holds_as_long_as_the_grammar_can_go_on() -> None:
    async with running() as engine:
        for grammar, n in ((from_regex("[a-z]*"), 30), (from_regex("[a-z]{5}"), 5)):
            sampling = structs.replace(WORD, grammar=grammar, min_tokens=30)
            deltas = (await read(await submit(engine, PROMPT, sampling=sampling)))[0]
            assert len(text_of(tokens_of(deltas))) >= n
            assert n == 30 or len(tokens_of(deltas)) == n


async def test_a_stop_string_ends_a_constrained_answer() -> None:
    sampling = structs.replace(WORD, stop=("-",))
    async with running() as engine:
        deltas = (await read(await submit(engine, PROMPT, sampling=sampling)))[0]
    assert deltas[-1].finish == Finish("stop", "-")
    assert re.fullmatch("[b-d]{8}", "".join(delta.text for delta in deltas))


async def test_what_cannot_be_followed_fails_alone() -> None:
    async with running("step_s=0.002") as engine:
        beside = await submit(engine, PROMPT, sampling=structs.replace(LONG, max_tokens=100))
        bad = {
            "cannot be used": structs.replace(WORD, grammar=from_regex("(")),
            "allow no token": structs.replace(
                WORD, grammar=from_regex("a"), logit_bias={ord("a"): -100.0}
            ),
            "grammar failed": structs.replace(
                WORD, grammar=from_regex("[b-d]{3}(((a{1000}){1000}){1000}){1000}")
            ),
        }
        for words, sampling in bad.items():
            error = await error_of(await submit(engine, PROMPT, sampling=sampling))
            assert error.code == "invalid_request"
            assert words in str(error)
        deltas = (await read(beside))[0]
        assert len(tokens_of(deltas)) == 100
        assert_follows((await read(await submit(engine, PROMPT, sampling=WORD)))[0], "[b-d]{8}-x?")


async def test_one_cancelled_while_its_grammar_compiles_is_answered_once() -> None:
    big = from_json_schema({"enum": [f"v{i}" for i in range(20000)]})
    async with running() as engine:
        answers = [await submit(engine, PROMPT, sampling=structs.replace(WORD, grammar=big))]
        answers += [await submit(engine, PROMPT, sampling=WORD) for _ in range(3)]
        for answer in answers[:3]:
            answer.cancel()
        for answer in answers[:3]:
            assert (await error_of(answer)).code == "cancelled"
        assert_follows((await read(answers[3]))[0], "[b-d]{8}-x?")
        await until(lambda: engine.stats.cancelled_queue == 3 and not engine.stats.n_running)
