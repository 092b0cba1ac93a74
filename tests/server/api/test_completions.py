"""POST /v1/completions, over a byte-level model that shouts the prompt back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from cflow.engine.base.errors import CflowError
from cflow.engine.base.messages import Delta, DiskUsage, Finish, Progress
from cflow.server.api.schemas import CompletionRequest
from cflow.server.config import server_config
from cflow.server.http.app import create_app
from cflow.server.http.routes import completions
from harness.fake_engine import BOS, EOS, READY, ByteTokenizer, Call, FakeEngine, logprob, shout
from harness.live import Live, error_of, events


def choice(live: Live, **fields: Any) -> dict[str, Any]:
    response = live.complete(**fields)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["choices"][0]
    return found


def streamed(live: Live, **fields: Any) -> list[dict[str, Any]]:
    return events(live.complete(stream=True, **fields))


def test_text_usage_and_envelope(live: Live) -> None:
    body = live.complete(prompt="abc", model="fake/model").json()
    assert body["choices"] == [
        {
            "index": 0,
            "text": "ABC",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 4, 7)
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "fake/model"


@pytest.mark.parametrize("prompt", ["", "x", " lead", "naïve 漢字 😸 end", "line\nline\r\n\t\x00"])
def test_stream_and_whole_answer_are_equal(live: Live, prompt: str) -> None:
    live.engine.card.tokenizer.bos_id = BOS
    fields: dict[str, Any] = {"prompt": prompt, "max_tokens": 40, "seed": 1}
    whole = live.complete(**fields).json()
    chunks = streamed(live, stream_options={"include_usage": True}, **fields)
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == whole["choices"][0]["text"]
    assert chunks[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert chunks[-1]["usage"] == whole["usage"]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1


def test_usage_chunk_comes_only_when_asked_and_last(live: Live) -> None:
    plain = streamed(live, prompt="ab")
    assert all(len(c["choices"]) == 1 and not c.get("usage") for c in plain)
    asked = streamed(live, prompt="ab", stream_options={"include_usage": True})
    assert [len(c["choices"]) for c in asked].count(0) == 1
    assert asked[-1]["choices"] == []
    assert all(c["usage"] is None for c in asked[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_usage_tells_what_the_disk_cost(live: Live, stream: bool) -> None:
    """Every choice of every prompt, where weights come from disk."""

    async def charged(call: Call) -> AsyncIterator[Delta | Progress]:
        async for event in shout(call):
            if isinstance(event, Delta) and event.finish is not None:
                event = replace(event, disk=DiskUsage(10, 2, 3, 8192, 1_500_000))
            yield event

    assert "expert_hits" not in live.complete(prompt="ab").json()["usage"]
    live.engine.script = charged
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    response = live.complete(prompt=["ab", "c"], n=2, stream=stream, **options)
    usage = (events(response)[-1] if stream else response.json())["usage"]
    assert (usage["expert_hits"], usage["expert_misses"]) == (40, 8)
    assert usage["layer_reads"] == 12
    assert (usage["disk_bytes"], usage["stall_ms"]) == (4 * 8192, 6.0)
    assert "deferred_experts" not in usage


def test_deferred_experts_are_said(live: Live) -> None:
    live.engine.put(ready=replace(READY, n_deferred=2))
    assert live.complete(prompt="ab").json()["usage"]["deferred_experts"] == 2


def test_prompts_and_choices_are_numbered_prompt_first(live: Live) -> None:
    body = live.complete(prompt=["ab", [99, 100]], n=2).json()
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in body["choices"]] == ["AB", "AB", "CD", "CD"]
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["completion_tokens"] == 12


def test_streamed_choices_carry_their_index(live: Live) -> None:
    texts = ["", "", "", ""]
    for chunk in streamed(live, prompt=["ab", "cd"], n=2):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["AB", "AB", "CD", "CD"]


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [(97, 98)]),
        ([97, 98], [(97, 98)]),
        (["a", "b"], [(97,), (98,)]),
        ([[97], [98, 99]], [(97,), (98, 99)]),
        ([" ", "\n"], [(32,), (10,)]),
    ],
)
def test_every_form_of_prompt(live: Live, prompt: Any, ids: list[tuple[int, ...]]) -> None:
    assert live.complete(prompt=prompt, max_tokens=2).status_code == 200
    assert [call.prompt for call in live.engine.calls] == ids


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        [[]],
        5,
        1.5,
        True,
        {},
        [1.5],
        [True],
        [None],
        ["a", 5],
        [["a"]],
        [258],
        [-1],
        [[0, 10**30]],
    ],
)
def test_other_prompts_are_refused_and_named(live: Live, prompt: Any) -> None:
    response = live.complete(prompt=prompt)
    assert response.status_code == 400
    assert error_of(response)["param"] == "prompt"
    assert live.engine.calls == []


def test_missing_prompt_is_refused(live: Live) -> None:
    for body in ({}, {"prompt": None}):
        assert error_of(live.post("/v1/completions", body))["code"] == "missing_parameter"


def test_empty_prompt_begins_a_document(live: Live) -> None:
    assert error_of(live.complete(prompt=""))["code"] == "empty_prompt"
    live.engine.card.tokenizer.bos_id = BOS
    body = live.complete(prompt=["", "a"]).json()
    assert body["usage"]["prompt_tokens"] == 3  # <s>, <s> and a
    assert [call.prompt for call in live.engine.calls] == [(BOS,), (BOS, 97)]


class TestParameters:
    def test_reach_the_engine(self, live: Live) -> None:
        live.complete(
            prompt="a", max_tokens=7, min_tokens=2, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1,
            seed=-1, presence_penalty=0.5, frequency_penalty=-0.5, repeat_penalty=1.25,
            logit_bias={"5": -100, "6": 100}, stop=["x", "yz"], stop_token_ids=[3], ignore_eos=True,
            include_stop_str_in_output=True, logprobs=2,
        )  # fmt: skip
        how = live.engine.calls[0].sampling
        assert (how.max_tokens, how.min_tokens, how.top_k) == (7, 2, 5)
        assert (how.temperature, how.top_p, how.min_p) == (0.5, 0.9, 0.1)
        assert (how.presence_penalty, how.frequency_penalty) == (0.5, -0.5)
        assert how.repetition_penalty == 1.25
        assert how.seed == 2**64 - 1
        assert how.logit_bias == {5: -100, 6: 100}
        assert (how.stop, how.stop_token_ids) == (("x", "yz"), (3,))
        assert how.ignore_eos
        assert how.include_stop
        assert (how.n_logprobs, how.n_prompt_logprobs) == (2, None)

    def test_defaults_are_openais(self, live: Live) -> None:
        live.complete(prompt="a")
        how = live.engine.calls[0].sampling
        assert (how.max_tokens, how.temperature, how.top_p, how.top_k) == (16, 1.0, 1.0, 0)
        assert how.n_logprobs is None

    def test_the_models_defaults_stand_between(self, live: Live) -> None:
        live.engine.card.metadata["generation"].update(temperature=0.25, top_k=3)
        live.complete(prompt="a", top_k=-1)
        how = live.engine.calls[0].sampling
        assert (how.temperature, how.top_k) == (0.25, 0)

    def test_a_missing_seed_is_random(self, live: Live) -> None:
        for _ in range(2):
            live.complete(prompt="a")
        first, second = (call.sampling.seed for call in live.engine.calls)
        assert first != second

    def test_null_is_absent(self, live: Live) -> None:
        names = [name for name in CompletionRequest.model_fields if name != "prompt"]
        response = live.complete(prompt="ab", **dict.fromkeys(names))
        assert response.json()["choices"] == live.complete(prompt="ab").json()["choices"]
        first, second = (call.sampling for call in live.engine.calls)
        assert first != second  # the seeds
        assert {f: getattr(first, f) for f in first.__struct_fields__ if f != "seed"} == {
            f: getattr(second, f) for f in second.__struct_fields__ if f != "seed"
        }

    def test_unknown_fields_are_ignored_and_listed(self, live: Live) -> None:
        response = live.complete(prompt="a", x_unknown=1, **{"odd\r\nname": 2, "user": "me"})
        assert response.status_code == 200
        assert response.headers["x-cflow-ignored-params"] == "x_unknown,odd%0D%0Aname"

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("max_tokens", -1), ("max_tokens", 0), ("max_tokens", 2147483646),
            ("max_tokens", 2147483647), ("max_tokens", 4294967296), ("max_tokens", 2**63 - 1),
            ("max_tokens", 2**64), ("max_tokens", 1e18), ("max_tokens", 1.5), ("max_tokens", True),
            ("max_tokens", "5"), ("n", 0), ("n", -1), ("n", 129), ("n", 1000000), ("n", True),
            ("temperature", 3), ("temperature", -0.1), ("temperature", "1"), ("temperature", True),
            ("temperature", []), ("top_p", 1.1), ("top_p", -1), ("top_k", -2), ("top_k", 2.5),
            ("min_p", 2), ("presence_penalty", 2.5), ("frequency_penalty", -3),
            ("repetition_penalty", 0), ("repeat_penalty", -1), ("logprobs", 21), ("logprobs", -1),
            ("logprobs", True), ("stop", ""), ("stop", ["a", 5]), ("stop", 5), ("stop", ["x"] * 17),
            ("stop_token_ids", [258]), ("stop_token_ids", ["a"]), ("seed", 1.5), ("seed", "1"),
            ("seed", 2**64), ("stream", "yes"), ("echo", 1), ("suffix", "x"), ("suffix", 5), ("prompt_logprobs", 21),
            ("prompt_logprobs", -1), ("return_token_ids", 1), ("best_of", 0),
            ("min_tokens", 17), ("priority", 1.5), ("priority", 2**31),
            ("timeout_s", 0), ("timeout_s", -1), ("timeout_s", 1e9), ("moe_top_k", 1), ("stream_options", {"include_usage": True}),
            ("logit_bias", {"99999999": -100}), ("logit_bias", {"-1": 5}), ("model", 5),
            ("logit_bias", {"abc": 1}), ("logit_bias", {"5": 101}), ("logit_bias", [[5, 1]]),
            ("logit_bias", {"258": 1}), ("logit_bias", {"\u0665": 1}), ("logit_bias", {"5": True}),
            ("logit_bias", {"05": 1}), ("logit_bias", {"5": 1, "005": -1}),
        ],
    )  # fmt: skip
    def test_bad_values_are_refused_and_named(self, live: Live, name: str, value: Any) -> None:
        response = live.complete(prompt="a", **{name: value})
        assert response.status_code == 400
        error = error_of(response)
        assert error["type"] == "invalid_request_error"
        # Too many tokens are a matter of the prompt's length as well.
        named = "prompt" if error["code"] == "context_length_exceeded" else name
        assert (error["param"] or "").split(".")[0].split("[")[0] == named
        assert live.engine.calls == []

    @pytest.mark.parametrize(
        "name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
                 "repetition_penalty", "logit_bias"],
    )  # fmt: skip
    @pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", '"NaN"', "-1e999"])
    def test_numbers_that_are_none(self, live: Live, name: str, value: str) -> None:
        text = f'{{"5":{value}}}' if name == "logit_bias" else value
        body = f'{{"prompt":"a","max_tokens":2,"{name}":{text}}}'.encode()
        headers = {"content-type": "application/json"}
        response = live.client.post("/v1/completions", content=body, headers=headers)
        assert response.status_code == 400
        error_of(response)
        assert choice(live, prompt="a")["text"] == "A"

    def test_one_penalty_under_two_names(self, live: Live) -> None:
        same = {"repetition_penalty": 1.5, "repeat_penalty": 1.5}
        assert live.complete(prompt="a", **same).status_code == 200
        response = live.complete(prompt="a", repetition_penalty=1.5, repeat_penalty=1.25)
        assert error_of(response)["param"] == "repeat_penalty"

    def test_priority_reaches_the_engine(self, live: Live) -> None:
        live.complete(prompt=["a", "b"], priority=-7)
        live.chat(priority=3)
        assert [request.priority for request in live.engine.requests] == [-7, 3]

    def test_experts_per_token(self, serve: Any) -> None:
        live: Live = serve(FakeEngine(top_k=4))
        live.complete(prompt="a", moe_top_k=3)
        assert live.engine.calls[0].sampling.n_experts == 3
        assert error_of(live.complete(prompt="a", moe_top_k=5))["param"] == "moe_top_k"

    def test_experts_used_are_told(self, serve: Any) -> None:
        live: Live = serve(FakeEngine(top_k=4), moe_top_k=2)
        for asked, given, told in ((None, 2, 2), (3, 3, 3), (4, 0, 4)):
            usage = live.complete(prompt="a", moe_top_k=asked).json()["usage"]
            assert live.engine.calls[-1].sampling.n_experts == given
            assert usage["moe_top_k"] == told
        assert live.chat().json()["usage"]["moe_top_k"] == 2
        assert "moe_top_k" not in serve().complete(prompt="a").json()["usage"]

    @pytest.mark.parametrize(("top_k", "named"), [(4, "uses 4"), (0, "no experts")])
    def test_more_experts_than_there_are_are_refused_at_the_start(
        self, top_k: int, named: str
    ) -> None:
        with pytest.raises(CflowError, match=named):
            create_app(server_config({"moe_top_k": 5}), FakeEngine(top_k=top_k))


class TestContext:
    """The fake's context is 64."""

    @pytest.mark.parametrize(
        ("n_prompt", "max_tokens"),
        [(64, 1), (60, 5), (65, None), (64, None), (100, 32), (1, 2**62)],
    )
    @pytest.mark.parametrize("stream", [False, True])
    def test_too_long_is_refused_before_any_compute(
        self, live: Live, n_prompt: int, max_tokens: int | None, stream: bool
    ) -> None:
        prompts = ["ok", "x" * n_prompt]
        response = live.complete(prompt=prompts, max_tokens=max_tokens, stream=stream)
        assert response.status_code == 400
        error = error_of(response)
        assert error["code"] == "context_length_exceeded"
        assert "64" in error["message"]
        assert str(n_prompt) in error["message"]
        assert str(max_tokens or 16) in error["message"]
        assert live.engine.calls == []

    @pytest.mark.parametrize(
        ("n_prompt", "asked", "given"), [(60, 4, 4), (60, None, 4), (2, 62, 62)]
    )
    def test_what_fits(self, live: Live, n_prompt: int, asked: int | None, given: int) -> None:
        assert live.complete(prompt="x" * n_prompt, max_tokens=asked).status_code == 200
        assert live.engine.calls[0].sampling.max_tokens == given

    def test_a_full_context_can_be_scored(self, live: Live) -> None:
        response = live.complete(prompt="x" * 64, max_tokens=0, echo=True, logprobs=1)
        assert response.status_code == 200


