"""The rows of the benchmark table: the command, the figure taken from it, and its goal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench import figures
from bench.figures import Figure, Taken

BITS = {"q4_0": 4.5, "q4_1": 5, "q8_0": 8.5, "q4_k": 4.625, "q6_k": 6.5625, "q4_k_m": 5.1}
MADE = {  # commands that make a model's file; {file} has no suffix
    "synth": ("cflow synth {shape} {file}.cflow",),
    "real": ("cflow convert {checkpoint} {file}.cflow --quant q4_0",),
    "gguf": (
        "python -m bench.shape_gguf {shape} {encoding} {file}.gguf",
        "cflow convert {file}.gguf {file}.cflow",
    ),
    "bundled": (),
}
ROWS_A_STEP = "1,2,3,4,8,16,32,64,128,512"


@dataclass(frozen=True)
class Source:
    """A model: random weights of a shape, or a checkpoint of that shape."""

    shape: str
    encoding: str = "q4_0"
    made: str = "synth"  # a key of MADE

    @property
    def name(self) -> str:
        if self.made in ("real", "bundled"):
            return self.shape
        return f"{self.shape}-{self.encoding}"


@dataclass(frozen=True)
class Row:
    """command: as typed, with {model} for the file. at_least: goal for the figure's ratio, relative to
    the ratio of the row `beside` if there is one. at_most: goal for the figure. said: explains the
    goal. copies: of the model in memory at once."""

    name: str
    source: Source
    command: str
    figure: Callable[[Taken], Figure]
    at_least: float | None = None
    at_most: float | None = None
    beside: str = ""
    said: str = ""
    copies: int = 1


SMOLLM2 = Source("smollm2-135m", made="real")
TINYSTORIES = Source("tinystories", made="bundled")
OLMOE, QWEN3, DENSE, DELAYED = (
    Source(shape) for shape in ("olmoe-1b-7b", "qwen3-30b-a3b", "qwen2.5-32b", "arch2_4_8k_16l")
)
ENCODED = {
    encoding: Source("qwen2.5-1.5b", encoding, "gguf")
    for encoding in ("q4_0", "q4_1", "q8_0", "q4_k", "q6_k", "q4_k_m")
}


def _bench(flags: str) -> str:
    return f"cflow bench {{model}} {flags} --json"


SMOLLM2_RUN = _bench("--prompt 512 --gen 128 --batch 1,16")
OLMOE_RUN = _bench("--prompt 512 --gen 32 --batch 1")
QWEN3_RUN = _bench("--prompt 128 --gen 32 --batch 1")
ENCODED_RUN = _bench("--prompt 128 --gen 32 --batch 1")

ROWS = (
    Row("decode smollm2-135m", SMOLLM2, SMOLLM2_RUN, figures.decode, 0.67, said="435 of 650"),
    Row("prefill 512 smollm2-135m", SMOLLM2, SMOLLM2_RUN, figures.prefill, 0.40,
        said="2,500 of 6,300"),
    Row("16 streams smollm2-135m", SMOLLM2, SMOLLM2_RUN, figures.sixteen, 0.30,
        said="1,500 of 4,950"),
    Row("rows a step smollm2-135m", SMOLLM2, _bench(f"--prompt 16 --gen 8 --batch {ROWS_A_STEP}"),
        figures.sweep, 0.95, said="no step slower than the one before"),
    Row("step overhead", TINYSTORIES, "python -m bench.beside {model} engine --tokens 200",
        figures.overhead, at_most=100, said="Python and socket", copies=2),
    Row("decode qwen2.5-1.5b q4_0", ENCODED["q4_0"], ENCODED_RUN, figures.decode, 0.90),
    *(
        Row(f"decode qwen2.5-1.5b {name}", source, ENCODED_RUN, figures.decode, 0.96,
            beside="decode qwen2.5-1.5b q4_0", said="of q4_0's share")
        for name, source in ENCODED.items() if name != "q4_0"
    ),
    *(
        Row(f"decode qwen2.5-1.5b at {depth}, KV {kv}", ENCODED["q4_0"],
            _bench(f"--prompt 16 --gen 8 --batch 1 --depth {depth} --kv {kv}"),
            figures.decode, 0.90)
        for depth in (8192, 32000) for kv in ("f16", "q8")
    ),
    Row("decode olmoe-1b-7b", OLMOE, OLMOE_RUN, figures.decode, 0.90),
    Row("prefill 512 olmoe-1b-7b", OLMOE, OLMOE_RUN, figures.prefill),
    Row("rows a step olmoe-1b-7b", OLMOE, _bench(f"--prompt 16 --gen 2 --batch {ROWS_A_STEP}"),
        figures.sweep, 0.95, said="no step slower than the one before"),
    Row("HTTP olmoe-1b-7b", OLMOE, "python -m bench.beside {model} http --tokens 64",
        figures.through, 0.95, said="of the bare engine", copies=2),
    Row("decode qwen3-30b-a3b", QWEN3, QWEN3_RUN, figures.decode, 0.90),
    Row("prefill 128 qwen3-30b-a3b", QWEN3, QWEN3_RUN, figures.prefill, 0.41, said="100 of 246"),
    Row("decode arch2_4_8k_16l", DELAYED, _bench("--prompt 8 --gen 8 --batch 1"), figures.decode,
        0.90),
    Row("decode qwen2.5-32b", DENSE, _bench("--prompt 4 --gen 4 --batch 1"), figures.decode, 0.90),
)  # fmt: skip
