"""`make claims`: writes docs/claims.md, the claims of the published design beside our measurements.

Long runs come from the committed figures in docs/results; everything else is measured on the spot. A
row that this machine cannot measure says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from cflow.engine import native
from cflow.engine.base import machine
from cflow.engine.base.reports import Report, silent
from cflow.engine.lab import results
from cflow.engine.lab.committed import (
    end_to_end_claim,
    measure_big_models,
    quality,
    training_text,
)
from cflow.engine.lab.measurements import (
    L1_CACHES,
    LAYOUTS,
    MIB,
    N_EXPERTS,
    PLANNED_ARMS,
    Bench,
    Experts,
    Groups,
    Misses,
    Planned,
    Samples,
    Sizes,
    planned,
)
from cflow.engine.lab.overlap.figures import ARMS as OVERLAP_ARMS
from cflow.engine.lab.overlap.figures import RESULTS as OVERLAP_RESULTS
from cflow.engine.lab.overlap.figures import Overlap
from cflow.engine.lab.page import HERE, NOT_YET, Claim, page, table
from cflow.engine.lab.results import BigModels, Trained
from cflow.engine.lab.storage import HINTS, OWN_HINT, Run, Storage
from cflow.engine.lab.storage import RESULTS as STORAGE_RESULTS

ITSELF = "`cflow lab claims`"
BY_HALVES = 0.5 * 32 / 18  # a q4_0 weight takes 18 / 32 bytes; the paper counts 0.5
MEMORY_BOUND = 0.8  # of the probe: a kernel that reaches this is limited by memory
FOLLOWS = 0.8  # the part of the bytes saved that must be saved in time
NET, LAW, RECURSION = 1.75, 0.01, 0.03  # least speed-up, largest errors of law and recursion
STOCK = ("smollm2-135m", "olmoe-1b-7b", "qwen3-30b-a3b")
UNDELAYED, DELAYED = "parallel", "arch2_4_combined"


def write_claims(
    root: Path,
    *,
    big_folder: Path | None = None,
    sizes: Sizes | None = None,
    threads: int | None = None,
    report: Report = silent,
) -> Path:
    """Measures, and writes docs/claims.md of the checkout at root; returns its path.

    Needs the programs that `make claims` builds in build/bench. big_folder: a folder for the models
    of some 17 GB, to measure them again; None keeps their committed figures. LabError: root is not a
    checkout, a program is missing or fails, or a file in docs/results is invalid.
    """
    root = root.resolve()
    results.check_checkout(root)
    sizes, threads = sizes or Sizes.of_machine(), threads or machine.cores().threads
    here = machine_text(threads)
    big_models = root / "docs/results/big_models.json"
    if big_folder is not None:
        measure_big_models(big_models, big_folder, here, threads, report)
    big = results.read(big_models, BigModels)
    training = results.read(root / "docs/results/training.json", Trained)
    overlap = results.read(root / OVERLAP_RESULTS, Overlap)
    storage = results.read(root / STORAGE_RESULTS, Storage)
    claims = [
        *measured_claims(Bench(root, sizes, threads, report), training, overlap, storage),
        disk_layout_claim(storage),
        end_to_end_claim(big),
        overlap_claim(overlap),
    ]
    path = root / "docs" / "claims.md"
    path.write_text(page(claims, here))
    return path


def machine_text(threads: int) -> str:
    cpu, cores = machine.cpu(), machine.cores()
    return (
        f"{cpu.model}, {cores.physical} cores, {cpu.l3_bytes // MIB} MiB of L3, "
        f"{machine.memory().total / 2**30:.0f} GiB of RAM, {native.best_isa()}, {threads} threads"
    )


def measured_claims(
    bench: Bench, training: Trained | None, overlap: Overlap | None, storage: Storage | None
) -> list[Claim]:
    """Claims 1 to 7. Probes memory before and after the kernels run."""
    small = {arm: bench.published_shape(arm, 512) for arm in PLANNED_ARMS}
    plans = {name: planned(name) for name in STOCK}
    shapes = {arm: planned(str(path)) for arm, path in small.items()}
    probes = [bench.probe_gb_s()]
    kernels = bench.groups("kernels")
    probes.append(bench.probe_gb_s())
    prefetch = {n: bench.groups("prefetch", n) for n in sorted({1, bench.threads})}
    wide, narrow = bench.sizes.columns
    example = bench.misses_command("tiled", "f32", "32 KiB", wide)
    return [
        experts_claim(bench.experts(), plans),
        misses_claim(bench.misses(), wide, narrow, bench.shown(example)),
        kernels_claim(kernels, max(probes), bench.shown(bench.command("kernels"))),
        fusion_claim(bench.groups("fusion"), bench.shown(bench.command("fusion"))),
        order_claim(
            bench.groups("order"), plans, shapes[DELAYED], bench.shown(bench.command("order"))
        ),
        prefetch_claim(prefetch, storage, bench.shown(bench.command("prefetch"))),
        schedule_claim(
            shapes,
            bench.shared_bus(),
            bench.sizes.d_bus,
            training,
            overlap,
            bench.shown(["cflow", "plan", str(small[DELAYED])]),
        ),
    ]


# ---- 1 to 6: the engine ----


def gigabytes(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.3g} GB"


def experts_claim(found: Experts, plans: Mapping[str, Planned]) -> Claim:
    every = N_EXPERTS
    fewer = {k: found.n_bytes[every] / found.n_bytes[k] for k in found.n_bytes}
    faster = {k: found.ms[every].over(found.ms[k]) for k in found.ms}
    rows = [
        (
            f"{k} of {every}",
            f"{found.n_bytes[k] / 1e6:.0f}",
            found.ms[k].text(2),
            f"{fewer[k]:.1f}x",
            f"{faster[k]:.1f}x",
        )
        for k in found.ms
    ]
    shares = "; ".join(
        f"`cflow plan {name}`: {gigabytes(p.plan.bytes_per_token)} of {gigabytes(p.file_bytes)}"
        for name, p in plans.items()
        if p.plan.bytes_per_token < p.file_bytes / 2
    )
    head = ("experts read", "MB a token", "ms a token", "fewer bytes", "faster")
    holds = faster[8] > FOLLOWS * fewer[8]
    return Claim(
        name="1. Conditional expert loading",
        published="proven; no figure known",
        ours=f"8 of {every} experts: {fewer[8]:.1f}x fewer bytes, {faster[8]:.1f}x faster",
        command=ITSELF,
        machine=HERE,
        verdict="holds" if holds else "does not hold: time does not follow the bytes",
        text=f"""\