class TestLogprobs:
    def test_absent_and_null_give_none(self, live: Live) -> None:
        assert choice(live, prompt="a")["logprobs"] is None
        assert choice(live, prompt="a", logprobs=None)["logprobs"] is None

    @pytest.mark.parametrize("n", [0, 1, 5, 20])
    def test_counts(self, live: Live, n: int) -> None:
        found = choice(live, prompt="abc", logprobs=n)["logprobs"]
        assert {len(values) for values in found.values()} == {4}
        assert found["token_logprobs"] == [-1.0] * 4
        for token, top in zip(found["tokens"], found["top_logprobs"], strict=True):
            assert n <= len(top) <= n + 1 or n == 0
            assert top[token] == -1.0

    def test_offsets_count_in_the_returned_text(self, live: Live) -> None:
        found = choice(live, prompt="aé😸b", max_tokens=40, logprobs=0)
        arrays = found["logprobs"]
        assert "".join(arrays["tokens"]) == found["text"] + "</s>"
        for token, start in zip(arrays["tokens"][:-1], arrays["text_offset"], strict=False):
            assert found["text"][start : start + len(token)] == token

    def test_special_tokens_are_named_though_the_text_does_not_have_them(self, live: Live) -> None:
        """As vLLM does it. They take no room in the text."""
        live.engine.card.tokenizer.bos_id = BOS
        arrays = choice(live, prompt="ab", max_tokens=9, echo=True, logprobs=1)["logprobs"]
        assert arrays["tokens"] == ["<s>", "a", "b", "A", "B", "</s>"]
        assert arrays["text_offset"] == [0, 0, 1, 2, 3, 4]
        assert arrays["top_logprobs"][-1]["</s>"] == arrays["token_logprobs"][-1]

    @pytest.mark.parametrize("max_tokens", [0, 1])
    @pytest.mark.parametrize("prompt", ["the cat", list(b"the cat"), "漢字 ü"])
    def test_echo_scores_the_prompt(self, live: Live, max_tokens: int, prompt: Any) -> None:
        found = choice(live, prompt=prompt, max_tokens=max_tokens, echo=True, logprobs=1)
        text = prompt if isinstance(prompt, str) else "the cat"
        n_prompt = len(text.encode())
        arrays = found["logprobs"]
        assert found["finish_reason"] == "length"
        assert found["text"][: len(text)] == text
        assert len(found["text"]) == sum(map(len, arrays["tokens"]))
        assert {len(values) for values in arrays.values()} == {n_prompt + max_tokens}
        assert arrays["token_logprobs"][0] is None
        assert arrays["top_logprobs"][0] is None
        assert None not in arrays["token_logprobs"][1:]
        assert live.engine.calls[0].sampling.n_prompt_logprobs == 1

    def test_echo_without_logprobs_and_for_many_prompts(self, live: Live) -> None:
        body = live.complete(prompt=["ab", "cd"], max_tokens=1, n=2, echo=True).json()
        assert [c["text"] for c in body["choices"]] == ["abA", "abA", "cdC", "cdC"]
        assert body["choices"][0]["logprobs"] is None

    def test_echo_leaves_out_the_token_that_was_added(self, live: Live) -> None:
        live.engine.card.tokenizer.bos_id = BOS
        added = choice(live, prompt="ab", max_tokens=0, echo=True, logprobs=0)
        typed = choice(live, prompt="<s>ab", max_tokens=0, echo=True, logprobs=0)
        assert (added["text"], typed["text"]) == ("ab", "<s>ab")
        for found in (added, typed):
            assert found["logprobs"]["tokens"] == ["<s>", "a", "b"]
        assert added["logprobs"]["text_offset"] == [0, 0, 1]
        assert typed["logprobs"]["text_offset"] == [0, 3, 4]

    def test_streamed_arrays_join_to_the_whole(self, live: Live) -> None:
        fields: dict[str, Any] = {"prompt": "né", "echo": True, "logprobs": 2, "n": 2}
        whole = live.complete(**fields).json()["choices"]
        joined: list[dict[str, list[Any]]] = [{}, {}]
        for chunk in streamed(live, **fields):
            part = chunk["choices"][0]
            for name, values in part["logprobs"].items():
                joined[part["index"]].setdefault(name, []).extend(values)
        assert joined == [c["logprobs"] for c in whole]

    def test_minus_infinity_stays_json(self, serve: Any) -> None:
        async def script(call: Call) -> Any:
            entry = logprob(65, 1)
            worst = type(entry)(65, float("-inf"), 3, ((66, -0.5), (67, float("-inf"))))
            yield Delta(0, 0, (65,), "A", (worst,), Finish("stop"))

        live: Live = serve(FakeEngine(script))
        found = choice(live, prompt="a", logprobs=2)["logprobs"]
        assert found["token_logprobs"] == [-9999.0]
        assert found["top_logprobs"] == [{"B": -0.5, "C": -9999.0, "A": -9999.0}]


