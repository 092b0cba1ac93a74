"""The version of the installed package."""

from __future__ import annotations


def version() -> str:
    from importlib import metadata

    try:
        return metadata.version("cflow")
    except metadata.PackageNotFoundError:
        return "unknown"