Only the top k experts of a layer are read, and time is proportional to bytes. A model of 8 layers \
with {every} experts each and random weights decodes one stream with k experts a layer. Bytes are \
counted by the engine as it reads.

{table(head, rows)}

Weights that a token reads: {shares}. Chapter 2 of the paper says that other engines load all experts. \
They do not: llama.cpp's `mul_mat_id` also reads only the chosen ones.""",
    )


def misses_claim(found: Misses | None, wide: int, narrow: int, command: str) -> Claim:
    name, published = "2. Tile-streaming cache locality", "7.29x fewer L1-data read misses"
    command = f"`{command}`, minus the same with a last argument of 0"
    if found is None:
        why = "cannot be judged here: valgrind is not installed"
        text = "The misses are counted by cachegrind, which comes with valgrind."
        return Claim(name, published, NOT_YET, command, HERE, why, text)

    def gain(activations: str, cache: str, columns: int, layout: str = "tiled") -> float:
        plain = found["row_major", activations, cache, columns]
        return plain / found[layout, activations, cache, columns]

    cases = list(dict.fromkeys((columns, act, cache) for _, act, cache, columns in found))
    rows = [
        (
            f"{columns:,}",
            act,
            cache,
            *(f"{found[layout, act, cache, columns]:,.0f}" for layout in LAYOUTS),
            f"{gain(act, cache, columns):.2f}x",
        )
        for columns, act, cache in cases
    ]
    head = ("columns", "x", "L1d", "row by row", "in the order of tiles", "tiles", "fewer")
    first = next(iter(L1_CACHES))
    f32, int8 = gain("f32", first, wide), gain("int8", first, wide)
    small = gain("int8", first, narrow)
    return Claim(
        name,
        published,
        f"{f32:.1f}x with f32 activations, {int8:.1f}x with int8, {small:.1f}x with int8 at "
        f"{narrow:,} columns",
        command,
        "cachegrind, any machine",
        "holds with f32 activations, which the engine does not use; in part with its int8"
        if f32 > 5 > int8
        else "does not hold",
        f"""\
L1 read misses a row, for the 8,192 rows of dense-down at d = 8192 ({wide:,} columns, q4_0) and for a \
matrix of {narrow:,} columns, counted on one stripe of 128 rows; all other stripes behave the same. \
The row-major matrix is GGML's; "in the order of tiles" reads the same bytes 256 columns of 128 rows \
at a time. Tiles with int8 run the engine's AVX2 kernel, everything else is plain C. Cachegrind does \
not see prefetches.

{table(head, rows)}

The gain comes from reading x, not the weights. A row of q4_0 weights is 288 lines, and every layout \
misses all of them. In f32, x is 2,048 lines, more than either cache holds: row by row it is read \
again for every output, in tiles once for 128 outputs, so (288 + 2048) / (288 + 16) = 7.7; the \
published 7.29 on a 32 KiB cache is this case. In int8, x with its scales is 36 KiB, 576 lines: (288 + \
576) / (288 + 4.5) = 2.95. At {narrow:,} columns int8 fits the cache and gains nothing, nor does f32 \
in 48 KiB. Most of the gain needs no new file layout: reading row-major weights in the order of tiles \
gives {gain("f32", first, wide, "by_tile"):.1f}x (f32). Tiles also avoid fetching a line for only a \
part of it.""",
    )


