"""What all routes share, at app.state.service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request, Response

from cflow.engine.base.messages import SamplingParams
from cflow.engine.client.card import ModelCard
from cflow.engine.client.engine import Engine, GenerateRequest
from cflow.server.api.admission import check_model, check_priority, check_ready, submit
from cflow.server.api.generation import Generation
from cflow.server.api.prompts import Prompt
from cflow.server.api.records import AnswerRecord, OnEnd
from cflow.server.api.schemas import (
    REF,
    AnyBody,
    Body,
    EmbeddingsRequest,
    Sampling,
    TokenizeRequest,
    ignored_header,
    parse,
)
from cflow.server.api.stored import ResponseStore
from cflow.server.config import ServerConfig
from cflow.server.http.auth import ApiKeys
from cflow.server.http.body import decode_object, read_body
from cflow.server.http.sse import Events, EventStream
from cflow.server.metrics import Metrics

if TYPE_CHECKING:
    from cflow.server.http.tracing import Tracing


AnySampling = TypeVar("AnySampling", bound=Sampling)


@dataclass(frozen=True, slots=True)
class Service:
    config: ServerConfig
    engine: Engine
    metrics: Metrics
    tracing: Tracing | None
    keys: ApiKeys | None
    responses: ResponseStore

    async def read(self, request: Request, kind: type[AnyBody]) -> tuple[AnyBody, dict[str, str]]:
        """The request's body, and headers for its answer. Raises RequestError, also if the engine
        cannot serve."""
        check_ready(self.engine, self.metrics)
        body = decode_object(await read_body(request, self.config.max_body_bytes))
        ask = parse(kind, body)
        check_model(self.engine, getattr(ask, "model", None))
        if isinstance(ask, Sampling | EmbeddingsRequest) and self.keys is not None:
            check_priority(ask.priority)
        if isinstance(ask, Sampling):
            ask = self.with_defaults(ask)
        return ask, ignored_header(kind, body, self._without_effect(ask))

    def with_defaults(self, ask: AnySampling) -> AnySampling:
        """The request with the server's own defaults."""
        if ask.moe_top_k is None and self.config.moe_top_k is not None:
            return ask.model_copy(update={"moe_top_k": self.config.moe_top_k})
        return ask

    def card_for(self, ask: Body) -> ModelCard:
        """The model as a request uses it: some models have a template of their own for tools."""
        card = self.engine.card
        return card.for_tools if getattr(ask, "tools", None) else card

    def _without_effect(self, ask: Body) -> list[str]:
        """The fields that cannot have an effect on this model."""
        has_effort = getattr(ask, "reasoning_effort", None) is not None
        if not has_effort or self.card_for(ask).dialect.switches:
            return []
        return ["reasoning_effort" if "reasoning_effort" in type(ask).model_fields else "reasoning"]

    def may_spell_special(self, ask: Sampling | TokenizeRequest | EmbeddingsRequest) -> bool:
        """Whether text of the request's prompt or messages may spell special tokens."""
        if ask.parse_special is not None:
            return ask.parse_special
        is_chat = getattr(ask, "messages", None) is not None
        return self.config.special_in_messages if is_chat else self.config.special_in_prompts

    async def generate(
        self,
        request: Request,
        ask: Sampling | EmbeddingsRequest,
        prompts: list[Prompt],
        sampling: list[SamplingParams],
        n_choices: int,
        *,
        is_embedding: bool = False,
    ) -> Generation:
        """Submit the prompts, all or none. sampling: one a prompt. Raises RequestError."""
        work = GenerateRequest(
            prompts=[prompt.ids for prompt in prompts],
            sampling=sampling,
            n_choices=n_choices,
            key=self.key_of(request),
            shares_queue=self.keys is not None and self.keys.are_several,
            priority=ask.priority,
            timeout_s=ask.timeout_s,
        )
        answers = await submit(self.engine, self.metrics, work, is_embedding)
        records = [
            AnswerRecord(
                self.metrics, len(prompt.ids), n_choices, how.max_tokens, self._follow(request, how)
            )
            for prompt, how in zip(prompts, sampling, strict=True)
        ]
        ready = self.engine.status.ready
        return Generation(
            answers,
            records,
            n_experts=sampling[0].n_experts or self.engine.card.top_k,
            n_deferred=ready.n_deferred if ready else 0,
        )

    def key_of(self, request: Request) -> str:
        """The name of the request's API key; "" on a server without keys."""
        key: str = request.scope.get("state", {}).get("key", "")
        return key

    def _follow(self, request: Request, how: SamplingParams) -> OnEnd | None:
        if self.tracing is None:
            return None
        return self.tracing.follow(self.engine.card.name, request.scope["state"]["id"], how)

    def stream(self, events: Events, generation: Generation, headers: dict[str, str]) -> Response:
        """A response that streams these events, which include the end of the answer."""
        return EventStream(
            events,
            on_gone=generation.cancel,
            state=generation.state,
            ping_s=self.config.ping_s,
            headers=headers,
        )


def service_of(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


def json_schema(kind: type[Body]) -> dict[str, Any]:
    """The openapi_extra of a route that reads its body with Service.read."""
    schema = kind.model_json_schema(ref_template=REF)
    schema.pop("$defs", None)
    return {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}
