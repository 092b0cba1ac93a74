"""How an answer ends, and what of it is shown."""

import pytest

from cflow.engine.base.messages import Finish, SamplingParams
from cflow.engine.base.native_types import TokenBytes
from cflow.engine.worker.transcript import Transcript
from oracles.toy_model import EOS, TOKEN_BYTES


def say(
    text: str | list[int],
    params: SamplingParams,
    *,
    eos_ids: tuple[int, ...] = (EOS,),
    table: TokenBytes = TOKEN_BYTES,
) -> tuple[str, Finish | None, int]:
    """The text shown, how it finished, and after how many tokens."""
    transcript = Transcript(params, table, eos_ids, params.max_tokens)
    tokens = list(text.encode()) if isinstance(text, str) else text
    shown = ""
    for n, token in enumerate(tokens, 1):
        piece, finish = transcript.push(token)
        shown += piece
        if finish is not None:
            return shown, finish, n
    return shown, None, len(tokens)


LONG = SamplingParams(max_tokens=100)


@pytest.mark.parametrize("eos", [65, 66, EOS])
def test_every_end_token_ends_the_answer_without_showing(eos: int) -> None:
    assert say([104, 105, eos, 99], LONG, eos_ids=(65, 66, EOS)) == ("hi", Finish("stop"), 3)


def test_end_tokens_can_be_ignored() -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    assert say([104, EOS, 105, EOS], params) == ("hi", Finish("length"), 4)


def test_a_stop_token_is_named() -> None:
    params = SamplingParams(max_tokens=9, stop_token_ids=(66,))
    assert say("aBc", params) == ("a", Finish("stop", 66), 2)


def test_a_stop_string_is_named_and_not_shown() -> None:
    params = SamplingParams(max_tokens=50, stop=("xx", "END"))
    assert say("the END is", params) == ("the ", Finish("stop", "END"), 7)


def test_stops_are_shown_where_asked_for() -> None:
    params = SamplingParams(max_tokens=50, stop=("END",), include_stop=True)
    assert say("an END.", params) == ("an END", Finish("stop", "END"), 6)
    assert say([97, EOS], params) == ("a<eos>", Finish("stop"), 2)


def test_the_last_token_allowed_flushes_what_is_held() -> None:
    params = SamplingParams(max_tokens=5, stop=("lo☃never",))
    assert say("hello world", params) == ("hello", Finish("length"), 5)
    params = SamplingParams(max_tokens=3)
    assert say("a漢", params) == ("a\ufffd", Finish("length"), 3)


def test_an_end_token_flushes_what_is_held() -> None:
    params = SamplingParams(max_tokens=50, stop=("☃never",))
    half = "☃".encode()[:2]
    assert say([104, *half, EOS], params) == ("h\ufffd", Finish("stop"), 4)


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    params = SamplingParams(max_tokens=20, min_tokens=4, stop=("ab",))
    assert say("ababxab", params) == ("ababx", Finish("stop", "ab"), 7)
