"""Grammars that constrain answers: made, bounded and compiled.

A grammar is the text that llguidance reads: {"grammars": [...]}. The front end makes it from a request
and checks it in a jail (grammar_checker.py), because compiling may take long; the worker compiles it
again (constraint.py).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from cflow.engine.base.model_header import ModelHeader, encode_header
from cflow.engine.text.jail import Jail
from cflow.engine.text.tokenizer import Tokenizer

MAX_CHARS = 128 << 10  # of a grammar
MAX_MESSAGE = 300  # characters of an error of llguidance that are passed on
TIME_S = 2.0  # to compile one; usual ones take milliseconds
_SPACE = r"[ \n\r\t]{1,20}"
_KNOWN = 128  # grammars whose result is cached
# The words of JSON in any order. Twenty digits hold every 64-bit number.
_WORDS = r"""
start: (NUMBER? word)* NUMBER?
word: STRING | MARK
STRING: /"([^"\\]|\\.)*"/
NUMBER: /-?[0-9]{1,20}(\.[0-9]{1,20})?([eE][+\-]?[0-9]{1,3})?/
MARK: /[{}\[\]:, \t\r\n]|true|false|null/
"""

# At most half of llguidance's defaults, so that the mask of one token takes milliseconds.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_items_in_row=1_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)

_NO_RANGE = "Failed to generate regex for"  # llguidance, for bounds beyond 64-bit integers

T = TypeVar("T")


class GrammarError(Exception):
    """A grammar that cannot be used; the message is for the person who wrote it."""


# ---- making one ----


def from_json_schema(schema: dict[str, Any] | bool) -> str:
    """Answers that are JSON and match the schema. White space between parts is bounded: small models
    may not stop writing it. An answer may match several parts of a oneOf."""
    rules = schema if isinstance(schema, dict) else {} if schema else {"not": {}}
    options = {"whitespace_pattern": _SPACE, "coerce_one_of": True}
    if isinstance(own := rules.get("x-guidance"), dict):
        options |= own
    return _one("json_schema", rules | {"x-guidance": options})


def with_short_numbers(grammar: str) -> str | None:
    """A grammar in which numbers end, and any JSON stands for what matches a schema; None if there is
    no schema. Together with the grammar itself, it bounds numbers: small models may not stop writing
    digits, and llguidance cannot bound them in schemas without changing what these mean."""
    whole = json.loads(grammar)
    with_schema = [part for part in whole["grammars"] if part.get("json_schema") is not None]
    for part in with_schema:
        del part["json_schema"]
        part["lark_grammar"] = _WORDS
    return json.dumps(whole, ensure_ascii=False) if with_schema else None


def from_lark(lark: str) -> str:
    return _one("lark_grammar", lark)


def from_text(text: str) -> str:
    """A grammar from Lark, or from llama.cpp's GBNF. Raises GrammarError for invalid GBNF."""
    _check_size(text)
    try:
        return from_lark(any_to_lark(text))
    except Exception as error:  # the converter raises anything
        raise GrammarError(_cut(str(error))) from None


def from_regex(pattern: str) -> str:
    """Answers that match the pattern as a whole, in the syntax of Rust's regex crate."""
    return str(LLMatcher.grammar_from_regex(pattern))


def from_choice(choices: Sequence[str]) -> str:
    """Answers that are one of the choices."""
    return from_lark(
        "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choices)
    )


def _one(kind: str, what: Any) -> str:
    return json.dumps({"grammars": [{kind: what}]}, ensure_ascii=False)


def combine(lark: str, parts: dict[str, str]) -> str:
    """A Lark grammar that refers to other grammars as @name. parts: these, by name."""
    grammars: list[dict[str, Any]] = [{"name": "main", "lark_grammar": lark}]
    for name, grammar in parts.items():
        (part,) = json.loads(grammar)["grammars"]
        grammars.append(part | {"name": name})
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


# ---- compiling it ----


class Vocabulary:
    """A model's tokens in llguidance's form. Making one takes most of a second for 150,000 tokens, and
    holds the GIL. may_be_number: tokens behind which a number in JSON may go on."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.n_tokens = tokenizer.n_tokens
        known, ends = _Tokens(tokenizer), list(tokenizer.eos_ids)
        self.may_be_number = {
            id for id, raw in enumerate(known.tokens) if raw and raw[-1] in b"0123456789.eE+-"
        }
        self._tokens = LLTokenizer(
            TokenizerWrapper(known), n_vocab=tokenizer.n_tokens, eos_token=ends
        )

    @classmethod
    def of(cls, header: ModelHeader) -> Vocabulary | None:
        """The vocabulary of a model; None if it lacks a tokenizer or an end token."""
        tokenizer = Tokenizer.of(header)
        return cls(tokenizer) if header.tokenizer_json and tokenizer.eos_ids else None

    def compile(self, grammar: str) -> LLMatcher:
        """A matcher at the start of the grammar. Raises GrammarError; releases the GIL."""
        matcher = LLMatcher(self._tokens, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarError(_cut(matcher.get_error()))
        return matcher

    def check(self, grammar: str) -> str:
        """Compile a grammar and its first mask; return why it cannot be used, "" if it can."""
        try:
            matcher = self.compile(grammar)
        except GrammarError as error:
            return str(error)
        can_begin, fault = any(matcher.compute_bitmask()), _cut(matcher.get_error())
        return fault if can_begin and "NoExtension" not in fault else "no text matches it"


class _Tokens:
    """The interface that llguidance expects of a tokenizer. Text that a grammar leaves no choice in is
    encoded with it, so that the model sees its usual tokens."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.n_tokens)
        self.eos_token_id = tokenizer.eos_ids[0]
        self.tokens = [tokenizer.token_bytes(id) for id in ids]
        self.special_token_ids = [id for id in ids if tokenizer.is_special(id)]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_bos=False, begins=False)


def _check_size(text: str) -> None:
    if len(text) > MAX_CHARS:
        raise GrammarError(f"it has {len(text)} characters, at most {MAX_CHARS} are allowed")


def _cut(message: str) -> str:
    text = message.removesuffix("\n<non-verbose/>").strip()
    if text.startswith(_NO_RANGE):
        text = text.replace(_NO_RANGE, "no grammar for the", 1)
        text += "; bounds of numbers must be within +-1e17, or be left out"
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "..."


# ---- checking it ----


class GrammarChecker:
    """Checks in a jail whether the worker will be able to compile a grammar.

    A grammar of a few hundred kilobytes can take a minute to compile, which must not block or kill
    the front end.
    """

    def __init__(self, header: ModelHeader) -> None:
        self._jail = Jail("cflow.engine.text.grammar_checker", encode_header(header))
        self._pool = ThreadPoolExecutor(1, "grammar")
        self._look = lru_cache(_KNOWN)(self._ask)

    async def make(self, maker: Callable[[T], str], what: T) -> str:
        """The grammar maker(what), checked. Raises GrammarError."""
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
        if fault is None:  # it may succeed another time, so it is not cached
            raise GrammarError(f"compiling it took more than {TIME_S:g} s or too much memory")
        return fault.decode()

    def close(self) -> None:
        # A queued check would start the jail again.
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._jail.close()
