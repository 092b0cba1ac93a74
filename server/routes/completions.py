"""POST /v1/completions: the legacy API, whole: id prompts, echo, prompt log-probabilities, best_of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response

from cflow.engine.messages import Delta, Finish, Logprob, Progress, SamplingParams
from cflow.engine.tokenizer import Tokenizer
from cflow.server.errors import ClientGone, RequestError
from cflow.server.generation import Generation
from cflow.server.logprobs import Legacy, LegacyLogprobs, join, prompt_texts
from cflow.server.parameters import sampling_params
from cflow.server.prompts import Prompt, context_of, encode_prompts, fit
from cflow.server.schemas import CompletionRequest
from cflow.server.service import Service, json_schema, service_of
from cflow.server.sse import Events, watching
from cflow.server.wire import Chunks, Envelope, encode

DEFAULT_MAX_TOKENS = 16
MAX_ECHOED = 1 << 21  # tokens and log-probabilities in all echoes of a request

router = APIRouter()


def _refuse(param: str, message: str) -> RequestError:
    return RequestError(f"{param} {message}", param=param)


def check(ask: CompletionRequest) -> None:
    """What fields mean together."""
    if ask.suffix is not None:
        raise _refuse("suffix", "is not supported: the model cannot fill in the middle.")
    if ask.max_tokens == 0 and not ask.echo:
        raise _refuse("max_tokens", "must be at least 1, or echo must be true.")
    if ask.best_of is not None and ask.best_of < ask.n:
        raise _refuse("best_of", f"is {ask.best_of}; it must be at least n, {ask.n}.")
    if ask.best_of is not None and ask.best_of > ask.n and ask.stream:
        raise _refuse("best_of", "must equal n in a stream: the best are known at the end.")
    if ask.stream_options is not None and not ask.stream:
        raise _refuse("stream_options", "is only allowed when stream is true.")


def plan_sampling(service: Service, ask: CompletionRequest, prompt: Prompt) -> SamplingParams:
    absent = ask.max_tokens is None
    asked = DEFAULT_MAX_TOKENS if ask.max_tokens is None else ask.max_tokens
    context = context_of(service.engine)
    return sampling_params(
        ask,
        service.engine.card,
        max_tokens=fit(len(prompt.ids), asked, context, param="prompt", cap=absent),
        n_logprobs=ask.logprobs if ask.logprobs is not None else 0 if _ranks(ask) else None,
        n_prompt_logprobs=ask.logprobs if ask.echo else None,
    )


def _ranks(ask: CompletionRequest) -> bool:
    return ask.best_of is not None and ask.best_of > ask.n


def check_echo(ask: CompletionRequest, prompts: list[Prompt], n_choices: int) -> None:
    """Echoes are the one part of an answer that takes no time to compute, only memory."""
    n = sum(len(prompt.ids) for prompt in prompts) * n_choices * (1 + (ask.logprobs or 0))
    if ask.echo and n > MAX_ECHOED:
        raise _refuse(
            "echo",
            f"of these prompts would return {n} tokens and log-probabilities; at most "
            f"{MAX_ECHOED} are allowed. Send fewer prompts, or lower n or logprobs.",
        )


@dataclass(slots=True)
class Echo:
    """A prompt as its answers repeat it."""

    text: str
    arrays: Legacy | None
    n_left: int  # choices that have not begun


class Choice:
    """One choice being written: its echo, then its text and log-probabilities, piece by piece."""

    def __init__(self, tokenizer: Tokenizer, echo: Echo | None, *, with_logprobs: bool) -> None:
        offset = len(echo.text) if echo else 0
        self._logprobs = LegacyLogprobs(tokenizer, offset) if with_logprobs else None
        self._echo = echo

    def add(self, delta: Delta) -> tuple[str, Legacy | None]:
        text, arrays = delta.text, None
        if self._logprobs is not None:
            is_last = delta.finish is not None
            arrays = self._logprobs.generated(delta.logprobs, is_last=is_last)
        if self._echo is not None:
            text = self._echo.text + text
            if arrays and self._echo.arrays:
                arrays = join([self._echo.arrays, arrays])
            self._echo = None
        return text, arrays


class Choices:
    """The choices of a request. Choice j of prompt i has index i * n_choices + j."""

    def __init__(
        self, tokenizer: Tokenizer, ask: CompletionRequest, prompts: list[Prompt], n_choices: int
    ) -> None:
        self._tokenizer = tokenizer
        self._is_echoed = ask.echo
        self._with_logprobs = ask.logprobs is not None
        self._prompts = prompts
        self._n = n_choices
        self._choices: dict[int, Choice] = {}  # those that have begun
        self._echoes: dict[int, Echo] = {}  # of prompts of which some have not

    def first_of(self, index: int) -> int:
        """The index of the first choice of prompt `index`."""
        return index * self._n

    def add(self, index: int, delta: Delta) -> tuple[int, str, Legacy | None]:
        """(choice index, text, arrays) of a delta of prompt `index`; the first delta of a choice
        also brings the prompt if it is echoed, the first of a prompt its log-probabilities."""
        at = self.first_of(index) + delta.choice
        if at not in self._choices:
            echo = self._echo(index, delta.prompt_logprobs) if self._is_echoed else None
            self._choices[at] = Choice(self._tokenizer, echo, with_logprobs=self._with_logprobs)
        text, arrays = self._choices[at].add(delta)
        return at, text, arrays

    def _echo(self, index: int, logprobs: tuple[Logprob | None, ...] | None) -> Echo:
        """The prompt's echo, made for the first choice and dropped with the last that begins."""
        echo = self._echoes.get(index)
        if echo is None:
            prompt = self._prompts[index]
            texts = prompt_texts(self._tokenizer, prompt.ids, prompt.n_added)
            arrays = None
            if self._with_logprobs:
                arrays = LegacyLogprobs(self._tokenizer, 0).prompt(texts, logprobs or ())
            echo = self._echoes[index] = Echo("".join(texts), arrays, self._n)
        echo.n_left -= 1
        if not echo.n_left:
            del self._echoes[index]
        return echo


