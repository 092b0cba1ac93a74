"""The container's health check: `python3 -m cflow.server.http.healthcheck` exits with 0 if /health
answers 200.

It connects to CFLOW_HOST and CFLOW_PORT, with and without TLS. It accepts any certificate, because
the name may be another and the answer stays on this machine. It runs every few seconds, so it
imports nothing of cflow.
"""

from __future__ import annotations

import os
import ssl
import sys
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection

TIMEOUT_S = 2.0
ANY = frozenset({"", "0.0.0.0", "::"})


def is_healthy(environment: Mapping[str, str]) -> bool:
    host = environment.get("CFLOW_HOST", "").split(",")[0].strip()
    host = "localhost" if host in ANY else host
    port = int(environment.get("CFLOW_PORT") or 8000)
    connections = [
        HTTPConnection(host, port, timeout=TIMEOUT_S),
        HTTPSConnection(host, port, timeout=TIMEOUT_S, context=ssl._create_unverified_context()),
    ]
    if environment.get("CFLOW_TLS_CERT"):
        connections.reverse()
    return any(map(_is_ok, connections))


def _is_ok(connection: HTTPConnection) -> bool:
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(not is_healthy(os.environ))
