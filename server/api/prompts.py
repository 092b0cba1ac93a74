"""Prompts as token ids, and whether they fit the context."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

from cflow.engine.base.errors import TemplateError
from cflow.engine.client.card import ModelCard
from cflow.engine.client.engine import Engine
from cflow.engine.text.infill import Infill, find_infill
from cflow.engine.text.template import ChatTemplate, Rendered
from cflow.engine.text.tokenizer import Tokenizer
from cflow.server.errors import RequestError, shorten

MAX_PROMPTS = 256
MAX_ANSWERS = 1024  # prompts x choices
INLINE_CHARS = 2000  # encoded in the event loop; longer texts go to a thread
# Longer texts have threads of their own, so that shorter ones do not wait for them.
LONG_CHARS = 100_000
LONG_TEXTS = ThreadPoolExecutor(2, "long-text")
# One thread: a template's process renders one conversation at a time.
RENDERING = ThreadPoolExecutor(1, "render")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: tuple[int, ...]
    n_added: int = 0  # leading ids that the tokenizer added (BOS); an echo leaves them out
    text: str = ""  # a rendered conversation


def context_of(engine: Engine) -> int:
    """Positions that a sequence can have: the worker may have lowered the model's context."""
    ready = engine.status.ready
    return ready.max_context if ready else engine.card.context


def _encode(tokenizer: Tokenizer, text: str, parse_special: bool = True) -> Prompt:
    ids = tuple(tokenizer.encode(text, trusted=_trusted(parse_special)))
    if not ids:
        if tokenizer.bos_id is None:
            message = "prompt is empty and this model has no token to begin a document with."
            raise RequestError(message, code="empty_prompt", param="prompt")
        return Prompt((tokenizer.bos_id,), 1)
    bos = tokenizer.bos_id
    if bos is None or ids[0] != bos:
        return Prompt(ids)
    typed = parse_special and text.encode().startswith(tokenizer.token_bytes(bos))
    return Prompt(ids, 0 if typed else 1)


async def _apart(text: str, encode: Callable[[str], T]) -> T:
    """encode(text), in a thread if it is long. Very long texts wait for each other only."""
    pool = LONG_TEXTS if len(text) > LONG_CHARS else None
    return await asyncio.get_running_loop().run_in_executor(pool, encode, text)


def _trusted(parse_special: bool) -> tuple[()] | None:
    """Where a text without marks may spell special tokens: everywhere or nowhere."""
    return None if parse_special else ()


async def encode_text(tokenizer: Tokenizer, text: str, *, parse_special: bool = True) -> Prompt:
    if len(text) <= INLINE_CHARS:
        return _encode(tokenizer, text, parse_special)
    return await _apart(text, partial(_encode, tokenizer, parse_special=parse_special))


async def encode_plain(
    tokenizer: Tokenizer, text: str, *, add_bos: bool, parse_special: bool
) -> tuple[int, ...]:
    """The ids of a text; () for an empty one."""
    encode = partial(tokenizer.encode, add_bos=add_bos, trusted=_trusted(parse_special))
    return tuple(await _apart(text, encode))


@lru_cache(maxsize=1)
def _longest_token(tokenizer: Tokenizer) -> int:
    """Bytes of the longest token."""
    return max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.n_tokens))


def _check_size(tokenizer: Tokenizer, text: str, context: int, param: str) -> None:
    """Reject a text that exceeds the context even if every token were the longest one."""
    n_bytes = len(text.encode(errors="replace"))
    if n_bytes > context * _longest_token(tokenizer):
        message = (
            f"This model's maximum context length is {context} tokens. However, the prompt has "
            f"{n_bytes} bytes, which are more tokens in any case. Shorten the prompt."
        )
        raise RequestError(message, code="context_length_exceeded", param=param)


def _is_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


def _check_ids(ids: list[int], tokenizer: Tokenizer) -> Prompt:
    if not ids:
        message = "prompt: a list of token ids must not be empty."
        raise RequestError(message, code="empty_prompt", param="prompt")
    if min(ids) < 0 or max(ids) >= tokenizer.n_tokens:
        wrong = next(id for id in ids if not 0 <= id < tokenizer.n_tokens)
        message = f"prompt: token id {shorten(wrong)} is not in 0..{tokenizer.n_tokens - 1}."
        raise RequestError(message, param="prompt")
    return Prompt(tuple(ids))


