"""Stop strings: nothing of them leaks, nothing else is lost or held."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cflow.engine.worker.stops import StopStrings


def run(
    stops: list[str], pieces: list[str], *, include_stop: bool = False
) -> tuple[str, str | None]:
    """What is shown in the end, and the stop string that matched."""
    matcher = StopStrings(stops, include_stop=include_stop)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.matched is not None:
            return shown, matcher.matched
    return shown + matcher.flush(), None


def expected(stops: list[str], text: str) -> tuple[str, str | None]:
    """By definition: the match that ends first, the longest of those."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("cut_1", range(9))
@pytest.mark.parametrize("cut_2", range(9))
def test_a_stop_string_is_found_across_any_two_cuts(cut_1: int, cut_2: int) -> None:
    text = "one STOP two"
    first, second = sorted((cut_1, cut_2))
    pieces = [text[:first], text[first:second], text[second:]]
    assert run(["STOP"], pieces) == ("one ", "STOP")


def test_only_a_true_prefix_is_held_back() -> None:
    matcher = StopStrings(["abcd", "xy"])
    assert matcher.push("--ab") == "--"
    assert matcher.push("c") == ""
    assert matcher.push("z") == "abcz"
    assert matcher.push("x") == ""
    assert matcher.push("a") == "x"
    assert matcher.flush() == "a"
    assert matcher.flush() == ""


def test_a_prefix_within_a_failed_prefix_is_still_held() -> None:
    matcher = StopStrings(["aab"])
    assert matcher.push("aaa") == "a"
    assert matcher.push("b") == ""
    assert matcher.matched == "aab"


def test_the_stop_string_can_be_shown() -> None:
    assert run(["ab"], ["xa", "by"], include_stop=True) == ("xab", "ab")


def test_without_stop_strings_nothing_is_held() -> None:
    assert StopStrings([]).push("any text") == "any text"


texts = st.text(alphabet="ab☃", max_size=30)


@given(
    stops=st.lists(st.text(alphabet="ab☃", min_size=1, max_size=5), min_size=1, max_size=4),
    pieces=st.lists(st.text(alphabet="ab☃", max_size=6), max_size=12),
)
def test_the_result_does_not_depend_on_how_the_text_is_cut(
    stops: list[str], pieces: list[str]
) -> None:
    assert run(stops, pieces) == expected(stops, "".join(pieces))


@given(
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4),
    text=st.text(alphabet="ab", max_size=30),
)
def test_what_is_held_could_become_a_stop_string(stops: list[str], text: str) -> None:
    matcher = StopStrings(stops)
    shown = matcher.push(text)
    if matcher.matched is None:
        held = matcher.flush()
        assert shown + held == text
        assert not held or any(stop.startswith(held) for stop in stops)
