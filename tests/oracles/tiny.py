"""Tiny models of every supported architecture with random weights, built by transformers offline."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from transformers import PreTrainedModel

VOCAB_SIZE = 272  # 16 rows more than the byte tokenizer has tokens

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 72, "decoder_sparse_step": 1}


TIED: dict[str, Any] = {"tie_word_embeddings": True}
WINDOW: dict[str, Any] = {"sliding_window": 24}
ODD: dict[str, Any] = {"hidden_size": 88, "intermediate_size": 100, "num_attention_heads": 4}
LONG: dict[str, Any] = {"original_max_position_embeddings": 64}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}


def longrope(n_pairs: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1 + 0.05 * i for i in range(n_pairs)],
        "long_factor": [1 + 0.9 * i for i in range(n_pairs)],
        **LONG,
    }


def of(family: str, config: str = "", /, **changes: Any) -> PreTrainedModel:
    """The causal model of a family, whose configuration may have another name."""
    sizes = getattr(transformers, f"{config or family}Config")(**SIZES | changes)
    sizes._attn_implementation = "eager"  # the others lack the cap of Gemma 2
    model: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(sizes)
    return model


def llama(**changes: Any) -> PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | changes))


def llama_rope(**rope: Any) -> PreTrainedModel:
    return llama(rope_parameters={"rope_theta": 10000.0} | rope)


def mixtral(**changes: Any) -> PreTrainedModel:
    sizes = SIZES | {"num_local_experts": 8, "num_experts_per_tok": 2} | changes
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))


def qwen2(**changes: Any) -> PreTrainedModel:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES | changes))


def qwen3(**changes: Any) -> PreTrainedModel:
    sizes = SIZES | {"head_dim": 32} | changes
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))


def qwen2moe(**changes: Any) -> PreTrainedModel:
    sizes = SIZES | MOE | SHARED | changes
    return transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**sizes))


def qwen3moe(**changes: Any) -> PreTrainedModel:
    sizes = SIZES | MOE | {"head_dim": 32} | changes
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))


def olmoe(**changes: Any) -> PreTrainedModel:
    sizes = SIZES | {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48} | changes
    return transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**sizes))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    # no dimension but the vocabulary is a multiple of 16
    "llama-odd-sizes": lambda: llama(hidden_size=88, intermediate_size=100, num_attention_heads=4),
    "llama-attention-bias": lambda: llama(attention_bias=True),
    "llama-linear-rope": lambda: llama_rope(rope_type="linear", factor=4.0),
    "llama-llama3-rope": lambda: llama_rope(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    "mixtral": mixtral,
    "qwen2": qwen2,
    "qwen2-tied": lambda: qwen2(tie_word_embeddings=True),
    "qwen3": qwen3,
    "qwen2moe": lambda: qwen2moe(norm_topk_prob=False),
    "qwen2moe-renormalised": lambda: qwen2moe(norm_topk_prob=True),
    "qwen3moe": lambda: qwen3moe(norm_topk_prob=True),
    "olmoe": lambda: olmoe(norm_topk_prob=False),
    "gemma2": lambda: of("Gemma2", **WINDOW, **TIED, head_dim=24, query_pre_attn_scalar=24),
    "gemma2-odd-sizes": lambda: of(
        "Gemma2", **WINDOW, **ODD, head_dim=20, query_pre_attn_scalar=40
    ),
    "gemma3": lambda: of(
        *("Gemma3", "Gemma3Text"),
        **WINDOW,
        **TIED,
        num_hidden_layers=7,
        head_dim=32,
        query_pre_attn_scalar=32,
    ),
    "gemma3-linear-rope": lambda: of(
        *("Gemma3", "Gemma3Text"),
        **WINDOW,
        head_dim=20,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "phi3": lambda: of("Phi3", sliding_window=40),
    "phi3-partial": lambda: of("Phi3", rope_parameters={"partial_rotary_factor": 0.75}),
    "ministral3": lambda: of(
        "Ministral3",
        rope_parameters={
            **YARN,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.2,
        },
    ),
    "llama-yarn": lambda: llama(rope_parameters=YARN),
    "llama-yarn-gain": lambda: llama(
        rope_parameters=YARN | {"attention_factor": 1.5, "truncate": False, "beta_fast": 8.0}
    ),
    "llama-mlp-bias": lambda: llama(mlp_bias=True),
    "smollm3": lambda: of("SmolLM3", num_hidden_layers=5),
    "granite": lambda: of(
        "Granite",
        embedding_multiplier=3.0,
        logits_scaling=2.5,
        residual_multiplier=0.4,
        attention_multiplier=0.3,
    ),
    "olmo2": lambda: of("Olmo2"),
    "olmo3": lambda: of(
        "Olmo3",
        **WINDOW,
        num_hidden_layers=5,
        rope_parameters={
            "full_attention": YARN | {"attention_factor": 1.2},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "glm4": lambda: of("Glm4", head_dim=16, attention_bias=True),
    "cohere2": lambda: of(
        "Cohere2",
        **WINDOW,
        **TIED,
        rotary_pct=1.0,
        num_hidden_layers=5,
        logit_scale=0.3,
        layer_norm_eps=1e-4,
    ),
    "exaone4": lambda: of("Exaone4", **WINDOW, num_hidden_layers=5),
    "exaone4-no-window": lambda: of(
        "Exaone4", sliding_window=None, layer_types=["full_attention"] * 3
    ),
    "seed_oss": lambda: of("SeedOss", head_dim=24, attention_out_bias=False),
    "seed_oss-out-bias": lambda: of("SeedOss", head_dim=24, attention_out_bias=True),
    "ernie4_5": lambda: of("Ernie4_5", head_dim=24),
    "ernie4_5-bias": lambda: of("Ernie4_5", head_dim=16, use_bias=True),
    "starcoder2": lambda: of("Starcoder2", sliding_window=30),
    "starcoder2-no-bias": lambda: of("Starcoder2", use_bias=False, **ODD),
    "hunyuan-dense": lambda: of("HunYuanDenseV1", head_dim=16),
    "hunyuan-dense-alpha": lambda: of(
        "HunYuanDenseV1",
        head_dim=16,
        max_position_embeddings=1 << 18,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0},
    ),
}


def build(name: str, seed: int = 0) -> PreTrainedModel:
    """The model in f32 with random weights: no bias is 0 and no norm is 1."""
    model = MODELS[name]()
    model.float().eval()
    randomise(model, seed)
    return model


def randomise(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if "norm" in key:
                p.copy_(1 + 0.3 * noise)
            elif p.ndim == 1:
                p.copy_(0.5 * noise)
            else:
                p.copy_(noise * (1.0 if "embed" in key else 1.5 / p.shape[-1] ** 0.5))


def save(model: PreTrainedModel, folder: Path) -> Path:
    """Writes a Hugging Face folder with a byte tokenizer."""
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def byte_tokenizer() -> tokenizers.Tokenizer:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def logits_and_routing(
    model: PreTrainedModel, tokens: list[int]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits (n, vocab_size) and, per MoE layer, router scores (n, n_experts)."""
    is_moe = hasattr(model.config, "num_experts_per_tok")
    more = {"output_router_logits": True} if is_moe else {}
    with torch.no_grad():
        out = model(torch.tensor([tokens]), **more)
    return out.logits[0], [r.reshape(len(tokens), -1) for r in out.get("router_logits") or ()]
