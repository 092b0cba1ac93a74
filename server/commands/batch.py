"""cflow batch: a file of requests, with a running server or an engine of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cflow.engine.base.errors import CflowError
from cflow.server.commands.models import engine_for, resolve_default
from cflow.server.commands.options import engine_flags, read_engine


@engine_flags()
def batch(
    engine: dict[str, Any],
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="Requests, one a line.")],
    target: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Where answers are added.")],
    model: Annotated[
        str | None,
        typer.Option(help="Model of an engine of its own. Default: as in cflow serve."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="A running server, as in http://127.0.0.1:8000. Default: none."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="CFLOW_API_KEY", help="Key for the server. Default: none."),
    ] = None,
    parallel: Annotated[int, typer.Option(min=1, max=1024, help="Requests at the same time.")] = 16,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    A line of IN is {"custom_id", "method": "POST", "url", "body"}; url is /v1/completions,
    /v1/chat/completions, /v1/responses or /v1/embeddings. Each answer is a line of OUT, in the order
    in which they come. Requests have the lowest priority, so a server's other clients go first.
    Lines that OUT already answers are not sent again, so an interrupted batch goes on where it was.

    \\b
    cflow batch in.jsonl out.jsonl --model qwen2.5-coder-0.5b
    cflow batch in.jsonl out.jsonl --url http://127.0.0.1:8000
    """
    if url is not None and model is not None:
        raise CflowError("--url and --model exclude each other: the server has its model")
    from cflow.server.commands import batch_file

    work = batch_file.read(source, target)
    if url is not None:
        batch_file.send(work, target, url.rstrip("/"), api_key, parallel)
        return
    if model is None:
        config = replace(read_engine(engine), model=str(resolve_default()[1]))
    else:
        config = engine_for(model, engine)
    batch_file.send_to_own_engine(work, target, config, parallel)
