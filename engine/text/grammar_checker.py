"""The process that tries grammars out: `python -m cflow.engine.text.grammar_checker`.

A grammar comes with a request. Compiling one of a few hundred kilobytes can take a minute, so it is
done in a jail first. The first frame is the model file's path; a job is a grammar, its result what
is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable

from cflow.engine.text.grammar import TIME_S, Vocabulary
from cflow.engine.text.jail import answer_jobs


def prepare(path: bytes) -> Callable[[bytes], bytes]:
    vocabulary = Vocabulary.read(path.decode())

    def check(grammar: bytes) -> bytes:
        if vocabulary is None:
            return b"this model has no tokenizer with an end token"
        return vocabulary.check(grammar.decode()).encode()

    return check


if __name__ == "__main__":
    answer_jobs(prepare, TIME_S)
