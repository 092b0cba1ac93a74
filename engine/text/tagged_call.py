"""Calls in tags, such as Qwen3-Coder's: a parser, and a grammar.

A call has its tool's name, then a key and a value for each argument, between texts that Tags gives.
Values are plain text; the parser turns them into JSON by the types in the tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from cflow.engine.text.grammar import GrammarError, from_json_schema

FUNCTION, PARAMETER = "<function=", "<parameter="
_ANY = r"(.|\n)*"
_END_ANCHOR = re.compile(r"(?<!\\)(?:\\\\)*(\$)\Z")  # a $ at the end that is not escaped
_BOUNDS = {"enum", "const", "pattern", "format", "minLength", "maxLength"}
_NAMES = {"True": "true", "False": "false", "None": "null"}  # models write both


@dataclass(frozen=True, slots=True)
class Tags:
    """The texts of a tagged call, as a template writes them.

    head NAME name_end, for each argument key KEY infix VALUE value_end, and end. text_infix: the
    infix of a string where it differs from those of other types.
    """

    head: str
    name_end: str
    key: str
    infix: str
    value_end: str
    end: str
    text_infix: str = ""

    def texts(self) -> tuple[str, ...]:
        return (
            *(self.head, self.name_end, self.key, self.infix),
            *(self.text_infix, self.value_end, self.end),
        )


QWEN = Tags(FUNCTION, ">\n", PARAMETER, ">\n", "\n</parameter>\n", "</function>")


class TaggedCall:
    """A tagged call that arrives in pieces and may turn out to be none.

    It has the methods of _Object in reply.py, which reads calls in JSON.
    """

    def __init__(self, tools: Mapping[str, Any], tags: Tags = QWEN) -> None:
        """tools: schemas of the arguments, by tool name."""
        self._tags = tags
        self._value_end = tags.value_end.strip()
        self.text = ""
        self.is_over = self.is_certain = False
        self._tools = tools
        self._is_wrong = False
        self._name: str | None = None
        self._key: str | None = None  # of the value that is being read
        self._keys: set[str] = set()
        self._at = self._searched = 0  # offsets: parsed up to, searched for _VALUE_END up to
        self._json = ""
        self._n_given = 0  # characters of _json that were given out

    def take(self, text: str) -> str:
        """Consume text; return what follows the call."""
        self.text += text
        while not (self.is_over or self._is_wrong) and self._read():
            pass
        if not (self.is_over or self._is_wrong):
            return ""
        self.text, rest = self.text[: self._at], self.text[self._at :]
        return rest

    def begin_call(self, tools: object) -> str | None:
        """The tool's name, once the text is certain to be a call."""
        self.is_certain = bool(self._keys) or self._key is not None or self.is_over
        return self._name if self.is_certain else None

    def is_no_call(self, tools: object) -> bool:
        return self._is_wrong

    def arguments(self) -> str:
        """The next piece of the arguments, in JSON."""
        piece, self._n_given = self._json[self._n_given :], len(self._json)
        return piece

    def call(self, tools: object) -> tuple[str, str] | None:
        """Name and arguments, in JSON, if the call is complete."""
        return (self._name, self._json) if self._name and self.is_over else None

    # ---- each method parses text from _at on; False: it needs more, or the call is over or wrong ----

    def _read(self) -> bool:
        return self._read_tag() if self._key is None else self._read_value()

    def _read_tag(self) -> bool:
        tags, rest = self._tags, self.text[self._at :].lstrip()
        end = tags.end.strip()
        if self._name is not None and rest.startswith(end):
            self._json += "}" if self._keys else "{}"
            self.is_over = True
            self._go_to(len(self.text) - len(rest) + len(end))
            return False
        is_name = self._name is None
        begin = tags.head if is_name else tags.key.strip()
        ends = (tags.name_end,) if is_name else (tags.infix, tags.text_infix or tags.infix)
        tag = _tag(rest, begin, ends)
        if tag is None:
            is_ending = not is_name and end.startswith(rest)
            self._is_wrong = not (is_ending or _begins_tag(rest, begin, ends))
            return False
        if is_name:
            self._name = tag[0]
            self._is_wrong = tag[0] not in self._tools
        else:
            self._key = tag[0]
            self._is_wrong = tag[0] in self._keys
        self._go_to(len(self.text) - len(rest) + tag[1])
        return True

    def _read_value(self) -> bool:
        end = self.text.find(self._value_end, self._searched)
        if end < 0:
            self._searched = max(self._at, len(self.text) - len(self._value_end) + 1)
            return False
        value = self.text[self._at : end]
        if self._tags.infix.endswith("\n"):
            value = value.removeprefix("\n").removesuffix("\n")
        key, self._key = str(self._key), None
        properties = self._tools[str(self._name)].get("properties")
        kinds = _kinds(properties.get(key) if isinstance(properties, dict) else None)
        self._json += ", " if self._keys else "{"
        self._json += f"{_quote(key)}: {_as_json(value, kinds)}"
        self._keys.add(key)
        self._go_to(end + len(self._value_end))
        return True

    def _go_to(self, at: int) -> None:
        self._at = self._searched = at


