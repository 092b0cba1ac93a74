"""POST /v1/messages, Anthropic's API, over the same generation as a chat."""

from __future__ import annotations

from contextlib import aclosing

from fastapi import APIRouter, Request, Response

from cflow.server.api.generation import Generation
from cflow.server.api.messages import MessageWriter, error_event, renamed, to_chat
from cflow.server.api.replies import Reply
from cflow.server.api.schemas import ChatRequest, CountRequest, MessagesRequest, with_ignored
from cflow.server.api.tools import read_tools
from cflow.server.api.wire import encode
from cflow.server.errors import ClientGone, RequestError, answer_failure
from cflow.server.http.routes.chat import begin, check, render
from cflow.server.http.service import Service, json_schema, service_of
from cflow.server.http.sse import Events, watching

router = APIRouter()


async def read(
    service: Service, request: Request, kind: type[MessagesRequest]
) -> tuple[ChatRequest, dict[str, str], dict[str, str]]:
    """The chat request, the names here of its parameters, and headers for the answer."""
    ask, headers = await service.read(request, kind)
    chat, names, ignored = to_chat(ask)
    if chat.reasoning_effort is not None and not service.card_for(chat).dialect.switches:
        ignored.append("thinking")
    check(chat)
    return service.with_defaults(chat), names, with_ignored(headers, ignored)


async def stream(write: MessageWriter, generation: Generation, reply: Reply) -> Events:
    for event in write.begin():
        yield event
    try:
        async with aclosing(write.events(generation, reply)) as events:
            async for event in events:
                yield event
    except Exception as error:
        yield error_event(answer_failure(error))
        return
    for event in write.end(reply):
        yield event


@router.post("/v1/messages", openapi_extra=json_schema(MessagesRequest))
async def create_message(request: Request) -> Response:
    """Answer a conversation in Anthropic's shape. Streams if stream is true."""
    service = service_of(request)
    chat, names, headers = await read(service, request, MessagesRequest)
    try:
        _, _, generation, (reply,) = await begin(service, request, chat)
    except RequestError as error:
        raise renamed(error, names) from None
    write = MessageWriter(service.engine.card.name, generation)
    if chat.stream:
        return service.stream(stream(write, generation, reply), generation, headers)
    async with watching(request.receive, generation.cancel):
        async for _ in write.events(generation, reply):
            pass
    if generation.is_cancelled:
        raise ClientGone
    for _ in write.end(reply):
        pass
    return Response(encode(write.message(reply)), media_type="application/json", headers=headers)


@router.post("/v1/messages/count_tokens", openapi_extra=json_schema(CountRequest))
async def count_tokens(request: Request) -> Response:
    """Count the tokens of a request's prompt without answering it."""
    service = service_of(request)
    chat, names, headers = await read(service, request, CountRequest)
    try:
        prompt = await render(service, chat, read_tools(chat, service.card_for(chat)))
    except RequestError as error:
        raise renamed(error, names) from None
    body = encode({"input_tokens": len(prompt.ids)})
    return Response(body, media_type="application/json", headers=headers)
