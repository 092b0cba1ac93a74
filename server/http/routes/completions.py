"""POST /v1/completions: all of the legacy API, with id prompts, echo and best_of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response

from cflow.engine.base.messages import Finish, Progress, SamplingParams
from cflow.engine.text.tokenizer import Tokenizer
from cflow.server.api.choices import Choices
from cflow.server.api.constraints import grammar_of
from cflow.server.api.generation import Generation
from cflow.server.api.logprobs import Legacy, join
from cflow.server.api.parameters import check_stream, sampling_params
from cflow.server.api.prompts import Prompt, context_of, encode_infill, encode_prompts, fit
from cflow.server.api.schemas import CompletionRequest
from cflow.server.api.wire import Chunks, Envelope, encode
from cflow.server.errors import ClientGone, RequestError
from cflow.server.http.service import Service, json_schema, service_of
from cflow.server.http.sse import Events, ended, watching

DEFAULT_MAX_TOKENS = 16
MAX_ECHOED = 1 << 21  # tokens and log-probabilities, over all echoes of a request

router = APIRouter()


def _refuse(param: str, message: str) -> RequestError:
    return RequestError(f"{param} {message}", param=param)


def check(ask: CompletionRequest) -> None:
    """Reject combinations of fields that contradict each other."""
    check_stream(ask)
    if ask.suffix and ask.echo:
        raise _refuse("echo", "is not allowed with suffix: the text between is the answer.")
    if ask.max_tokens == 0 and not ask.echo:
        raise _refuse("max_tokens", "must be at least 1, or echo must be true.")
    if ask.best_of is not None and ask.best_of < ask.n:
        raise _refuse("best_of", f"is {ask.best_of}; it must be at least n, {ask.n}.")
    if ask.best_of is not None and ask.best_of > ask.n and ask.stream:
        raise _refuse("best_of", "must equal n in a stream: the best are known at the end.")


async def read_prompts(
    tokenizer: Tokenizer, ask: CompletionRequest, context: int, parse_special: bool
) -> tuple[list[Prompt], tuple[int, ...]]:
    """The prompts, and tokens that end their answers in addition to the model's own."""
    how: Any = {
        "n_choices": ask.best_of or ask.n,
        "context": context,
        "parse_special": parse_special,
    }
    if ask.suffix:
        return await encode_infill(tokenizer, ask.prompt, ask.suffix, **how)
    return await encode_prompts(tokenizer, ask.prompt, **how), ()


def plan_sampling(
    service: Service,
    ask: CompletionRequest,
    prompt: Prompt,
    ends: tuple[int, ...],
    grammar: str | None,
) -> SamplingParams:
    absent = ask.max_tokens is None
    asked = DEFAULT_MAX_TOKENS if ask.max_tokens is None else ask.max_tokens
    context = context_of(service.engine)
    scored = [ask.prompt_logprobs, ask.logprobs if ask.echo else None]
    return sampling_params(
        ask,
        service.engine.card,
        max_tokens=fit(len(prompt.ids), asked, context, param="prompt", cap=absent),
        n_logprobs=ask.logprobs if ask.logprobs is not None else 0 if _ranks(ask) else None,
        n_prompt_logprobs=max((n for n in scored if n is not None), default=None),
        ends=ends,
        grammar=grammar,
    )


def _ranks(ask: CompletionRequest) -> bool:
    return ask.best_of is not None and ask.best_of > ask.n


def check_echo(ask: CompletionRequest, prompts: list[Prompt], n_choices: int) -> None:
    """Bound the echo: it is the only part of an answer that costs memory but no compute."""
    per_token = {
        "echo": 1 + (ask.logprobs or 0) if ask.echo else 0,
        "prompt_logprobs": 0 if ask.prompt_logprobs is None else 1 + ask.prompt_logprobs,
        "return_token_ids": int(ask.return_token_ids),
    }
    n = sum(len(prompt.ids) for prompt in prompts) * n_choices * sum(per_token.values())
    if n > MAX_ECHOED:
        raise _refuse(
            max(per_token, key=per_token.__getitem__),
            f"of these prompts would return {n} tokens and log-probabilities; at most "
            f"{MAX_ECHOED} are allowed. Send fewer prompts, or lower n or logprobs.",
        )


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
        if event.finish is None and arrays is None and not ask.return_token_ids:
            if text:
                yield chunks.chunk(_piece(at, text))
            continue
        choice = {"index": at, "text": text, "logprobs": arrays} | _end(event.finish)
        if ask.return_token_ids:
            choice |= choices.ids(index, event)
        yield chunks.chunk(encode(choice), ends=event.finish is not None)
    if chunks.with_usage:
        yield chunks.usage_chunk()


def _piece(index: int, text: str) -> bytes:
    head = b'{"index":%d,"text":' % index
    return head + encode(text) + b',"logprobs":null,"finish_reason":null}'


@dataclass(slots=True)
class Whole:
    """One choice of a whole answer, as it grows."""

    texts: list[str] = field(default_factory=list)
    arrays: list[Legacy] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    logprob: float = 0.0

    def mean_logprob(self) -> float:
        return self.logprob / max(len(self.tokens), 1)


async def gather(generation: Generation, choices: Choices, n: int) -> list[Whole]:
    wholes = [Whole() for _ in range(n)]
    async for index, delta in generation.deltas():
        at, text, arrays = choices.add(index, delta)
        whole = wholes[at]
        whole.texts.append(text)
        if arrays is not None:
            whole.arrays.append(arrays)
        whole.logprob += sum(entry.logprob for entry in delta.logprobs)
        whole.tokens += delta.tokens
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
    """Continue prompts. Streams if stream is true."""
    service = service_of(request)
    ask, headers = await service.read(request, CompletionRequest)
    check(ask)
    tokenizer = service.engine.card.tokenizer
    n_sampled = ask.best_of or ask.n
    prompts, ends = await read_prompts(
        tokenizer, ask, context_of(service.engine), service.may_spell_special(ask)
    )
    grammar = await grammar_of(ask, service.engine.card.grammars)
    sampling = [plan_sampling(service, ask, prompt, ends, grammar) for prompt in prompts]
    model = service.engine.card.name
    check_echo(ask, prompts, n_sampled)
    generation = await service.generate(request, ask, prompts, sampling, n_sampled)
    choices = Choices(tokenizer, ask, prompts, n_sampled)
    if ask.stream:
        chunks = Chunks("cmpl", "text_completion", model, generation, ask)
        return service.stream(ended(stream(ask, generation, choices, chunks)), generation, headers)
    async with watching(request.receive, generation.cancel):
        wholes = await gather(generation, choices, len(prompts) * n_sampled)
    if generation.is_cancelled:
        raise ClientGone
    kept = keep_best(wholes, n_sampled, ask.n)
    out = [
        _as_json(i, whole, with_logprobs=ask.logprobs is not None)
        | choices.details(i // ask.n, whole.tokens)
        for i, whole in enumerate(kept)
    ]
    body = Envelope("cmpl", "text_completion", model, generation).answer(out)
    return Response(body, media_type="application/json", headers=headers)
