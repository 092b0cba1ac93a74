"""cflow bench, perplexity, doctor: measure a model and this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cflow.engine.base.errors import CflowError
from cflow.server.commands.models import MODEL, engine_for
from cflow.server.commands.options import engine_flags
from cflow.server.commands.output import Json, print_json, size, table
from cflow.server.commands.progress import count_progress

if TYPE_CHECKING:
    from cflow.engine.measure.bench import BenchResult, Tier


BARE_FLAGS = (
    "threads", "kv", "precision", "expert_cache", "weights_memory", "expert_io", "expert_reads",
    "expert_read_rate", "defer_experts", "isa",
)  # fmt: skip


def _read_batches(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise CflowError(f"flag --batch: {text!r} is not whole numbers with commas, as in 1,4,16")
    return tuple(int(part) for part in parts)


@engine_flags(*BARE_FLAGS)
def bench(
    model: MODEL,
    engine: dict[str, Any],
    prompt: Annotated[
        int | None,
        typer.Option(min=1, help="Length of the prompt in tokens. Default: 512, or what fits."),
    ] = None,
    gen: Annotated[int, typer.Option(min=1, help="Tokens that each stream generates.")] = 128,
    batch: Annotated[
        str, typer.Option(help="Numbers of streams to measure, with commas.")
    ] = "1,4,16",
    depth: Annotated[int, typer.Option(min=0, help="Tokens in the context before the prompt.")] = 0,
    json: Json = False,
) -> None:
    """Measure how fast a model runs here.

    Prefill, decode and decode of several streams, in tokens a second, beside the memory bandwidth of
    this machine.

    \b
    cflow bench smollm2-135m --prompt 1024 --batch 1,8,32
    """
    batches, config = _read_batches(batch), engine_for(model, engine)
    from cflow.engine.measure import bench as bencher

    with count_progress() as report:
        found = bencher.run(
            config, prompt=prompt, gen=gen, batch=batches, depth=depth, progress=report
        )
    print_json(found.to_json()) if json else _print_bench(model, found)


def _print_bench(model: str, found: BenchResult) -> None:
    share = f"{100 * found.fraction.median:.0f} % of {found.probe_gb_s:.1f} GB/s"
    rows = [
        ("prefill", f"{found.prefill.median:.1f} tokens/s ({found.prompt} tokens)"),
        ("decode", f"{found.decode.median:.1f} tokens/s ({found.gen} tokens)"),
        *((f"{b.streams} streams", f"{b.rates.median:.1f} tokens/s in all") for b in found.batch),
        ("bytes per token", size(found.bytes_per_token)),
        ("read", f"{found.read_gb_s:.1f} GB/s, {share}"),
        ("ran on", f"{found.isa}, {found.threads} threads"),
        (
            "weights",
            f"{size(found.resident_bytes)}, {100 * found.huge_page_ratio:.0f} % in huge pages",
        ),
    ]
    if found.depth:
        kv = f"{size(found.kv_bytes_per_token)} a token, {found.depth} positions deep"
        rows.append(("keys and values", kv))
    if found.experts:
        rows += _expert_rows(found.experts)
    if found.layers:
        rows += _layer_rows(found.layers)
    table(f"{model} ({found.quant})", rows)


def _expert_rows(tier: Tier) -> list[tuple[str, str]]:
    decode = tier.decode
    return [
        ("experts", f"{tier.in_memory} of {tier.records} in memory, {tier.io} reads"),
        ("hits", f"{decode.hits} of {decode.hits + decode.misses} in decode"),
        ("experts: disk", _disk(tier)),
        ("experts: stalls", _stalls(tier)),
    ]


def _layer_rows(tier: Tier) -> list[tuple[str, str]]:
    return [
        ("layers", f"{tier.in_memory} of {tier.records} stay in memory, {tier.io} reads"),
        ("layers: disk", _disk(tier)),
        ("layers: stalls", _stalls(tier)),
    ]


def _disk(tier: Tier) -> str:
    decode, floor = tier.decode, tier.floor_tok_s
    return (
        f"{size(decode.disk_bytes / decode.tokens)} a token, "
        f"{tier.disk_probe_gb_s:.2f} GB/s by direct reads"
        + (f": at most {floor:.2f} tokens/s" if floor else "")
    )


def _stalls(tier: Tier) -> str:
    return f"{1000 * tier.decode.stall_s / tier.decode.tokens:.1f} ms a token"


@engine_flags(*BARE_FLAGS)
def perplexity(
    model: MODEL,
    file: Annotated[Path, typer.Argument(help="A text file in UTF-8.")],
    engine: dict[str, Any],
    windows: Annotated[
        int | None, typer.Option(min=1, help="Score only this many windows. Default: all.")
    ] = None,
    json: Json = False,
) -> None:
    """Score a text with a model.

    The perplexity of windows of 512 tokens without overlap; the first token of each is not scored.

    \b
    cflow perplexity smollm2-135m book.txt --windows 100
    """
    config = engine_for(model, engine)
    from cflow.engine.measure import perplexity as scorer

    with count_progress() as report:
        found = scorer.run(config, file, windows=windows, progress=report)
    if json:
        print_json(found.to_json())
        return
    low, high = (found.perplexity * (1 + sign * found.stderr_nll) for sign in (-1, 1))
    deferred = f", {found.defer_experts} experts deferred" if found.defer_experts else ""
    rows = [
        ("perplexity", f"{found.perplexity:.4f} ({low:.3f} to {high:.3f})"),
        ("scored", f"{found.n_scored} tokens in {found.n_windows} windows"),
        ("settings", f"{found.precision}, KV in {found.kv}{deferred}"),
        ("speed", f"{found.tokens_per_s:.0f} tokens/s ({found.isa}, {found.threads} threads)"),
    ]
    table(f"{model} ({found.quant})", rows)


def doctor(json: Json = False) -> None:
    """Show what this machine offers and what slows it down.

    Processor, kernels, threads, memory, huge pages and disk, each with advice where it limits cflow.
    """
    from cflow.engine.measure import doctor as examiner

    findings = examiner.run()
    if json:
        print_json({f.name: {"value": f.value, "advice": f.advice} for f in findings})
        return
    rows = []
    for finding in findings:
        mark = "!" if finding.advice else " "
        rows.append((f"{mark} {finding.name}", finding.value))
        if finding.advice:
            rows.append(("", finding.advice))
    table("This machine", rows)
