"""POST /v1/embeddings."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from cflow.engine.base.messages import SamplingParams
from cflow.engine.client.card import ModelCard
from cflow.server.api.embeddings import check_dimensions, shown, vector_of
from cflow.server.api.prompts import MAX_ANSWERS, Prompt, context_of, encode_prompts, fit
from cflow.server.api.schemas import EmbeddingsRequest
from cflow.server.api.wire import encode
from cflow.server.errors import ClientGone, RequestError
from cflow.server.http.service import Service, json_schema, service_of
from cflow.server.http.sse import watching

router = APIRouter()


async def read_input(service: Service, ask: EmbeddingsRequest) -> list[tuple[int, ...]]:
    """The ids of each input, with what the model's tokenizer puts behind a text. RequestError."""
    card, context = service.engine.card, context_of(service.engine)
    try:
        prompts = await encode_prompts(
            card.tokenizer,
            ask.input,
            n_choices=1,
            context=context,
            parse_special=service.may_spell_special(ask),
            most=MAX_ANSWERS,
        )
        given = ask.input if isinstance(ask.input, list) else [ask.input]
        is_text = (
            [isinstance(item, str) for item in given] if len(given) == len(prompts) else [False]
        )
        inputs = [
            (*prompt.ids, card.end_id) if text and card.end_id is not None else prompt.ids
            for prompt, text in zip(prompts, is_text, strict=True)
        ]
        for ids in inputs:
            fit(len(ids), 0, context, param="input", cap=False)
    except RequestError as error:
        message = str(error).replace("prompt", "input")
        raise RequestError(message, code=error.code, param="input", status=error.status) from None
    return inputs


def check_model(card: ModelCard) -> None:
    if card.pooling is None:
        message = f"{card.name} is not a model for embeddings; serve one such as Qwen3-Embedding."
        raise RequestError(message, code="unsupported_model", param="model")


@router.post("/v1/embeddings", openapi_extra=json_schema(EmbeddingsRequest))
async def create_embeddings(request: Request) -> Response:
    """Turn texts into vectors, with a model that is made for it."""
    service = service_of(request)
    ask, headers = await service.read(request, EmbeddingsRequest)
    card = service.engine.card
    check_model(card)
    inputs = await read_input(service, ask)
    generation = await service.generate(
        request,
        ask,
        [Prompt(ids) for ids in inputs],
        [SamplingParams(max_tokens=0)] * len(inputs),
        1,
        is_embedding=True,
    )
    states: dict[int, bytes] = {}
    async with watching(request.receive, generation.cancel):
        async for index, delta in generation.deltas():
            if delta.embedding is not None:
                states[index] = delta.embedding
    if generation.is_cancelled:
        raise ClientGone
    check_dimensions(ask.dimensions, len(states[0]) // 4)
    data = []
    for index in range(len(inputs)):
        vector = vector_of(states[index], ask.dimensions, card.normalise)
        embedding = shown(vector, ask.encoding_format)
        data.append({"object": "embedding", "index": index, "embedding": embedding})
    usage = {"prompt_tokens": generation.n_prompt, "total_tokens": generation.n_prompt}
    body = {"object": "list", "data": data, "model": card.name, "usage": usage}
    return Response(encode(body), media_type="application/json", headers=headers)
