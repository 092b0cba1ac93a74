"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from fastapi import APIRouter, Request, Response

from cflow.engine.base.messages import Delta, Progress, SamplingParams
from cflow.engine.client.card import ModelCard
from cflow.engine.text.dialect import Thinking
from cflow.engine.text.reply import MAX_CALLS, ReplyReader
from cflow.server.api.constraints import grammar_of
from cflow.server.api.generation import Generation
from cflow.server.api.logprobs import chat_logprobs, prompt_entries
from cflow.server.api.parameters import check_stream, refuse_given, sampling_params
from cflow.server.api.prompts import Prompt, context_of, fit, render_chat
from cflow.server.api.replies import Pieces, Reply, read_replies
from cflow.server.api.schemas import ChatRequest, render_messages
from cflow.server.api.tools import Calling, form_of, read_tools
from cflow.server.api.wire import Chunks, Envelope, encode
from cflow.server.errors import ClientGone, RequestError
from cflow.server.http.service import Service, json_schema, service_of
from cflow.server.http.sse import Events, ended, watching

router = APIRouter()


class Talk(NamedTuple):
    """A request under way. replies: what takes its answers apart, one a choice."""

    prompt: Prompt
    sampling: SamplingParams
    generation: Generation
    replies: list[Reply]


def check(ask: ChatRequest) -> None:
    """Reject combinations of fields that contradict each other or are not supported."""
    refuse_given("functions", ask.functions, ([],))
    refuse_given("function_call", ask.function_call, ("none", "auto"))
    if ask.top_logprobs is not None and not ask.logprobs:
        message = "top_logprobs is only allowed when logprobs is true."
        raise RequestError(message, param="top_logprobs")
    if ask.max_tokens == 0:
        raise RequestError("max_tokens must be at least 1.", param="max_tokens")
    begins = "add_generation_prompt" in ask.model_fields_set and ask.add_generation_prompt
    if ask.continue_final_message and begins:
        message = "continue_final_message and add_generation_prompt exclude each other."
        raise RequestError(message, param="continue_final_message")
    if ask.continue_final_message and ask.messages[-1].tool_calls:
        message = "continue_final_message: the last message ends with tool calls, not with content."
        raise RequestError(message, param="continue_final_message")
    check_stream(ask)


def plan_sampling(
    service: Service, ask: ChatRequest, prompt: Prompt, grammar: str | None
) -> SamplingParams:
    """Sampling parameters. The smaller of max_tokens and max_completion_tokens counts, and the
    context caps both."""
    given = [n for n in (ask.max_tokens, ask.max_completion_tokens) if n is not None]
    asked = min(given) if given else None
    card, context = service.card_for(ask), context_of(service.engine)
    return sampling_params(
        ask,
        card,
        max_tokens=fit(len(prompt.ids), asked, context, param="messages", cap=True),
        n_logprobs=(ask.top_logprobs or 0) if ask.logprobs else None,
        n_prompt_logprobs=ask.prompt_logprobs,
        grammar=grammar,
        shown_ids=tuple(card.dialect.special_ids(card.tokenizer).values()),
    )


def _choice(
    index: int, delta: dict[str, Any], logprobs: Any, ends: Reply | None = None, **more: Any
) -> bytes:
    """One choice of a chunk. ends: it is the last chunk of that choice."""
    choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": logprobs} | more
    choice["finish_reason"] = ends.reason if ends else None
    if ends and ends.finish:
        choice["stop_reason"] = ends.finish.stop
    return encode(choice)


def _pieces(service: Service, ask: ChatRequest, delta: Delta, pieces: Pieces) -> Iterator[bytes]:
    """The pieces of a delta. Log-probabilities and ids go with the first, or alone if there is none."""
    logprobs: dict[str, Any] | None = None
    more: dict[str, Any] = {}
    if delta.tokens and ask.logprobs:
        content = chat_logprobs(service.engine.card.tokenizer, delta.logprobs)
        logprobs = {"content": content, "refusal": None}
    if delta.tokens and ask.return_token_ids:
        more = {"token_ids": delta.tokens}
    if (logprobs or more) and not pieces:
        pieces = [{}]
    for piece in pieces:
        if logprobs is None and not more and (text := piece.get("content")) is not None:
            head = b'{"index":%d,"delta":{"content":' % delta.choice
            yield head + encode(text) + b'},"logprobs":null,"finish_reason":null}'
        else:
            yield _choice(delta.choice, piece, logprobs, **more)
        logprobs, more = None, {}


