"""Detokenizing: pieces of text equal the whole decoded at once."""

from hypothesis import given
from hypothesis import strategies as st

from cflow.engine.base.native_types import TokenBytes
from cflow.engine.text.detokenizer import Detokenizer

BYTES = TokenBytes([bytes([i]) for i in range(256)], bytes(256))


def pieces(tokens: list[bytes]) -> list[str]:
    table = TokenBytes(tokens, bytes(len(tokens)))
    detokenizer = Detokenizer(table)
    return [*(detokenizer.push(i) for i in range(len(tokens))), detokenizer.flush()]


def test_half_characters_wait_for_their_rest() -> None:
    cat = "😸".encode()
    assert pieces([b"a" + cat[:2], cat[2:] + b"b"]) == ["a", "😸b", ""]


def test_a_token_with_one_character_and_half_of_another() -> None:
    first, second = "漢".encode(), "字".encode()
    assert pieces([first + second[:1], second[1:2], second[2:]]) == ["漢", "", "字", ""]


def test_an_unfinished_character_comes_out_as_a_replacement_at_the_end() -> None:
    assert pieces([b"ok", "é".encode()[:1]]) == ["ok", "", "\ufffd"]


def test_special_tokens_and_unknown_ids_have_no_text() -> None:
    detokenizer = Detokenizer(TokenBytes([b"<s>", b"a"], b"\1\0"))
    assert [detokenizer.push(i) for i in (0, 1, 2, 10**6)] == ["", "a", "", ""]
    assert detokenizer.push(0, show_special=True) == "<s>"


@given(st.binary(max_size=40))
def test_joined_pieces_equal_the_whole_byte_by_byte(data: bytes) -> None:
    detokenizer = Detokenizer(BYTES)
    shown = "".join(map(detokenizer.push, data)) + detokenizer.flush()
    assert shown == data.decode(errors="replace")


broken = st.lists(
    st.one_of(st.binary(max_size=5), st.text(max_size=3).map(str.encode)), max_size=12
)


@given(broken)
def test_joined_pieces_equal_the_whole_for_tokens_of_any_bytes(tokens: list[bytes]) -> None:
    assert "".join(pieces(tokens)) == b"".join(tokens).decode(errors="replace")


@given(st.text(), st.data())
def test_valid_text_never_shows_a_replacement(text: str, data: st.DataObject) -> None:
    encoded = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)), max_size=8)))
    tokens = [encoded[a:b] for a, b in zip([0, *cuts], [*cuts, len(encoded)], strict=True)]
    shown = pieces(tokens)
    assert "".join(shown) == text
    assert sum(piece.count("\ufffd") for piece in shown) == text.count("\ufffd")
