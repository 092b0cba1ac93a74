"""Times vLLM's CPU back end on a llama shape with random bf16 weights, as `cflow bench` times cflow.

One prompt, then streams that decode greedily from short contexts. Runs in its own environment, without
cflow. Prints JSON.

    build/peers/vLLM/bin/python tests/bench/peer_vllm.py configs/shapes/smollm2-135m.toml --streams 16
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import peer_timing


def config(shape: Path) -> dict[str, Any]:
    """The shape's config.json."""
    model = tomllib.loads(shape.read_text())
    layer = model["layer"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model["d_model"],
        "intermediate_size": layer["d_ff"],
        "num_hidden_layers": model["n_layers"],
        "num_attention_heads": layer["n_heads"],
        "num_key_value_heads": layer["n_kv_heads"],
        "head_dim": layer["head_dim"],
        "vocab_size": model["vocab_size"],
        "max_position_embeddings": model["context"],
        "rms_norm_eps": model["norm_eps"],
        "rope_theta": layer["rope"]["base"],
        "tie_word_embeddings": model["tied"],
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }


class Peer:
    def __init__(self, folder: str, n_tokens: int, args: argparse.Namespace) -> None:
        from vllm import LLM, SamplingParams

        self._n_tokens = n_tokens
        self._params = SamplingParams
        self._llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=args.prompt + args.gen,
            max_num_seqs=args.streams,
            enable_prefix_caching=False,
        )

    def rate(self, streams: int, prompt: int, gen: int) -> float:
        """Tokens a second: of the prompt if gen is 1, else of the generated tokens."""
        prompts = [
            {"prompt_token_ids": random.choices(range(self._n_tokens), k=prompt)}
            for _ in range(streams)
        ]
        params = self._params(temperature=0, max_tokens=gen, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        self._llm.generate(prompts, params, use_tqdm=False)
        return (prompt if gen == 1 else streams * gen) / (time.perf_counter() - started)


def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        fields = config(args.shape)
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        peer = Peer(folder, fields["vocab_size"], args)
    peer.rate(1, args.prompt, 2)
    return peer_timing.measure(
        args,
        lambda n: peer.rate(1, n, 1),
        lambda streams, n: peer.rate(streams, 1, n),
    )


def main() -> None:
    parser = peer_timing.parser("time vLLM on a CPU")
    parser.add_argument("shape", type=Path)
    args = parser.parse_args()
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{args.threads - 1}"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_CACHE_ROOT"] = str(Path(sys.prefix) / "cache")  # of what it compiles
    out, sys.stdout = sys.stdout, sys.stderr  # its log
    found = measure(args)
    print(json.dumps(found), file=out)


if __name__ == "__main__":
    main()
