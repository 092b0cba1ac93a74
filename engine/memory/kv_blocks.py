"""Who owns which KV block, and which blocks hold a prefix that another sequence may share."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from cflow.engine.native import const

BLOCK: int = const.CFLOW_KV_BLOCK  # positions in a block


def n_blocks_for(n_tokens: int) -> int:
    return -(-n_tokens // BLOCK)


def root_key(n_experts: int) -> bytes:
    """The key before a sequence's first block. Keys and values depend on the number of experts."""
    return n_experts.to_bytes(4, "little")


def block_key(parent: bytes, tokens: array[int]) -> bytes:
    """Names a full block by its tokens and all before it. Wide enough that nobody finds two prompts
    with one name, which would show one user's answer to another."""
    return blake2b(parent + tokens.tobytes(), digest_size=16).digest()


class BlockPool:
    """Reference-counted blocks 0 .. n_blocks - 1. A block with a key stays findable after its last
    owner has gone, until it is needed: the one unused for longest goes first."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._n_owners = [0] * n_blocks
        self._empty = list(range(n_blocks - 1, -1, -1))
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # keyed, no owner; longest unused first

    @property
    def n_free(self) -> int:
        return len(self._empty) + len(self._idle)

    @property
    def n_used(self) -> int:
        """Blocks with an owner."""
        return self.n_blocks - self.n_free

    def allocate(self) -> int | None:
        """A block for one owner, its old content forgotten but not cleared. None: all are owned."""
        if self._empty:
            block = self._empty.pop()
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
        else:
            return None
        self._n_owners[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more owner."""
        if not self._n_owners[block]:
            del self._idle[block]
        self._n_owners[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One owner fewer for each block of a sequence. Its end is forgotten before its beginning,
        which more prompts have in common."""
        for block in reversed(blocks):
            self._n_owners[block] -= 1
            if self._n_owners[block]:
                continue
            if block in self._key_of:
                self._idle[block] = None
            else:
                self._empty.append(block)

    def register(self, block: int, key: bytes) -> None:
        """Makes a full, computed block findable, unless another with its content is."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix; not yet shared."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def n_idle(self, blocks: Sequence[int]) -> int:
        """How many of them count as free until they are shared."""
        return sum(1 for block in blocks if not self._n_owners[block])
