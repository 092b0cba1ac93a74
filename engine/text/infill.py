"""Filling the middle: the tokens that models trained for it have, and the prompt made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cflow.engine.text.tokenizer import Tokenizer

# Before the prefix, before the suffix, before the middle, as tokenizers of these models spell them.
NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    (
        "<\uff5cfim▁begin\uff5c>",
        "<\uff5cfim▁hole\uff5c>",
        "<\uff5cfim▁end\uff5c>",
    ),  # DeepSeek-Coder
)
# What such a model says where the middle is complete, besides its end of text.
END_NAMES = (
    "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|file_separator|>", "<fim_pad>",
    "<file_sep>", "▁<EOT>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Infill:
    """Token ids. ends: those that end a middle."""

    prefix: int
    suffix: int
    middle: int
    ends: tuple[int, ...]

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
        """What a model continues with what stands between two texts."""
        return (self.prefix, *before, self.suffix, *after, self.middle)


def find_infill(tokenizer: Tokenizer) -> Infill | None:
    """None if the model has no such tokens."""
    for names in NAMES:
        prefix, suffix, middle = (_find(tokenizer, name) for name in names)
        if prefix is not None and suffix is not None and middle is not None:
            ends = (_find(tokenizer, name) for name in END_NAMES)
            return Infill(prefix, suffix, middle, tuple(id for id in ends if id is not None))
    return None


def _find(tokenizer: Tokenizer, name: str) -> int | None:
    """The token that a name alone becomes. One for all that is unknown does not spell it."""
    ids = tokenizer.encode(name, add_bos=False)
    spelled = tokenizer.token_bytes(ids[0]).decode(errors="replace") if len(ids) == 1 else ""
    return ids[0] if _plain(spelled) == _plain(name) else None


def _plain(name: str) -> str:
    """The mark that tokenizers write for a space is one in the text."""
    return name.replace("\u2581", " ").strip()