class TestPromptLogprobs:
    """The fake gives each token -1, and as the best the tokens from it on, each one worse."""

    def test_in_vllms_shape(self, live: Live) -> None:
        body = live.complete(prompt=["abc", "z"], prompt_logprobs=2, n=2).json()
        b = {"logprob": -1.0, "rank": 1, "decoded_token": "b"}
        c = {"logprob": -2.0, "rank": 2, "decoded_token": "c"}
        for choice in body["choices"][:2]:
            assert choice["prompt_logprobs"][:2] == [None, {"98": b, "99": c}]
            assert len(choice["prompt_logprobs"]) == 3
            assert choice["logprobs"] is None
        assert [choice["prompt_logprobs"] for choice in body["choices"][2:]] == [[None], [None]]
        chat = live.chat(prompt_logprobs=0).json()
        assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
        assert all(len(entry) == 1 for entry in chat["prompt_logprobs"][1:])

    def test_beside_an_echo_each_has_its_own_number(self, live: Live) -> None:
        for echoed, asked in ((1, 4), (4, 1)):
            found = choice(live, prompt="ab", echo=True, logprobs=echoed, prompt_logprobs=asked)
            assert len(found["logprobs"]["top_logprobs"][1]) == echoed
            assert len(found["prompt_logprobs"][1]) == asked
            assert live.engine.calls[-1].sampling.n_prompt_logprobs == 4

    def test_not_in_streams(self, live: Live) -> None:
        for response in (
            live.complete(prompt="a", stream=True, prompt_logprobs=1),
            live.chat(stream=True, prompt_logprobs=0),
        ):
            assert (response.status_code, error_of(response)["param"]) == (400, "prompt_logprobs")


