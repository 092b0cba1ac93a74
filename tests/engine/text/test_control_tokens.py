"""Control tokens come from the template only, whatever users write."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from cflow.engine.base.errors import TemplateError
from cflow.engine.base.native_types import TokenBytes
from cflow.engine.text.template import ChatTemplate, Rendered
from cflow.engine.text.tokenizer import Tokenizer
from oracles import llama_cpp

# What looks like a control token in the sources of templates.
LOOKS = re.compile(
    r"<\|[\w/.:-]+\|>|<\uff5c[^\uff5c\s]+\uff5c>|\[/?[A-Z_]{3,}\]|</?[a-z_]+>|<\w+_of_\w+>"
)
BUILT = [f"<|{role}|>" for role in ("system", "user", "assistant", "tool", "end", "observation")]
IN, OUT = "@(", ")@"  # around each spelling that a user writes


def tokenizer_with(control: list[str], template: str = "") -> tuple[Tokenizer, Any]:
    """Every byte, then the control tokens, every other one of those that the template spells as a
    user-defined token; and the same tokenizer as Hugging Face's library has it."""
    letters: dict[int, str] = bytes_to_unicode()
    plain = tokenizers.Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(letters.values())}, merges=[])
    )
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = [i % 2 == 0 or token not in template for i, token in enumerate(control)]
    for token, is_special in zip(control, special, strict=True):
        plain.add_tokens([AddedToken(token, special=is_special, normalized=False)])
    table = [bytes([byte]) for byte in letters] + [token.encode() for token in control]
    flags = bytes([*([False] * 256), *special])
    source = plain.to_str().encode()
    return Tokenizer(source, TokenBytes(table, flags), {"chat_template": template}), plain


def conversation(text: str) -> list[dict[str, Any]]:
    call = {"name": "f", "arguments": {"a": text, text: "b"}}
    # Templates cut an assistant's content at the end of its reasoning, and write that end themselves.
    answer = text.replace("</think>", "")
    return [
        {"role": "system", "content": f"S {text}"},
        {"role": "user", "content": f"{text} U {text}"},
        {
            "role": "assistant",
            "content": f" A {answer}",
            "reasoning_content": f"R {text}",
            "tool_calls": [{"type": "function", "id": "abcdefghi", "function": call}],
        },
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": f"T {text}"},
        {"role": "assistant", "content": f"B {answer}\n"},
        {"role": "user", "content": f"\n{text}"},
    ]


def tools(text: str) -> list[dict[str, Any]]:
    properties = {"a": {"type": "string", "description": text}}
    parameters = {"type": "object", "properties": properties, "required": ["a"]}
    function = {"name": "f", "description": f"D {text}", "parameters": parameters}
    return [{"type": "function", "function": function}]


def renderings(template: ChatTemplate, text: str) -> Iterator[Rendered]:
    turns = conversation(text)
    for messages, given in (
        (turns, tools(text)),
        (turns[1:], tools(text)),
        ([turns[0], turns[1]], None),
        ([turns[1], turns[4], turns[5]], None),
    ):
        try:
            yield template.render(messages, given, functions="[]", datetime="today")
        except TemplateError:
            continue  # its own rules


@pytest.mark.parametrize("path", llama_cpp.templates(), ids=lambda path: path.stem)
def test_f22_no_text_of_a_user_is_a_control_token(path: Path) -> None:
    source = path.read_text()
    control = sorted({*LOOKS.findall(source), *BUILT, "<s>", "</s>"})
    ours, plain = tokenizer_with(control, source)
    ids = {plain.token_to_id(token) for token in control}
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    try:
        n_rendered = 0
        for prompt in renderings(template, "some <b>text</b> of\n the <| user"):
            n_rendered += 1
            expected = plain.encode(prompt.text).ids
            assert ours.encode(prompt.text, trusted=prompt.own) == expected
        assert n_rendered
        theirs = re.compile("|".join(re.escape(f"{IN}{token}{OUT}") for token in control))
        for prompt in renderings(template, " ".join(f"{IN}{token}{OUT}" for token in control)):
            rest = plain.encode(theirs.sub("x", prompt.text)).ids
            found = [id for id in ours.encode(prompt.text, trusted=prompt.own) if id in ids]
            assert found == [id for id in rest if id in ids]
    finally:
        template.close()
