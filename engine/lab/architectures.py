"""The pipeline-native family in PyTorch, as its equations read.

x[l] is what layer l of L reads, x[0] the embedding; N are RMSNorms, s is the residual scale:

    a[l]   = s Attn(N1 x[l])
    d[l]   = s FFN(N2 u)       u = x[l] + a[l] | x[l] | x[l-1], the embedding for l = 0
    e[l]   = MoE(N2 v)         v = x[l] + a[l] | x[l]
    x[l+1] = x[l] + a[l] + d[l] + sum of e[k] where min(k + expert_delay, L - 1) = l
    logits = W N(x[L])

Sources: arXiv 2608.23841v1, (2.4) for FFN(x) = (x W_gate * GELU(x W_up)) W_down and (2.5) for
MoE(x) = sum of s_i FFN_i(x) over the top k, s_i their softmax weights over their sum; docs/delays.md
for the delays. Shapes: b sequences, n tokens, d = d_model.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cflow.engine.lab.arms import Arm, Shape

INIT_STD = 0.02


class Routing(NamedTuple):
    """experts (b n, top_k): ids, most probable first. probabilities (b n, n_experts)."""

    experts: Tensor
    probabilities: Tensor

    def balance(self) -> Tensor:
        """Switch's loss, E sum_i f_i P_i: 1 if tokens spread evenly (arXiv 2101.03961, eq. 4)."""
        n_experts = self.probabilities.shape[1]
        share = torch.bincount(self.experts.flatten(), minlength=n_experts) / self.experts.numel()
        return n_experts * (share * self.probabilities.mean(0)).sum()


class Output(NamedTuple):
    """logits (b, n, vocab_size); routing of each layer."""

    logits: Tensor
    routing: list[Routing]

    def balance(self) -> Tensor:
        return torch.stack([layer.balance() for layer in self.routing]).mean()


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        d = shape.d_model
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        size = (b, n, self.shape.n_heads, self.shape.head_dim)
        q, k, v = (w(x).view(size).transpose(1, 2) for w in (self.q, self.k, self.v))
        if self.shape.v_norm:
            v = F.rms_norm(v, size[-1:], eps=self.shape.norm_eps)
        q, k = rotated(q, self.shape.rope_base), rotated(k, self.shape.rope_base)
        later = torch.full((n, n), -torch.inf, dtype=q.dtype, device=x.device).triu(1)
        heads = (q @ k.mT * self.shape.head_dim**-0.5 + later).softmax(-1) @ v
        out: Tensor = self.o(heads.transpose(1, 2).reshape(b, n, d))
        return out


def rotated(x: Tensor, base: float) -> Tensor:
    """RoPE of x (b, heads, n, head_dim); dimension i pairs with i + head_dim / 2."""
    n, dim = x.shape[-2:]
    pairs = torch.arange(0, dim, 2, device=x.device, dtype=torch.float32)
    angle = torch.arange(n, device=x.device)[:, None] * base ** (-pairs / dim)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def geglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """GELU applies to up, as in the paper. gate, up (width, d), down (d, width)."""
    return F.linear(F.linear(x, gate) * F.gelu(F.linear(x, up), approximate="tanh"), down)


class Dense(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(shape.d_ff, shape.d_model))
        self.up = nn.Parameter(torch.empty(shape.d_ff, shape.d_model))
        self.down = nn.Parameter(torch.empty(shape.d_model, shape.d_ff))

    def forward(self, x: Tensor) -> Tensor:
        return geglu(x, self.gate, self.up, self.down)


class Experts(nn.Module):
    """The top k of n_experts. No token is dropped."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.top_k = shape.top_k
        n, d, width = shape.n_experts, shape.d_model, shape.d_expert
        self.router = nn.Parameter(torch.empty(n, d))
        self.gate = nn.Parameter(torch.empty(n, width, d))
        self.up = nn.Parameter(torch.empty(n, width, d))
        self.down = nn.Parameter(torch.empty(n, d, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        tokens = x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):  # routing is computed in f32
            probabilities = F.linear(tokens.float(), self.router).softmax(-1)
        chosen, experts = probabilities.topk(self.top_k)
        weights = chosen / chosen.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for expert in range(len(self.router)):
            row, rank = (experts == expert).nonzero(as_tuple=True)
            one = geglu(tokens[row], self.gate[expert], self.up[expert], self.down[expert])
            out = out.index_add(0, row, (weights[row, rank, None] * one).to(out.dtype))
        return out.view_as(x), Routing(experts, probabilities)


class Block(nn.Module):
    """The weights of one layer. The dense FFN and the experts share norm2."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(shape.d_model, shape.norm_eps)
        self.norm2 = nn.RMSNorm(shape.d_model, shape.norm_eps)
        self.attention = Attention(shape)
        self.dense = Dense(shape)
        self.experts = Experts(shape)


