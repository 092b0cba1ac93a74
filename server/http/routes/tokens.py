"""POST /tokenize and /detokenize (in the shapes of llama-server and vLLM), GET /tokenizer_info."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from cflow.engine.text.tokenizer import Tokenizer
from cflow.server.api.admission import check_ready
from cflow.server.api.logprobs import token_name
from cflow.server.api.prompts import context_of, encode_plain, render_chat
from cflow.server.api.schemas import DetokenizeRequest, TokenizeRequest, render_messages
from cflow.server.api.wire import encode
from cflow.server.errors import RequestError, shorten
from cflow.server.http.service import Service, json_schema, service_of

router = APIRouter()


def _pieces(tokenizer: Tokenizer, ids: tuple[int, ...]) -> list[dict[str, Any]]:
    return [{"id": token, "piece": token_name(tokenizer, token)} for token in ids]


async def _encode(service: Service, ask: TokenizeRequest) -> tuple[int, ...]:
    card, parse_special = service.engine.card, service.may_spell_special(ask)
    if ask.messages is not None:
        prompt = await render_chat(
            card,
            render_messages(ask.messages),
            ask.chat_template_kwargs,
            add_generation_prompt=ask.add_generation_prompt,
            parse_special=parse_special,
        )
        return prompt.ids
    text, add_bos = ask.content, ask.add_special
    if text is None:
        text, add_bos = ask.prompt, ask.add_special_tokens
    assert text is not None
    return await encode_plain(card.tokenizer, text, add_bos=add_bos, parse_special=parse_special)


@router.post("/tokenize", openapi_extra=json_schema(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """Turn a text or messages into token ids."""
    service = service_of(request)
    ask, headers = await service.read(request, TokenizeRequest)
    given = [name for name in ("content", "prompt", "messages") if getattr(ask, name) is not None]
    if len(given) != 1:
        message = (
            f"Exactly one of content, prompt and messages is required; {len(given)} were given."
        )
        raise RequestError(message, param="prompt")
    ids = await _encode(service, ask)
    tokens: Any = ids
    if ask.with_pieces:
        tokens = await asyncio.to_thread(_pieces, service.engine.card.tokenizer, ids)
    body: dict[str, Any] = {"tokens": tokens}
    if ask.content is None:
        body |= {"count": len(ids), "max_model_len": context_of(service.engine)}
    return Response(encode(body), media_type="application/json", headers=headers)


@router.post("/detokenize", openapi_extra=json_schema(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """Turn token ids into text that shows special tokens: as `content` (llama-server) and `prompt`
    (vLLM)."""
    service = service_of(request)
    ask, headers = await service.read(request, DetokenizeRequest)
    tokenizer = service.engine.card.tokenizer
    for token in ask.tokens:
        if not 0 <= token < tokenizer.n_tokens:
            message = f"tokens: token id {shorten(token)} is not in 0..{tokenizer.n_tokens - 1}."
            raise RequestError(message, param="tokens")
    text = await asyncio.to_thread(tokenizer.decode, ask.tokens, skip_special=False)
    body = encode({"content": text, "prompt": text})
    return Response(body, media_type="application/json", headers=headers)


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """Special tokens, chat template and context, in vLLM's shape."""
    service = service_of(request)
    check_ready(service.engine, service.metrics)
    card = service.engine.card
    ids = {
        "bos_token": card.tokenizer.bos_id,
        "eos_token": next(iter(card.tokenizer.eos_ids), None),
    }
    names = {
        name: None if token is None else card.tokenizer.decode((token,), skip_special=False)
        for name, token in ids.items()
    }
    body = names | {
        "chat_template": card.metadata.get("chat_template"),
        "model_max_length": context_of(service.engine),
    }
    return Response(encode(body), media_type="application/json")
