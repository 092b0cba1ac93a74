"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response

from cflow.server.api.admission import check_model, check_ready
from cflow.server.api.prompts import context_of
from cflow.server.api.wire import encode
from cflow.server.http.errors import speaks_anthropic
from cflow.server.http.service import Service, service_of

router = APIRouter()


def describe(service: Service) -> dict[str, Any]:
    card = service.engine.card
    context = context_of(service.engine)
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "cflow",
        "root": card.name,
        "parent": None,
        "permission": [],
        "max_model_len": context,
        "context_length": context,
        "meta": {
            "n_ctx": context,
            "n_ctx_train": card.trained_context,
            "n_params": card.n_params,
            "n_vocab": card.vocab_size,
            "pooling": card.pooling,
        },
    }


def describe_for_anthropic(service: Service) -> dict[str, Any]:
    card = service.engine.card
    return {
        "type": "model",
        "id": card.name,
        "display_name": card.name,
        "created_at": datetime.fromtimestamp(card.created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": context_of(service.engine),
    }


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """List the one model of this server."""
    service = service_of(request)
    check_ready(service.engine, service.metrics)
    body: dict[str, Any]
    if speaks_anthropic(request.scope):
        name = service.engine.card.name
        data = [describe_for_anthropic(service)]
        body = {"data": data, "has_more": False, "first_id": name, "last_id": name}
    else:
        body = {"object": "list", "data": [describe(service)]}
    return Response(encode(body), media_type="application/json")


@router.get("/v1/models/{model:path}")
async def show_model(request: Request, model: str) -> Response:
    """Describe a model by its name, which may contain slashes."""
    service = service_of(request)
    check_ready(service.engine, service.metrics)
    check_model(service.engine, model)
    shape = describe_for_anthropic if speaks_anthropic(request.scope) else describe
    return Response(encode(shape(service)), media_type="application/json")