def kernels_claim(groups: Groups, probe_gb_s: float, command: str) -> Claim:
    l2, ram = groups["l2"], groups["ram"]
    rows = [
        (isa, l2[isa].text(), ram[isa].text(), f"{ram[isa].median / probe_gb_s:.2f}") for isa in l2
    ]
    ours, verdict = "no AVX2", "cannot be judged here: this processor has no AVX2"
    if "avx2" in l2:
        ours = "; ".join(
            f"{isa} {l2[isa].median:.1f} GB/s out of L2, {ram[isa].median:.1f} out of RAM"
            for isa in l2
        )
        share = ram["avx2"].median / probe_gb_s
        verdict = (
            "holds: limited by memory bandwidth"
            if share >= MEMORY_BOUND
            else f"in part: {share:.2f} of what the memory gives"
        )
    head = ("kernel", "GB/s out of L2", "GB/s out of RAM", "of the probe")
    return Claim(
        name="3. AVX2 Q4 kernels",
        published="proven; no figure known",
        ours=ours,
        command=f"`{command}`",
        machine=HERE,
        verdict=verdict,
        text=f"""\
GB/s of weights in the product of a q4_0 matrix and one row of int8 activations, all threads together. \
Reading alone (`cflow doctor`'s probe, before and after) reaches {probe_gb_s:.1f} GB/s. The scalar \
kernel is the reference that the others must match bit for bit; it is written for clarity, not speed.

{table(head, rows)}""",
    )


def fusion_claim(groups: Groups, command: str) -> Claim:
    gains = {name: arms["fused"].over(arms["separate"]) for name, arms in groups.items()}
    rows = [
        (name, arms["fused"].text(), arms["separate"].text(), f"{gains[name]:.2f}x")
        for name, arms in groups.items()
    ]
    head = ("projections of", "fused", "separate", "faster")
    winners = [name for name, arms in groups.items() if arms["fused"].beats(arms["separate"])]
    verdict = "does not hold: no gain beyond noise"
    if winners:
        verdict = "holds" if len(winners) == len(gains) else f"holds for {winners[0]} only"
    return Claim(
        name="4. Fused projections",
        published="proven; no figure known",
        ours=", ".join(f"{gain:.2f}x for {name}" for name, gain in gains.items()),
        command=f"`{command}`",
        machine=HERE,
        verdict=verdict,
        text=f"""\
GB/s of weights for Q, K and V, and for gate with up, of all layers in turn. Fused: the input is \
quantised once, the threads share all outputs and pass one barrier, and gate and up are combined \
stripe by stripe. Separate: the input is quantised and a barrier passed for each matrix, and gate and \
up are written and read again. Fusing saves barriers, quantising and small vectors, but no byte of \
weights, so it pays where matrices are small.

{table(head, rows)}""",
    )


