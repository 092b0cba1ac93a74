"""What an answer may look like: grammars in llguidance's form, made, bounded and compiled.

A grammar is the text that llguidance takes: {"grammars": [...]}. The front end makes one from a
request and has it checked in a jail (grammar_checker.py), because compiling may take long; the
worker compiles what passed (constraint.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from cflow.engine.native import Model, const
from cflow.engine.text.jail import Jail
from cflow.engine.text.tokenizer import Tokenizer

MAX_CHARS = 128 << 10  # of a grammar
MAX_MESSAGE = 300  # characters of llguidance's reasons that are passed on
TIME_S = 2.0  # to compile one; sane ones take milliseconds
_SPACE = r"[ \n\r\t]{1,64}"
_KNOWN = 128  # grammars whose check is remembered

# About half of llguidance's own, or less: the work of one token's mask is milliseconds.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_items_in_row=1_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


T = TypeVar("T")


class GrammarError(Exception):
    """A grammar that cannot be used; says why, for the person who wrote it."""


# ---- making one ----


def from_json_schema(schema: dict[str, Any] | bool) -> str:
    """The answer is JSON that fits. White space between its parts is bounded: small models may not
    stop writing it."""
    rules = schema if isinstance(schema, dict) else {} if schema else {"not": {}}
    return _one("json_schema", {"x-guidance": {"whitespace_pattern": _SPACE}} | rules)


def from_lark(lark: str) -> str:
    return _one("lark_grammar", lark)


def from_text(text: str) -> str:
    """A Lark grammar, or GBNF as llama.cpp has it. GrammarError for GBNF that is none."""
    _check_size(text)
    try:
        return from_lark(any_to_lark(text))
    except Exception as error:  # the converter raises what it likes
        raise GrammarError(_cut(str(error))) from None


def from_regex(pattern: str) -> str:
    """The whole answer matches it: the syntax of Rust's regex crate."""
    return str(LLMatcher.grammar_from_regex(pattern))


def from_choice(choices: Sequence[str]) -> str:
    """The answer is one of them."""
    return from_lark(
        "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choices)
    )


def _one(kind: str, what: Any) -> str:
    return json.dumps({"grammars": [{kind: what}]}, ensure_ascii=False)


def combine(lark: str, parts: dict[str, str]) -> str:
    """A Lark grammar whose rules name other grammars, as @name; those are of one part each."""
    grammars: list[dict[str, Any]] = [{"name": "main", "lark_grammar": lark}]
    for name, grammar in parts.items():
        (part,) = json.loads(grammar)["grammars"]
        grammars.append(part | {"name": name})
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


# ---- compiling it ----


class Vocabulary:
    """A model's tokens as llguidance needs them. Making one takes most of a second, and the GIL, for
    150,000 tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.n_tokens = tokenizer.n_tokens
        tokens, ends = TokenizerWrapper(_Tokens(tokenizer)), list(tokenizer.eos_ids)
        self._tokens = LLTokenizer(tokens, n_vocab=tokenizer.n_tokens, eos_token=ends)

    @classmethod
    def read(cls, path: str) -> Vocabulary | None:
        """Of a model file; None if it lacks a tokenizer or an end token."""
        model = Model(path, header_only=True)
        tokenizer_json = model.section(const.SectionId.TOKENIZER)
        tokenizer = Tokenizer(tokenizer_json, model.token_bytes, model.metadata)
        return cls(tokenizer) if tokenizer_json and tokenizer.eos_ids else None

    def compile(self, grammar: str) -> LLMatcher:
        """Its start. GrammarError if it cannot be; releases the GIL."""
        matcher = LLMatcher(self._tokens, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarError(_cut(matcher.get_error()))
        return matcher

    def check(self, grammar: str) -> str:
        """Compiles it and looks at the first token: why it cannot be used, "" if it can."""
        try:
            matcher = self.compile(grammar)
        except GrammarError as error:
            return str(error)
        can_begin, fault = any(matcher.compute_bitmask()), _cut(matcher.get_error())
        return fault if can_begin and "NoExtension" not in fault else "no text matches it"


class _Tokens:
    """What llguidance asks of a tokenizer. It encodes what a grammar leaves no choice in, which is to
    come in the tokens that the model knows it by."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.n_tokens)
        self.eos_token_id = tokenizer.eos_ids[0]
        self.tokens = [tokenizer.token_bytes(id) for id in ids]
        self.special_token_ids = [id for id in ids if tokenizer.is_special(id)]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_bos=False)


def _check_size(text: str) -> None:
    if len(text) > MAX_CHARS:
        raise GrammarError(f"it has {len(text)} characters, at most {MAX_CHARS} are allowed")


def _cut(message: str) -> str:
    text = message.removesuffix("\n<non-verbose/>").strip()
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "..."


# ---- checking it ----


class GrammarChecker:
    """Says whether the worker will be able to compile a grammar, without letting it take the front
    end's time or life."""

    def __init__(self, model: str | Path) -> None:
        """The model's file stays open: another may take its name before the process starts."""
        fd = os.open(model, os.O_RDONLY)
        self._close_file = weakref.finalize(self, os.close, fd)
        self._jail = Jail(
            "cflow.engine.text.grammar_checker", f"/proc/self/fd/{fd}".encode(), (fd,)
        )
        self._pool = ThreadPoolExecutor(1, "grammar")
        self._look = lru_cache(_KNOWN)(self._ask)

    async def make(self, maker: Callable[[T], str], what: T) -> str:
        """The grammar maker(what). GrammarError says why it cannot be used."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._make, maker, what)

    def _make(self, maker: Callable[[T], str], what: T) -> str:
        grammar = maker(what)
        _check_size(grammar)
        if fault := self._look(grammar):
            raise GrammarError(fault)
        return grammar

    def _ask(self, grammar: str) -> str:
        fault = self._jail.run(grammar.encode(errors="replace"))
        if fault is None:  # another time it may be quicker: not remembered
            raise GrammarError(f"compiling it took more than {TIME_S:g} s or too much memory")
        return fault.decode()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)  # none of these starts the jail again
        self._jail.close()
        self._close_file()