async def stream(service: Service, ask: ChatRequest, talk: Talk, chunks: Chunks) -> Events:
    """Chunks: a role chunk a choice, deltas, a finish chunk a choice, and usage if requested."""
    prompt, _, generation, replies = talk
    first = {"role": "assistant"}
    ids: dict[str, Any] = {"prompt_token_ids": prompt.ids} if ask.return_token_ids else {}
    yield b"".join(chunks.chunk(_choice(i, first, None), **ids) for i in range(ask.n))
    async for event in read_replies(generation, replies):
        if isinstance(event, Progress):
            if ask.return_progress:
                progress = generation.progress(0)
                yield chunks.chunk(_choice(0, {}, None), prompt_progress=progress)
            continue
        reply, delta, pieces = event
        for piece in _pieces(service, ask, delta, pieces):
            yield chunks.chunk(piece)
        if reply.is_over:
            yield chunks.chunk(_choice(delta.choice, {}, None, reply), ends=True)
    if chunks.with_usage:
        yield chunks.usage_chunk()


def whole(service: Service, ask: ChatRequest, talk: Talk) -> bytes:
    """The whole answer, once it is complete."""
    prompt, _, generation, replies = talk
    tokenizer = service.engine.card.tokenizer
    out = []
    for i, reply in enumerate(replies):
        choice: dict[str, Any] = {"index": i, "message": reply.message(), "logprobs": None}
        if ask.logprobs:
            content = chat_logprobs(tokenizer, reply.logprobs)
            choice["logprobs"] = {"content": content, "refusal": None}
        choice["finish_reason"] = reply.reason
        choice["stop_reason"] = reply.finish.stop if reply.finish else None
        out.append(choice)
    more: dict[str, Any] = {}
    if ask.return_token_ids:
        more["prompt_token_ids"] = prompt.ids
        for choice, reply in zip(out, replies, strict=True):
            choice["token_ids"] = reply.tokens
    if (n_top := ask.prompt_logprobs) is not None:
        more["prompt_logprobs"] = prompt_entries(tokenizer, replies[0].prompt_logprobs, n_top)
    envelope = Envelope("chatcmpl", "chat.completion", service.engine.card.name, generation)
    return envelope.answer(out, **more)


async def render(service: Service, ask: ChatRequest, calling: Calling) -> Prompt:
    """The prompt of a checked request. Raises RequestError."""
    card = service.card_for(ask)
    return await render_chat(
        card,
        render_messages(ask.messages),
        card.dialect.effort(ask.reasoning_effort) | ask.chat_template_kwargs,
        tools=calling.shown,
        add_generation_prompt=ask.add_generation_prompt and not ask.continue_final_message,
        continue_final_message=ask.continue_final_message,
        parse_special=service.may_spell_special(ask),
        context=context_of(service.engine),
    )


async def begin(service: Service, request: Request, ask: ChatRequest) -> Talk:
    """Submit a checked request to the engine."""
    card = service.card_for(ask)
    calling = read_tools(ask, card)
    body = await grammar_of(ask, card.grammars)
    prompt = await render(service, ask, calling)
    begun = (ask.messages[-1].content or "") if ask.continue_final_message else ""
    thinking = card.dialect.thinking(prompt.text, begun)
    form = await form_of(calling, body, thinking, card)
    sampling = plan_sampling(service, ask, prompt, form)
    generation = await service.generate(request, ask, [prompt], [sampling], ask.n)
    json_calls = service.config.json_calls and body is None and not begun
    replies = [new_reply(card, calling, thinking, json_calls) for _ in range(ask.n)]
    return Talk(prompt, sampling, generation, replies)


def new_reply(card: ModelCard, calling: Calling, thinking: Thinking, json_calls: bool) -> Reply:
    if not calling.schemas and thinking == "no":
        return Reply()
    syntax, max_calls = card.dialect.calls, MAX_CALLS if calling.is_parallel else 1
    reader = ReplyReader(
        syntax,
        calling.schemas,
        thinking,
        max_calls,
        must_call=calling.must,
        json_calls=json_calls,
    )
    return Reply(reader, syntax.id_length) if syntax else Reply(reader)


@router.post("/v1/chat/completions", openapi_extra=json_schema(ChatRequest))
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation. Streams if stream is true."""
    service = service_of(request)
    ask, headers = await service.read(request, ChatRequest)
    check(ask)
    talk = await begin(service, request, ask)
    generation = talk.generation
    if ask.stream:
        name = service.engine.card.name
        chunks = Chunks("chatcmpl", "chat.completion.chunk", name, generation, ask)
        events = stream(service, ask, talk, chunks)
        return service.stream(ended(events), generation, headers)
    async with watching(request.receive, generation.cancel):
        await gather(generation, talk.replies)
    if generation.is_cancelled:
        raise ClientGone
    body = whole(service, ask, talk)
    return Response(body, media_type="application/json", headers=headers)


async def gather(generation: Generation, replies: list[Reply]) -> None:
    async for _ in read_replies(generation, replies):
        pass