def order_claim(
    groups: Groups, plans: Mapping[str, Planned], delayed: Planned, command: str
) -> Claim:
    arms = groups["ram"]
    stripes = arms["stripes"].over(arms["stripes shuffled"])
    tiles = arms["tiles"].over(arms["tiles shuffled"])
    ordered = all(p.ordered == p.n_matrices for p in plans.values())
    counts = ", ".join(f"{p.ordered} of {p.n_matrices} in {name}" for name, p in plans.items())
    rows = [(name, samples.text()) for name, samples in arms.items()]
    return Claim(
        name="5. Compute-order file layout",
        published="proven by construction",
        ours=f"{'all' if ordered else 'not all'} matrices in order; against shuffled stripes "
        f"{stripes:.2f}x, against shuffled tiles {tiles:.2f}x",
        command=f"`{command}`",
        machine=HERE,
        verdict="holds"
        if ordered and arms["tiles"].beats(arms["tiles shuffled"])
        else "does not hold",
        text=f"""\
Matrices that lie in the file behind the one that the plan reads before them: {counts}. Experts are \
records of their own and not counted. Where delays make stages wide, stage order differs from layer \
order: {delayed.ordered} of {delayed.n_matrices} in a layer-major file of {DELAYED}. The table shows \
what order is worth in memory; a stripe is 128 rows x 2,048 columns (147 kB), a tile 128 x 256 (18 \
kB). Order pays because prefetch hints run 8 KiB ahead of the kernel, across stripes.

{table(("pieces read", "GB/s"), rows)}

Claim 8 is about order on disk.""",
    )


def prefetch_claim(found: Mapping[int, Groups], storage: Storage | None, command: str) -> Claim:
    name, published = (
        "6. PREFETCHT0",
        "refuted: about 4 % worse at 4.7 GB of direct I/O, else within 0.1 %",
    )
    cases = [(isa, n, arms) for n, groups in found.items() for isa, arms in groups.items()]
    if not cases:
        why = "cannot be judged here: no kernel of this processor has hints"
        return Claim(name, published, NOT_YET, f"`{command}`", HERE, why, f"{why}.")
    rows = [
        (
            isa,
            str(n),
            *(arms[hint].text() for hint in HINTS),
            *(f"{arms[hint].over(arms['none']):.2f}x" for hint in ("t0", "t1")),
        )
        for isa, n, arms in cases
    ]
    head = ("kernel", "threads", "none", "T0", "T1", "T0 over none", "T1 over none")
    isa, threads, arms = cases[-1]
    t0, t1 = rows[-1][-2:]
    from_disk = streamed_hints(storage)
    ours = f"T0 {t0}, T1 {t1} of no hints ({isa}, {threads} threads, RAM)"
    return Claim(
        name,
        published,
        ours + (f"; from disk {hint_gains(from_disk)}" if from_disk else ""),
        f"`{command}`; `cflow lab storage`",
        HERE if storage is None else f"{HERE}; from disk: {storage.machine}",
        f"in RAM {hint_verdict(arms)}; from storage {hint_verdict(from_disk)}",
        f"""\
GB/s of q4_0 weights from RAM: the engine's kernels with their own hints (T0, 8 KiB ahead), with the \
same hints to the second-level cache (T1), and with none. The second argument of the command is the \
number of threads. The paper's hints ran over whole regions ahead of a pass that waited for storage, \
and over whole expert regions at 30.9B, where removing them won 1.92x. Hints that run a fixed distance \
ahead inside the kernel are not the same. An earlier machine preferred T1 \
([prefetch-hints](decisions/prefetch-hints.md)).

{table(head, rows)}

{streamed_hints_text(storage)}""",
    )


