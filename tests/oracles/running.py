"""Runs token sequences through the engine: logits and values as arrays."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cflow.engine.native import Context, ExpertOptions, Model, Row, const

KV_BLOCK = 32
Logits = NDArray[np.float32]


@contextmanager
def opened(
    path: Path,
    *,
    as_f32: bool = False,
    experts: ExpertOptions | None = None,
    defer_experts: int = 0,
    weights_memory: int = 0,
    max_context: int = 512,
    n_sequences: int = 4,
    **options: Any,
) -> Iterator[Context]:
    """A context whose sequence i owns the i-th range of KV blocks, for prompts up to max_context."""
    n_blocks = -(-max_context // KV_BLOCK)
    options = {"threads": 2, "kv_type": "f32" if as_f32 else "f16"} | options
    model = Model(
        str(path),
        threads=2,
        as_f32=as_f32,
        experts=experts,
        defer_experts=defer_experts,
        weights_memory=weights_memory,
    )
    context = Context(
        model,
        max_rows=64,
        max_sequences=64,
        max_context=max_context,
        n_kv_blocks=n_sequences * n_blocks,
        **options,
    )
    try:
        for sequence in range(n_sequences):
            context.bind(sequence, range(sequence * n_blocks, (sequence + 1) * n_blocks))
        yield context
    finally:
        context.close()
        model.close()


def rows(tokens: Sequence[int], first: int = 0, sequence: int = 0) -> list[Row]:
    """One row with logits for each token, from position `first`."""
    flags = const.CFLOW_ROW_LOGITS
    return [Row(sequence, t, first + i, flags) for i, t in enumerate(tokens)]


def step(context: Context, batch: Sequence[Row]) -> Logits:
    """Logits of every row of one step, (n, vocab_size)."""
    status = context.step(batch).status
    assert not any(status), f"row status {status}"
    return np.stack([context.logits(i) for i in range(len(batch))])


def logits(context: Context, tokens: Sequence[int], chunk: int = 64, sequence: int = 0) -> Logits:
    """Logits after every token of one sequence, (n, vocab_size), `chunk` rows a step."""
    batch = rows(tokens, sequence=sequence)
    return np.concatenate(
        [step(context, batch[i : i + chunk]) for i in range(0, len(batch), chunk)]
    )


def greedy(context: Context, prompt: Sequence[int], n: int) -> list[int]:
    """The n tokens of greedy decoding after prompt; ties go to the smaller id."""
    last = logits(context, prompt)[-1]
    tokens: list[int] = []
    for position in range(len(prompt), len(prompt) + n):
        tokens.append(int(last.argmax()))
        last = step(context, rows(tokens[-1:], position))[-1]
    return tokens


def values(context: Context, names: Sequence[str], n_rows: int) -> dict[str, NDArray[np.float64]]:
    """The named values of the last step's rows, each (n_rows, width)."""
    return {
        name: np.stack([context.value(name, row) for row in range(n_rows)]).astype(np.float64)
        for name in names
    }


def relative_error(got: NDArray[Any], want: NDArray[Any]) -> NDArray[np.float64]:
    """|got - want| / |want| of each row."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.asarray(np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1))


def centred_error(got: NDArray[Any], want: NDArray[Any]) -> NDArray[np.float64]:
    """relative_error after subtracting row means, the part that a softmax depends on."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return relative_error(got - got.mean(-1, keepdims=True), want - want.mean(-1, keepdims=True))
