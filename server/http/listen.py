"""The listening sockets."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from contextlib import ExitStack

from cflow.engine.base.errors import CflowError

BACKLOG = 2048
NO_SUCH_FAMILY = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)


def listen(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Listen on every address of the hosts, IPv4 and IPv6; `::` takes both. All have one port, also
    if it is 0 and chosen by the system. CflowError names the flag to change."""
    with ExitStack() as opened:
        sockets: list[socket.socket] = []
        for host in hosts:
            for sock in _listen(host, sockets[0].getsockname()[1] if sockets else port):
                sockets.append(opened.enter_context(sock))
        opened.pop_all()
        return sockets


def _listen(host: str, port: int) -> list[socket.socket]:
    """A name such as localhost may have addresses of a family that this machine lacks: one suffices."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        addresses = list(dict.fromkeys((family, address[0]) for family, _, _, _, address in found))
    except (OSError, UnicodeError) as error:
        raise _refused(host, port, error, "--host") from None
    sockets: list[socket.socket] = []
    for family, address in addresses:
        is_both = host == "::" and socket.has_dualstack_ipv6()
        try:
            sock = socket.create_server(
                (str(address), port), family=family, backlog=BACKLOG, dualstack_ipv6=is_both
            )
        except OSError as error:
            if error.errno in NO_SUCH_FAMILY and (sockets or address != addresses[-1][1]):
                continue
            for other in sockets:
                other.close()
            flag = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
            raise _refused(host, port, error, flag) from None
        sockets.append(sock)
        port = sock.getsockname()[1]
    return sockets


def _refused(host: str, port: int, error: OSError | UnicodeError, flag: str) -> CflowError:
    reason = getattr(error, "strerror", None) or error
    return CflowError(f"cannot listen on {host}:{port}: {reason}; choose another {flag}")
