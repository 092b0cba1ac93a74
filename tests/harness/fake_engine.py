"""An engine without a model: the Engine interface over a byte tokenizer, driven by the test.

Tokens are bytes, 256 is BOS ("<s>"), 257 ends an answer ("</s>"). By default an answer is the
prompt's bytes in upper case, one token a delta, then the end token.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cflow.engine.base.errors import EngineError
from cflow.engine.base.messages import (
    Delta,
    Finish,
    Logprob,
    Progress,
    Ready,
    SamplingParams,
    Stats,
)
from cflow.engine.base.model_header import ModelHeader
from cflow.engine.client.card import ModelCard
from cflow.engine.client.engine import Engine, GenerateRequest, Status
from cflow.engine.text.dialect import Dialect
from cflow.engine.text.grammar import GrammarChecker, Vocabulary
from cflow.engine.text.template import Rendered
from cflow.engine.text.tokenizer import Span

BOS, EOS = 256, 257
SPECIALS = {BOS: b"<s>", EOS: b"</s>"}


class ByteTokenizer:
    eos_ids = (EOS,)

    def __init__(self, bos_id: int | None = None, *names: str) -> None:
        """names: of more special tokens, from 258 on."""
        self.bos_id = bos_id
        self.specials = SPECIALS | {258 + i: name.encode() for i, name in enumerate(names)}
        self.n_tokens = 258 + len(names)

    def encode(
        self,
        text: str,
        add_bos: bool = True,
        trusted: Sequence[Span] | None = None,
        begins: bool = True,
    ) -> list[int]:
        ids: list[int] = []
        at = 0
        for start, end in [(0, len(text))] if trusted is None else trusted:
            ids += text[at:start].encode()
            raw = text[start:end].encode()
            while raw:
                names = self.specials.items()
                special = next((id for id, name in names if raw.startswith(name)), None)
                ids.append(raw[0] if special is None else special)
                raw = raw[1 if special is None else len(self.specials[special]) :]
            at = end
        ids += text[at:].encode()
        if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def token_bytes(self, token: int) -> bytes:
        return self.specials.get(token) or bytes([token])

    def is_special(self, token: int) -> bool:
        return token in self.specials

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        shown = [t for t in ids if not (skip_special and t in self.specials)]
        return b"".join(map(self.token_bytes, shown)).decode(errors="replace")


NO_HEADER = ModelHeader(
    path="", digest="", context=0, created=0, vocab_size=0, n_layers=0, n_experts=0, top_k=0,
    bytes_per_token=0, metadata_json=b"{}", tokenizer_json=b"", token_table=bytes(4),
)  # fmt: skip


class QuickChecker(GrammarChecker):
    """Checks in this process, without a jail."""

    def __init__(self) -> None:
        super().__init__(NO_HEADER)
        self._vocabulary = Vocabulary(ByteTokenizer())  # type: ignore[arg-type]

    def _ask(self, grammar: str) -> str:
        return self._vocabulary.check(grammar)


GRAMMARS = QuickChecker()


def all_own(text: str) -> Rendered:
    return Rendered(text, [(0, len(text))])


class PlainTemplate:
    """role:content| for each message; raises what a template raises when asked to. All text of the
    prompt counts as the template's own."""

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: Any = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> Rendered:
        text = "".join(f"{m['role']}:{m['content']}|" for m in messages)
        text += "".join(f"{key}={value}|" for key, value in kwargs.items())
        return all_own(text + ("assistant:" if add_generation_prompt else ""))


@dataclass
class Call:
    """One prompt of a request, and the request."""

    prompt: tuple[int, ...]
    n_choices: int
    sampling: SamplingParams
    request: GenerateRequest


Script = Callable[[Call], AsyncIterator[Delta | Progress]]


def logprob(token: int, n_top: int) -> Logprob:
    """-1 for the token; alternatives token+1, token+2, ... each one worse."""
    top = tuple(((token + i) % 256, -1.0 - i) for i in range(n_top))
    return Logprob(token=token, logprob=-1.0, rank=0, top=top)


def deltas_of(call: Call, choice: int, tokens: Sequence[int], reason: str) -> list[Delta]:
    """One delta a token, the last with the finish. Half characters are held back as the real
    detokenizer does."""
    how, out, pending = call.sampling, [], b""
    for i, token in enumerate(tokens):
        pending += b"" if token in SPECIALS else bytes([token])
        is_last = i == len(tokens) - 1
        try:
            text, pending = pending.decode(), b""
        except UnicodeDecodeError:
            text = pending.decode(errors="replace") if is_last else ""
        out.append(
            Delta(
                request_id=0,
                choice=choice,
                tokens=(token,),
                text=text,
                logprobs=() if how.n_logprobs is None else (logprob(token, how.n_logprobs),),
                finish=Finish(reason) if is_last else None,  # type: ignore[arg-type]
                n_cached=0 if choice == 0 and i == 0 else None,
                prompt_logprobs=_prompt_logprobs(call) if choice == 0 and i == 0 else None,
            )
        )
    return out


def _prompt_logprobs(call: Call) -> tuple[Logprob | None, ...] | None:
    n = call.sampling.n_prompt_logprobs
    return None if n is None else (None, *(logprob(token, n) for token in call.prompt[1:]))


