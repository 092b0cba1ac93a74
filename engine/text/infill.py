"""Fill-in-the-middle: its special tokens, by model family, and a prompt made with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cflow.engine.text.tokenizer import Tokenizer

# The tokens before prefix, suffix and middle, as the tokenizers of these models spell them.
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
# Tokens that such a model generates at the end of the middle, besides its end-of-text tokens.
END_NAMES = (
    "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|file_separator|>", "<fim_pad>",
    "<file_sep>", "▁<EOT>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Infill:
    """Ids of a model's tokens for fill-in-the-middle. ends: tokens that end the middle."""

    prefix: int
    suffix: int
    middle: int
    ends: tuple[int, ...]

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
        """A prompt that the model continues with the text between `before` and `after`."""
        return (self.prefix, *before, self.suffix, *after, self.middle)


def find_infill(tokenizer: Tokenizer) -> Infill | None:
    """The tokens of this model; None if it has none for fill-in-the-middle."""
    for names in NAMES:
        prefix, suffix, middle = (_find(tokenizer, name) for name in names)
        if prefix is not None and suffix is not None and middle is not None:
            ends = (_find(tokenizer, name) for name in END_NAMES)
            return Infill(prefix, suffix, middle, tuple(id for id in ends if id is not None))
    return None


def _find(tokenizer: Tokenizer, name: str) -> int | None:
    """The id of the token spelled `name`; None if it encodes to others or to an unknown one."""
    ids = tokenizer.encode(name, add_bos=False)
    spelled = tokenizer.token_bytes(ids[0]).decode(errors="replace") if len(ids) == 1 else ""
    return ids[0] if _plain(spelled) == _plain(name) else None


def _plain(name: str) -> str:
    """A name without spaces at its ends, where a tokenizer's mark for a space counts as one."""
    return name.replace("\u2581", " ").strip()
