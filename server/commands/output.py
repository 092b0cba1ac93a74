"""How commands print results: a table for people, one JSON object for programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def print_json(value: dict[str, Any]) -> None:
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value)).decode())


def table(title: str, rows: Iterable[tuple[str, Any]]) -> None:
    """Print names and values. Text is printed as it is, never read as markup."""
    from rich.console import Console
    from rich.table import Table

    out = Table(title=title, title_justify="left", show_header=False, box=None)
    out.add_column(style="bold")
    out.add_column(overflow="fold")
    for name, value in rows:
        out.add_row(name, str(value), style=None)
    Console(highlight=False, markup=False).print(out)


def size(n_bytes: float) -> str:
    """Bytes for people, in powers of 1000 as disks and bandwidths are sold."""
    for unit in ("B", "kB", "MB"):
        if n_bytes < 1000:
            return f"{n_bytes:.4g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.4g} GB"