def hint_verdict(arms: Mapping[str, Samples] | None) -> str:
    if arms is None:
        return NOT_YET
    if arms["t0"].beats(arms["none"]):
        return "the refutation does not hold"
    worse = arms["none"].beats(arms["t0"])
    return "refuted here too: " + ("T0 costs" if worse else "no gain beyond noise")


def streamed_hints(storage: Storage | None) -> dict[str, Samples] | None:
    """Tokens a second with layers from disk, by hint."""
    if storage is None:
        return None
    return {hint: storage.run("layer", "25 %", hint=hint).rate for hint in HINTS}


def hint_gains(arms: Mapping[str, Samples]) -> str:
    return ", ".join(f"{h.upper()} {arms[h].over(arms['none']):.2f}x" for h in ("t0", "t1"))


def streamed_hints_text(storage: Storage | None) -> str:
    arms = streamed_hints(storage)
    if storage is None or arms is None:
        return f"With layers from disk it is {NOT_YET} (`cflow lab storage`)."
    run, memory = storage.run("layer", "25 %"), storage.run("layer", "all")
    text = f"""\
From storage: the whole engine, with each of these kernels, decodes the model of claim 8 in layer \
order with 25 % of its layers in memory. A token takes {run.token_bytes / 1e6:.0f} MB of direct reads \
and {1e3 / run.rate.median:.0f} ms, against {1e3 / memory.rate.median:.0f} ms with all layers in \
memory. Tokens a second, relative to no hints: {hint_gains(arms)}."""
    return f"{text}\n\n{table(HINTS, [[arms[hint].text(2) for hint in HINTS]])}"


# ---- 7: the schedule ----


def schedule_claim(
    shapes: Mapping[str, Planned],
    bus: Mapping[str, Samples],
    d_bus: int,
    training: Trained | None,
    overlap: Overlap | None,
    command: str,
) -> Claim:
    def mib(n_bytes: float) -> float:
        return n_bytes * BY_HALVES / MIB

    graph = {arm: mib(p.plan.critical_path_bytes) for arm, p in shapes.items()}
    law = {arm: mib(p.plan.critical_path_closed_form_bytes) for arm, p in shapes.items()}
    rows = [
        (
            arm,
            f"{law[arm]:.2f}",
            f"{graph[arm]:.2f}",
            f"{mib(p.quantised_bytes):.2f}",
            str(p.plan.n_stages),
            bus[arm].text(2) if arm in bus else "",
        )
        for arm, p in shapes.items()
    ]
    head = ("arm", "law, MiB", "graph, MiB", "all, MiB", "stages", f"ms a token, d = {d_bus:,}")
    by_law, by_graph = law[UNDELAYED] / law[DELAYED], graph[UNDELAYED] / graph[DELAYED]
    on_bus = bus[UNDELAYED].over(bus[DELAYED])
    return Claim(
        name="7. Delay-aware pipeline schedule",
        published="critical path 2.00x shorter (9.00 to 4.50 MB a token), within 0.24 perplexity of "
        "the best; 1.68x in wall clock with experts on disk",
        ours=f"{by_law:.2f}x by the law, {by_graph:.2f}x in the graph, {on_bus:.2f}x on one memory "
        f"bus; perplexity: {quality(training)}",
        command=f"`{command}`; {ITSELF}",
        machine=HERE if training is None else f"{HERE}; training: {training.machine}",
        verdict=f"{'holds' if round(by_law, 2) == 2 else 'does not hold'} by the paper's law, "
        f"{by_graph:.2f}x in the graph, {on_bus:.2f}x in time on one memory bus, "
        f"{overlap_net(overlap)} with experts on disk",
        text=f"""\
Critical path of one token at d = 512 and 6 layers, at half a byte a weight (q4_0 takes 9/8 of that), \
by the paper's law and as the longest path of the engine's own graph; "all" is what a token reads with \
any delays. The graph is longer than the law because the first layers clamp to the embedding and the \
last experts flush; the law also leaves out a sequential dense FFN. Wall clock: models of equal size \
with random weights (shapes in `build/bench/shapes/`, usable with `cflow synth` and `cflow bench`) \
decode one stream from memory. Delays change nothing about the bytes that are read.

{table(head, rows)}

The published 1.68x is with experts on disk: see the last row of the table above. {training_text(training)}""",
    )


