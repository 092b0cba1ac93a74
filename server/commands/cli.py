"""The cflow command and its list of commands.

Every start imports this module and the flags of all commands, so the modules it imports stay light:
what a command runs is imported when it runs.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cflow.engine.base.errors import CflowError
from cflow.server.commands import batch, files, lab, measure, talk
from cflow.server.commands.models import KINDS, resolve, resolve_default
from cflow.server.commands.options import engine_flags, read_settings
from cflow.server.commands.progress import say
from cflow.server.config import server_config

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from cflow.server.version import version

        print(f"cflow {version()}")
        raise typer.Exit


@app.callback()
def cflow(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
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
            help=f"The model: {KINDS}. Default: smollm2-135m, or tinystories if that cannot be fetched."
        ),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Address or name to listen on, may be repeated; 0.0.0.0 for all of IPv4, :: for all. "
            "Default: 127.0.0.1."
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on, 0 for any free one. Default: 8000.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file of settings, as configs/server.toml. Default: none."),
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            help="File of API keys, one KEY or NAME: KEY a line. Default: no key is needed."
        ),
    ] = None,
    served_name: Annotated[
        str | None,
        typer.Option(
            help="Name of the model in the API. Default: MODEL; for a path its file name, without suffix."
        ),
    ] = None,
    max_queue: Annotated[
        int | None,
        typer.Option(help="Most answers that may wait; further requests get a 429. Default: 1024."),
    ] = None,
    max_step_ms: Annotated[
        int | None,
        typer.Option(
            help="Longest delay of a running stream by other requests' prompts, in milliseconds. "
            "Default: 250."
        ),
    ] = None,
    max_sequences: Annotated[
        int | None, typer.Option(help="Most answers generated at the same time. Default: 64.")
    ] = None,
    max_body: Annotated[
        str | None, typer.Option(help="Largest request body in bytes. Default: 8MiB.")
    ] = None,
    drain_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds for running requests to finish after SIGTERM. Default: 30."),
    ] = None,
    cors_origins: Annotated[
        str | None,
        typer.Option(
            help="Origins whose pages may call from a browser, with commas, as in "
            "https://ui.example; * for all. Default: none."
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(help="Certificate in PEM form, to serve HTTPS. Default: HTTP."),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(help="Key of the certificate in PEM form. Default: in the same file."),
    ] = None,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            help="OpenTelemetry collector for traces, as in http://collector:4318/v1/traces; needs the "
            "extra otel. Default: no traces."
        ),
    ] = None,
    access_log: Annotated[
        bool | None,
        typer.Option("--access-log", help="Log a line for each request. Default: off."),
    ] = None,
    json_calls: Annotated[
        bool | None,
        typer.Option(
            help="Whether an answer that is nothing but a tool call in JSON, without the marks that the "
            "chat template asks for, is a call. Default: yes."
        ),
    ] = None,
    special_in_messages: Annotated[
        bool | None,
        typer.Option(
            help="Whether text of messages may spell special tokens such as <|im_end|>. Default: no."
        ),
    ] = None,
    special_in_prompts: Annotated[
        bool | None,
        typer.Option(help="Whether text of raw prompts may. Default: yes."),
    ] = None,
    moe_top_k: Annotated[
        int | None,
        typer.Option(
            help="Experts a token uses, for requests that do not set it. Default: the model's number."
        ),
    ] = None,
) -> None:
    """Serve a model behind the OpenAI HTTP API.

    Every setting is a flag (--max-queue), an environment variable (CFLOW_MAX_QUEUE) and a key of the
    config file (max_queue). Flags override the environment, which overrides the file.

    \b
    cflow serve
    cflow serve qwen2.5-coder-0.5b --host 0.0.0.0 --api-keys keys.txt
    cflow serve model.gguf --threads 8 --kv-memory 4GiB
    """
    flags = {
        "model": model, "host": host or None, "port": port, "api_keys": api_keys,
        "served_name": served_name, "max_queue": max_queue, "max_step_ms": max_step_ms,
        "max_sequences": max_sequences, "max_body": max_body, "drain_timeout": drain_timeout,
        "access_log": access_log, "cors_origins": cors_origins, "tls_cert": tls_cert,
        "tls_key": tls_key, "moe_top_k": moe_top_k,
        "otlp_traces_endpoint": otlp_traces_endpoint,
        "json_calls": json_calls,
        "special_in_messages": special_in_messages, "special_in_prompts": special_in_prompts,
    }  # fmt: skip
    _serve(read_settings(config, flags | engine))


def _serve(settings: dict[str, Any]) -> None:
    """Check all that can be wrong before a long download, then serve."""
    import logging

    from cflow.server.http.auth import ApiKeys
    from cflow.server.http.listen import listen
    from cflow.server.http.tls import read_certificate

    config = server_config(settings)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("cflow.access").disabled = not config.access_log
    for sock in listen(config.host, config.port):
        sock.close()
    if config.api_keys:
        ApiKeys(config.api_keys)
    read_certificate(config.tls_cert, config.tls_key)
    reference = config.engine.model
    if "model" in settings:
        path = resolve(reference)
    else:
        reference, path = resolve_default()
    name = config.engine.served_name or (
        Path(reference).stem if Path(reference).exists() else reference
    )
    from cflow.server.commands.serve import serve

    serve(replace(config, engine=replace(config.engine, model=str(path), served_name=name)))


for command in (
    files.convert, talk.run, talk.chat, batch.batch, measure.bench, measure.perplexity,
    files.plan, files.inspect, files.synth, measure.doctor,
):  # fmt: skip
    app.command()(command)
app.add_typer(lab.app, name="lab")


def main() -> None:
    """Run the command. An expected error is one line on stderr and exit code 1."""
    try:
        app()
    except CflowError as error:
        say(f"error: {error}")
        sys.exit(1)
