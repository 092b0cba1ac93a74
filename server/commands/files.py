"""cflow convert, synth, plan, inspect: making model files and looking into them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cflow.engine.base.errors import NoModelError
from cflow.server.commands.models import MODEL, resolve
from cflow.server.commands.options import engine_flags, read_engine
from cflow.server.commands.output import Json, print_json, size, table
from cflow.server.commands.progress import byte_progress, console

if TYPE_CHECKING:
    from cflow.engine.files.inspect import Inspection
    from cflow.engine.measure.plan import Plan


OUT = Annotated[Path, typer.Argument(help="The .cflow or .vflow file to write.")]
ORDER = Annotated[
    str | None,
    typer.Option(
        help="How the weights lie in the file. layer: layer by layer (.cflow); stage: as the stages "
        "of the plan read them (.vflow).",
        show_default="that of OUT's suffix",
    ),
]


def convert(
    source: Annotated[str, typer.Argument(help="A .gguf file or a Hugging Face folder.")],
    out: OUT,
    quant: Annotated[
        str,
        typer.Option(
            help="keep: each tensor in the encoding that holds it exactly; or q4_0, q4_1, q8_0, "
            "f16, bf16, f32."
        ),
    ] = "keep",
    order: ORDER = None,
) -> None:
    """Convert a model into cflow's own format, whole or not at all."""
    from cflow.engine.files import convert as converter

    with byte_progress() as report:
        converter.convert(
            source, out, quant=quant, order=order,
            progress=lambda done, total: report(f"writing {out.name}", done, total),
        )  # fmt: skip
    console.print(f"cflow: wrote {out} ({size(out.stat().st_size)})")


def synth(
    shape: Annotated[str, typer.Argument(help="A shape of configs/shapes, or a .toml file.")],
    out: OUT,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same weights.")] = 0,
    order: ORDER = None,
) -> None:
    """Write a model of a real shape with random weights.

    For sizing, load and fault tests."""
    from cflow.engine.files import synth as maker

    with byte_progress() as report:
        maker.synth(
            shape, out, seed=seed, order=order,
            progress=lambda done, total: report(f"writing {out.name}", done, total),
        )  # fmt: skip
    console.print(f"cflow: wrote {out} ({size(out.stat().st_size)})")


@engine_flags(
    "threads", "context", "kv_memory", "kv", "expert_cache", "weights_memory", "expert_reads",
    "expert_read_rate",
)  # fmt: skip
def plan(
    model: Annotated[str, typer.Argument(help="A model, or a shape of configs/shapes.")],
    engine: dict[str, Any],
    json: Json = False,
) -> None:
    """Say what a model needs and how fast it will be here.

    Before loading it, and with the settings that serve would take from flags and environment."""
    from cflow.engine.files import hub
    from cflow.engine.measure import plan as planner

    config = read_engine(model, engine)
    if planner.is_shape(model) and not hub.has_made(model):
        found = planner.run_shape(config)
    else:
        found = planner.run(replace(config, model=str(_resolve_beside_shapes(model))))
    print_json(found.to_json()) if json else _print_plan(model, found)


def _resolve_beside_shapes(model: str) -> Path:
    """As resolve does; what there is no model of might have been a shape."""
    from cflow.engine.files.synth import shape_names

    try:
        return resolve(model)
    except NoModelError as error:
        raise NoModelError(f"{error}, nor a shape ({', '.join(shape_names())})") from None


def _print_plan(model: str, plan: Plan) -> None:
    fits = "does NOT fit" if plan.problem else "fits"
    closed_form = int(plan.critical_path_closed_form_bytes)
    table(
        model,
        [
            (
                "weights in memory",
                f"{size(plan.resident_bytes)} of {size(plan.available_bytes)} "
                f"({plan.memory_limited_by}): the model {fits}",
            ),
            *_disk_rows(plan),
            ("KV", _kv_text(plan)),
            ("context", f"{plan.context}; memory holds {plan.context_in_memory} positions in all"),
            (
                "bytes per token",
                f"{size(plan.bytes_per_token)} of weights are read, whatever the delays; "
                f"{size(plan.layer_bytes)} of them by layers",
            ),
            (
                "critical path",
                f"{size(plan.critical_path_bytes)} of the layers' bytes wait for one another",
            ),
            (
                "closed form",
                f"{size(closed_form)}: sum over layers of max(attention, "
                "dense / (dense delay + 1), experts / (expert delay + 1))",
            ),
            (
                "stages",
                f"{plan.n_stages}, ops of one run together; {plan.n_barriers} barriers a token",
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
        console.print(f"cflow: {note}", markup=False)


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
            f"{size(plan.layer_memory_bytes)} of memory: {plan.layers_kept} stay, the others pass "
            f"through room for {plan.layers_at_once}; {size(plan.layer_disk_bytes)} a step read"
        )
        rows.append(("layers", text))
    if plan.n_experts:
        share = plan.expert_cache_bytes / plan.expert_bytes
        text = f"{100 * share:.3g}% of {plan.n_experts} in memory, {size(plan.expert_bytes)}"
        rows.append(("experts", text))
    if plan.disk_bytes_per_token:
        disk = f"at {plan.disk_gb_s:.2f} GB/s" if plan.disk_gb_s else "at a speed not known here"
        equally = " if all experts are wanted equally often" if plan.n_experts else ""
        rows.append(
            ("read from disk", f"{size(plan.disk_bytes_per_token)} a token{equally}, {disk}")
        )
    return rows


def inspect(
    model: MODEL,
    json: Json = False,
) -> None:
    """Show what a model file holds."""
    from cflow.engine.files import inspect as inspector

    found = inspector.run(resolve(model))
    print_json(found.to_json()) if json else _print_inspection(found)


def _print_inspection(found: Inspection) -> None:
    from cflow.engine.files.inspect import describe

    header, metadata = found.header, found.metadata
    encodings = Counter(str(describe(tensor)["encoding"]) for tensor in found.tensors)
    rows: list[tuple[str, Any]] = [
        (key, metadata[key])
        for key in ("name", "architecture", "licence", "source", "quantisation", "parameters")
        if metadata.get(key) is not None
    ]
    rows += [
        ("file", f"{size(header.file_bytes)}, format version {header.version}"),
        ("order", found.order),
        ("width", header.d_model),
        ("layers", f"{header.n_layers}, {header.n_blocks} with weights of their own"),
        ("vocabulary", f"{header.vocab_size} rows, {header.n_tokens} tokens"),
        ("context", header.context),
        ("head", "the embedding" if header.tied else "its own"),
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
