"""The official openai client against a real server."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from harness.servers import Server
from harness.waiting import until

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time there was",
    "The three primary colours are",
    "Water boils at",
    "SELECT name FROM users",
    "Dear Sir or Madam,",
    "1 2 3 4 5 6 7",
]


def test_completions(shared: Server) -> None:
    answer = shared.openai().completions.create(
        model="M", prompt="The capital of France is", max_tokens=5, temperature=0
    )
    assert "Paris" in answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


def test_chat(shared: Server) -> None:
    answer = shared.openai().chat.completions.create(
        model="M",
        messages=[{"role": "user", "content": "What is 2 + 2? Answer briefly."}],
        max_completion_tokens=40,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    choice = answer.choices[0]
    assert "4" in (choice.message.content or "")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert answer.usage is not None
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)


def test_stream(shared: Server) -> None:
    client = shared.openai()
    whole = client.chat.completions.create(
        model="M", messages=[{"role": "user", "content": "Hello!"}], max_tokens=20, temperature=0
    )
    texts, usages = [], []
    for chunk in client.chat.completions.create(
        model="M",
        messages=[{"role": "user", "content": "Hello!"}],
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usages.append(chunk.usage)
        texts += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert whole.usage is not None
    assert usages[-1] is not None
    assert usages[-1].total_tokens == whole.usage.total_tokens
    assert usages[:-1] == [None] * (len(usages) - 1)


def test_cancellation(shared: Server) -> None:
    before = shared.metric("cflow_cancelled_total")
    stream = shared.openai().completions.create(
        model="M", prompt="Count: 1 2 3", max_tokens=1500, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    for _, _chunk in zip(range(3), stream, strict=False):
        pass
    stream.close()
    until(lambda: shared.metric("vllm:num_requests_running") == 0)
    until(lambda: shared.metric("cflow_cancelled_total") == before + 1)


def test_the_asynchronous_client_asks_many_at_once(shared: Server) -> None:
    """Whole and streamed answers, of three routes."""

    async def ask(text: str) -> set[str]:
        turns: Any = [{"role": "user", "content": text}]
        async with openai.AsyncOpenAI(base_url=f"{shared.url}/v1", api_key="none") as client:

            async def whole() -> str:
                answer = await client.chat.completions.create(
                    model="M", messages=turns, max_tokens=12, temperature=0
                )
                return answer.choices[0].message.content or ""

            async def streamed() -> str:
                stream = await client.chat.completions.create(
                    model="M", messages=turns, max_tokens=12, temperature=0, stream=True
                )
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            async def response() -> str:
                answer = await client.responses.create(
                    model="M", input=text, max_output_tokens=12, temperature=0
                )
                return answer.output_text

            async def response_stream() -> str:
                async with client.responses.stream(
                    model="M", input=text, max_output_tokens=12, temperature=0
                ) as stream:
                    return "".join(
                        [e.delta async for e in stream if e.type == "response.output_text.delta"]
                    )

            return set(await asyncio.gather(whole(), streamed(), response(), response_stream()))

    async def ask_all() -> list[set[str]]:
        return await asyncio.gather(*map(ask, PROMPTS[:4]))

    texts = asyncio.run(ask_all())
    assert [len(found) for found in texts] == [1, 1, 1, 1]
    assert all(text for found in texts for text in found)


def test_errors_have_the_clients_types(shared: Server) -> None:
    client = shared.openai(max_retries=0)
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="nope", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="M", prompt=[1] * 3000)
    assert long.value.code == "context_length_exceeded"


def test_models(shared: Server) -> None:
    client = shared.openai()
    assert [model.id for model in client.models.list()] == ["M"]
    assert client.models.retrieve("M").id == "M"


def test_eight_streams_at_once_give_the_text_they_give_alone(shared: Server) -> None:
    client = shared.openai()

    def tell(prompt: str) -> str:
        stream = client.completions.create(
            model="M", prompt=prompt, max_tokens=48, temperature=0, stream=True
        )
        return "".join(chunk.choices[0].text for chunk in stream)

    alone = [tell(prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(tell, PROMPTS)) == alone
        # With log-probabilities, several answers and other temperatures beside them as well.
        noise = [
            pool.submit(shared.complete, prompt, n=2, temperature=1.0, max_tokens=40, logprobs=3)
            for prompt in PROMPTS[:4]
        ]
        assert list(pool.map(tell, PROMPTS)) == alone
        for future in noise:
            future.result()


# ---- structured output ----

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 3, "maxLength": 20},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2030},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 2, "maxItems": 3},
        "where": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["title", "year", "tags", "where"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
            "additionalProperties": False,
        }
    },
}


def test_answers_fit_their_schema_at_any_temperature(shared: Server) -> None:
    """Several choices, hot, streamed and whole, beside answers without a schema."""
    form = {"type": "json_schema", "json_schema": {"name": "film", "schema": SCHEMA}}
    fields = {"response_format": form, "n": 6, "temperature": 1.5, "max_tokens": 400}
    free = shared.complete(PROMPTS[0], max_tokens=30)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(shared.chat, "Name a film.", seed=seed, **fields) for seed in (1, 2)]
        beside = pool.submit(shared.complete, PROMPTS[0], max_tokens=30)
        messages = [{"role": "user", "content": "Name a film."}]
        body = {"messages": messages, "seed": 1, **fields}
        streamed = [""] * 6
        for event in shared.events("/v1/chat/completions", body):
            for choice in event.get("choices", []):
                streamed[choice["index"]] += choice["delta"].get("content", "")
        texts = [c["message"]["content"] for a in answers for c in a.result()["choices"]]
        assert {c["finish_reason"] for a in answers for c in a.result()["choices"]} == {"stop"}
    assert streamed == texts[:6]
    assert len(set(texts)) > 6
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert beside.result()["choices"] == free["choices"]


def test_logprobs_of_a_constrained_answer_are_the_models_own(shared: Server) -> None:
    """A choice that the model would not make keeps its low probability; scored as a prompt, the
    same tokens have the same log-probabilities."""
    prompt = "The capital of France is"
    choices = {"guided_choice": [" zebra crossing", " quartz"]}
    answer = shared.complete(prompt, logprobs=1, return_token_ids=True, **choices)["choices"][0]
    logprobs = answer["logprobs"]["token_logprobs"]
    assert answer["text"] in choices["guided_choice"]
    assert sum(logprobs) < -10
    ids = answer["prompt_token_ids"] + answer["token_ids"]
    scored = shared.complete(ids, max_tokens=0, echo=True, logprobs=1)["choices"][0]
    assert scored["logprobs"]["token_logprobs"][-len(logprobs) :] == logprobs


class Step(BaseModel):
    explanation: str
    kind: Literal["add", "multiply"]


class Solution(BaseModel):
    steps: list[Step]
    answer: int


def test_the_client_parses_what_it_asked_for(shared: Server) -> None:
    answer = shared.openai().chat.completions.parse(
        model="M",
        messages=[{"role": "user", "content": "What is 2 + 2?"}],
        response_format=Solution,
        max_tokens=600,
        temperature=0,
        frequency_penalty=0.3,
    )
    assert isinstance(answer.choices[0].message.parsed, Solution)


def test_a_schema_that_cannot_be_followed_is_the_clients_error(shared: Server) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        shared.openai(max_retries=0).chat.completions.create(
            model="M",
            messages=[{"role": "user", "content": "x"}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "wizard"}},
            },
        )
    assert bad.value.param == "response_format.json_schema.schema"
    assert "wizard" in str(bad.value)
