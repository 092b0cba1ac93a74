"""cflow convert, synth, plan, inspect: write model files and look into them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cflow.engine.base.errors import NoModelError
from cflow.server.commands.models import KINDS, MODEL, SOURCES, found, resolve
from cflow.server.commands.options import engine_flags, read_engine
from cflow.server.commands.output import Json, print_json, size, table
from cflow.server.commands.progress import byte_progress, say

if TYPE_CHECKING:
    from cflow.engine.files.inspect import Inspection
    from cflow.engine.measure.plan import Plan


OUT = Annotated[Path, typer.Argument(help="The .cflow or .vflow file to write.")]
ORDER = Annotated[
    str | None,
    typer.Option(
        help="Order of the weights in the file: layer (layer by layer, .cflow) or stage (as the "
        "stages of the plan read them, .vflow). Default: by the suffix of OUT.",
    ),
]


def convert(
    source: Annotated[str, typer.Argument(help=f"The model to convert: {SOURCES}.")],
    out: OUT,
    quant: Annotated[
        str,
        typer.Option(
            help="Encoding of the matrices: q4_0, q4_1, q8_0, f16, bf16, f32, or keep, which gives "
            "each tensor the encoding that holds it exactly."
        ),
    ] = "keep",
    order: ORDER = None,
    pre: Annotated[
        str | None,
        typer.Option(
            help="Pre-tokenizer of a GGUF file that names none or a wrong one: qwen2, llama-bpe, "
            "gpt-2, ... Default: the file's own."
        ),
    ] = None,
) -> None:
    """Convert a model to cflow's own format.

    OUT is written whole or not at all.

    \b
    cflow convert model.gguf model.cflow
    cflow convert hf:HuggingFaceTB/SmolLM2-135M-Instruct smol.cflow --quant q4_0
    """
    from cflow.engine.files.target import check_quant, order_of

    check_quant(quant)
    order_of(out, order)
    with found(source) as path:
        from cflow.engine.files import convert as converter

        with byte_progress() as report:
            converter.convert(
                str(path), out, quant=quant, order=order, pre=pre, say=say,
                progress=lambda done, total: report(f"writing {out.name}", done, total),
            )  # fmt: skip
    _say_written(out)


def synth(
    shape: Annotated[
        str,
        typer.Argument(help="Name of a shape in configs/shapes (qwen3-30b-a3b), or a .toml file."),
    ],
    out: OUT,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same weights.")] = 0,
    order: ORDER = None,
) -> None:
    """Write a model of a real shape with random weights.

    For sizing, load tests and fault tests.

    \b
    cflow synth qwen3-30b-a3b random.cflow
    """
    from cflow.engine.files.shapes import shape_path

    shape_path(shape)
    from cflow.engine.files import synth as maker

    with byte_progress() as report:
        maker.synth(
            shape, out, seed=seed, order=order,
            progress=lambda done, total: report(f"writing {out.name}", done, total),
        )  # fmt: skip
    _say_written(out)


def _say_written(out: Path) -> None:
    say(f"wrote {out} ({size(out.stat().st_size)})")


@engine_flags(
    "threads", "context", "kv_memory", "kv", "expert_cache", "weights_memory", "expert_reads",
    "expert_read_rate",
)  # fmt: skip
def plan(
    model: Annotated[
        str,
        typer.Argument(help=f"The model: {KINDS}; or a shape, as synth takes it."),
    ],
    engine: dict[str, Any],
    json: Json = False,
) -> None:
    """Predict what memory a model needs and how fast it runs here.

    Reads the model's header only and takes the same settings as serve. Measures the memory bandwidth,
    which takes some seconds.

    \b
    cflow plan smollm2-135m --kv q8
    cflow plan qwen3-30b-a3b --expert-cache 25%
    """
    from cflow.engine.files import hub
    from cflow.engine.files.shapes import is_shape, shape_path

    config = read_engine(engine)
    if is_shape(model) and not hub.has_made(model):
        shape_path(model)
        from cflow.engine.measure import plan as planner

        predicted = planner.run_shape(replace(config, model=model))
    else:
        path = _resolve_beside_shapes(model)
        from cflow.engine.measure import plan as planner

        predicted = planner.run(replace(config, model=str(path)))
    print_json(predicted.to_json()) if json else _print_plan(model, predicted)


def _resolve_beside_shapes(model: str) -> Path:
    """Resolve a model. The error for one that does not exist lists the shapes too."""
    from cflow.engine.files.shapes import shape_names

    try:
        return resolve(model)
    except NoModelError as error:
        raise NoModelError(f"{error}, and not a shape ({', '.join(shape_names())})") from None


def _print_plan(model: str, plan: Plan) -> None:
    fits = "does NOT fit" if plan.problem else "fits"
    closed_form = int(plan.critical_path_closed_form_bytes)
    table(
        model,
        [
            *([("pooling", f"{plan.pooling}, for embeddings")] if plan.pooling else []),
            (
                "weights in memory",
                f"{size(plan.resident_bytes)} of {size(plan.available_bytes)} "
                f"({plan.memory_limited_by}): the model {fits}",
            ),
            *_disk_rows(plan),
            ("KV", _kv_text(plan)),
            (
                "context",
                f"{plan.context}; the memory holds {plan.context_in_memory} positions in all",
            ),
            (
                "bytes per token",
                f"{size(plan.bytes_per_token)} of weights, whatever the delays; "
                f"{size(plan.layer_bytes)} of them in layers",
            ),
            (
                "critical path",
                f"{size(plan.critical_path_bytes)} of the layers' bytes are read one after the other",
            ),
            (
                "closed form",
                f"{size(closed_form)}: sum over layers of max(attention, "
                "dense / (dense delay + 1), experts / (expert delay + 1))",
            ),
            (
                "stages",
                f"{plan.n_stages}, each of ops that run together; {plan.n_barriers} barriers a token",
            ),
            ("threads", f"{plan.threads} ({plan.threads_reason})"),
            ("memory bandwidth", f"{plan.probe_gb_s:.1f} GB/s with {plan.threads} threads"),
            (
                "predicted decode",
                f"{plan.predicted_decode_tok_s:.1f} tokens/s, one stream: bandwidth / bytes, "
                "of memory or of the disk",
            ),
        ],
    )
    for note in (*plan.notes, *filter(None, [plan.problem])):
        say(note)


def _kv_text(plan: Plan) -> str:
    text = f"{size(plan.kv_bytes_per_token)} a token ({plan.kv})"
    if plan.kv_positions:
        kept = size(plan.kv_positions * plan.kv_bytes_per_token)
        text += f", {kept} for {plan.kv_positions} positions"
    return text


def _disk_rows(plan: Plan) -> list[tuple[str, str]]:
    rows = []
    if plan.layer_memory_bytes:
        text = (
            f"{size(plan.layer_memory_bytes)} of memory: {plan.layers_kept} stay, the rest share "
            f"{plan.layers_at_once} slots; {size(plan.layer_disk_bytes)} read in every step"
        )
        rows.append(("layers", text))
    if plan.n_experts:
        share = plan.expert_cache_bytes / plan.expert_bytes
        text = f"{100 * share:.3g}% of {plan.n_experts} in memory, {size(plan.expert_bytes)}"
        rows.append(("experts", text))
    if plan.disk_bytes_per_token:
        disk = f"at {plan.disk_gb_s:.2f} GB/s" if plan.disk_gb_s else "at an unknown speed"
        equally = " if all experts are used equally often" if plan.n_experts else ""
        rows.append(
            ("read from disk", f"{size(plan.disk_bytes_per_token)} a token{equally}, {disk}")
        )
    return rows


def inspect(model: MODEL, json: Json = False) -> None:
    """Show what a model file holds.

    Sizes, layers, tensors and their encodings; --json lists every tensor.

    \b
    cflow inspect smollm2-135m
    """
    path = resolve(model)
    from cflow.engine.files import inspect as inspector

    inspection = inspector.run(path)
    print_json(inspection.to_json()) if json else _print_inspection(inspection)


def _print_inspection(found: Inspection) -> None:
    from collections import Counter

    from cflow.engine.files.inspect import describe

    header, metadata = found.header, found.metadata
    encodings = Counter(str(describe(tensor)["encoding"]) for tensor in found.tensors)
    rows: list[tuple[str, Any]] = [
        (key, metadata[key])
        for key in (
            "name",
            "architecture",
            "licence",
            "source",
            "quantisation",
            "parameters",
            "pooling",
        )
        if metadata.get(key) is not None
    ]
    rows += [
        ("file", f"{size(header.file_bytes)}, format version {header.version}"),
        ("order", found.order),
        ("width", header.d_model),
        ("layers", f"{header.n_layers}, {header.n_blocks} of them with their own weights"),
        ("vocabulary", f"{header.vocab_size} rows, {header.n_tokens} tokens"),
        ("context", header.context),
        ("head", "the embedding" if header.tied else "separate"),
        ("tensors", ", ".join(f"{n} {name}" for name, n in sorted(encodings.items()))),
        ("chat template", "yes" if metadata.get("chat_template") else "no"),
    ]
    for first, last, layer in found.layers:
        kind = f"{layer.n_heads} heads of {layer.head_dim}, {layer.n_kv_heads} KV heads"
        if layer.d_ff:
            kind += f", dense {layer.d_ff}"
        if layer.n_experts:
            kind += f", {layer.top_k} of {layer.n_experts} experts of {layer.d_expert}"
        rows.append((f"layers {first}-{last}", kind))
    table(found.path, rows)
