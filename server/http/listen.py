"""The listening socket."""

from __future__ import annotations

import errno
import socket

from cflow.engine.base.errors import CflowError

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Listen on an IPv4 or IPv6 address. CflowError names the flag to change."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        flag = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise CflowError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another {flag}"
        ) from None
