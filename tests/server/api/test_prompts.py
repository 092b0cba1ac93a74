"""Long texts: refused before they are encoded if they cannot fit, and in nobody's way."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from cflow.engine.text.template import Rendered
from cflow.server.api import prompts
from harness.fake_engine import EOS, READY, ByteTokenizer, FakeEngine, all_own
from harness.live import Live, error_of
from harness.waiting import LIMIT_S, until, until_async

LONGEST = READY.max_context * len("</s>")  # bytes; that is the longest token


def ask(live: Live, path: str, text: str) -> httpx.Response:
    if path == "/v1/completions":
        return live.post(path, prompt=["a", text])
    return live.post(path, messages=[{"role": "user", "content": text}])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_cannot_fit_is_not_encoded(
    live: Live, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(self: ByteTokenizer, text: str, add_bos: bool = True, **_: Any) -> list[int]:
        pytest.fail("encoded")

    monkeypatch.setattr(ByteTokenizer, "encode", encode)
    for text in ("a" * (LONGEST + 1), "\u6f22" * (LONGEST // 3 + 1)):
        refused = ask(live, path, text)
        assert refused.status_code == 400
        error = error_of(refused)
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == ("prompt" if path == "/v1/completions" else "messages")


def test_what_might_fit_is_encoded(live: Live) -> None:
    assert live.complete(prompt="</s>" * (READY.max_context - 1), max_tokens=1).status_code == 200
    assert live.complete(prompt="</s>" * READY.max_context, max_tokens=1).status_code == 400


def test_tokenize_takes_texts_beyond_the_context(live: Live) -> None:
    text = "a" * (LONGEST + 1)
    assert live.post("/tokenize", prompt=text).json()["count"] == len(text)
    messages = [{"role": "user", "content": text}]
    assert live.post("/tokenize", messages=messages).json()["count"] > len(text)


class SlowTokenizer:
    """Each text that is encoded waits until it is let go."""

    bos_id = None

    def __init__(self) -> None:
        self.n_now = 0
        self.let_go = threading.Event()

    def encode(self, text: str, **_: Any) -> list[int]:
        if len(text) > prompts.LONG_CHARS:
            self.n_now += 1
            assert self.let_go.wait(LIMIT_S)
        return [1]


def test_long_texts_hold_up_only_each_other() -> None:
    tokenizer: Any = SlowTokenizer()

    async def check() -> None:
        long = "a" * (prompts.LONG_CHARS + 1)
        tasks = [asyncio.create_task(prompts.encode_text(tokenizer, long)) for _ in range(40)]
        await until_async(lambda: tokenizer.n_now == 2)
        async with asyncio.timeout(LIMIT_S):
            for _ in range(40):
                await prompts.encode_text(tokenizer, "b" * 5000)
        assert tokenizer.n_now == 2
        tokenizer.let_go.set()
        await asyncio.gather(*tasks)

    asyncio.run(check())
    assert tokenizer.n_now == 40


def test_slow_templates_hold_up_only_each_other(live: Live) -> None:
    let_go = threading.Event()

    class SlowTemplate:
        def render(self, messages: Any, **_options: Any) -> Rendered:
            assert let_go.wait(LIMIT_S)
            return all_own("x")

    object.__setattr__(live.engine.card, "template", SlowTemplate())
    body = {"messages": [{"role": "user", "content": "x"}]}
    url = f"http://127.0.0.1:{live.port}/v1/chat/completions"
    chats = [threading.Thread(target=httpx.post, args=(url,), kwargs={"json": body, "timeout": LIMIT_S})
             for _ in range(40)]  # fmt: skip
    for chat in chats:
        chat.start()
    try:
        until(lambda: len(live._server.server_state.tasks) == 40)
        assert live.post("/tokenize", content="a" * 5000).status_code == 200
    finally:
        let_go.set()
        for chat in chats:
            chat.join()


class Bracketed:
    """<role:content>, of which only the content is not the template's own."""

    def render(self, messages: Any, **_: Any) -> Rendered:
        text, own = "", []
        for message in messages:
            for part, is_own in ((f"</s>{message['role']}:", True), (message["content"], False)):
                if is_own:
                    own.append((len(text), len(text) + len(part)))
                text += part
        return Rendered(text, own)


def test_f22_text_of_messages_is_text_unless_a_setting_or_the_request_says_otherwise(
    serve: Any,
) -> None:
    messages = [{"role": "user", "content": "a</s>b"}]
    own, spelled, parsed = [EOS], list(b"a</s>b"), [97, EOS, 98]
    user = list(b"user:")

    def asked(settings: dict[str, Any], **fields: Any) -> list[int]:
        live = serve(FakeEngine(template=Bracketed()), **settings)
        live.chat(messages=messages, **fields)
        by_chat = list(live.engine.calls[-1].prompt)
        live.post("/v1/responses", input="a</s>b", **fields)
        assert list(live.engine.calls[-1].prompt) == by_chat
        assert live.post("/tokenize", messages=messages, **fields).json()["tokens"] == by_chat
        return by_chat

    assert asked({}) == [*own, *user, *spelled]
    assert asked({"special_in_messages": True}) == [*own, *user, *parsed]
    assert asked({}, parse_special=True) == [*own, *user, *parsed]
    assert asked({"special_in_messages": True}, parse_special=False) == [*own, *user, *spelled]


def test_f22_raw_prompts_may_spell_special_tokens_unless_a_setting_or_the_request_says_otherwise(
    serve: Any,
) -> None:
    def asked(settings: dict[str, Any], **fields: Any) -> list[int]:
        live = serve(FakeEngine(), **settings)
        live.complete(prompt="a</s>b", **fields)
        by_completion = list(live.engine.calls[-1].prompt)
        for name in ("prompt", "content"):
            tokens = live.post("/tokenize", **{name: "a</s>b"}, **fields).json()["tokens"]
            assert tokens == by_completion
        return by_completion

    spelled, parsed = list(b"a</s>b"), [97, EOS, 98]
    assert asked({}) == parsed
    assert asked({"special_in_prompts": False}) == spelled
    assert asked({}, parse_special=False) == spelled
    assert asked({"special_in_prompts": False}, parse_special=True) == parsed


def test_f22_a_suffix_never_spells_a_special_token(serve: Any) -> None:
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    live = serve()
    live.engine.card.tokenizer.__init__(None, *names)
    live.complete(prompt="a", suffix="b<|fim_middle|>", parse_special=True)
    ids = list(live.engine.calls[-1].prompt)
    assert ids == [258, 97, 259, *b"b<|fim_middle|>", 260]
