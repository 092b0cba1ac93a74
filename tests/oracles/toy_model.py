"""A language model without arithmetic: the next token is a hash of all tokens before it.

ToyContext stands in for native.Context. Its KV memory holds tokens, and every row reads its whole
history back through the block table, so a block shared, copied, freed or cleared wrongly changes
the answer or raises. `continuation` gives the right answer without any KV memory.
"""

import threading
import time
from collections.abc import Sequence
from hashlib import blake2b

from cflow.engine.base.errors import EngineError
from cflow.engine.base.messages import SamplingParams
from cflow.engine.base.native_types import (
    Choice,
    Pick,
    Row,
    RowUsage,
    Score,
    StepResult,
    TokenBytes,
)
from cflow.engine.native import Floats
from cflow.engine.text.grammar import Vocabulary

EOS = 256
N_TOKENS = 257
BLOCK = 32
LOGITS, SCORE = 1, 2
EINVAL, NUMERIC, EIO = -1, -7, -3

# Tokens that affect the step they are in.
RAISES, NOT_FINITE, HANGS = 1, 2, 3
NO_EXPERT = 4  # needs an expert that cannot be read while is_disk_broken
REPEATS = 5  # starts a text that mostly repeats the token of 20 positions before


class ToyTokenizer:
    """One token a byte; the part of cflow.engine.text.tokenizer.Tokenizer that grammars use."""

    n_tokens = N_TOKENS
    eos_ids = (EOS,)

    def encode(self, text: str, add_bos: bool = True, begins: bool = True) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token: int) -> bytes:
        return TOKEN_BYTES[token]

    def is_special(self, token: int) -> bool:
        return TOKEN_BYTES.is_special(token)


def toy_vocabulary() -> Vocabulary:
    return Vocabulary(ToyTokenizer())  # type: ignore[arg-type]


TOKEN_BYTES = TokenBytes([bytes([i]) for i in range(256)] + [b"<eos>"], bytes(256) + b"\1")


def digest(*values: object) -> int:
    return int.from_bytes(blake2b(repr(values).encode(), digest_size=8).digest(), "little")


def next_token(history: Sequence[int], seed: int, choice: int, index: int) -> int:
    """A letter, or occasionally the end token."""
    value = digest(tuple(history), seed, choice, index)
    if history[0] == REPEATS and len(history) > 20 and value % 8:
        return history[-20]
    return EOS if value % 40 == 0 else ord("a") + value // 40 % 26


def logprob(history: Sequence[int], target: int) -> float:
    return -1 - digest(tuple(history), target) % 1000 / 100


def continuation(prompt: Sequence[int], sampling: SamplingParams, choice: int = 0) -> list[int]:
    """The tokens of an answer, including the end token."""
    history = [seen(token, sampling.n_experts) for token in prompt]
    answer: list[int] = []
    while len(answer) < sampling.max_tokens and answer[-1:] != [EOS]:
        answer.append(next_token(history, sampling.seed, choice, len(answer)))
        history.append(seen(answer[-1], sampling.n_experts))
    return answer


def seen(token: int, n_experts: int) -> int:
    """The value that KV memory stores for a token."""
    return token + 1000 * n_experts


class ToyContext:
    def __init__(self, n_blocks: int, *, step_s: float = 0.0) -> None:
        self.step_s = step_s
        self.stage_count = 0
        self.read_bytes = 0
        self.n_rows: list[int] = []  # of each step so far
        self.is_disk_broken = True
        self._memory: list[list[int | None]] = [[None] * BLOCK for _ in range(n_blocks)]
        self._tables: dict[int, list[int]] = {}
        self._histories: dict[int, tuple[int, ...]] = {}
        self._cancelled = threading.Event()

    def bind(self, sequence: int, blocks: Sequence[int]) -> None:
        self._tables[sequence] = list(blocks)

    def copy_block(self, source: int, target: int) -> None:
        self._memory[target] = list(self._memory[source])

    def clear_block(self, block: int) -> None:
        self._memory[block] = [None] * BLOCK

    def cancel(self) -> None:
        self._cancelled.set()

    def value(self, name: str, row: int) -> Floats:
        raise NotImplementedError

    def step(self, rows: Sequence[Row]) -> StepResult:
        tokens = {row.token for row in rows}
        if RAISES in tokens:
            raise RuntimeError("a poisoned token")
        if HANGS in tokens:
            time.sleep(3600)
        self._cancelled.clear()
        self._histories = {}
        if self._cancelled.wait(self.step_s):
            raise EngineError("cancelled", "the step was cancelled")
        scores = [score for i, row in enumerate(rows) if (score := self._run(i, row))]
        self.stage_count += 1
        self.read_bytes += 1000
        self.n_rows.append(len(rows))
        usage = [RowUsage(row.position, 1, 2, 4096, 1000) for row in rows]
        return StepResult(self._status(rows), scores, usage)

    def _status(self, rows: Sequence[Row]) -> list[int]:
        """Status by row. A row that lacks an expert fails later rows of its sequence and spoils their memory."""
        status, spoilt = [], set()
        for i, row in enumerate(rows):
            if row.token == NO_EXPERT and self.is_disk_broken:
                spoilt.add(row.sequence)
            failed = EIO if row.sequence in spoilt else NUMERIC if row.token == NOT_FINITE else 0
            status.append(failed)
            if failed:
                self._histories.pop(i, None)
                table = self._tables[row.sequence]
                self._memory[table[row.position // BLOCK]][row.position % BLOCK] = -1
        return status

    def row_error(self, row: int) -> str:
        return "layer 3, expert 17: the file ends inside it" if self.is_disk_broken else ""

    def _run(self, i: int, row: Row) -> Score | None:
        table = self._tables[row.sequence]
        self._memory[table[row.position // BLOCK]][row.position % BLOCK] = seen(
            row.token, row.n_experts
        )
        history = tuple(
            token
            for p in range(row.position + 1)
            if (token := self._memory[table[p // BLOCK]][p % BLOCK]) is not None
        )
        assert len(history) == row.position + 1, f"{row}: reads a position nobody wrote"
        if row.flags & LOGITS:
            self._histories[i] = history
        if not row.flags & SCORE:
            return None
        return Score(row.target, logprob(history, row.target), 0, ((7, -0.5),) * row.n_top)

    def sample(self, picks: Sequence[Pick]) -> list[Choice]:
        return [self._choose(pick) for pick in picks]

    def _choose(self, pick: Pick) -> Choice:
        history = self._histories[pick.row]
        token = next_token(history, pick.seed, pick.choice, pick.index)
        bias: dict[int, float] = {}
        if pick.bias_ids is not None and pick.bias is not None:
            bias = dict(zip(pick.bias_ids.tolist(), pick.bias.tolist(), strict=True))
            token = max(bias, key=bias.__getitem__) if max(bias.values()) >= 100 else token
            if bias.get(token, 0) <= -100:
                token = ord("-")
        if pick.mask is not None:
            bits = [i for i in range(N_TOKENS) if pick.mask[i // 32] >> (i % 32) & 1]
            allowed = [i for i in bits if bias.get(i, 0) > -100]
            if not allowed:
                return Choice(EINVAL, -1, None)
            if token not in allowed:
                token = allowed[token * 7919 % len(allowed)]
        score = Score(token, logprob(history, token), 0, ()) if pick.n_top >= 0 else None
        return Choice(0, token, score)
