"""Text for training: a byte-level BPE trained on it, its token ids, and the batches of an epoch."""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from cflow.engine.lab.errors import LabError

END = "<|endoftext|>"
BUNDLED = Path(__file__).parent / "data" / "tinystories"


@dataclass(frozen=True)
class Corpus:
    """Token ids of the two texts, (n,) each, END between documents."""

    tokenizer: Tokenizer
    train: NDArray[np.int64]
    valid: NDArray[np.int64]


def load(folder: Path, vocab_size: int) -> Corpus:
    """Reads train.txt and valid.txt of folder, or their .xz. The tokenizer is trained on train.txt."""
    train, valid = _text(folder, "train.txt"), _text(folder, "valid.txt")
    tokenizer = _tokenizer(train, vocab_size)
    if (n := tokenizer.get_vocab_size()) != vocab_size:
        raise LabError(
            f"{folder}: train.txt yields a vocabulary of {n} tokens, fewer than vocab_size "
            f"{vocab_size}; use more text or lower vocab_size"
        )
    return Corpus(tokenizer, _ids(tokenizer, train), _ids(tokenizer, valid))


def _text(folder: Path, name: str) -> str:
    plain, packed = folder / name, folder / f"{name}.xz"
    try:
        raw = plain.read_bytes() if plain.exists() else lzma.decompress(packed.read_bytes())
        return raw.decode()
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise LabError(f"{folder}: {name} or {name}.xz cannot be read as text: {error}") from None


def _tokenizer(text: str, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.split(END), trainer)
    return tokenizer


def _ids(tokenizer: Tokenizer, text: str) -> NDArray[np.int64]:
    documents = tokenizer.encode_batch_fast([part.strip() for part in text.split(END)])
    end = tokenizer.token_to_id(END)
    return np.array([id for d in documents if d.ids for id in (*d.ids, end)], np.int64)


def n_batches(ids: NDArray[np.int64], context: int, batch: int) -> int:
    """Batches of one epoch."""
    return (len(ids) - 1) // context // batch


def epoch(
    ids: NDArray[np.int64], context: int, batch: int, seed: tuple[int, int]
) -> Iterator[Tensor]:
    """Batches (batch, context + 1) of windows that overlap by one token.

    Their order and the offset of the first window depend on seed alone, so that all arms see the same
    batches. Windows that do not fill a batch are dropped."""
    generator = np.random.default_rng(seed)
    n_windows = (len(ids) - 1) // context
    spare = (len(ids) - 1) - n_windows * context
    first = int(generator.integers(spare + 1))
    order = generator.permutation(n_windows)
    for at in range(n_batches(ids, context, batch)):
        starts = first + order[at * batch : (at + 1) * batch] * context
        yield torch.from_numpy(np.stack([ids[s : s + context + 1] for s in starts]))


def windows(ids: NDArray[np.int64], context: int, batch: int) -> Iterator[Tensor]:
    """Batches of the text from its start; a last, shorter window is dropped."""
    n_windows = (len(ids) - 1) // context
    for at in range(0, n_windows, batch):
        starts = range(at * context, min(at + batch, n_windows) * context, context)
        yield torch.from_numpy(np.stack([ids[s : s + context + 1] for s in starts]))