def _end(finish: Finish | None) -> dict[str, Any]:
    if finish is None:
        return {"finish_reason": None}
    return {"finish_reason": finish.reason, "stop_reason": finish.stop}


async def stream(
    ask: CompletionRequest, generation: Generation, choices: Choices, chunks: Chunks
) -> Events:
    async for index, event in generation.events():
        if isinstance(event, Progress):
            if ask.return_progress:
                nothing = _piece(choices.first_of(index), "")
                yield chunks.chunk(nothing, prompt_progress=generation.progress(index))
            continue
        at, text, arrays = choices.add(index, event)
        if event.finish is None and arrays is None:
            if text:
                yield chunks.chunk(_piece(at, text))
            continue
        choice = {"index": at, "text": text, "logprobs": arrays} | _end(event.finish)
        yield chunks.chunk(encode(choice), ends=event.finish is not None)
    if chunks.with_usage:
        yield chunks.usage_chunk()


def _piece(index: int, text: str) -> bytes:
    head = b'{"index":%d,"text":' % index
    return head + encode(text) + b',"logprobs":null,"finish_reason":null}'


@dataclass(slots=True)
class Whole:
    """A choice as it gathers for an answer that is not streamed."""

    texts: list[str] = field(default_factory=list)
    arrays: list[Legacy] = field(default_factory=list)
    finish: Finish | None = None
    logprob: float = 0.0
    n_tokens: int = 0

    def mean_logprob(self) -> float:
        return self.logprob / max(self.n_tokens, 1)


async def gather(generation: Generation, choices: Choices, n: int) -> list[Whole]:
    wholes = [Whole() for _ in range(n)]
    async for index, delta in generation.deltas():
        at, text, arrays = choices.add(index, delta)
        whole = wholes[at]
        whole.texts.append(text)
        if arrays is not None:
            whole.arrays.append(arrays)
        whole.logprob += sum(entry.logprob for entry in delta.logprobs)
        whole.n_tokens += len(delta.logprobs)
        whole.finish = delta.finish or whole.finish
    return wholes


def keep_best(wholes: list[Whole], n_sampled: int, n: int) -> list[Whole]:
    """The n choices of each prompt with the best mean log-probability, best first."""
    if n_sampled == n:
        return wholes
    kept: list[Whole] = []
    for first in range(0, len(wholes), n_sampled):
        group = wholes[first : first + n_sampled]
        kept += sorted(group, key=Whole.mean_logprob, reverse=True)[:n]
    return kept


def _as_json(index: int, whole: Whole, *, with_logprobs: bool) -> dict[str, Any]:
    arrays = join(whole.arrays) if with_logprobs else None
    text = "".join(whole.texts)
    return {"index": index, "text": text, "logprobs": arrays} | _end(whole.finish)


@router.post("/v1/completions", openapi_extra=json_schema(CompletionRequest))
async def create_completion(request: Request) -> Response:
    """Continue prompts. Streams with stream: true."""
    service = service_of(request)
    ask, headers = await service.read(request, CompletionRequest)
    check(ask)
    tokenizer = service.engine.card.tokenizer
    n_sampled = ask.best_of or ask.n
    prompts = await encode_prompts(
        tokenizer, ask.prompt, n_choices=n_sampled, context=context_of(service.engine)
    )
    sampling = [plan_sampling(service, ask, prompt) for prompt in prompts]
    model = service.engine.card.name
    check_echo(ask, prompts, n_sampled)
    generation = service.generate(request, ask, prompts, sampling, n_sampled)
    choices = Choices(tokenizer, ask, prompts, n_sampled)
    if ask.stream:
        chunks = Chunks("cmpl", "text_completion", model, generation, ask)
        return service.stream(stream(ask, generation, choices, chunks), generation, headers)
    async with watching(request.receive, generation.cancel):
        wholes = await gather(generation, choices, len(prompts) * n_sampled)
    if generation.is_cancelled:
        raise ClientGone
    kept = keep_best(wholes, n_sampled, ask.n)
    out = [_as_json(i, w, with_logprobs=ask.logprobs is not None) for i, w in enumerate(kept)]
    body = Envelope("cmpl", "text_completion", model, generation).answer(out)
    return Response(body, media_type="application/json", headers=headers)
