"""Sampling parameters: from the request, else the model's defaults, else OpenAI's."""

from __future__ import annotations

import secrets
from typing import Any

from cflow.engine.base.messages import SamplingParams
from cflow.engine.client.card import ModelCard
from cflow.server.api.schemas import Sampling
from cflow.server.errors import RequestError, shorten


def _choose(card: ModelCard, name: str, asked: float | None, otherwise: float) -> float:
    if asked is not None:
        return asked
    default = (card.metadata.get("generation") or {}).get(name)
    return otherwise if default is None else default


def _check_tokens(name: str, tokens: list[int], n_tokens: int) -> tuple[int, ...]:
    for token in tokens:
        if not 0 <= token < n_tokens:
            message = f"{name}: token id {shorten(token)} is not in 0..{n_tokens - 1}."
            raise RequestError(message, param=name)
    return tuple(tokens)


def _read_bias(bias: dict[str, float], n_tokens: int) -> dict[int, float]:
    out = {}
    for key, value in bias.items():
        is_number = key.isascii() and key.isdecimal() and len(key) <= 10
        if not is_number or int(key) >= n_tokens or key != str(int(key)):  # one spelling a token
            message = f"logit_bias: key {shorten(key)} is not a token id in 0..{n_tokens - 1}."
            raise RequestError(message, code="invalid_logit_bias", param="logit_bias")
        out[int(key)] = value
    return out


def _repetition(ask: Sampling) -> float | None:
    if ask.repeat_penalty is None or ask.repetition_penalty is None:
        return ask.repeat_penalty if ask.repetition_penalty is None else ask.repetition_penalty
    if ask.repeat_penalty != ask.repetition_penalty:
        message = "repetition_penalty and repeat_penalty are one knob; they were given two values."
        raise RequestError(message, param="repeat_penalty")
    return ask.repetition_penalty


def _count_experts(ask: Sampling, card: ModelCard) -> int:
    if ask.moe_top_k is None:
        return 0
    if not card.top_k:
        message = "moe_top_k: this model has no experts."
        raise RequestError(message, param="moe_top_k")
    if ask.moe_top_k > card.top_k:
        message = f"moe_top_k: {ask.moe_top_k} is more than the {card.top_k} experts of this model."
        raise RequestError(message, param="moe_top_k")
    # The model's own number becomes 0, so that requests with and without it share prefixes.
    return ask.moe_top_k % card.top_k


def sampling_params(
    ask: Sampling,
    card: ModelCard,
    *,
    max_tokens: int,
    n_logprobs: int | None,
    n_prompt_logprobs: int | None = None,
    ends: tuple[int, ...] = (),
    grammar: str | None = None,
    shown_ids: tuple[int, ...] = (),
) -> SamplingParams:
    """SamplingParams of a request.

    max_tokens: already limited to the context. ends: tokens that end an answer in addition to the
    model's. grammar: already checked. shown_ids: special tokens that appear in the text. A missing
    seed is drawn at random."""
    if ask.min_tokens > max_tokens:
        message = f"min_tokens: {ask.min_tokens} is more than max_tokens, {max_tokens}."
        raise RequestError(message, param="min_tokens")
    seed = secrets.randbits(63) if ask.seed is None else ask.seed % 2**64
    top_k = int(_choose(card, "top_k", ask.top_k, 0))
    n_tokens = card.tokenizer.n_tokens
    stop_ids = _check_tokens("stop_token_ids", ask.stop_token_ids, n_tokens)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=ask.min_tokens,
        temperature=_choose(card, "temperature", ask.temperature, 1.0),
        top_k=max(top_k, 0),
        top_p=_choose(card, "top_p", ask.top_p, 1.0),
        min_p=_choose(card, "min_p", ask.min_p, 0.0),
        repetition_penalty=_choose(card, "repetition_penalty", _repetition(ask), 1.0),
        frequency_penalty=ask.frequency_penalty,
        presence_penalty=ask.presence_penalty,
        seed=seed,
        logit_bias=_read_bias(ask.logit_bias, n_tokens),
        stop=tuple(ask.stop),
        stop_token_ids=(*stop_ids, *(() if ask.ignore_eos else ends)),
        ignore_eos=ask.ignore_eos,
        include_stop=ask.include_stop_str_in_output,
        n_logprobs=n_logprobs,
        n_prompt_logprobs=n_prompt_logprobs,
        n_experts=_count_experts(ask, card),
        grammar=grammar,
        shown_ids=shown_ids,
    )


def check_stream(ask: Sampling) -> None:
    """Reject stream options without a stream."""
    if ask.stream_options is not None and not ask.stream:
        message = "stream_options is only allowed when stream is true."
        raise RequestError(message, param="stream_options")
    if ask.prompt_logprobs is not None and ask.stream:
        raise RequestError(
            "prompt_logprobs is only allowed when stream is false.", param="prompt_logprobs"
        )


def refuse_given(param: str, value: Any, harmless: tuple[Any, ...]) -> None:
    """Reject fields that are not supported, if their value would change the answer."""
    if value is not None and value not in harmless:
        message = f"{param} is not supported yet by this server."
        raise RequestError(message, code="unsupported_parameter", param=param)
