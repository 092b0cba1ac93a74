"""The claims table: its programs against numpy and by hand, its verdicts on made-up figures."""

import json
import shutil
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cflow.engine import native
from cflow.engine.files.synth import synth
from cflow.engine.lab import claims, committed, results
from cflow.engine.lab import storage as storages
from cflow.engine.lab.errors import LabError
from cflow.engine.lab.measurements import (
    PLANNED_ARMS,
    Bench,
    Experts,
    Groups,
    Samples,
    Sizes,
    planned,
)
from cflow.engine.lab.overlap.figures import Overlap
from cflow.engine.lab.page import Claim, table
from cflow.engine.lab.storage import HINTS, SETTINGS, Storage
from cflow.engine.measure.bare import decode, open_stream
from cflow.engine.native import Model

ROOT = Path(__file__).parents[3]
SMALL = Sizes(mib=16, rounds=2, columns=(8192, 2048), rows=128, d_experts=64, d_bus=64, tokens=2)
needs_valgrind = pytest.mark.skipif(
    shutil.which("valgrind") is None, reason="valgrind is not installed"
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/bench, built."""
    cmake, ninja = (
        shutil.which(name, path=str(Path(sys.executable).parent)) for name in ("cmake", "ninja")
    )
    if not cmake or not ninja:
        pytest.skip("cmake and ninja, of the extra `dev`, are not installed")
    folder = tmp_path_factory.mktemp("bench")
    options = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", "-DCMAKE_BUILD_TYPE=Debug"]
    flags = ["-DCMAKE_C_FLAGS_DEBUG=-O1", "-DCFLOW_BENCH=ON", "-DCFLOW_WERROR=ON"]
    for command in (
        [cmake, "-S", str(ROOT / "native"), "-B", str(folder), *options, *flags],
        [cmake, "--build", str(folder)],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def checkout(programs: Path, tmp_path: Path) -> Path:
    """A root with built programs and nothing else."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "build").mkdir()
    shutil.copytree(programs, tmp_path / "build/bench", ignore=shutil.ignore_patterns("CMake*"))
    return tmp_path


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one takes a GiB."""
    monkeypatch.setattr(native, "probe_bandwidth", lambda *_: 40e9)


# ---- programs ----


def product_sum(columns: int, rows: int, activations: str) -> float:
    """Sum of output i times i + 1, from the formulas at the head of cache_misses.c, in f64."""
    row, col = np.arange(rows)[:, None], np.arange(columns)[None, :]
    codes = (row * 5 + col * 3 ^ col >> 4) & 15
    scale_bits = 0x2C00 + (row + np.arange(columns // 32)[None, :]) % 64
    scales = scale_bits.astype(np.uint16).view(np.float16).astype(np.float64)
    x = (np.arange(columns) * 37 % 255 - 127).astype(np.float64)
    if activations == "int8":
        blocks = x.reshape(-1, 32)
        unit = np.abs(blocks).max(axis=1, keepdims=True) / 127
        x = (np.round(blocks / unit) * unit).reshape(-1)
    y = (np.repeat(scales, 32, axis=1) * (codes - 8)) @ x
    return float(y @ np.arange(1, rows + 1))


@pytest.mark.parametrize("activations", ["f32", "int8"])
def test_every_layout_gives_the_same_product(programs: Path, activations: str) -> None:
    printed = set()
    for layout in ("tiled", "row_major", "by_tile"):
        command = [programs / "cache_misses", layout, activations, "2048", "256", "1"]
        printed.add(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert len(printed) == 1
    assert float(printed.pop()) == pytest.approx(product_sum(2048, 256, activations), rel=1e-4)


@needs_valgrind
def test_misses_are_the_lines_that_a_cache_cannot_keep(programs: Path, tmp_path: Path) -> None:
    """By hand, for a row of 8,192 columns: 72 lines of weights; x is 512 lines in f32, as large as the
    32 KiB cache, and 144 in int8 with its scales."""
    (tmp_path / "build").mkdir()
    (tmp_path / "build/bench").symlink_to(programs)
    found = Bench(tmp_path, replace(SMALL, columns=(8192,)), 1).misses()
    assert found is not None
    assert found["row_major", "f32", "32 KiB", 8192] == pytest.approx(72 + 512, rel=0.01)
    assert found["tiled", "f32", "32 KiB", 8192] == pytest.approx(72 + 512 / 128, rel=0.01)
    assert found["row_major", "f32", "48 KiB", 8192] == pytest.approx(72 + 512 / 128, rel=0.01)
    for layout in ("row_major", "tiled"):
        assert found[layout, "int8", "32 KiB", 8192] == pytest.approx(72 + 144 / 128, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["kernels", "0", "1", "1"], "MIB is 0: a number from 1"),
        (["order", "16", "1"], "order MIB THREADS ROUNDS"),
        (["fusion", "16", "x", "1"], "THREADS is x"),
        (["prefetch", "1", "1024", "1"], "less than a stripe for each of 1024 threads"),
        (["cache_misses", "tiles", "f32", "256", "128", "1"], "tiles is none of tiled"),
        (["cache_misses", "tiled", "f32", "100", "128", "1"], "COLUMNS come in 256s"),
        (["streamed_t0", "x", "0", "direct", "2", "1"], "FILE MEMORY IO TOKENS THREADS LOGITS"),
        (["streamed_t1", "x", "0", "direct", "1", "1", "y"], "TOKENS is 1: a number from 2"),
        (
            ["streamed_none", "none/x", "0", "direct", "2", "1", "/dev/null"],
            "none/x cannot be evicted",
        ),
    ],
)
def test_programs_refuse_what_they_cannot_do(
    programs: Path, arguments: list[str], text: str
) -> None:
    done = subprocess.run([programs / arguments[0], *arguments[1:]], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert text in done.stderr


def test_each_program_that_streams_has_its_hint_and_no_other(programs: Path) -> None:
    for hint, want in (("none", set()), ("t0", {"prefetcht0"}), ("t1", {"prefetcht1"})):
        command = ["objdump", "-d", "--no-show-raw-insn", str(programs / f"streamed_{hint}")]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert {word for word in code.split() if word.startswith("prefetch")} == want


def test_a_missing_program_names_what_builds_it(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"kernels cannot be run.*make claims"):
        Bench(tmp_path, SMALL, 1).groups("kernels")


def test_a_failing_program_is_quoted(programs: Path, tmp_path: Path) -> None:
    (tmp_path / "build").mkdir()
    (tmp_path / "build/bench").symlink_to(programs)
    with pytest.raises(
        LabError, match=r"failed with status 1: 1048576 bytes are less than a stripe"
    ):
        Bench(tmp_path, replace(SMALL, mib=1), 64).groups("order")


# ---- figures ----


def test_ratios_are_taken_inside_the_rounds() -> None:
    a, b = Samples((10, 40, 90)), Samples((10, 20, 30))
    assert a.over(b) == 2
    assert a.text(0) == "40 (10 to 90)"
    assert not a.beats(b)  # in two rounds of three
    assert Samples((10.3, 20.6, 30.9)).beats(b)
    assert not Samples((10.1, 20.2, 30.3)).beats(b)  # by 1 %


def test_published_critical_paths(tmp_path: Path) -> None:
    """MiB at half a byte a weight, by law and in the graph (docs/decisions/critical-path.md)."""
    bench = Bench(tmp_path, SMALL, 1)
    by_hand = {
        "parallel": (9.0, 9.0),
        "arch2_4_combined": (4.5, 5.25),
        "arch4_async_experts": (9.0, 12.0),
        "sequential": (9.0, 12.0),
    }
    for arm, (law, graph) in by_hand.items():
        found = planned(str(bench.published_shape(arm, 512)))
        mib = claims.BY_HALVES / 2**20
        assert found.plan.critical_path_closed_form_bytes * mib == law
        assert found.plan.critical_path_bytes * mib == graph
        assert found.quantised_bytes * mib == 6 * (0.5 + 1.5 + 0.75)
    assert by_hand.keys() == set(PLANNED_ARMS)


def test_stock_files_lie_in_reading_order_and_delayed_ones_do_not(tmp_path: Path) -> None:
    stock = planned("smollm2-135m")
    assert stock.ordered == stock.n_matrices == 30 * 7  # q k v o gate up down
    delayed = planned(str(Bench(tmp_path, SMALL, 1).published_shape("arch2_4_combined", 64)))
    assert delayed.ordered < delayed.n_matrices == 6 * 8 + 1  # with router; and the head


# ---- rows ----


def samples(*values: float) -> Samples:
    return Samples(values)


def test_experts_hold_only_where_time_follows_the_bytes() -> None:
    n_bytes = {2: 30.0, 8: 100.0, 32: 400.0}
    fast = Experts(n_bytes, {2: samples(1, 1), 8: samples(3, 3), 32: samples(12, 12)})
    assert claims.experts_claim(fast, {}).verdict == "holds"
    assert "4.0x fewer bytes, 4.0x faster" in claims.experts_claim(fast, {}).ours
    for ms in (4, 10):  # 3.0x and 1.2x faster for 4.0x fewer bytes
        slow = Experts(n_bytes, {2: samples(9, 9), 8: samples(ms, ms), 32: samples(12, 12)})
        assert claims.experts_claim(slow, {}).verdict.startswith("does not hold")


def test_prefetch_is_judged_by_the_last_kernel_and_from_disk(tmp_path: Path) -> None:
    helps = {"none": samples(10, 10), "t0": samples(15, 15), "t1": samples(12, 12)}
    idle = {"none": samples(10, 10), "t0": samples(10, 10), "t1": samples(12, 12)}

    def claim(ram: Groups, *t0_from_disk: float) -> Claim:
        stored = storage(tmp_path, t0=t0_from_disk) if t0_from_disk else None
        return claims.prefetch_claim({1: {"avx2": idle}, 2: ram}, stored, "x")

    found = claim({"avx2": idle, "avx512vnni": helps}, 2.9, 2.8)
    assert found.ours == (
        "T0 1.50x, T1 1.20x of no hints (avx512vnni, 2 threads, RAM); from disk T0 0.95x, T1 1.00x"
    )
    assert found.verdict == (
        "in RAM the refutation does not hold; from storage refuted here too: T0 costs"
    )
    assert "600 MB of direct reads and 351 ms, against 50 ms" in found.text
    ram = "in RAM refuted here too: no gain beyond noise; from storage "
    assert claim({"avx2": idle}, 3.0, 3.0).verdict == f"{ram}refuted here too: no gain beyond noise"
    assert claim({"avx2": idle}, 3.1, 3.1).verdict == f"{ram}the refutation does not hold"
    assert claim({"avx2": idle}).verdict == f"{ram}not yet measured"
    assert claims.prefetch_claim({2: {}}, None, "x").verdict.startswith("cannot be judged here")


def test_orders_are_judged_wherever_files_are_read(tmp_path: Path) -> None:
    assert claims.disk_layout_claim(None).verdict == "not yet measured"
    found = claims.disk_layout_claim(storage(tmp_path))
    assert found.verdict == "does not hold: no gain beyond noise"
    assert found.ours.endswith(
        "decoding with the least 1.00x, a cold first token by direct reads 1.00x, "
        "one through the page cache 1.00x, a cold load of the whole file 1.00x"
    )
    assert (
        "| 25 % | stage | direct | 120 | 6.0 | 600 | 600 | 3.00 (3.00 to 3.00) | 900 |"
        in found.text
    )
    better = claims.disk_layout_claim(storage(tmp_path, stage=1.5))
    assert better.verdict == "holds"
    assert "decoding with 25 % of the layers in memory 1.50x" in better.ours
    slow_start = storage(tmp_path, stage=1.5, stage_load_s=(2.0, 2.0))
    assert claims.disk_layout_claim(slow_start).verdict == (
        "holds for decoding with 25 % of the layers in memory, decoding with the least only; "
        "slower: a cold first token by direct reads, one through the page cache, "
        "a cold load of the whole file"
    )
    worse = claims.disk_layout_claim(storage(tmp_path, stage=0.9)).verdict
    assert worse.startswith("does not hold; slower: decoding with 25 %")


def test_fusion_may_hold_for_one_shape_only() -> None:
    gain = {"fused": samples(12, 12), "separate": samples(10, 10)}
    none = {"fused": samples(10, 10), "separate": samples(10, 10)}
    assert claims.fusion_claim({"a": gain, "b": gain}, "x").verdict == "holds"
    assert claims.fusion_claim({"a": gain, "b": none}, "x").verdict == "holds for a only"
    assert claims.fusion_claim({"a": none, "b": none}, "x").verdict.startswith("does not hold")


def test_kernels_are_judged_by_what_the_memory_gives() -> None:
    scalar = {"scalar": samples(1)}
    found = claims.kernels_claim({"l2": scalar, "ram": scalar}, 40, "x")
    assert found.verdict.startswith("cannot be judged here")
    for rate, verdict in ((36, "holds: "), (20, "in part: 0.50 of what the memory gives")):
        groups = {"l2": scalar | {"avx2": samples(80)}, "ram": scalar | {"avx2": samples(rate)}}
        assert claims.kernels_claim(groups, 40, "x").verdict.startswith(verdict)


def test_misses_without_valgrind_say_so() -> None:
    claim = claims.misses_claim(None, 32768, 8192, "x")
    assert claim.verdict == "cannot be judged here: valgrind is not installed"


# ---- committed figures ----


def trained(name: str, seed: int, perplexity: float, **arm: Any) -> dict[str, Any]:
    whole = {
        "dense_source": "post_attention",
        "expert_anchor": "post_attention",
        "expert_delay": 0,
        "residual_scale": 1.0,
        "passes": 1,
        "streams": "one",
    }
    return {
        "name": name,
        "arm": whole | arm,
        "seed": seed,
        "n_params": 1_500_000,
        "valid_perplexity": perplexity,
        "valid_loss": float(np.log(perplexity)),
        "n_tokens": 1_000_000,
        "seconds": 60.0,
    }


DELAYED = {"dense_source": "x_in_previous", "expert_anchor": "x_in", "expert_delay": 2}
TRAINING = {
    "machine": "a trainer",
    "shape": {
        "vocab_size": 4096,
        "d_model": 128,
        "n_layers": 6,
        "n_heads": 4,
        "d_ff": 512,
        "n_experts": 8,
        "top_k": 2,
        "d_expert": 128,
        "context": 256,
    },
    "training": {
        "epochs": 1,
        "batch": 8,
        "peak_rate": 3e-3,
        "final_rate": 3e-4,
        "warm_up": 100,
        "betas": [0.9, 0.95],
        "weight_decay": 0.1,
        "clip": 1.0,
        "dropout": 0.0,
        "balance": 0.01,
        "validate_every": 200,
    },
    "n_valid_tokens": 5000,
    "runs": [
        trained("sequential", 0, 10.0),
        trained("sequential", 1, 11.0),
        trained("sequential", 2, 12.0),
        trained("arch2_4_combined", 0, 10.4, **DELAYED),
        trained("arch2_4_combined", 1, 11.5, **DELAYED),
        trained("arch2_4_combined", 2, 12.6, **DELAYED),
        trained("arch5", 0, 10.3, passes=3),
        trained("arch5", 1, 10.8, passes=3),
    ],
}
BIG = {
    "machine": "a big one",
    "date": "2026-11-29",
    "runs": [
        {
            "model": "arch2_4_8k_16l",
            "engine": "cflow",
            "params_b": 30.9,
            "file_bytes": 17_400_000_000,
            "bytes_per_token": 11_700_000_000,
            "decode_tok_s": {"min": 2.9, "median": 3.0, "max": 3.1},
            "probe_gb_s": 39.0,
            "command": "cflow bench a | b",
        },
        {
            "model": "qwen2.5-32b",
            "engine": "llama.cpp",
            "params_b": 32.8,
            "file_bytes": 18_400_000_000,
            "bytes_per_token": 18_000_000_000,
            "decode_tok_s": {"min": 1.0, "median": 1.5, "max": 1.6},
            "probe_gb_s": None,
            "command": "llama-bench",
        },
        {
            "model": "qwen3-30b-a3b",
            "engine": "llama.cpp",
            "params_b": 30.5,
            "file_bytes": 17_200_000_000,
            "bytes_per_token": 1_700_000_000,
            "decode_tok_s": {"min": 8.0, "median": 9.0, "max": 9.9},
            "probe_gb_s": None,
            "command": "llama-bench",
        },
    ],
}


def write(root: Path, name: str, value: Any) -> Path:
    path = root / "docs/results" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def storage(
    folder: Path,
    *,
    t0: tuple[float, ...] = (3.0, 3.0),
    stage: float = 1.0,
    stage_load_s: tuple[float, ...] = (),
) -> Storage:
    """As read from a file. t0: tok/s of that hint. stage: how much faster that order is."""
    runs = []
    for setting in SETTINGS:
        speed = stage if setting.order == "stage" else 1.0
        rate = 20.0 if setting.memory == "all" else 3.0
        run: dict[str, Any] = {
            "memory_bytes": 0 if setting.memory == "all" else 120_000_000,
            "token_reads": 6.0,
            "token_bytes": 6e8,
            "token_storage_bytes": 6e8,
            "cold_storage_bytes": 9e8,
            "load_s": [1 / speed] * 2,
            "first_s": [0.5 / speed] * 2,
            "tok_s": [rate * speed] * 2,
        }
        if setting.order == "stage" and stage_load_s:
            run["load_s"] = stage_load_s
        if setting == ("layer", "25 %", "direct", "t0"):
            run["tok_s"] = t0
        runs.append(setting._asdict() | run)
    whole = {
        "machine": "one with a disk",
        "date": "2026-11-29",
        "command": "cflow lab storage",
        "n_layers": 8,
        "file_bytes": 2_000_000_000,
        "slot_bytes": {"layer": 25_000_000, "stage": 30_000_000},
        "runs": runs,
    }
    found = results.read(write(folder, "storage.json", whole), Storage)
    assert found is not None
    return found


def test_layers_are_streamed_cold_and_to_the_bit(checkout: Path) -> None:
    """What came from storage is the kernel's own count."""
    bench = Bench(checkout, SMALL, 1)
    sizes = storages.Sizes(d_model=256, n_layers=20, tokens=3, rounds=2)
    found = storages.measure(bench, "here", sizes)
    assert [run.setting for run in found.runs] == list(SETTINGS)
    in_memory = found.run("layer", "all").cold_storage_bytes
    assert in_memory >= 0.95 * found.file_bytes
    for run in found.runs:
        if run.io == "direct":
            assert run.token_storage_bytes == pytest.approx(run.token_bytes, rel=0.25)
        else:  # opening reads past the page cache: the first token finds no layer in it
            layer_bytes = 20 * 16 * 256**2 * 18 / 32
            assert run.cold_storage_bytes >= in_memory + 0.9 * layer_bytes
    # Of 20 layers five slots keep one: four are for two layers at once and two reads.
    for memory, n_reads in (("least", 20), ("25 %", 19), ("all", 0)):
        assert found.run("layer", memory).token_reads == pytest.approx(n_reads, abs=2)
    assert not list(bench.folder.glob("**/*.?flow"))


def test_streamed_logits_are_those_of_memory(programs: Path, tmp_path: Path) -> None:
    shape = Bench(tmp_path, SMALL, 1).published_shape("arch2_4_combined", 64)
    path, out = tmp_path / "model.vflow", tmp_path / "logits"
    synth(str(shape), path)
    with closing(Model(str(path))) as model, closing(open_stream(model, 4, threads=1)) as context:
        tokens = ([(37 * i + 11) % model.header.n_tokens] for i in range(4))
        want = b"".join(context.logits(0).tobytes() for _ in decode(context, tokens))
    for hint in HINTS:
        program = str(programs / f"streamed_{hint}")
        command = [program, str(path), str(1 << 23), "direct", "4", "2", str(out)]
        subprocess.run(command, check=True, capture_output=True)
        assert out.read_bytes() == want


def test_runs_that_differ_are_no_results(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = iter((1, 2))  # of the two files
    monkeypatch.setattr(storages, "synth", lambda *a, **named: synth(*a, **named, seed=next(seeds)))
    with pytest.raises(LabError, match=r"other logits"):
        storages.measure(Bench(checkout, SMALL, 1), "here", storages.Sizes(64, 20, 2, 1))


def test_differences_are_over_equal_seeds(tmp_path: Path) -> None:
    training = results.read(write(tmp_path, "training.json", TRAINING), results.Trained)
    assert training is not None
    found = results.difference(training, "arch2_4_combined", "sequential")
    assert found is not None
    assert found.mean == pytest.approx(0.5)
    assert found.spread == pytest.approx(0.1)  # of 0.4, 0.5, 0.6
    assert found.text() == "+0.50 ± 0.10"
    shared = results.difference(training, "arch5", "sequential")
    assert shared is not None
    assert shared.pairs == pytest.approx((0.3, -0.2))
    assert shared.text() == "+0.05 ± 0.35, not separable"
    assert results.difference(training, "arch5", "arch9") is None


def test_training_is_told_arm_by_arm(tmp_path: Path) -> None:
    training = results.read(write(tmp_path, "training.json", TRAINING), results.Trained)
    text = committed.training_text(training)
    assert (
        "| sequential | post_attention | post_attention | 0 | 1.50 | 11.00 (10.00 to 12.00) |  |"
        in text
    )
    assert "| 11.50 (10.40 to 12.60) | +0.50 ± 0.10 |" in text
    assert "| post_attention | 11.00 |  |\n| x_in_previous |  | 11.50 |" in text  # arch5 is no cell
    assert committed.quality(training).startswith("+0.50 ± 0.10 against sequential; ")
    assert "not yet measured" in committed.training_text(None)


def test_the_dense_peer_is_what_counts_end_to_end(tmp_path: Path) -> None:
    big = results.read(write(tmp_path, "big_models.json", BIG), results.BigModels)
    claim = committed.end_to_end_claim(big)
    assert claim.ours == "arch2_4_8k_16l: 3.00 tok/s; llama.cpp 1.50 with qwen2.5-32b"
    assert (claim.machine, claim.verdict) == ("a big one", "holds")
    assert "| 35.1 | 0.90 |" in claim.text  # 11.7 GB times 3.0, of 39
    assert committed.end_to_end_claim(None).verdict == "not yet measured"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"machine": 3}', json.dumps(TRAINING | {"runs": []}), "\xff"]
)
def test_results_that_are_none_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "training.json"
    path.write_text(text)
    with pytest.raises(LabError, match=r"training\.json: not valid results"):
        results.read(path, results.Trained)


