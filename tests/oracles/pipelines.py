"""Tiny pipeline-native models with random weights, in PyTorch."""

import torch

from cflow.engine.lab.architectures import Pipeline
from cflow.engine.lab.architectures import build as build_arm
from cflow.engine.lab.arms import Arm, Shape
from oracles import tiny

SHAPE = Shape(
    vocab_size=tiny.VOCAB_SIZE, d_model=96, n_layers=6, n_heads=3, d_ff=160,
    n_experts=8, top_k=2, d_expert=48, context=128,
)  # fmt: skip
PROMPT = [(i * i + 3 * i) % SHAPE.vocab_size for i in range(70)]


def build(arm: Arm, shape: Shape = SHAPE, seed: int = 0) -> Pipeline:
    """In evaluation mode. No norm is 1 and no gate 0, so that every part affects the logits."""
    model = build_arm(arm, shape).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if "norm" in name:
                p.copy_(1 + 0.3 * noise)
            else:
                wide = name == "gates" or "embedding" in name
                p.copy_(noise if wide else noise * 1.5 / p.shape[-1] ** 0.5)
    return model
