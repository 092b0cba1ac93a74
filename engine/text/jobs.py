"""What a renderer is asked and answers. Apart from it, so that a worker does not import jinja2."""

import msgspec

TIME_S = 3.0  # a rendering may take


class Job(msgspec.Struct, frozen=True, array_like=True):
    """variables: a JSON object, since msgpack has no integers beyond 64 bits. special_tokens: variables
    that are the template's own text, such as bos_token."""

    variables: bytes
    special_tokens: dict[str, str] = {}


class Result(msgspec.Struct, frozen=True, array_like=True):
    """own: the spans of the text that the template wrote, in order: first character, one past the
    last. is_broken: the template has a syntax error, so every rendering fails. is_limit: time or
    memory ran out."""

    text: str
    own: list[tuple[int, int]] = []
    error: str | None = None
    is_broken: bool = False
    is_limit: bool = False
