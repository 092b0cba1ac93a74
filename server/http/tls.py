"""TLS for the listening socket, from files that may be replaced while it is in use."""

from __future__ import annotations

import ssl
from pathlib import Path

from cflow.engine.base.errors import CflowError


def read_certificate(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """None without files. CflowError if they are of no use."""
    if cert is None:
        if key is not None:
            raise CflowError(f"tls_key = {key} needs tls_cert, the certificate")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, cert, key)
    return context


def load_certificate(context: ssl.SSLContext, cert: Path, key: Path | None) -> None:
    """For connections from now on. key: None if it is in the file of the certificate."""
    try:  # apart first: a key that does not fit must not leave the context half changed
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=_no_password)
        context.load_cert_chain(cert, key, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = f"{cert} and {key}" if key else str(cert)
        raise CflowError(f"tls_cert: cannot use {files}: {error}") from None


def _no_password() -> str:
    """Instead of asking at the terminal."""
    raise ValueError("the key is encrypted")
