"""POST /v1/responses, without stored responses, over the same generation as a chat."""

from __future__ import annotations

from contextlib import aclosing

from fastapi import APIRouter, Request, Response

from cflow.engine.base.messages import Progress
from cflow.server.api import responses
from cflow.server.api.generation import Generation
from cflow.server.api.replies import Reply
from cflow.server.api.responses import EventWriter, items_of, read_input, renamed, to_chat
from cflow.server.api.schemas import ResponsesRequest
from cflow.server.api.wire import encode
from cflow.server.errors import ClientGone, RequestError, answer_failure
from cflow.server.http.routes.chat import begin, check, gather
from cflow.server.http.service import json_schema, service_of
from cflow.server.http.sse import Events, watching

router = APIRouter()


def check_state(ask: ResponsesRequest) -> None:
    """Reject what needs stored responses, and what only other routes offer."""
    for name in ("previous_response_id", "conversation", "background", "prompt"):
        if getattr(ask, name):
            message = f"{name} is not supported: this server keeps no responses."
            raise RequestError(message, code="unsupported_parameter", param=name)
    if ask.top_logprobs or "message.output_text.logprobs" in ask.include:
        name = "top_logprobs" if ask.top_logprobs else "include"
        message = f"{name} is not supported here; get log-probabilities from /v1/chat/completions."
        raise RequestError(message, code="unsupported_parameter", param=name)
    if ask.prompt_logprobs is not None or ask.return_token_ids:
        name = "return_token_ids" if ask.return_token_ids else "prompt_logprobs"
        message = f"{name} is not supported here; use /v1/chat/completions."
        raise RequestError(message, code="unsupported_parameter", param=name)
    if ask.n != 1:
        raise RequestError("n must be 1.", param="n")


async def stream(response: responses.Response, generation: Generation, reply: Reply) -> Events:
    write = EventWriter()
    yield write.event("response.created", response=response.begun())
    yield write.event("response.in_progress", response=response.begun())
    try:
        async with aclosing(generation.events()) as events:
            async for _, delta in events:
                if isinstance(delta, Progress):
                    continue
                for piece in reply.add(delta):
                    for event in write.add(piece):
                        yield event
    except Exception as error:
        failed = response.failed(write.items, answer_failure(error))
        yield write.event("response.failed", response=failed)
        return
    generation.n_reasoning = reply.n_reasoning
    kind = "incomplete" if reply.reason == "length" else "completed"
    for event in write.close(kind):
        yield event
    ended = response.ended(reply, write.items, generation)
    yield write.event(f"response.{kind}", response=ended)


@router.post("/v1/responses", openapi_extra=json_schema(ResponsesRequest))
async def create_response(request: Request) -> Response:
    """Answer a conversation, statelessly. Streams if stream is true."""
    service = service_of(request)
    ask, headers = await service.read(request, ResponsesRequest)
    check_state(ask)
    turns, origins = read_input(ask)
    try:
        chat = to_chat(ask, turns)
        check(chat)
        _, how, generation, (reply,) = await begin(service, request, chat)
    except RequestError as error:
        raise renamed(error, origins) from None
    response = responses.Response(ask, service.engine.card.name, how.temperature, how.top_p)
    if ask.stream:
        return service.stream(stream(response, generation, reply), generation, headers)
    async with watching(request.receive, generation.cancel):
        await gather(generation, [reply])
    if generation.is_cancelled:
        raise ClientGone
    body = encode(response.ended(reply, items_of(reply), generation))
    return Response(body, media_type="application/json", headers=headers)
