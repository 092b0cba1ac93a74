"""Claims that rest on committed figures: the cost of delays in training, and models of some 17 GB."""

from __future__ import annotations

from dataclasses import asdict
from datetime import date
from pathlib import Path

from cflow.engine.base.config import EngineConfig
from cflow.engine.base.reports import Report
from cflow.engine.files.synth import load_shape, synth
from cflow.engine.lab import results
from cflow.engine.lab.page import HERE, NOT_YET, Claim, table
from cflow.engine.lab.results import (
    BigModels,
    BigRun,
    Rate,
    Result,
    Trained,
    difference,
    mean_perplexity,
)
from cflow.engine.measure import bench

BASELINE, DELAYED = "sequential", "arch2_4_combined"
KNOBS = (  # the one thing that differs between two arms
    ("experts read x_in", "sequential_x_in", BASELINE),
    ("dense reads x_in[l-1], with delayed experts", DELAYED, "arch4_async_experts"),
    ("experts two layers late, with delayed dense", DELAYED, "arch2_4_sync"),
    ("experts two layers late, sequential dense", "arch4_async_experts", "sequential_x_in"),
)
BIG_SHAPES = ("arch2_4_8k_16l", "qwen3-30b-a3b")
BIG_PROMPT, BIG_GEN = 16, 32


def quality(training: Trained | None) -> str:
    """Perplexity of arch2_4_combined against the baseline and against the best arm."""
    if training is None:
        return NOT_YET
    best = min(training.names, key=lambda name: mean_perplexity(training.of(name).values()))
    others = dict.fromkeys((BASELINE, best))
    found = {other: difference(training, DELAYED, other) for other in others if other != DELAYED}
    said = [f"{d.text()} against {other}" for other, d in found.items() if d is not None]
    return "; ".join(said) or NOT_YET


def training_text(training: Trained | None) -> str:
    """The cost of delays: each arm against the sequential baseline, then one change at a time."""
    if training is None:
        return f"The cost of the delays in perplexity is {NOT_YET} (`cflow lab train`)."
    rows = []
    for name in training.names:
        runs = list(training.of(name).values())
        found = difference(training, name, BASELINE)
        arm = runs[0].arm
        low, high = (f(run.valid_perplexity for run in runs) for f in (min, max))
        rows.append(
            (
                name,
                arm.dense_source,
                arm.expert_anchor,
                str(arm.expert_delay),
                f"{runs[0].n_params / 1e6:.2f}",
                f"{mean_perplexity(runs):.2f} ({low:.2f} to {high:.2f})",
                found.text() if found and name != BASELINE else "",
            )
        )
    head = (
        "arm",
        "dense source",
        "anchor",
        "delay",
        "M weights",
        "perplexity",
        "against the baseline",
    )
    seeds = sorted({run.seed for run in training.runs})
    shape = training.shape
    return f"""\
Cost of the delays: {len(training.runs)} models (d = {shape.d_model}, {shape.n_layers} layers, \
{shape.n_experts} experts, top {shape.top_k}) were trained on {training.runs[0].n_tokens:,} tokens \
with seeds {", ".join(map(str, seeds))}. All arms of a seed see the same batches, and start with the \
same weights where they have the same number of blocks (all but arch5). Perplexity is over \
{training.n_valid_tokens:,} tokens of validation text. Differences are between runs of equal seeds: \
mean ± standard deviation, "not separable" if the mean is no larger. A deviation over {len(seeds)} \
seeds is itself a rough estimate. Trained on {training.machine} by `cflow lab train`; figures in \
`docs/results/training.json`.

{table(head, rows)}

{effects(training)}

{grid(training)}"""


def effects(training: Trained) -> str:
    """Differences between arms that differ in one setting alone."""
    found = [(knob, a, b, difference(training, a, b)) for knob, a, b in KNOBS]
    said = (f"- {knob}: {d.text()} ({a} against {b})" for knob, a, b, d in found if d is not None)
    return "One change at a time, in perplexity:\n\n" + "\n".join(said)


