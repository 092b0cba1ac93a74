"""HTTPS, and certificates that are replaced while the server runs."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from cflow.engine.base.errors import CflowError
from cflow.server.commands.serve import reload_files
from cflow.server.config import server_config
from cflow.server.http.tls import read_certificate
from harness.fake_engine import FakeEngine
from harness.live import Live, events, read_all, request
from harness.waiting import LIMIT_S

pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl to make one with")


def make_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
            "-nodes", "-days", "2", "-subj", f"/CN={name}", "-addext",
            "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert),
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return cert, key


def trusting(live: Live, cert: Path) -> httpx.Client:
    context = ssl.create_default_context(cafile=str(cert))
    return httpx.Client(base_url=f"https://127.0.0.1:{live.port}", verify=context, timeout=LIMIT_S)


def test_answers_and_streams(serve: Any, tmp_path: Path) -> None:
    cert, key = make_pair(tmp_path, "one")
    live: Live = serve(FakeEngine(), tls_cert=cert, tls_key=key)
    with trusting(live, cert) as client:
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        streamed = client.post("/v1/completions", json={"prompt": "ab", "stream": True})
        assert "".join(c["choices"][0]["text"] for c in events(streamed)) == "AB"
        assert client.post("/v1/completions", content=b"{").status_code == 400


def test_what_is_not_http_is_refused_over_tls_too(serve: Any, tmp_path: Path) -> None:
    cert, key = make_pair(tmp_path, "one")
    live: Live = serve(FakeEngine(), tls_cert=cert, tls_key=key)
    context = ssl.create_default_context(cafile=str(cert))
    plain = socket.create_connection(("127.0.0.1", live.port), timeout=LIMIT_S)
    with context.wrap_socket(plain, server_hostname="127.0.0.1") as sock:
        sock.sendall(b"\x00nonsense\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 400")
    with live.raw(request("GET", "/live")) as sock:  # HTTP to the HTTPS port
        assert not read_all(sock).startswith(b"HTTP")
    assert live.client.get("/live").status_code == 200


def test_a_new_certificate_is_for_new_connections(serve: Any, tmp_path: Path) -> None:
    cert, key = make_pair(tmp_path, "one")
    other, other_key = make_pair(tmp_path, "two")
    config = server_config({"tls_cert": cert, "tls_key": key})
    live: Live = serve(FakeEngine(), tls_cert=cert, tls_key=key)
    old = cert.read_bytes()
    shutil.copy(other, cert)  # the key does not fit: the old pair stays
    reload_files(config, None, live.tls)
    (tmp_path / "old.pem").write_bytes(old)
    with trusting(live, tmp_path / "old.pem") as client:
        assert client.get("/live").status_code == 200
    shutil.copy(other_key, key)
    reload_files(config, None, live.tls)
    with trusting(live, other) as client:
        assert client.get("/live").status_code == 200
    with trusting(live, tmp_path / "old.pem") as client, pytest.raises(httpx.ConnectError):
        client.get("/live")


def check_health(**environment: str) -> int:
    """The exit status of the container's health check."""
    command = [sys.executable, "-m", "cflow.server.http.healthcheck"]
    return subprocess.run(command, env=os.environ | environment, timeout=LIMIT_S).returncode


def test_the_health_check_asks_with_and_without_tls(serve: Any, tmp_path: Path) -> None:
    cert, key = make_pair(tmp_path, "elsewhere")
    keys = tmp_path / "keys"
    keys.write_text("k\n")
    secret = {"tls_cert": cert, "tls_key": key, "api_keys": keys}
    for live in (serve(), serve(**secret)):
        port = str(live.port)
        assert check_health(CFLOW_PORT=port, CFLOW_HOST="127.0.0.1") == 0
        assert check_health(CFLOW_PORT=port, CFLOW_TLS_CERT=str(cert)) == 0
        live.engine.put(state="loading")
        assert check_health(CFLOW_PORT=port, http_proxy=f"http://127.0.0.1:{port}") == 1
    assert check_health(CFLOW_PORT="1") == 1


def test_files_of_no_use(tmp_path: Path) -> None:
    cert, key = make_pair(tmp_path, "one")
    other, _ = make_pair(tmp_path, "two")
    assert read_certificate(None, None) is None
    for pair in ((cert, tmp_path / "none"), (key, key), (other, key), (cert, None)):
        with pytest.raises(CflowError, match="tls_cert: cannot use"):
            read_certificate(*pair)
    with pytest.raises(CflowError, match="needs tls_cert"):
        read_certificate(None, key)
    both = tmp_path / "both.pem"
    both.write_bytes(cert.read_bytes() + key.read_bytes())
    assert read_certificate(both, None) is not None


def test_an_encrypted_key_does_not_ask_at_the_terminal(tmp_path: Path) -> None:
    cert, key = make_pair(tmp_path, "one")
    secret = tmp_path / "secret.key"
    subprocess.run(
        ["openssl", "ec", "-aes128", "-passout", "pass:x", "-in", str(key), "-out", str(secret)],
        check=True,
        capture_output=True,
    )
    with pytest.raises(CflowError, match="encrypted"):
        read_certificate(cert, secret)
