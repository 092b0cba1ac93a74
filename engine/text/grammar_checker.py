"""The jail that checks grammars: `python -m cflow.engine.text.grammar_checker`.

The first frame is a ModelHeader. A job is a grammar, its result why it cannot be used, or "".
"""

from __future__ import annotations

from collections.abc import Callable

from cflow.engine.base.model_header import ModelHeader, decode_header
from cflow.engine.text.grammar import TIME_S, Vocabulary
from cflow.engine.text.jail import answer_jobs


def prepare(header: bytes) -> Callable[[bytes], bytes]:
    known = decode_header(header)
    assert isinstance(known, ModelHeader)
    vocabulary = Vocabulary.of(known)

    def check(grammar: bytes) -> bytes:
        if vocabulary is None:
            return b"this model has no tokenizer with an end token"
        return vocabulary.check(grammar.decode()).encode()

    return check


if __name__ == "__main__":
    answer_jobs(prepare, TIME_S)