class TestTokenIds:
    def test_of_prompt_and_answer(self, live: Live) -> None:
        body = live.complete(prompt=["ab", "é"], max_tokens=2, return_token_ids=True).json()
        ids = [(c["prompt_token_ids"], c["token_ids"]) for c in body["choices"]]
        assert ids == [(list(b"ab"), list(b"AB")), (list("é".encode()), list("é".encode()))]
        assert "token_ids" not in choice(live, prompt="a")

    def test_streamed(self, live: Live) -> None:
        fields: dict[str, Any] = {"prompt": ["é", "b"], "n": 2, "return_token_ids": True}
        whole = live.complete(**fields).json()["choices"]
        told: list[list[Any]] = [[[], []] for _ in whole]
        for chunk in streamed(live, **fields):
            (part,) = chunk["choices"]
            told[part["index"]][0] += part["token_ids"]
            if "prompt_token_ids" in part:
                told[part["index"]][1].append(part["prompt_token_ids"])
        assert told == [[c["token_ids"], [c["prompt_token_ids"]]] for c in whole]

    @pytest.mark.parametrize("n", [1, 2])
    def test_in_chat(self, live: Live, n: int) -> None:
        whole = live.chat(return_token_ids=True, n=n).json()
        prompt = list(b"user:hi|assistant:")
        assert whole["prompt_token_ids"] == prompt
        tokens: list[list[int]] = [[] for _ in range(n)]
        chunks = events(live.chat(return_token_ids=True, stream=True, n=n))
        assert chunks[0]["prompt_token_ids"] == prompt
        for chunk in chunks:
            (part,) = chunk["choices"]
            tokens[part["index"]] += part.get("token_ids", ())
        assert tokens == [c["token_ids"] for c in whole["choices"]]
        assert tokens[0][-1] == EOS