def _tag(text: str, begin: str, ends: tuple[str, ...]) -> tuple[str, int] | None:
    """What stands between `begin` and the first of `ends`, and where that ends."""
    if not text.startswith(begin):
        return None
    for end in dict.fromkeys(ends):
        # White space between the words of an end is the model's choice.
        after = r"\s*".join(map(re.escape, end.split())) or r"(?=[\s<])"
        name = r"[^\n]*?" if end.split() else r"[^\s<]+"
        if found := re.compile(f"({name}){after}").match(text, len(begin)):
            return found[1], found.end()
    return None


def _begins_tag(text: str, begin: str, ends: tuple[str, ...]) -> bool:
    """Whether more text may complete this to a tag."""
    if not text.startswith(begin):
        return begin.startswith(text)
    line, newline, _ = text[len(begin) :].partition("\n")
    return not newline or any(words[:1] and words[0] in line for words in map(str.split, ends))


def _as_json(value: str, kinds: frozenset[str]) -> str:
    """A value in JSON: a string if the schema allows one or the value is no JSON, else unchanged."""
    if "string" in kinds and not (value == "null" and "null" in kinds):
        return _quote(value)
    value = _NAMES.get(value, value)
    try:
        msgspec.json.decode(value)
    except (msgspec.MsgspecError, RecursionError):
        return _quote(value)
    return value.strip()


def _kinds(schema: Any) -> frozenset[str]:
    """The JSON types that a schema allows; empty if the schema names none."""
    if not isinstance(schema, dict):
        return frozenset()
    named = schema.get("type")
    found = {kind for kind in (named, *_list(schema, "type")) if isinstance(kind, str)}
    found |= {"string" for value in _values(schema) if isinstance(value, str)}
    for one in (*_list(schema, "anyOf"), *_list(schema, "oneOf")):
        found |= _kinds(one)
    return frozenset(found)


def _values(schema: Mapping[str, Any]) -> list[Any]:
    return [schema["const"]] if "const" in schema else _list(schema, "enum")


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


# ---- the grammar ----


def rules_of(
    tool: str,
    name: str,
    schema: Mapping[str, Any],
    parts: dict[str, str],
    tags: Tags,
    spell: Callable[[str], str],
) -> tuple[str, list[str]]:
    """A call in Lark, and the rules that it refers to, whose names begin with `tool`.

    Grammars of values in JSON are added to parts. spell: writes a text in Lark. Arguments come in the
    schema's order. Raises GrammarError for a schema that cannot be followed.
    """
    call, rules = [spell(tags.head + name + tags.name_end)], []
    after, has_special = spell(tags.value_end), spell(tags.value_end) != _quote(tags.value_end)
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise GrammarError("properties must be an object")
    for i, (key, value) in enumerate(properties.items()):
        rule, infix = f"{tool}_{i}", tags.infix
        if "string" in _kinds(value):
            infix = tags.text_infix or infix
            if has_special:  # no text holds a special token, so any text ends there
                rules.append(f"{rule}: /{_text(value)}/ {after}")
            else:
                end = _in_slashes(re.escape(tags.value_end).replace("\\\n", "\n"))
                rules.append(f"{rule}[lazy]: /{_text(value)}{end}/")
        else:
            parts[f"{rule}_value"] = from_json_schema(
                value | definitions if isinstance(value, dict) else value
            )
            rules.append(f"{rule}: @{rule}_value {after}")
        one = spell(tags.key + key + infix) + f" {rule}"
        call.append(one if key in _list(schema, "required") else f"({one})?")
    return " ".join([*call, spell(tags.end)]), rules


def _text(schema: Mapping[str, Any]) -> str:
    """A regular expression for the strings that a schema allows, without the tag that ends them."""
    alternatives = [*_list(schema, "anyOf"), *_list(schema, "oneOf")]
    is_bounded = bool(schema.keys() & {"minLength", "maxLength"})
    if (
        "format" in schema
        or ("pattern" in schema and is_bounded)
        or any(isinstance(one, dict) and one.keys() & _BOUNDS for one in alternatives)
    ):
        raise GrammarError(
            "for this model, a string parameter can have only one of enum, const, pattern and length "
            "limits, no format, and none of these within anyOf or oneOf"
        )
    if values := _values(schema):
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        return "(" + "|".join(map(_in_slashes, map(re.escape, texts))) + ")"
    if isinstance(pattern := schema.get("pattern"), str):
        before = "" if pattern.startswith("^") else _ANY
        end = _END_ANCHOR.search(pattern)
        body = pattern[: end.start(1) if end else None].removeprefix("^")
        return f"{before}({_in_slashes(body)}){'' if end else _ANY}"
    least, most = schema.get("minLength"), schema.get("maxLength")
    if least is most is None:
        return _ANY
    if not all(isinstance(bound, int | None) for bound in (least, most)):
        raise GrammarError("minLength and maxLength must be integers")
    return rf"(.|\n){{{least or 0},{'' if most is None else most}}}"


def _in_slashes(pattern: str) -> str:
    """A pattern, escaped for the slashes around it in Lark."""
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL)
    return escaped.replace("\n", r"\n")


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
