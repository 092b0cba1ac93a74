"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from cflow.engine.messages import Delta, Finish, Logprob, Progress, SamplingParams
from cflow.engine.tokenizer import Tokenizer
from cflow.server.constraints import grammar_of
from cflow.server.errors import ClientGone, RequestError
from cflow.server.generation import Generation
from cflow.server.logprobs import chat_logprobs, prompt_entries
from cflow.server.parameters import check_stream, refuse_given, sampling_params
from cflow.server.prompts import Prompt, context_of, fit, render_chat
from cflow.server.schemas import ChatRequest, render_messages
from cflow.server.service import Service, json_schema, service_of
from cflow.server.sse import Events, watching
from cflow.server.wire import Chunks, Envelope, encode

router = APIRouter()


def check(ask: ChatRequest) -> None:
    """What fields mean together, and what is not built yet."""
    refuse_given("tools", ask.tools, ([],))
    refuse_given("functions", ask.functions, ([],))
    refuse_given("tool_choice", ask.tool_choice, ("none", "auto"))
    refuse_given("function_call", ask.function_call, ("none", "auto"))
    if ask.top_logprobs is not None and not ask.logprobs:
        message = "top_logprobs is only allowed when logprobs is true."
        raise RequestError(message, param="top_logprobs")
    if ask.max_tokens == 0:
        raise RequestError("max_tokens must be at least 1.", param="max_tokens")
    check_stream(ask)


def plan_sampling(
    service: Service, ask: ChatRequest, prompt: Prompt, grammar: str | None
) -> SamplingParams:
    """Of max_tokens and max_completion_tokens the smaller counts; the context caps both."""
    given = [n for n in (ask.max_tokens, ask.max_completion_tokens) if n is not None]
    asked = min(given) if given else None
    context = context_of(service.engine)
    return sampling_params(
        ask,
        service.engine.card,
        max_tokens=fit(len(prompt.ids), asked, context, param="messages", cap=True),
        n_logprobs=(ask.top_logprobs or 0) if ask.logprobs else None,
        n_prompt_logprobs=ask.prompt_logprobs,
        grammar=grammar,
    )


def _logprobs(tokenizer: Tokenizer, delta: Delta) -> dict[str, Any]:
    return {"content": chat_logprobs(tokenizer, delta.logprobs), "refusal": None}


def _choice(
    index: int, delta: dict[str, str], logprobs: Any, finish: Finish | None, **more: Any
) -> bytes:
    choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": logprobs} | more
    choice["finish_reason"] = finish.reason if finish else None
    if finish:
        choice["stop_reason"] = finish.stop
    return encode(choice)


async def stream(
    service: Service, ask: ChatRequest, prompt: Prompt, generation: Generation, chunks: Chunks
) -> Events:
    """Role chunks, content chunks, a finish chunk for each choice, usage if it was asked for."""
    tokenizer = service.engine.card.tokenizer
    first = {"role": "assistant", "content": ""}
    ids: dict[str, Any] = {"prompt_token_ids": prompt.ids} if ask.return_token_ids else {}
    yield b"".join(chunks.chunk(_choice(i, first, None, None), **ids) for i in range(ask.n))
    async for _, delta in generation.events():
        if isinstance(delta, Progress):
            if ask.return_progress:
                progress = generation.progress(0)
                yield chunks.chunk(_choice(0, {}, None, None), prompt_progress=progress)
            continue
        if (ask.logprobs or ask.return_token_ids) and (delta.text or delta.tokens):
            content = {"content": delta.text}
            logprobs = _logprobs(tokenizer, delta) if ask.logprobs else None
            more = {"token_ids": delta.tokens} if ask.return_token_ids else {}
            yield chunks.chunk(_choice(delta.choice, content, logprobs, None, **more))
        elif delta.text:
            head = b'{"index":%d,"delta":{"content":' % delta.choice
            tail = b'},"logprobs":null,"finish_reason":null}'
            yield chunks.chunk(head + encode(delta.text) + tail)
        if delta.finish is not None:
            yield chunks.chunk(_choice(delta.choice, {}, None, delta.finish), ends=True)
    if chunks.with_usage:
        yield chunks.usage_chunk()


class Whole:
    """A choice as it gathers for an answer that is not streamed."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self.tokens: list[int] = []
        self.prompt_logprobs: tuple[Logprob | None, ...] = ()  # the first choice has them
        self.finish: Finish | None = None

    def as_json(self, index: int, *, with_logprobs: bool) -> dict[str, Any]:
        text = "".join(self.texts)
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": {"content": self.logprobs, "refusal": None} if with_logprobs else None,
            "finish_reason": self.finish.reason if self.finish else None,
            "stop_reason": self.finish.stop if self.finish else None,
        }


async def gather(generation: Generation, n: int, tokenizer: Tokenizer) -> list[Whole]:
    wholes = [Whole() for _ in range(n)]
    async for _, delta in generation.deltas():
        whole = wholes[delta.choice]
        whole.texts.append(delta.text)
        whole.logprobs += chat_logprobs(tokenizer, delta.logprobs)
        whole.tokens += delta.tokens
        whole.prompt_logprobs = delta.prompt_logprobs or whole.prompt_logprobs
        whole.finish = delta.finish or whole.finish
    return wholes


@router.post("/v1/chat/completions", openapi_extra=json_schema(ChatRequest))
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation. Streams with stream: true."""
    service = service_of(request)
    ask, headers = await service.read(request, ChatRequest)
    check(ask)
    card = service.engine.card
    prompt = await render_chat(
        card,
        render_messages(ask.messages),
        ask.chat_template_kwargs,
        context=context_of(service.engine),
    )
    grammar = await grammar_of(ask, card.grammars)
    sampling = plan_sampling(service, ask, prompt, grammar)
    generation = service.generate(request, ask, [prompt], [sampling], ask.n)
    if ask.stream:
        chunks = Chunks("chatcmpl", "chat.completion.chunk", card.name, generation, ask)
        events = stream(service, ask, prompt, generation, chunks)
        return service.stream(events, generation, headers)
    async with watching(request.receive, generation.cancel):
        wholes = await gather(generation, ask.n, card.tokenizer)
    if generation.is_cancelled:
        raise ClientGone
    out = [whole.as_json(i, with_logprobs=ask.logprobs) for i, whole in enumerate(wholes)]
    more: dict[str, Any] = {}
    if ask.return_token_ids:
        more["prompt_token_ids"] = prompt.ids
        for choice, whole in zip(out, wholes, strict=True):
            choice["token_ids"] = whole.tokens
    if (n_top := ask.prompt_logprobs) is not None:
        scores = wholes[0].prompt_logprobs
        more["prompt_logprobs"] = prompt_entries(card.tokenizer, scores, n_top)
    envelope = Envelope("chatcmpl", "chat.completion", card.name, generation)
    body = envelope.answer(out, **more)
    return Response(body, media_type="application/json", headers=headers)