class TestSuffix:
    NAMES = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")

    def test_is_for_models_with_such_tokens(self, live: Live) -> None:
        response = live.complete(prompt="a", suffix="b")
        assert error_of(response)["code"] == "unsupported_parameter"
        assert live.complete(prompt="a", suffix="").status_code == 200

    @pytest.mark.parametrize("bos_id", [None, BOS])
    def test_prompt_and_suffix_go_around_the_middle(self, live: Live, bos_id: int | None) -> None:
        live.engine.card.tokenizer.__init__(bos_id, *self.NAMES)  # type: ignore[misc]
        begin = () if bos_id is None else (BOS,)
        assert live.complete(prompt=["ab", ""], suffix="cd", stop_token_ids=[3]).status_code == 200
        assert [call.prompt for call in live.engine.calls] == [
            (*begin, 258, 97, 98, 259, 99, 100, 260), (*begin, 258, 259, 99, 100, 260)
        ]  # fmt: skip
        assert live.engine.calls[0].sampling.stop_token_ids == (3, 261)
        live.complete(prompt="a", suffix="b", ignore_eos=True)
        assert live.engine.calls[-1].sampling.stop_token_ids == ()

    @pytest.mark.parametrize(
        ("fields", "param"),
        [({"prompt": [97]}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": 5}, "prompt"),
         ({"prompt": ["a", [97]]}, "prompt"), ({"prompt": "a", "echo": True}, "echo"),
         ({"prompt": "a" * 62}, "prompt"), ({"prompt": ["a"] * 257}, "prompt")],
    )  # fmt: skip
    def test_refusals(self, live: Live, fields: dict[str, Any], param: str) -> None:
        live.engine.card.tokenizer.__init__(None, *self.NAMES)  # type: ignore[misc]
        response = live.complete(suffix="b", **fields)
        assert (response.status_code, error_of(response)["param"]) == (400, param)


def test_best_of_returns_the_likeliest(serve: Any) -> None:
    async def script(call: Call) -> Any:
        for number, value in enumerate((-3.0, -1.0, -2.0)):
            entry = type(logprob(65, 0))(65 + number, value, 0)
            yield Delta(0, number, (65 + number,), chr(65 + number), (entry,), Finish("stop"))

    live: Live = serve(FakeEngine(script))
    body = live.complete(prompt="a", best_of=3, n=2).json()
    assert [c["text"] for c in body["choices"]] == ["B", "C"]
    assert [c["index"] for c in body["choices"]] == [0, 1]
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 3
    assert live.engine.calls[0].n_choices == 3
    assert error_of(live.complete(prompt="a", best_of=1, n=2))["param"] == "best_of"
    assert error_of(live.complete(prompt="a", best_of=3, stream=True))["param"] == "best_of"


def test_the_stop_that_matched_is_named(serve: Any) -> None:
    async def script(call: Call) -> Any:
        yield Delta(0, 0, (65,), "A", finish=Finish("stop", "END"))

    live: Live = serve(FakeEngine(script))
    assert choice(live, prompt="a")["stop_reason"] == "END"
    assert streamed(live, prompt="a")[-1]["choices"][0]["stop_reason"] == "END"


def test_every_event_is_valid_utf8_json_without_half_characters(live: Live) -> None:
    text = "😸漢é👩\u200d👧"
    with live.client.stream(
        "POST", "/v1/completions", json={"prompt": text, "max_tokens": 40, "stream": True}
    ) as response:
        raw = b"".join(response.iter_raw())
    lines = [line for line in raw.split(b"\n\n") if line]
    parts = [json.loads(line.decode().removeprefix("data: ")) for line in lines[:-1]]
    joined = "".join(part["choices"][0]["text"] for part in parts)
    assert "\ufffd" not in joined
    assert joined == choice(live, prompt=text, max_tokens=40)["text"]


@pytest.mark.parametrize("knob", ["n", "best_of"])
def test_prompts_times_choices_are_bounded(live: Live, knob: str) -> None:
    refused = live.complete(prompt=[[5]] * 256, max_tokens=1, **{knob: 5})
    assert refused.status_code == 400
    assert error_of(refused)["param"] == "n"
    assert not live.engine.calls
    assert live.complete(prompt=[[5]] * 256, max_tokens=1, **{knob: 4}).status_code == 200


def test_a_prompt_is_spelled_once_for_all_its_choices(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert live.complete(prompt="x").status_code == 200  # the longest token is looked for once
    spelled: list[int] = []
    known = ByteTokenizer.token_bytes

    def spell(self: ByteTokenizer, token: int) -> bytes:
        spelled.append(token)
        return known(self, token)

    monkeypatch.setattr(ByteTokenizer, "token_bytes", spell)
    body = live.complete(prompt=["abcd", "efgh"], n=20, max_tokens=1, echo=True).json()
    assert [c["text"] for c in body["choices"]] == ["abcdA"] * 20 + ["efghE"] * 20
    assert len([id for id in spelled if id in set(b"abcdefgh")]) == 8


def test_echoes_are_bounded(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "MAX_ECHOED", 2 * 4 * 3 * (1 + 5))
    fields: dict[str, Any] = {"prompt": ["abcd", "efgh"], "n": 3, "logprobs": 5, "max_tokens": 1}
    assert live.complete(echo=True, **fields).status_code == 200
    refused = live.complete(echo=True, **fields | {"prompt": ["abcd", "efghi"]})
    assert refused.status_code == 400
    assert error_of(refused)["param"] == "echo"
    assert live.complete(**fields | {"prompt": "much longer, but not echoed"}).status_code == 200
    del fields["logprobs"]
    scored = live.complete(prompt_logprobs=6, **fields)
    assert (scored.status_code, error_of(scored)["param"]) == (400, "prompt_logprobs")