# ---- disk ----


def disk_layout_claim(found: Storage | None) -> Claim:
    name, published = "8. Stage-major disk layout", "inconclusive"
    command = "`cflow lab storage`"
    if found is None:
        text = "The figures are committed once they are measured on an idle machine."
        return Claim(name, published, NOT_YET, command, HERE, NOT_YET, text)
    cases = order_speeds(found)
    ours = ", ".join(f"{what} {stage.over(layer):.2f}x" for what, (stage, layer) in cases.items())
    ours = f"stage order over layer order: {ours}"
    return Claim(
        name, published, ours, command, found.machine, order_verdict(cases), disk_layout_text(found)
    )


Pair = tuple[Samples, Samples]  # speeds in stage order and in layer order


def order_speeds(found: Storage) -> dict[str, Pair]:
    def pair(memory: str, io: str, what: Callable[[Run], Samples]) -> Pair:
        return what(found.run("stage", memory, io)), what(found.run("layer", memory, io))

    return {
        "decoding with 25 % of the layers in memory": pair("25 %", "direct", lambda r: r.rate),
        "decoding with the least": pair("least", "direct", lambda r: r.rate),
        "a cold first token by direct reads": pair("25 %", "direct", lambda r: r.cold.inverse),
        "one through the page cache": pair("25 %", "cached", lambda r: r.cold.inverse),
        "a cold load of the whole file": pair("all", "direct", lambda r: r.load.inverse),
    }


def order_verdict(cases: Mapping[str, Pair]) -> str:
    faster = [what for what, (stage, layer) in cases.items() if stage.beats(layer)]
    slower = [what for what, (stage, layer) in cases.items() if layer.beats(stage)]
    if not faster and not slower:
        return "does not hold: no gain beyond noise"
    if len(faster) == len(cases):
        return "holds"
    parts = [f"holds for {', '.join(faster)} only"] if faster else ["does not hold"]
    if slower:
        parts.append(f"slower: {', '.join(slower)}")
    return "; ".join(parts)


def disk_layout_text(found: Storage) -> str:
    rows = [
        (
            run.memory,
            run.order,
            run.io,
            f"{run.memory_bytes / 1e6:.0f}" if run.memory_bytes else "",
            f"{run.token_reads:.1f}",
            f"{run.token_bytes / 1e6:.0f}",
            f"{run.token_storage_bytes / 1e6:.0f}",
            run.rate.text(2),
            f"{run.cold_storage_bytes / 1e6:,.0f}",
            run.load.text(2),
            run.cold.text(2),
        )
        for run in found.runs
        if run.hint == OWN_HINT
    ]
    head = ["layers in memory", "order", "reads", "MB of memory", "reads a token", "MB a token"]
    head += ["of that from storage", "tok/s", "MB from storage, cold", "load, s", "first token, s"]
    layer, stage = (found.slot_bytes[order] / 1e6 for order in ("layer", "stage"))
    return f"""\
{found.machine}, {found.date}. The model has random weights, {found.n_layers} layers and arch2_4's \
delays. Of its {found.file_bytes / 1e9:.1f} GB, {found.run("layer", "least").token_bytes / 1e6:.0f} MB \
are layers that can stay on disk; experts stay in memory. It is written in both orders (`cflow synth \
x.cflow`, `x.vflow`) and read by two readers. Each run is a process of its own that evicts the file \
from the page cache, opens it and decodes one stream; caches below the virtual disk cannot be emptied \
from here. The command fails unless the logits of all runs are equal byte by byte. "From storage" is \
counted by the kernel. A cold direct run reads more than the file, because the next token's first \
layers are read ahead. Through the page cache only the first token is cold; later ones hit the cache.

{table(head, rows)}

In both orders a token reads the same bytes in the same number of pieces from front to back, and a \
layer is one large read, so neither order has much to gain. In stage order a piece holds parts of two \
layers. Layers 0 and 1 both read the embedding, so their dense FFNs share a piece, which is the \
largest: {stage:.1f} MB, against {layer:.1f} in layer order. Every slot in memory has the size of the \
largest piece."""


