"""The cflow command."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cflow.engine.base.errors import CflowError
from cflow.server.commands import files, lab, measure, talk
from cflow.server.commands.models import resolve, resolve_default
from cflow.server.commands.options import engine_flags, read_settings
from cflow.server.commands.progress import console

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from cflow.server.http.routes.health import version

        print(f"cflow {version()}")
        raise typer.Exit


@app.callback()
def cflow(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Serve language models from CPU machines at the speed their memory allows."""


@app.command()
@engine_flags()
def serve(
    engine: dict[str, Any],
    model: Annotated[
        str | None,
        typer.Argument(
            help="Catalogue name, .cflow, .vflow or .gguf file, Hugging Face folder, or hf:org/repo. "
            "Default: smollm2-135m, or tinystories where that cannot be fetched."
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; 0.0.0.0 for all. Default: 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port; 0 for any free one. Default: 8000.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file; weaker than CFLOW_* and flags.")
    ] = None,
    api_keys: Annotated[
        Path | None, typer.Option(help="File of keys, one KEY or NAME: KEY a line.")
    ] = None,
    served_name: Annotated[
        str | None, typer.Option(help="The model's name in the API. Default: as given.")
    ] = None,
    max_queue: Annotated[
        int | None, typer.Option(help="Answers that may wait; more get 429. Default: 1024.")
    ] = None,
    max_step_ms: Annotated[
        int | None,
        typer.Option(help="How long others' prompts may delay a running stream. Default: 250."),
    ] = None,
    max_sequences: Annotated[
        int | None, typer.Option(help="Answers made at a time. Default: 64.")
    ] = None,
    max_body: Annotated[
        str | None, typer.Option(help="Largest request body. Default: 8MiB.")
    ] = None,
    drain_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds running requests get after SIGTERM. Default: 30."),
    ] = None,
    cors_origins: Annotated[
        str | None, typer.Option(help="Origins whose pages may call, with commas; * for all.")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="Certificate in PEM form: serve HTTPS.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key, if not in the same file.")] = None,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            help="Where OpenTelemetry traces go, such as http://collector:4318/v1/traces; needs the "
            "extra otel. Default: nowhere."
        ),
    ] = None,
    access_log: Annotated[
        bool | None, typer.Option("--access-log", help="A line for each request.")
    ] = None,
    moe_top_k: Annotated[
        int | None,
        typer.Option(
            help="Experts a token uses where the request does not say. Default: as the model says."
        ),
    ] = None,
) -> None:
    """Serve a model behind the OpenAI HTTP API. Settings: file < CFLOW_* environment < flags."""
    flags = {
        "model": model, "host": host, "port": port, "api_keys": api_keys,
        "served_name": served_name, "max_queue": max_queue, "max_step_ms": max_step_ms,
        "max_sequences": max_sequences, "max_body": max_body, "drain_timeout": drain_timeout,
        "access_log": access_log, "cors_origins": cors_origins, "tls_cert": tls_cert,
        "tls_key": tls_key, "moe_top_k": moe_top_k,
        "otlp_traces_endpoint": otlp_traces_endpoint,
    }  # fmt: skip
    _serve(read_settings(config, flags | engine))


def _serve(settings: dict[str, Any]) -> None:
    from cflow.server.commands.serve import listen, serve
    from cflow.server.config import server_config

    config = server_config(settings)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("cflow.access").disabled = not config.access_log
    reference = config.engine.model
    listen(config.host, config.port).close()  # a port in use is told before a long download
    if "model" in settings:
        path = resolve(reference)
    else:
        reference, path = resolve_default()
    name = config.engine.served_name or (
        Path(reference).stem if Path(reference).exists() else reference
    )
    serve(replace(config, engine=replace(config.engine, model=str(path), served_name=name)))


for command in (
    files.convert, talk.run, talk.chat, measure.bench, measure.perplexity,
    files.plan, files.inspect, files.synth, measure.doctor,
):  # fmt: skip
    app.command()(command)
app.add_typer(lab.app, name="lab")


def main() -> None:
    """Runs the command; an expected error is one line and exit code 1."""
    try:
        app()
    except CflowError as error:
        console.print(f"cflow: error: {error}", markup=False)
        sys.exit(1)