def _split(prompt: Any) -> list[str | list[int]]:
    """The prompts of a request: a string, strings, token ids, or lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if _is_ids(prompt):
            return [prompt]
        if all(
            isinstance(item, str) or (isinstance(item, list) and _is_ids(item)) for item in prompt
        ):
            return prompt
    message = (
        f"prompt is {shorten(prompt)}; it must be a string, a list of token ids, "
        "or a list that is not empty of either."
    )
    raise RequestError(message, param="prompt")


def _check_count(n_prompts: int, n_choices: int, most: int = MAX_PROMPTS) -> None:
    if n_prompts > most:
        message = f"prompt: {n_prompts} prompts in one request; at most {most} are allowed."
        raise RequestError(message, param="prompt")
    if n_prompts * n_choices > MAX_ANSWERS:
        message = (
            f"n: {n_choices} choices for each of {n_prompts} prompts are {n_prompts * n_choices} "
            f"answers in one request; at most {MAX_ANSWERS} are allowed."
        )
        raise RequestError(message, param="n")


async def encode_prompts(
    tokenizer: Tokenizer,
    prompt: Any,
    *,
    n_choices: int,
    context: int,
    parse_special: bool = True,
    most: int = MAX_PROMPTS,
) -> list[Prompt]:
    """The prompts of a request. n_choices: choices a prompt. parse_special: text may spell special
    tokens. Raises RequestError."""
    parts = _split(prompt)
    _check_count(len(parts), n_choices, most)
    for part in parts:
        if isinstance(part, str):
            _check_size(tokenizer, part, context, "prompt")
    return [
        await encode_text(tokenizer, part, parse_special=parse_special)
        if isinstance(part, str)
        else _check_ids(part, tokenizer)
        for part in parts
    ]


@lru_cache(maxsize=1)
def _infill_of(tokenizer: Tokenizer) -> Infill | None:
    return find_infill(tokenizer)


async def encode_infill(
    tokenizer: Tokenizer,
    prompt: Any,
    suffix: str,
    *,
    n_choices: int,
    context: int,
    parse_special: bool,
) -> tuple[list[Prompt], tuple[int, ...]]:
    """Prompts for the text between each prompt and the suffix, and the tokens that end it.

    parse_special: the prompt may spell special tokens; the suffix never does, or it would end itself.
    """
    infill = _infill_of(tokenizer)
    if infill is None:
        message = "suffix: this model has no tokens for filling in the middle."
        raise RequestError(message, code="unsupported_parameter", param="suffix")
    parts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(parts, list) or not parts or not all(isinstance(p, str) for p in parts):
        message = f"prompt is {shorten(prompt)}; with suffix it must be a text, or a list of them."
        raise RequestError(message, param="prompt")
    _check_count(len(parts), n_choices)
    for part in parts:
        _check_size(tokenizer, part + suffix, context, "prompt")
    begin = tokenizer.encode("")
    after = await encode_plain(tokenizer, suffix, add_bos=False, parse_special=False)
    prompts = []
    for part in parts:
        before = await encode_plain(tokenizer, part, add_bos=False, parse_special=parse_special)
        prompts.append(Prompt((*begin, *infill.prompt(before, after))))
    return prompts, infill.ends


async def render_chat(
    card: ModelCard,
    messages: list[dict[str, Any]],
    options: dict[str, Any],
    *,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    parse_special: bool = False,
    context: int | None = None,
) -> Prompt:
    """The prompt of a conversation, rendered by the model's chat template.

    options: chat_template_kwargs. continue_final_message: end the prompt with the content of the
    last message. parse_special: text of the messages may spell special tokens. context: reject a conversation that is far too long before encoding it."""
    template = card.template
    if template is None:
        message = "This model has no chat template; use /v1/completions."
        raise RequestError(message, code="no_chat_template", param="messages")
    reserved = {"self", "messages", "tools", "add_generation_prompt"} & options.keys()
    if reserved:
        message = f"chat_template_kwargs must not set {', '.join(sorted(reserved))}."
        raise RequestError(message, param="chat_template_kwargs")

    render = partial(
        _render,
        template,
        _with_mark(messages) if continue_final_message else messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        **options,
    )
    rendered = await asyncio.get_running_loop().run_in_executor(RENDERING, render)
    if continue_final_message:
        rendered = _up_to_mark(rendered)
    if context is not None:
        _check_size(card.tokenizer, rendered.text, context, "messages")
    trusted = None if parse_special else rendered.own
    ids = await _apart(rendered.text, partial(card.tokenizer.encode, trusted=trusted))
    return Prompt(tuple(ids), text=rendered.text)


def _render(template: ChatTemplate, messages: list[dict[str, Any]], **variables: Any) -> Rendered:
    """Render a conversation as it is, else with its system messages where the template takes them."""
    try:
        return _placed(template, messages, **variables)
    except TemplateError as error:
        param = "messages"
        if not error.is_limit and sum(len(turn["content"]) for turn in messages) <= LONG_CHARS:
            param = _rejected(template, messages, **variables)
        raise RequestError(f"{param}: {error}", code=error.code, param=param) from None


def _placed(template: ChatTemplate, messages: list[dict[str, Any]], **variables: Any) -> Rendered:
    """Raises the TemplateError of the conversation as it is, or that of a limit."""
    first = None
    for turns in (messages, *_placements(messages)):
        try:
            return template.render(turns, **variables)
        except TemplateError as error:
            if error.is_limit:
                raise
            first = first or error
    assert first is not None
    raise first


def _rejected(template: ChatTemplate, messages: list[dict[str, Any]], **variables: Any) -> str:
    """The parameter at fault: the message that turns an accepted beginning of the conversation into a
    rejected one, or all messages if no such beginning is found. Takes log2(n) renderings."""
    accepted, rejected = 0, len(messages)
    while rejected - accepted > 1:
        middle = (accepted + rejected) // 2
        try:
            _placed(template, messages[:middle], **variables)
        except TemplateError as error:
            if error.is_limit:
                break
            rejected = middle
        else:
            accepted = middle
    return f"messages[{accepted}]" if accepted and rejected - accepted == 1 else "messages"


def _placements(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The conversation for templates that take system messages only at its start, only one, or none:
    the leading ones as one, later ones at the beginning of the next user's turn (the last ones at the
    end of the last), then all there."""
    n = next((i for i, turn in enumerate(messages) if turn["role"] != "system"), len(messages))
    first, rest = messages[:n], messages[n:]
    merged = [{"role": "system", "content": "\n\n".join(turn["content"] for turn in first)}][
        : len(first)
    ]
    has_later = any(turn["role"] == "system" for turn in rest)
    if n > 1:
        yield [*merged, *rest]
    if has_later:
        yield [*merged, *_folded(rest)]
    if n:
        yield _folded([*merged, *rest])


