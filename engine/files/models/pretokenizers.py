"""Pre-tokenizers by their name in GGUF (tokenizer.ggml.pre): how text is split before merging.

The patterns are those that the models' publishers use, in the dialect of Oniguruma. llama.cpp spells
some of them otherwise, because its regular expressions know fewer character classes.
"""

from __future__ import annotations

from dataclasses import dataclass

from cflow.engine.base.errors import ModelError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}"
_JAIS2 = (
    rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|\s*[\r\n]+|"
    + "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))
    + r"|\s{1,2}(?!\S)|\s{1}"
)
_MINICPM5 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}+|{_PUNCTUATION}|{_SPACES}"

_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_PUNCTUATION}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED_CODER = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_UFAKZEKA = rf"{_WORD}|\p{{N}}|{_PUNCTUATION}|{_SPACES}"
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)

_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(end: str, rest: str, without: str = "") -> str:
    """Words that change from upper to lower case at most once. end: what may follow a word.
    without: what the classes of letters leave out."""
    upper, lower = f"[{_UPPER}{without}]", f"[{_LOWER}{without}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{upper}*{lower}+{end}|{start}{upper}+{lower}*{end}|{rest}"


_O200K_REST = rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_O200K = _cased(f"{_CONTRACTIONS}?", _O200K_REST)
_TEKKEN = _cased("", rf"\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}")
_YOUTU_CJK = (
    "[\uac00-\ud7a3\u3131-\u318e]+|"
    "[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+|"
    "[\u3105-\u312f]+|"
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_YOUTU = _cased(f"{_CONTRACTIONS}?", rf"\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}")
_KIMI = r"\p{Han}+|" + _cased(
    f"{_CONTRACTIONS}?", rf"\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}", r"&&[^\p{Han}]"
)
# Numbers in groups of three digits from the right. The published lookahead takes quadratic time for
# a long number, these take linear time: the number, then its first digits; three by three the rest.
_THREES = (r"(?<!\d)\d++\b", r"\A\d{1,2}(?=(?:\d{3})*\z)")
_AFMOE_DIGITS = (r"\p{N}+", r"\A\p{N}{1,2}(?=(?:\p{N}{3})*\z)", r"\p{N}{3}")

_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_MARKED_WORDS = (
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    r"| ?[\p{P}\p{S}]+"
)
_DEEPSEEK3 = rf"{_MARKED_WORDS}[\r\n]*|{_SPACES}"
_SPARK = rf"{_MARKED_WORDS}|[\r\n]|\s+(?!\S)|\s+"
_AFMOE_CJK = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-"
    "\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff"
    "\uac00-\ud7af\u1100-\u11ff]+"
)
_DEEPSEEK_LLM = (
    "[\r\n]",
    r"\s?"
    "[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-"
    "\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-"
    "\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15"
    "\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d"
    "\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183"
    "\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-"
    "\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb"
    "\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943]+",
    r"\s?"
    "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
_DEEPSEEK_CODER = (
    "[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")
_CHAMELEON = (
    "<sentinel:[0-9]+>",
    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
# Before each group of three digits from the right, in the last 300 of a number: longer ones would
# take quadratic time.
_SUPERBPE = (r"\p{N}+", r"(?=(?:\d{3}){1,100}(?!\d))")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_LINES = r"[^\n]+|\n+"


@dataclass(frozen=True)
class PreTokenizer:
    """patterns: regular expressions that split the text, applied in turn. whole: a word of the
    vocabulary is one token, whatever the merges say. nfc: normalise the text first. add_bos: if the
    file does not say. raw: tokens are spelt in UTF-8 with spaces as U+2581, not in GPT-2's letters."""

    patterns: tuple[str, ...]
    whole: bool = False
    nfc: bool = False
    add_bos: bool = False
    raw: bool = False


_GROUPS = {
    PreTokenizer((_GPT2,)): (
        *("gpt-2", "gpt2", "phi-2", "jais", "trillion", "granite-docling", "exaone4", "gigachat"),
        *("a.x-4.0", "mellum", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de"),
        *("jina-v1-en", "jina-v2-code", "roberta-bpe"),
    ),
    PreTokenizer((_GPT2,), nfc=True): ("mpt", "olmo", "modern-bert"),
    PreTokenizer((r"\p{N}", _GPT2)): (
        *("starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
    ),
    PreTokenizer((r"\p{N}", _GPT2), nfc=True): ("command-r",),
    PreTokenizer((_LLAMA3,)): ("dbrx", "smaug-bpe", "chatglm-bpe"),
    PreTokenizer((_LLAMA3,), whole=True): ("glm4", "glm5"),
    PreTokenizer((_LLAMA3,), whole=True, add_bos=True): (
        *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        "jina-v5-nano",
    ),
    PreTokenizer((_JAIS2,)): ("jais-2",),
    PreTokenizer((r"\p{N}{1,3}", _MINICPM5), whole=True): ("minicpm5",),
    PreTokenizer((_QWEN2,), nfc=True): ("qwen2", "deepseek-r1-qwen", "f2llmv2"),
    PreTokenizer((_QWEN2,)): ("kormo", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"),
    PreTokenizer((_QWEN35,), nfc=True): ("qwen35",),
    PreTokenizer((_BAILING,)): ("bailingmoe", "bailingmoe2", "llada-moe"),
    PreTokenizer((_SEED_CODER,)): ("seed-coder",),
    PreTokenizer((_UFAKZEKA,)): ("ufakzeka",),
    PreTokenizer((_EXAONE_MOE,)): ("exaone-moe",),
    PreTokenizer((_LINES, _QWEN2)): ("laguna",),
    PreTokenizer((_O200K,)): ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"),
    PreTokenizer((_O200K,), whole=True): ("granite-embed-multi-97m",),
    PreTokenizer((_TEKKEN,), whole=True, add_bos=True): ("tekken",),
    PreTokenizer((*_THREES, _O200K)): ("tiny_aya", "cohere2moe"),
    PreTokenizer((_KIMI,)): ("kimi-k2",),
    PreTokenizer((_YOUTU_CJK, _YOUTU), whole=True): ("youtu",),
    PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK3)): (
        *("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
    ),
    PreTokenizer((r"\p{N}{1,3}", _CJK, _SPARK, r"\p{N}")): ("spark2_5",),
    PreTokenizer((*_AFMOE_DIGITS, _AFMOE_CJK, _DEEPSEEK3)): ("afmoe",),
    PreTokenizer(_DEEPSEEK_LLM): ("deepseek-llm",),
    PreTokenizer(_DEEPSEEK_CODER): ("deepseek-coder",),
    PreTokenizer(_FALCON): ("falcon",),
    PreTokenizer((_BLOOM,)): ("bloom", "poro-chat", "gpt3-finnish"),
    PreTokenizer((_BLOOM, r"\p{N}")): ("viking",),
    PreTokenizer(_CHAMELEON, add_bos=True): ("chameleon",),
    PreTokenizer(_SUPERBPE): ("superbpe",),
    PreTokenizer(_DEFAULT): ("default",),
    PreTokenizer((_LINES,), raw=True, add_bos=True): ("gemma4", "granite-embed-multi-311m"),
    PreTokenizer((_LINES,), raw=True): ("sarvam-moe",),
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
    "cohere2": "command-r",
    "command-r": "command-r",
    "exaone": "exaone",
    "exaone4": "exaone4",
    "falcon": "falcon",
    "gpt2": "gpt-2",
    "gpt-oss": "gpt-4o",
    "gptneox": "mpt",
    "glm4": "glm4",
    "mpt": "mpt",
    "olmo": "olmo",
    "olmoe": "olmo",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2",
    "qwen3": "qwen2",
    "qwen3moe": "qwen2",
    "refact": "refact",
    "starcoder": "starcoder",
    "starcoder2": "starcoder",
}
_BY_TOKEN = {
    "<|begin_of_text|>": "llama-bpe",
    "[TOOL_CALLS]": "tekken",
    "<repo_name>": "smollm",
    "<|LDWANG|>": "gpt-2",  # Aquila
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
