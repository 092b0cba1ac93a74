"""Arguments of a call that a conversation carries back."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec


def arguments_object(arguments: Any) -> dict[str, Any]:
    """The arguments of a call as an object, which templates print or iterate over.

    Models write other things, and answers are cut: what is no JSON object becomes the only parameter
    of one, null and "" an empty one."""
    value = arguments
    if isinstance(arguments, str):
        with suppress(msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
            value = msgspec.json.decode(arguments or "{}")
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"arguments": value}
