"""Times llama.cpp, or a fork of it, through its Python package, as `cflow bench` times cflow.

Random tokens: one prompt in batches of 512, then streams that decode from empty contexts, without
sampling. Runs in the peer's own environment, without cflow. Prints JSON.

    build/peers/llama.cpp/bin/python tests/bench/peer_llama.py llama_cpp x.gguf --prompt 512 --streams 16
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import peer_timing

MAX_ROWS = 512
Row = tuple[int, int, int]  # sequence, position, token


class Peer:
    def __init__(self, module: str, path: str, args: argparse.Namespace) -> None:
        self._api = api = importlib.import_module(module)
        api.llama_backend_init()
        options = api.llama_model_default_params()
        options.n_gpu_layers = 0
        if args.repack:
            options.repack_tensors, options.use_mmap = True, False
        self._model = self._call("llama_model_load_from_file", "llama_load_model_from_file")(
            path.encode(), options
        )
        options = api.llama_context_default_params()
        options.n_ctx = max(args.prompt, args.streams * args.gen) + 256
        options.n_batch = options.n_ubatch = MAX_ROWS
        options.n_threads = options.n_threads_batch = args.threads
        if hasattr(options, "n_seq_max"):
            options.n_seq_max = args.streams
        if hasattr(options, "kv_unified"):
            options.kv_unified = True
        self._context = self._call("llama_init_from_model", "llama_new_context_with_model")(
            self._model, options
        )
        if not self._context:
            raise SystemExit("no context")
        self._batch = api.llama_batch_init(MAX_ROWS, 0, 1)
        vocab = (
            api.llama_model_get_vocab(self._model) if hasattr(api, "llama_vocab_n_tokens") else 0
        )
        self.n_tokens = api.llama_vocab_n_tokens(vocab) if vocab else api.llama_n_vocab(self._model)

    def _call(self, *names: str) -> Any:
        """A function by the first of its names that this version has."""
        return next(getattr(self._api, name) for name in names if hasattr(self._api, name))

    def clear(self) -> None:
        if hasattr(self._api, "llama_memory_clear"):
            self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        else:
            self._call("llama_kv_self_clear", "llama_kv_cache_clear")(self._context)

    def step(self, rows: Sequence[Row], n_logits: int) -> None:
        """n_logits: how many rows, from the last, give logits."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (sequence, position, token) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = i >= len(rows) - n_logits
        if status := self._api.llama_decode(self._context, batch):
            raise SystemExit(f"llama_decode of {len(rows)} rows: {status}")
        if n_logits:  # waits until they are computed
            self._api.llama_get_logits_ith(self._context, len(rows) - 1)


def prefill(peer: Peer, n: int) -> float:
    peer.clear()
    rows = [(0, i, random.randrange(peer.n_tokens)) for i in range(n)]
    started = time.perf_counter()
    for first in range(0, n, MAX_ROWS):
        chunk = rows[first : first + MAX_ROWS]
        peer.step(chunk, n_logits=first + len(chunk) == n)
    return n / (time.perf_counter() - started)


def decode(peer: Peer, streams: int, n: int) -> float:
    peer.clear()
    started = time.perf_counter()
    for position in range(n):
        peer.step([(s, position, random.randrange(peer.n_tokens)) for s in range(streams)], streams)
    return streams * n / (time.perf_counter() - started)


def main() -> None:
    parser = peer_timing.parser("time llama.cpp or a fork")
    parser.add_argument("module")
    parser.add_argument("model")
    parser.add_argument("--repack", action="store_true", help="reorder weights at load")
    args = parser.parse_args()
    random.seed(0)
    peer = Peer(args.module, args.model, args)
    prefill(peer, args.prompt)  # brings a mapped file into memory
    decode(peer, 1, 4)
    found = peer_timing.measure(args, partial(prefill, peer), partial(decode, peer))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
