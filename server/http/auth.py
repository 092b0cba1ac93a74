"""API keys: who may call. Checked before the body is read; keys are compared in constant time."""

from __future__ import annotations

import hmac
import logging
from hashlib import sha256
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from cflow.engine.base.errors import CflowError
from cflow.server.errors import RequestError, error_response

OPEN_PATHS = frozenset({"/live", "/health", "/ready", "/metrics", "/version", "/status", "/"})
OPEN_FOLDER = "/web/"


log = logging.getLogger("cflow.server")


class ApiKeys:
    """Digests of the keys of a file: one key a line, `name: key` to give it a name, # comments."""

    def __init__(self, path: Path) -> None:
        """CflowError if the file is of no use."""
        self._path = path
        self._digests = _digests(_read(path))

    def reload(self) -> None:
        """Reads the file again. CflowError: it is of no use, and the keys stay as they were."""
        keys = _read(self._path)
        self._digests = _digests(keys)
        log.info("%s holds %d keys: %s", self._path, len(keys), ", ".join(keys))

    @property
    def are_several(self) -> bool:
        return len({name for name, _ in self._digests}) > 1

    def find(self, key: bytes) -> str | None:
        """The name of the key, or None. All are compared, however early one matches."""
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
        raise CflowError(f"api_keys: {path} holds no key, so nobody could call")
    return keys


def _digests(keys: dict[str, str]) -> list[tuple[str, bytes]]:
    """Clients send what is not ASCII in either encoding."""
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


def _bearer(scope: Scope) -> bytes | None:
    """The token of the one Authorization header, whose scheme must be Bearer."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, token = values[0].partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None


class Authentication:
    """ASGI middleware: 401 without a valid key; leaves the key's name in scope["state"]["key"]."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope["path"]):
            await self.app(scope, receive, send)
            return
        token = _bearer(scope)
        name = self.keys.find(token) if token else None
        if name is None:
            error = RequestError(
                "Missing or wrong API key; send it as 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
                status=401,
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error_response(error)(scope, receive, send)
            return
        scope.setdefault("state", {})["key"] = name
        await self.app(scope, receive, send)
