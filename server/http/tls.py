"""TLS for the listening socket, from files that can be replaced while it is open."""

from __future__ import annotations

import ssl
from pathlib import Path

from cflow.engine.base.errors import CflowError


def read_certificate(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """The TLS context, or None without files. Raises CflowError if they are unusable."""
    if cert is None:
        if key is not None:
            raise CflowError(f"tls_key = {key} needs tls_cert, the certificate")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, cert, key)
    return context


def load_certificate(context: ssl.SSLContext, cert: Path, key: Path | None) -> None:
    """Load the files for new connections. key: None if the certificate's file holds it."""
    try:  # on a separate context first: a key that does not match must not leave this one half changed
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=_no_password)
        context.load_cert_chain(cert, key, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = f"{cert} and {key}" if key else str(cert)
        raise CflowError(f"tls_cert: cannot use {files}: {error}") from None


def _no_password() -> str:
    """Raise instead of asking for the password at the terminal."""
    raise ValueError("the key is encrypted")