async def shout(call: Call) -> AsyncIterator[Delta | Progress]:
    """The prompt's letters in upper case, then the end token or the length limit."""
    yield Progress(request_id=0, n_done=0)
    letters = bytes(token for token in call.prompt if token < 256).upper()
    tokens = [*letters, EOS][: call.sampling.max_tokens]
    reason = "stop" if tokens and tokens[-1] == EOS else "length"
    if not tokens:
        for choice in range(call.n_choices):
            scores = _prompt_logprobs(call) if not choice else None
            n_cached = 0 if not choice else None
            finish = Finish("length")
            yield Delta(0, choice, finish=finish, n_cached=n_cached, prompt_logprobs=scores)
        return
    for step in zip(
        *(deltas_of(call, choice, tokens, reason) for choice in range(call.n_choices)), strict=True
    ):
        for delta in step:
            await asyncio.sleep(0)
            yield delta


class FakeAnswer:
    def __init__(self, script: AsyncIterator[Delta | Progress]) -> None:
        self._script = script
        self._cancelled = asyncio.Event()
        self.request_id = 0
        self.n_ahead: int | None = None
        self.is_over = False

    @property
    def is_cancelled(self) -> bool:
        """Whether it was cancelled while it ran."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        if not self.is_over:
            self._cancelled.set()

    def __aiter__(self) -> FakeAnswer:
        return self

    async def __anext__(self) -> Delta | Progress:
        step = asyncio.ensure_future(anext(self._script))
        gone = asyncio.ensure_future(self._cancelled.wait())
        try:
            await asyncio.wait((step, gone), return_when=asyncio.FIRST_COMPLETED)
            if not step.done():
                raise EngineError("cancelled", "the request was cancelled")
            return step.result()
        except (EngineError, StopAsyncIteration):
            self.is_over = True
            raise
        finally:
            step.cancel()
            gone.cancel()


READY = Ready(
    pid=1, isa="scalar", n_threads=2, n_kv_blocks=8, max_context=64,
    resident_bytes=1000, huge_bytes=500, kv_bytes=300, scratch_bytes=200, load_s=0.1,
)  # fmt: skip


async def _embedded(call: Call) -> AsyncIterator[Delta | Progress]:
    vector = struct.pack("<3f", len(call.prompt), call.prompt[0], call.prompt[-1])
    yield Delta(0, 0, finish=Finish("length"), n_cached=0, embedding=vector)


@dataclass
class FakeEngine:
    script: Script = shout
    bos_id: int | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    refuse: EngineError | None = None
    template: Any = field(default_factory=PlainTemplate)
    dialect: Dialect = field(default_factory=Dialect)
    context: int = 64
    top_k: int = 0

    def __post_init__(self) -> None:
        self.card = ModelCard(
            name="fake/model",
            path="fake.cflow",
            digest="",
            context=4 * self.context,
            trained_context=8 * self.context,
            n_params=12,
            created=1_700_000_000,
            metadata={"generation": self.generation},
            tokenizer=ByteTokenizer(self.bos_id),  # type: ignore[arg-type]
            template=self.template,
            dialect=self.dialect,
            grammars=GRAMMARS,
            vocab_size=260,
            n_layers=2,
            n_experts=4 * self.top_k,
            top_k=self.top_k,
            bytes_per_token=1000,
        )
        self.status = Status(
            state="ready",
            ready=READY,
            loading=None,
            restarts=0,
            queue_depth=0,
            is_failing=False,
        )
        self.stats = Stats()
        self.calls: list[Call] = []
        self.requests: list[GenerateRequest] = []
        self.answers: list[FakeAnswer] = []
        self.drained = asyncio.Event()

    def become(self, other: FakeEngine) -> None:
        """Take over all state of another engine, for a server that keeps this object."""
        vars(self).clear()
        vars(self).update(vars(other))

    def put(self, **changes: Any) -> None:
        """Change fields of the status."""
        self.status = replace(self.status, **changes)

    async def submit(self, request: GenerateRequest) -> list[FakeAnswer]:
        if self.refuse is not None:
            raise self.refuse
        self.requests.append(request)
        calls = [
            Call(tuple(prompt), request.n_choices, sampling, request)
            for prompt, sampling in zip(request.prompts, request.sampling, strict=True)
        ]
        self.calls += calls
        answers = [FakeAnswer(self.script(call)) for call in calls]
        self.answers += answers
        return answers

    async def embed(self, request: GenerateRequest) -> list[FakeAnswer]:
        """The embedding of a prompt is its length, its first and its last token."""
        if self.card.pooling is None:
            raise EngineError("invalid_request", "fake/model is not a model for embeddings")
        answers = await self.submit(request)
        for answer, call in zip(answers, self.calls[-len(answers) :], strict=True):
            answer._script = _embedded(call)
        return answers

    async def wait_ready(self) -> Ready:
        assert self.status.ready is not None
        return self.status.ready

    async def drain(self, timeout_s: float) -> None:
        self.drained.set()

    async def close(self) -> None:
        self.put(state="closed")


def as_engine(fake: FakeEngine) -> Engine:
    """The fake keeps the interface: mypy checks this line."""
    return fake