def _folded(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with the text of system messages in turns of users."""
    turns: list[dict[str, Any]] = []
    waiting: list[str] = []
    for turn in messages:
        if turn["role"] == "system":
            waiting.append(turn["content"])
        elif turn["role"] == "user" and waiting:
            turns.append(turn | {"content": "\n\n".join([*waiting, turn["content"]])})
            waiting = []
        else:
            turns.append(turn)
    if waiting and turns and turns[-1]["role"] == "user":
        turns[-1] = turns[-1] | {"content": "\n\n".join([turns[-1]["content"], *waiting])}
    elif waiting:
        turns.append({"role": "user", "content": "\n\n".join(waiting)})
    return turns


_MARK = "\ufdd0end of content\ufdd1"  # noncharacters, which no conversation contains


def _with_mark(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    last = messages[-1]
    return [*messages[:-1], last | {"content": last["content"] + _MARK}]


def _up_to_mark(prompt: Rendered) -> Rendered:
    if (at := prompt.text.rfind(_MARK)) < 0:
        message = (
            "The chat template changes the content of the last message, so it cannot be continued."
        )
        raise RequestError(message, param="continue_final_message")
    return prompt.until(at)


def fit(n_prompt: int, asked: int | None, context: int, *, param: str, cap: bool) -> int:
    """How many tokens may be generated.

    asked: the request's max_tokens, or None. cap: shorten an answer that would exceed the context
    instead of rejecting it. Raises RequestError "context_length_exceeded"."""
    room = context - n_prompt
    needed = 1 if asked is None else min(asked, 1) if cap else asked
    if needed <= room:
        return room if asked is None else min(asked, room)
    wanted = "" if asked is None else f" and {asked} more were asked for"
    message = (
        f"This model's maximum context length is {context} tokens. However, the prompt has "
        f"{n_prompt} tokens{wanted}. Shorten the prompt or lower max_tokens."
    )
    raise RequestError(message, code="context_length_exceeded", param=param)
