"""POST /v1/responses over the same generation as a chat, and the responses that it keeps."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NamedTuple

from fastapi import APIRouter, Request, Response

from cflow.engine.base.messages import Progress
from cflow.server.api import responses
from cflow.server.api.admission import check_ready
from cflow.server.api.generation import Generation
from cflow.server.api.logprobs import chat_logprobs, split_at_text
from cflow.server.api.replies import Reply, read_replies
from cflow.server.api.responses import (
    EventWriter,
    Tools,
    read_input,
    read_items,
    read_tools,
    renamed,
    to_chat,
)
from cflow.server.api.schemas import ChatRequest, ResponsesRequest, with_ignored
from cflow.server.api.tools import read_tools as read_calling
from cflow.server.api.wire import encode
from cflow.server.errors import ClientGone, RequestError, answer_failure
from cflow.server.http.routes.chat import begin, check, render
from cflow.server.http.service import Service, json_schema, service_of
from cflow.server.http.sse import Events, watching

router = APIRouter()


class Asked(NamedTuple):
    """A checked request. items: the conversation. params: the parameter each turn comes from."""

    ask: ResponsesRequest
    chat: ChatRequest
    items: list[dict[str, object]]
    params: list[str]
    tools: Tools
    headers: dict[str, str]


async def read(service: Service, request: Request) -> Asked:
    """Raises RequestError."""
    ask, headers = await service.read(request, ResponsesRequest)
    check_state(ask)
    tools = read_tools(ask)
    items, n_stored = read_items(ask, service.responses, service.key_of(request))
    turns, params, ignored = read_input(ask, items, n_stored, tools)
    try:
        chat = to_chat(ask, tools, turns)
        check(chat)
    except RequestError as error:
        raise renamed(error, params, tools) from None
    return Asked(ask, chat, items, params, tools, with_ignored(headers, tools.ignored + ignored))


def check_state(ask: ResponsesRequest) -> None:
    """Reject what this server does not do in the background or keep, and what other routes offer."""
    for name in ("conversation", "background", "prompt"):
        if getattr(ask, name):
            message = f"{name} is not supported: send the whole input, or previous_response_id."
            if name == "background":
                message = "background is not supported: a response is computed while you wait."
            raise RequestError(message, code="unsupported_parameter", param=name)
    if ask.prompt_logprobs is not None or ask.return_token_ids:
        name = "return_token_ids" if ask.return_token_ids else "prompt_logprobs"
        message = f"{name} is not supported here; use /v1/chat/completions."
        raise RequestError(message, code="unsupported_parameter", param=name)
    if ask.n != 1:
        raise RequestError("n must be 1.", param="n")


class Telling:
    """One response as it is generated: its events, and the object that a whole answer is."""

    def __init__(
        self, service: Service, request: Request, asked: Asked, generation: Generation, reply: Reply
    ) -> None:
        self._service, self._key = service, service.key_of(request)
        self._asked = asked
        self._generation, self._reply = generation, reply
        self._write = EventWriter(asked.tools)
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is not certain yet

    async def events(self, response: responses.Response) -> Events:
        write = self._write
        yield write.event("response.created", response=response.begun())
        yield write.event("response.in_progress", response=response.begun())
        try:
            async with aclosing(self._pieces()) as pieces:
                async for event in pieces:
                    yield event
        except Exception as error:
            failed = response.failed(write.items, answer_failure(error))
            yield write.event("response.failed", response=failed)
            return
        status = self.status
        for event in write.end(status):
            yield event
        yield write.event(f"response.{status}", response=self._ended(response))

    async def whole(self, response: responses.Response) -> bytes:
        async for _ in self._pieces():
            pass
        for _ in self._write.end(self.status):
            pass
        return encode(self._ended(response))

    @property
    def status(self) -> str:
        return "incomplete" if self._reply.reason == "length" else "completed"

    async def _pieces(self) -> AsyncGenerator[bytes]:
        async with aclosing(read_replies(self._generation, [self._reply])) as read:
            async for event in read:
                if isinstance(event, Progress):
                    continue
                _, delta, pieces = event
                if self._asked.chat.logprobs:
                    tokenizer = self._service.engine.card.tokenizer
                    self._logprobs += chat_logprobs(tokenizer, delta.logprobs)
                for piece in pieces:
                    for told in self._write.add(piece, self._logprobs_of(piece)):
                        yield told

    def _logprobs_of(self, piece: dict[str, Any]) -> list[dict[str, Any]]:
        """Log-probabilities of the tokens of a piece, if it is text."""
        if "content" not in piece or not self._logprobs:
            return []
        told, self._logprobs = split_at_text(self._logprobs, piece["content"])
        return told

    def _ended(self, response: responses.Response) -> dict[str, object]:
        ended = response.ended(self._reply, self._write.items, self._generation)
        if ended["store"] and not self._generation.is_cancelled:
            items = [*self._asked.items, *self._write.items]
            self._service.responses.put(self._key, ended, items)
        return ended


@router.post("/v1/responses", openapi_extra=json_schema(ResponsesRequest))
async def create_response(request: Request) -> Response:
    """Answer a conversation, which may go on from a stored response. Streams if stream is true."""
    service = service_of(request)
    asked = await read(service, request)
    ask = asked.ask
    try:
        _, how, generation, (reply,) = await begin(service, request, asked.chat)
    except RequestError as error:
        raise renamed(error, asked.params, asked.tools) from None
    is_stored = ask.store and service.responses.is_on
    name = service.engine.card.name
    response = responses.Response(ask, name, how.temperature, how.top_p, is_stored)
    telling = Telling(service, request, asked, generation, reply)
    if ask.stream:
        return service.stream(telling.events(response), generation, asked.headers)
    async with watching(request.receive, generation.cancel):
        body = await telling.whole(response)
    if generation.is_cancelled:
        raise ClientGone
    return Response(body, media_type="application/json", headers=asked.headers)


@router.post("/v1/responses/input_tokens", openapi_extra=json_schema(ResponsesRequest))
async def count_input_tokens(request: Request) -> Response:
    """Count the tokens of a request's prompt without answering it."""
    service = service_of(request)
    asked = await read(service, request)
    try:
        calling = read_calling(asked.chat, service.card_for(asked.chat))
        prompt = await render(service, asked.chat, calling)
    except RequestError as error:
        raise renamed(error, asked.params, asked.tools) from None
    body = {"object": "response.input_tokens", "input_tokens": len(prompt.ids)}
    return Response(encode(body), media_type="application/json", headers=asked.headers)


@router.get("/v1/responses/{response_id}")
async def show_response(request: Request, response_id: str) -> Response:
    """A stored response."""
    service = service_of(request)
    check_ready(service.engine, service.metrics)
    stored = service.responses.get(service.key_of(request), response_id)
    return Response(encode(stored.response), media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    """Forget a stored response."""
    service = service_of(request)
    check_ready(service.engine, service.metrics)
    service.responses.delete(service.key_of(request), response_id)
    body = {"id": response_id, "object": "response", "deleted": True}
    return Response(encode(body), media_type="application/json")
