"""The official openai client against a real server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from running import Server, wait_for

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
    assert wait_for(lambda: shared.metric("vllm:num_requests_running") == 0, 2)
    assert wait_for(lambda: shared.metric("cflow_cancelled_total") == before + 1, 1)


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
