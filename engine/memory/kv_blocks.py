"""Which sequence owns which KV block, and which blocks hold a prefix that others can share."""

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
    """The parent key of a first block. Keys and values depend on the number of experts."""
    return n_experts.to_bytes(4, "little")


def block_key(parent: bytes, tokens: array[int]) -> bytes:
    """The key of a full block: a hash of its tokens and of all tokens before it. 128 bits, so that
    nobody can construct two prompts with one key and read another user's prefix."""
    return blake2b(parent + tokens.tobytes(), digest_size=16).digest()


class BlockPool:
    """Reference-counted blocks 0 .. n_blocks - 1. A block with a key can be found after its last
    owner releases it, until it is evicted: least recently used first."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._n_owners = [0] * n_blocks
        self._empty = list(range(n_blocks - 1, -1, -1))
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = (
            OrderedDict()
        )  # keyed, no owner; least recently used first

    @property
    def n_free(self) -> int:
        return len(self._empty) + len(self._idle)

    @property
    def n_used(self) -> int:
        """Blocks with an owner."""
        return self.n_blocks - self.n_free

    def allocate(self) -> int | None:
        """A block for one owner, not cleared; may evict an idle block. None: all are owned."""
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
        """Add an owner."""
        if not self._n_owners[block]:
            del self._idle[block]
        self._n_owners[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove an owner from each block of a sequence. Its last blocks will be evicted first,
        since more prompts share the first ones."""
        for block in reversed(blocks):
            self._n_owners[block] -= 1
            if self._n_owners[block]:
                continue
            if block in self._key_of:
                self._idle[block] = None
            else:
                self._empty.append(block)

    def register(self, block: int, key: bytes) -> None:
        """Make a full, computed block findable, unless a block with this key already is."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix. The caller has to share() them."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def n_idle(self, blocks: Sequence[int]) -> int:
        """How many of these blocks count as free until they are shared."""
        return sum(1 for block in blocks if not self._n_owners[block])
