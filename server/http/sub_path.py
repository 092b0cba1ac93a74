"""ASGI middleware for a server behind a proxy's sub-path, such as https://host/llm/."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_address, ip_network

from starlette.types import ASGIApp, Receive, Scope, Send

_PREFIX = re.compile(rb"(/[\w.~-]+)+")


class SubPath:
    """Puts the sub-path into scope["root_path"], and takes it off the path if the proxy left it there.

    It is the setting root_path, or what a trusted proxy sends as X-Forwarded-Prefix."""

    def __init__(self, app: ASGIApp, root_path: str, trusted: Sequence[str]) -> None:
        self.app = app
        self._root_path = root_path
        self._trusted = [ip_network(network, strict=False) for network in trusted]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (root := self._root_of(scope)):
            path = scope["path"]
            if path == root or path.startswith(f"{root}/"):
                path = path[len(root) :] or "/"
            scope = {**scope, "path": path, "root_path": root}
        await self.app(scope, receive, send)

    def _root_of(self, scope: Scope) -> str:
        prefixes = [value for name, value in scope["headers"] if name == b"x-forwarded-prefix"]
        if len(prefixes) != 1 or not self._is_trusted(scope):
            return self._root_path
        prefix = prefixes[0].rstrip(b"/")
        return prefix.decode() if _PREFIX.fullmatch(prefix) else self._root_path

    def _is_trusted(self, scope: Scope) -> bool:
        if not scope.get("client"):
            return False
        try:
            client = ip_address(scope["client"][0])
        except ValueError:
            return False
        client = getattr(client, "ipv4_mapped", None) or client
        return any(client in network for network in self._trusted)
