"""Pre-tokenizers by their name in GGUF (tokenizer.ggml.pre): how text is split before merging."""

from __future__ import annotations

from dataclasses import dataclass

from cflow.engine.base.errors import ModelError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION}|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True)
class PreTokenizer:
    """patterns: regular expressions that split the text, applied in turn. ignore_merges: a word of the
    vocabulary is one token. nfc: normalise the text first. add_bos: if the file does not say."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    nfc: bool = False
    add_bos: bool = False


_GROUPS = {
    PreTokenizer((_GPT2,)): ("gpt-2", "gpt2", "phi-2", "mpt", "jina-v1-en"),
    PreTokenizer((_GPT2,), nfc=True): ("olmo",),
    PreTokenizer((r"\p{N}", _GPT2)): ("smollm", "starcoder", "refact", "command-r", "codeshell"),
    PreTokenizer((_LLAMA3,)): ("dbrx", "smaug-bpe"),
    PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True): (
        "llama-bpe",
        "llama3",
        "llama-v3",
    ),
    PreTokenizer((_QWEN2,), nfc=True): ("qwen2", "deepseek-r1-qwen"),
    PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True): ("tekken",),
    PreTokenizer(_DEFAULT): ("default",),
}
PRE_TOKENIZERS = {name: pre for pre, names in _GROUPS.items() for name in names}


def pre_tokenizer(name: str, origin: str) -> PreTokenizer:
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelError(
            f"{origin}: tokenizer.ggml.pre is {name!r}, which is not supported; supported: {known}"
        )
    return PRE_TOKENIZERS[name]


# Without a name: by architecture, and by a token that only one family's vocabulary has.
_BY_ARCHITECTURE = {
    "qwen2": "qwen2",
    "qwen2moe": "qwen2",
    "qwen3": "qwen2",
    "qwen3moe": "qwen2",
    "olmoe": "olmo",
}
_BY_TOKEN = {
    "<|begin_of_text|>": "llama-bpe",
    "[TOOL_CALLS]": "tekken",
    "<repo_name>": "smollm",
}


def guess(architecture: str, tokens: set[str], origin: str) -> str:
    """The pre-tokenizer of a file that does not name one. Raises ModelError without a clue."""
    if name := _BY_ARCHITECTURE.get(architecture):
        return name
    for token, name in _BY_TOKEN.items():
        if token in tokens:
            return name
    raise ModelError(
        f"{origin}: tokenizer.ggml.pre is missing, and neither architecture nor vocabulary tells "
        f"it; name it: cflow convert --pre NAME, one of {', '.join(sorted(PRE_TOKENIZERS))}"
    )