def test_big_models_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probe: None
) -> None:
    shape = Bench(tmp_path, SMALL, 1).published_shape("parallel", 64)
    monkeypatch.setattr(committed, "BIG_SHAPES", (str(shape),))
    monkeypatch.setattr(committed, "BIG_GEN", 2)
    path = write(tmp_path, "big_models.json", BIG)
    for here, peers in (("a big one", ["llama.cpp"] * 2), ("another", [])):
        committed.measure_big_models(path, tmp_path, here, 1, lambda *_: None)
        big = results.read(path, results.BigModels)
        assert big is not None
        assert (big.machine, [run.engine for run in big.runs]) == (here, ["cflow", *peers])
        assert big.runs[0].probe_gb_s == 40
        assert big.runs[0].bytes_per_token == planned(str(shape)).plan.bytes_per_token
    assert not list(tmp_path.glob("**/*.cflow"))


# ---- the whole ----


def table_of(path: Path) -> list[list[str]]:
    lines = [line for line in path.read_text().split("\n## ")[0].splitlines() if line[:1] == "|"]
    return [
        [cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|")] for line in lines
    ]


def test_a_folder_that_is_no_checkout_is_named(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"is not the root of a checkout"):
        claims.write_claims(tmp_path, threads=1)


def test_the_page_has_a_row_for_every_claim(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, probe: None
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    write(checkout, "training.json", TRAINING)
    write(checkout, "big_models.json", BIG)
    storage(checkout)
    seen = set()
    path = claims.write_claims(
        checkout, sizes=SMALL, threads=1, report=lambda what, *_: seen.add(what)
    )
    assert path == checkout / "docs/claims.md"
    head, _, *rows = table_of(path)
    assert head == ["claim", "published", "ours", "command", "machine", "verdict"]
    assert [row[0][:2] for row in rows] == [f"{n}." for n in range(1, 9)] + ["En", "Ov"]
    assert all(len(row) == 6 and all(row) for row in rows)
    text = path.read_text()
    assert "nan" not in text
    assert str(checkout) not in text
    assert [line[3:] for line in text.splitlines() if line[:3] == "## "] == [row[0] for row in rows]
    assert "valgrind is not installed" in rows[1][5]
    assert rows[5][4] == "here; from disk: one with a disk"
    assert "training: a trainer" in rows[6][4]
    assert rows[7][4:] == ["one with a disk", "does not hold: no gain beyond noise"]
    assert {"kernels", "fusion", "order", "prefetch", "experts", "shared bus"} <= seen
    assert (checkout / "build/bench/shapes/arch2_4_combined_d512.toml").exists()


def test_the_committed_page_shows_the_committed_figures() -> None:
    """Sections that rest on docs/results alone, word for word."""
    text = (ROOT / "docs/claims.md").read_text()

    def read(name: str, kind: Any) -> Any:
        return results.read(ROOT / f"docs/results/{name}.json", kind)

    storage = read("storage", Storage)
    for claim in (
        claims.disk_layout_claim(storage),
        committed.end_to_end_claim(read("big_models", results.BigModels)),
        claims.overlap_claim(read("overlap", Overlap)),
    ):
        row = (claim.name, claim.published, claim.ours, claim.command, claim.machine, claim.verdict)
        assert table((), [row]).splitlines()[-1] in text
        assert f"## {claim.name}\n\n{claim.text}" in text
    assert committed.training_text(read("training", results.Trained)) in text
    assert claims.streamed_hints_text(storage) in text


def test_the_table_needs_no_torch() -> None:
    code = "import sys, cflow.engine.lab.claims; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "cflow.engine.lab.claims" in loaded
    assert "torch" not in loaded
