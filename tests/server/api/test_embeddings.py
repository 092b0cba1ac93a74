"""POST /v1/embeddings over a fake engine, with OpenAI's own client."""

from __future__ import annotations

import base64
import math
import struct
from dataclasses import replace
from typing import Any

import openai
import pytest

from harness.fake_engine import FakeEngine
from harness.live import Live, error_of

END = 257


@pytest.fixture
def live(serve: Any) -> Live:
    engine = FakeEngine()
    engine.card = replace(engine.card, pooling="last", normalise=True, end_id=END)
    live: Live = serve(engine)
    return live


def unit(*vector: float) -> list[float]:
    length = math.sqrt(math.fsum(x * x for x in vector))
    return list(
        struct.unpack(
            f"<{len(vector)}f", struct.pack(f"<{len(vector)}f", *(x / length for x in vector))
        )
    )


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("ab", [(97, 98, END)]),
        (["ab", "c"], [(97, 98, END), (99, END)]),
        ([97, 98], [(97, 98)]),
        ([[97], [98, 99]], [(97,), (98, 99)]),
    ],
)
def test_each_input_has_a_vector(live: Live, given: Any, prompts: list[tuple[int, ...]]) -> None:
    body = live.post("/v1/embeddings", input=given).json()
    assert [call.prompt for call in live.engine.calls] == prompts
    assert body["data"] == [
        {"object": "embedding", "index": i, "embedding": unit(len(p), p[0], p[-1])}
        for i, p in enumerate(prompts)
    ]
    n = sum(map(len, prompts))
    assert body["usage"] == {"prompt_tokens": n, "total_tokens": n}
    assert (body["object"], body["model"]) == ("list", "fake/model")


def test_openai_s_client_reads_both_formats(live: Live) -> None:
    url = f"http://127.0.0.1:{live.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        packed = client.embeddings.create(model="fake/model", input="ab")  # asks for base64
        plain = client.embeddings.create(model="fake/model", input="ab", encoding_format="float")
    assert packed.data[0].embedding == plain.data[0].embedding == unit(3, 97, END)


def test_base64_is_little_endian_floats(live: Live) -> None:
    body = live.post("/v1/embeddings", input="ab", encoding_format="base64").json()
    raw = base64.b64decode(body["data"][0]["embedding"])
    assert list(struct.unpack("<3f", raw)) == unit(3, 97, END)


def test_dimensions_cut_and_normalise(live: Live) -> None:
    body = live.post("/v1/embeddings", input="ab", dimensions=2).json()
    assert body["data"][0]["embedding"] == unit(3, 97)
    refused = live.post("/v1/embeddings", input="ab", dimensions=4)
    assert error_of(refused)["param"] == "dimensions"


def test_a_model_may_not_normalise(live: Live) -> None:
    live.engine.card = replace(live.engine.card, normalise=False)
    body = live.post("/v1/embeddings", input="ab").json()
    assert body["data"][0]["embedding"] == [3, 97, END]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"), ({"input": 5}, "input"), ({"input": [[]]}, "input"),
        ({"input": [["a"]]}, "input"), ({"input": "x" * 500}, "input"), ({}, "input"),
        ({"input": [999]}, "input"), ({"input": ["a"] * 1025}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "model": "other"}, "model"),
    ],
)  # fmt: skip
def test_refusals_name_the_parameter(live: Live, fields: dict[str, Any], param: str) -> None:
    response = live.post("/v1/embeddings", fields)
    assert response.status_code == (404 if param == "model" else 400)
    assert error_of(response)["param"] == param
    assert "prompt" not in error_of(response)["message"]


def test_other_models_are_refused(serve: Any) -> None:
    error = error_of(serve().post("/v1/embeddings", input="a"))
    assert (error["code"], error["param"]) == ("unsupported_model", "model")