def overlap_net(found: Overlap | None) -> str:
    """The best speed-up of the delay among cells with C and IO nearly equal."""
    if found is None or not found.balanced:
        return NOT_YET
    return f"{max(cell.net('delay') for cell in found.balanced):.2f}x"


def overlap_claim(found: Overlap | None) -> Claim:
    name = "Overlap of experts on disk"
    published = "up to 1.68x net; (C + IO) / max(C, IO_eff) right within 1 %"
    command = "`cflow lab overlap`"
    if found is None:
        text = "The figures are committed once they are measured on an idle machine."
        return Claim(name, published, NOT_YET, command, HERE, NOT_YET, text)
    law, recursion = found.worst_law, found.worst_recursion
    best = max(found.balanced, key=lambda cell: cell.net("delay"), default=None)
    if best is None:
        ours, verdict = "no cell with C and IO within 20 %", "cannot be judged by these figures"
    else:
        ours = f"{best.net('delay'):.2f}x, {best.net('layer'):.2f}x in the window of one layer"
        verdict = "the gain holds" if best.net("delay") >= NET else f"less than {NET}x"
    ours += f"; law off by up to {100 * abs(law):.1f} %, schedule by {100 * abs(recursion):.1f} %"
    verdict += f"; the law {'holds' if abs(law) <= LAW else 'does not hold within 1 %'}"
    verdict += (
        f"; the schedule {'is' if abs(recursion) <= RECURSION else 'is not'} right within 3 %"
    )
    return Claim(name, published, ours, command, found.machine, verdict, overlap_text(found))


def overlap_text(found: Overlap) -> str:
    rows = [
        (
            f"{cell.routing}, {cell.experts}",
            str(cell.threads),
            f"{cell.slots} of {cell.records}",
            f"{cell.read_rate / 1e9:.2f}",
            f"{cell.misses:.1f}",
            f"{cell.c:.1f}",
            f"{cell.io:.1f}",
            *(f"{cell.ms(arm):.1f}" for arm in OVERLAP_ARMS),
            f"{cell.net('layer'):.2f}x",
            f"{cell.net('delay'):.2f}x",
            f"{cell.law:.2f}x ({100 * cell.law_error:+.1f} %)",
            f"{cell.recursion('delay'):.2f}x ({100 * cell.recursion_error('delay'):+.1f} %)",
        )
        for cell in found.cells
    ]
    head = (
        "routing, experts",
        "threads",
        "in memory",
        "GB/s",
        "misses",
        "C",
        "IO",
        *OVERLAP_ARMS.values(),
    )
    head += ("net, layer", "net, delay", "law", "recursion")
    return f"""\
{found.machine}, {found.date}. One stream, milliseconds a token, medians over {len(found.cells[0].compute_ms)} tokens or more; the \
arms alternate token by token. The command fails unless every arm gives the same tokens and the same \
bits of all logits as with all experts in memory. One reader, direct reads, limited to the GB/s in the \
table. "uniform" and "Zipf-like": a model of {found.n_layers} layers with random weights, experts two \
layers late and records of {found.record_bytes / 1e6:.2f} MB is fed uniform tokens, or Zipf-like \
tokens of which every other repeats one of the last four. "real": the bundled model tells a story; its \
FFNs are widened by zeros, which changes no routing. C: all experts in memory. IO: the same records in \
the same order, nothing computed. Law: (C + IO) / max(C, IO_eff). Recursion: the stages of the \
engine's own plan in order, each as long as with all experts in memory, with reads begun and needed \
where the plan says, from one disk. Its only inputs are those times, the time of a read, and the share \
of its speed that compute keeps beside reads (`engine/lab/overlap/schedule.py`).

{table(head, rows)}

![time of each arm, and the two laws](results/overlap.png)

The law ignores both ends of a token: the first layers have nothing to read yet, and the experts of \
the last layers all land in the last one."""
