"""Parameters of /v1/completions in combination: streams join to whole answers, arrays keep to their
lengths. The bundled model, as many combinations as a few seconds allow."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from cflow.engine.files.hub import BUNDLED_FILE
from harness.servers import Server, serving

N = 60
IDS = range(3, 1000)
ALWAYS: dict[str, list[Any]] = {
    "prompt": ["Once upon", "The 😸 cat", ["a b", "Lily and Tom"], [5, 6, 7], [[5, 6], [7]], "x" * 50],
    "max_tokens": [1, 2, 5, 12],
    "temperature": [0, 0.7, 1.5],
    "n": [1, 1, 3],
}  # fmt: skip
SOMETIMES: dict[str, list[Any]] = {
    "stop": ["e", ["th", ". "], [" a", " the"], ["zzz"]],
    "include_stop_str_in_output": [True],
    "min_tokens": [1],
    "ignore_eos": [True],
    "stop_token_ids": [list(IDS[::30]), list(IDS[::200])],
    "logit_bias": [{"300": 20}, {"13": -100, "400": 5}],
    "presence_penalty": [1.5],
    "frequency_penalty": [-1.0],
    "repetition_penalty": [1.3],
    "top_p": [0, 0.5],
    "top_k": [-1, 1, 5],
    "min_p": [0.1],
    "moe_top_k": [1, 2],
    "echo": [True],
    "logprobs": [0, 1, 20],
    "guided_regex": ["[a-z ]{3,9}", "(yes|no)!?"],
    "guided_choice": [["red", "green light", "é😸"]],
    "best_of": [3],
    "prompt_logprobs": [0, 2],
    "return_progress": [True],
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(BUNDLED_FILE, "--max-sequences", "8") as server:
        yield server


def combination(seed: int) -> dict[str, Any]:
    random = Random(seed)
    body = {"seed": seed, "return_token_ids": True}
    body |= {name: random.choice(values) for name, values in ALWAYS.items()}
    body |= {k: random.choice(v) for k, v in SOMETIMES.items() if random.random() < 0.2}
    if "guided_choice" in body:
        body.pop("guided_regex", None)
    return body


def check_choice(body: dict[str, Any], choice: dict[str, Any]) -> None:
    assert choice["finish_reason"] in ("stop", "length")
    if "logprobs" not in body:
        assert choice["logprobs"] is None
        return
    arrays = choice["logprobs"]
    n = len(choice["token_ids"]) + (len(choice["prompt_token_ids"]) if body.get("echo") else 0)
    assert {len(entries) for entries in arrays.values()} == {n}
    lengths = [len(text) for text in arrays["tokens"][:-1]]
    assert arrays["text_offset"] == list(itertools.accumulate(lengths, initial=0))
    told = "".join(arrays["tokens"])
    is_cut = choice["stop_reason"] is not None  # what stopped it is a token, and no text
    assert told.startswith(choice["text"]) if is_cut else told == choice["text"]


def joined(events: Iterator[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Choices as a whole answer has them, by index."""
    found: dict[int, dict[str, Any]] = defaultdict(
        lambda: {"text": "", "token_ids": [], "logprobs": None, "finish_reason": None}
    )
    *chunks, end = events
    assert end == {"done": True}
    for piece in (choice for chunk in chunks for choice in chunk["choices"]):
        choice = found[piece["index"]]
        assert choice["finish_reason"] is None
        choice["text"] += piece["text"]
        choice["token_ids"] += piece.get("token_ids", [])
        if piece["logprobs"] is not None:
            arrays = choice["logprobs"] or {name: [] for name in piece["logprobs"]}
            choice["logprobs"] = {k: arrays[k] + piece["logprobs"][k] for k in arrays}
        choice["finish_reason"] = piece["finish_reason"]
        for name in ("stop_reason", "prompt_token_ids"):
            choice |= {name: piece[name]} if name in piece else {}
    return found


@pytest.mark.parametrize("seed", range(N))
def test_a_stream_joins_to_the_whole_answer(server: Server, seed: int) -> None:
    body = combination(seed)
    whole = server.post("/v1/completions", body)
    for choice in whole["choices"]:
        check_choice(body, choice)
    if body.get("best_of", body["n"]) == body["n"]:
        n_tokens = sum(len(choice["token_ids"]) for choice in whole["choices"])
        assert whole["usage"]["completion_tokens"] == n_tokens
    if body.keys() & {"best_of", "prompt_logprobs"}:
        return  # not in streams
    streamed = joined(server.events("/v1/completions", body))
    assert len(streamed) == len(whole["choices"])
    for choice in whole["choices"]:
        assert streamed[choice.pop("index")] == choice