class Pipeline(nn.Module):
    """Arms with one residual stream, as in the equations above."""

    def __init__(self, arm: Arm, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        if shape.n_layers % arm.passes or shape.d_model % (2 * shape.n_heads):
            raise ValueError(f"{shape} cannot be {arm.passes} passes of even-sized heads")
        if shape.top_k > shape.n_experts:
            raise ValueError(f"{shape.top_k} of {shape.n_experts} experts cannot be chosen")
        self.arm, self.shape = arm, shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.d_model)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.n_layers // arm.passes))
        self.final_norm = nn.RMSNorm(shape.d_model, shape.norm_eps)
        self.head = nn.Linear(shape.d_model, shape.vocab_size, bias=False)
        self.drop = nn.Dropout(dropout)
        self._initialise()

    def _initialise(self) -> None:
        """Matrices are N(0, INIT_STD); those that write to a stream are divided by sqrt(2 L), as in
        GPT-2. Arms of one seed start with the same matrices if they have the same number of blocks."""
        for name, p in self.named_parameters():
            if p.ndim > 1:
                writes = name.endswith((".o.weight", ".down"))
                scale = 1 / math.sqrt(2 * self.shape.n_layers) if writes else 1.0
                nn.init.normal_(p, std=INIT_STD * scale)

    def forward(self, tokens: Tensor) -> Output:
        """tokens (b, n)"""
        x, routing = self.layers(self.drop(self.embedding(tokens)))
        return Output(self.head(self.final_norm(x)), routing)

    def block(self, layer: int) -> Block:
        block = self.blocks[layer % len(self.blocks)]
        assert isinstance(block, Block)
        return block

    def layers(self, embedded: Tensor) -> tuple[Tensor, list[Routing]]:
        """(b, n, d) in and out."""
        arm, last = self.arm, self.shape.n_layers - 1
        x, due, routing = [embedded], [torch.zeros_like(embedded)] * (last + 1), []
        for layer in range(last + 1):
            block = self.block(layer)
            a = arm.residual_scale * self.drop(block.attention(block.norm1(x[layer])))
            sources = {
                "post_attention": x[layer] + a,
                "x_in": x[layer],
                "x_in_previous": x[max(layer - 1, 0)],
            }
            d = block.dense(block.norm2(sources[arm.dense_source]))
            e, routed = block.experts(block.norm2(sources[arm.expert_anchor]))
            lands = min(layer + arm.expert_delay, last)
            due[lands] = due[lands] + self.drop(e)
            x.append(x[layer] + a + arm.residual_scale * self.drop(d) + due[layer])
            routing.append(routed)
        return x[-1], routing


class DecoupledStreams(Pipeline):
    """arch1: attention writes one stream s and the FFNs another t, each with its own norms.

        s[l+1] = s[l] + Attn(N1 s[l] + N1' t[l])
        t[l+1] = t[l] + (FFN + MoE)(N2 t[l] + N2' s[l+1])       logits = W (N s[L] + N' t[L])

    With a single norm of the sum, s + t would be the stream of the sequential model.
    """

    def __init__(self, arm: Arm, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__(arm, shape, dropout)
        n_norms = 2 * shape.n_layers + 1
        self.other_norms = nn.ModuleList(
            nn.RMSNorm(shape.d_model, shape.norm_eps) for _ in range(n_norms)
        )

    def forward(self, tokens: Tensor) -> Output:
        s = self.drop(self.embedding(tokens))
        t, routing = torch.zeros_like(s), []
        for layer in range(self.shape.n_layers):
            block = self.block(layer)
            norm1, norm2 = self.other_norms[2 * layer], self.other_norms[2 * layer + 1]
            s = s + self.drop(block.attention(block.norm1(s) + norm1(t)))
            x = block.norm2(t) + norm2(s)
            e, routed = block.experts(x)
            t = t + self.drop(block.dense(x)) + self.drop(e)
            routing.append(routed)
        return Output(self.head(self.final_norm(s) + self.other_norms[-1](t)), routing)


class PipelineRegisters(Pipeline):
    """arch3: a register r carries what a layer added to the next layer, which reads it through a gate.

        y[l]   = Attn(N1 z) + (FFN + MoE)(N2 (z + Attn(N1 z)))     z = x[l] + g[l] * r[l]
        x[l+1] = x[l] + y[l]                                       r[l+1] = y[l], r[0] = 0

    If r were the whole stream, g would only scale it.
    """

    def __init__(self, arm: Arm, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__(arm, shape, dropout)
        self.gates = nn.Parameter(torch.zeros(shape.n_layers, shape.d_model))

    def layers(self, embedded: Tensor) -> tuple[Tensor, list[Routing]]:
        x, r, routing = embedded, torch.zeros_like(embedded), []
        for layer in range(self.shape.n_layers):
            block = self.block(layer)
            z = x + self.gates[layer] * r
            a = self.drop(block.attention(block.norm1(z)))
            normed = block.norm2(z + a)
            e, routed = block.experts(normed)
            r = a + self.drop(block.dense(normed)) + self.drop(e)
            x = x + r
            routing.append(routed)
        return x, routing


CLASSES = {"one": Pipeline, "decoupled": DecoupledStreams, "registers": PipelineRegisters}


def build(arm: Arm, shape: Shape, dropout: float = 0.0) -> Pipeline:
    """A model with fresh weights from torch's generator. ValueError if sizes do not fit."""
    return CLASSES[arm.streams](arm, shape, dropout)


def n_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
