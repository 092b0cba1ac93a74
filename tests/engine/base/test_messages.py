"""What crosses the socket: cut anywhere, it arrives whole."""

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cflow.engine.base.messages import (
    MAX_FRAME_BYTES,
    Cancel,
    Delta,
    Down,
    Failed,
    Finish,
    FrameSplitter,
    Heartbeat,
    Hello,
    Logprob,
    Progress,
    SamplingParams,
    Stats,
    Step,
    Submit,
    Up,
    decode_down,
    decode_up,
    encode_frame,
)

SAMPLING = SamplingParams(max_tokens=5, logit_bias={3: -1.5}, stop=("a", "b"), n_logprobs=2)
LOGPROBS = (Logprob(7, -0.25, 0, ((7, -0.25), (8, -2.0))),)
DOWN: list[Down] = [
    Hello(1, {"model": "m.cflow", "threads": None, "max_step_ms": 250.0}, "d1"),
    Submit(1, (1, 2, 3), 2, SAMPLING, "key", -1),
    Cancel(1),
]
UP: list[Up] = [
    Step((Delta(1, 0, (7,), "é", LOGPROBS, Finish("stop", "b"), 0, (None, *LOGPROBS)),), ()),
    Step((), (Progress(1, 512),)),
    Failed(1, "cancelled", "gone"),
    Stats(steps=3, step_s=0.5),
    Heartbeat(9, True),
]


@pytest.mark.parametrize("message", DOWN, ids=lambda m: type(m).__name__)
def test_messages_down_come_back_equal(message: Down) -> None:
    assert decode_down(encode_frame(message)[4:]) == message


@pytest.mark.parametrize("message", UP, ids=lambda m: type(m).__name__)
def test_messages_up_come_back_equal(message: Up) -> None:
    assert decode_up(encode_frame(message)[4:]) == message


@given(st.data())
def test_frames_are_found_wherever_the_stream_is_cut(data: st.DataObject) -> None:
    stream = b"".join(map(encode_frame, UP))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    splitter = FrameSplitter()
    found = [
        decode_up(body)
        for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)
        for body in splitter.feed(stream[a:b])
    ]
    assert found == UP


def test_a_length_that_no_sender_makes_is_refused() -> None:
    with pytest.raises(ValueError, match="a frame of"):
        list(FrameSplitter().feed(struct.pack("<I", MAX_FRAME_BYTES + 1)))


@pytest.mark.parametrize("value", [{"type": "unknown"}, 7, {"type": "cancel"}])
def test_what_is_no_message_is_refused(value: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_down(msgspec.msgpack.encode(value))