def grid(training: Trained) -> str:
    """Perplexity by dense source against anchor and delay, over arms that differ in nothing else."""
    cells: dict[tuple[str, str, int], list[Result]] = {}
    for run in training.runs:
        arm = run.arm
        if (arm.passes, arm.streams, arm.residual_scale) == (1, "one", 1.0):
            key = (arm.dense_source, arm.expert_anchor, arm.expert_delay)
            cells.setdefault(key, []).append(run)
    sources = sorted({source for source, *_ in cells})
    columns = sorted({(anchor, delay) for _, anchor, delay in cells})
    rows = [
        (
            source,
            *(
                f"{mean_perplexity(cells[source, *column]):.2f}"
                if (source, *column) in cells
                else ""
                for column in columns
            ),
        )
        for source in sources
    ]
    heads = (f"{anchor}, delay {delay}" for anchor, delay in columns)
    return "Dense source against expert anchor and delay:\n\n" + table(
        ("dense source", *heads), rows
    )


# ---- models of some 17 GB ----


def measure_big_models(path: Path, folder: Path, here: str, threads: int, report: Report) -> None:
    """Measures cflow's big models and writes big_models.json at path.

    here: the name of this machine; peers' runs are kept if they were measured on it. Needs 18 GB of
    RAM, and 18 GB of disk in folder."""
    old = results.read(path, BigModels)
    peers = (
        [run for run in old.runs if run.engine != "cflow"] if old and old.machine == here else []
    )
    ours = [_big_run(shape, folder / f"{shape}.cflow", threads, report) for shape in BIG_SHAPES]
    results.write(path, BigModels(here, date.today().isoformat(), (*ours, *peers)))


def _big_run(shape: str, path: Path, threads: int, report: Report) -> BigRun:
    try:
        synth(shape, path, progress=lambda done, total: report(f"synth {shape}", done, total))
        config = EngineConfig(model=str(path), threads=threads)
        found = bench.run(config, prompt=BIG_PROMPT, gen=BIG_GEN, batch=(), progress=report)
        file_bytes = path.stat().st_size
    finally:
        path.unlink(missing_ok=True)
    return BigRun(
        model=shape,
        engine="cflow",
        params_b=load_shape(shape).n_parameters() / 1e9,
        file_bytes=file_bytes,
        bytes_per_token=found.bytes_per_token,
        decode_tok_s=Rate(**asdict(found.decode)),
        probe_gb_s=found.probe_gb_s,
        command=f"cflow synth {shape} x.cflow; cflow bench x.cflow --prompt {BIG_PROMPT} "
        f"--gen {BIG_GEN} --batch 1",
    )


def end_to_end_claim(big: BigModels | None) -> Claim:
    name = "End to end"
    published = (
        "30.9B on 32 vCPU: 5.94 tok/s; llama.cpp 4.75 and vLLM CPU 1.65 with a dense 32B model"
    )
    ours = max(big.of("cflow"), key=lambda run: run.params_b, default=None) if big else None
    peer = _dense_peer(big) if big else None
    if big is None or ours is None:
        text = "The models take more than 17 GB; their figures are committed once measured."
        return Claim(name, published, NOT_YET, "none yet", HERE, NOT_YET, text)
    command, said = f"`{ours.command}`", f"{ours.model}: {ours.decode_tok_s.median:.2f} tok/s"
    verdict = "cannot be judged here: no peer was measured"
    if peer is not None:
        said += f"; llama.cpp {peer.decode_tok_s.median:.2f} with {peer.model}"
        won = ours.decode_tok_s.median > peer.decode_tok_s.median
        verdict = "holds" if won else "does not hold"
    rows = [
        (
            run.model,
            run.engine,
            f"{run.file_bytes / 1e9:.1f}",
            f"{run.bytes_per_token / 1e9:.2f}",
            f"{run.decode_tok_s.median:.2f} ({run.decode_tok_s.min:.2f} to {run.decode_tok_s.max:.2f})",
            f"{run.read_gb_s:.1f}",
            f"{run.read_gb_s / run.probe_gb_s:.2f}" if run.probe_gb_s else "",
            f"`{run.command}`",
        )
        for run in big.runs
    ]
    head = ("model", "engine", "GB", "GB a token", "tok/s", "GB/s", "of the probe", "command")
    return Claim(
        name,
        published,
        said,
        command,
        big.machine,
        verdict,
        f"""\
One stream, {big.machine}, {big.date}. The published comparison sets a mixture that reads some 11.7 GB a token beside a dense model that \
reads some 18 GB. Per byte read, the paper's engine is the slower one (68-70 GB/s against 85-95), so \
compare GB/s.

{table(head, rows)}""",
    )


def _dense_peer(big: BigModels) -> BigRun | None:
    """The peer's dense model that reads the most bytes a token."""
    dense = [run for run in big.of("llama.cpp") if run.bytes_per_token > run.file_bytes / 2]
    return max(dense, key=lambda run: run.bytes_per_token, default=None)
