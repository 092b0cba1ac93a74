"""Chat messages to a prompt, through the model's own template."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import msgspec

from cflow.engine.errors import TemplateError
from cflow.engine.renderer import TIME_S, Job, Result, read_frame, write_frame

COMMAND = (sys.executable, "-P", "-m", "cflow.engine.renderer")


class ChatTemplate:
    """Renders in a process of its own (renderer.py), started at the first use and again after a
    template has cost it its life. Any thread may call render; one at a time gets through."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """special_tokens: variables such as bos_token and eos_token."""
        self._source = source
        self._special_tokens = dict(special_tokens or {})
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None  # ends the process, also with this object

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt. TemplateError says what the template did not like."""
        everything = {
            **self._special_tokens,
            "documents": None,
            **variables,
            "messages": [_normalise(message) for message in messages],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        with self._lock:
            result = self._run(everything)
        if result.error is not None:
            raise TemplateError(f"the chat template failed: {result.error}")
        return result.text

    def close(self) -> None:
        """Ends the process; it would end by itself when ours does."""
        with self._lock:
            self._stop()

    def _run(self, variables: dict[str, Any]) -> Result:
        if self._process is not None and self._process.poll() is not None:
            self._stop()  # somebody killed it between two jobs; the template is not to blame
        source = self._source if self._process is None else None
        try:
            job = msgspec.msgpack.encode(Job(source, variables))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            return Result("", f"the messages cannot be passed to it: {error}")
        reply = _exchange(self._start(), job)
        if reply is None:
            self._stop()
            return Result("", f"it took more than {TIME_S:g} s or too much memory")
        return msgspec.msgpack.decode(reply, type=Result)

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._end = weakref.finalize(self, _end, self._process)
        return self._process

    def _stop(self) -> None:
        self._end()
        self._process = None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _exchange(process: subprocess.Popen[bytes], body: bytes) -> bytes | None:
    """None: the process has ended."""
    stdin, stdout = _pipe(process.stdin), _pipe(process.stdout)
    try:
        write_frame(stdin, body)
    except BrokenPipeError:
        return None
    return read_frame(stdout)


def _pipe(stream: IO[bytes] | None) -> Any:
    assert stream is not None
    return stream


def _normalise(message: Mapping[str, Any]) -> dict[str, Any]:
    """What templates count on: a role they know, content that is text, call arguments as objects."""
    normal = dict(message)
    if normal.get("role") == "developer":
        normal["role"] = "system"
    if normal.get("content") is None:
        normal["content"] = ""
    if normal.get("tool_calls"):
        normal["tool_calls"] = [_normalise_call(call) for call in normal["tool_calls"]]
    return normal


def _normalise_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        function["arguments"] = _parse_object(arguments)
    return {**call, "function": function}


def _parse_object(text: str) -> dict[str, Any] | str:
    """Arguments that are no JSON object, as a model may write them, stay as they are."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
