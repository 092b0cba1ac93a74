"""API keys, checked before the body is read and compared in constant time."""

from __future__ import annotations

import hmac
import logging
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from cflow.engine.base.errors import CflowError
from cflow.server.errors import RequestError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS = frozenset({"/live", "/health", "/ready", "/metrics", "/version", "/status", "/"})
OPEN_FOLDER = "/web/"


log = logging.getLogger("cflow.server")


class ApiKeys:
    """The keys of a file, as digests. A line is `KEY` or `NAME: KEY`; `#` starts a comment."""

    def __init__(self, path: Path) -> None:
        """Raises CflowError if the file cannot be read or holds no valid keys."""
        self._path = path
        self._digests = _digests(_read(path))

    def reload(self) -> None:
        """Read the file again. Raises CflowError and keeps the old keys if it is unusable."""
        keys = _read(self._path)
        self._digests = _digests(keys)
        log.info("%s holds %d keys: %s", self._path, len(keys), ", ".join(keys))

    @property
    def are_several(self) -> bool:
        return len({name for name, _ in self._digests}) > 1

    def find(self, key: bytes) -> str | None:
        """The name of the key, or None. Compares all keys, so timing does not reveal a match."""
        digest = sha256(key).digest()
        found = None
        for name, known in self._digests:
            if hmac.compare_digest(digest, known):
                found = name
        return found


def _read(path: Path) -> dict[str, str]:
    """Keys by name."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CflowError(f"api_keys: cannot read {path}: {error}") from None
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, colon, key = (part.strip() for part in text.partition(":"))
        name, key = (name, key) if colon else (f"key-{number}", name)
        if not key or name in keys:
            raise CflowError(
                f"api_keys: line {number} of {path} must be KEY or NAME: KEY, with a new name"
            )
        keys[name] = key
    if not keys:
        raise CflowError(f"api_keys: {path} holds no key; add one a line")
    return keys


def _digests(keys: dict[str, str]) -> list[tuple[str, bytes]]:
    """(name, digest) of each key, in both encodings that clients use for non-ASCII headers."""
    return [
        (name, sha256(key.encode(encoding)).digest())
        for name, key in keys.items()
        for encoding in ("utf-8", "latin-1")
        if encoding == "utf-8" or _fits_latin1(key)
    ]


def _fits_latin1(text: str) -> bool:
    return max(map(ord, text), default=0) < 256


def is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def _token(scope: Scope) -> bytes | None:
    """The key that a request brings: a Bearer token, or without one x-api-key, as Anthropic's clients
    send it. None unless there is exactly one."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if not values:
        keys = [value for name, value in scope["headers"] if name == b"x-api-key"]
        return keys[0].strip() if len(keys) == 1 else None
    if len(values) != 1:
        return None
    scheme, _, token = values[0].partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None


class Authentication:
    """ASGI middleware: reject requests without a valid key (401), and put the name of a valid one
    into scope["state"]["key"]."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope["path"]):
            await self.app(scope, receive, send)
            return
        token = _token(scope)
        name = self.keys.find(token) if token else None
        if name is None:
            from cflow.server.http.errors import error_response

            error = RequestError(
                "Missing or wrong API key; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
                code="invalid_api_key",
                status=401,
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error_response(error, scope)(scope, receive, send)
            return
        scope.setdefault("state", {})["key"] = name
        await self.app(scope, receive, send)
