"""The KV cache of a replica as vLLM counts it: blocks with reference counts, a free queue, a prefix index. Pure.

It follows vLLM's V1 block pool block by block, because admission, preemption and prefix hits all hang on it: freed
blocks keep their content until they are taken again, those without a known prefix are taken first, and among the
others the least recently freed.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

BlockHash = int
"""Stands for the content of a full block and of all blocks before it."""


class KvBlocks:
    """A pool of `total` blocks of `block_size` tokens. One block is vLLM's null block and never given out."""

    def __init__(self, total: int, block_size: int, prefix_caching: bool) -> None:
        """Raises ValueError for a pool of fewer than two blocks, or a block size below one token."""
        if total < 2:
            raise ValueError(f"kv_blocks: got {total}, expected at least 2 (one is the null block)")
        if block_size < 1:
            raise ValueError(f"block_size: got {block_size}, expected at least 1 token")
        self.block_size = block_size
        self.usable = total - 1
        self._caching = prefix_caching
        self._references = [0] * total
        self._content: list[BlockHash | None] = [None] * total
        self._index: dict[BlockHash, dict[int, None]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, total))

    @property
    def free(self) -> int:
        """Blocks that nobody holds; some still have a content that a prefix may hit."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that are held, 0 to 1."""
        return 1.0 - len(self._free) / self.usable

    def needed(self, tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-tokens // self.block_size)

    def prefix(self, hashes: Sequence[BlockHash], tokens: int) -> list[int]:
        """The blocks whose content is the beginning of a sequence of `tokens`.

        At least the last token is always left to compute, since its output is what the first new token comes from.
        """
        found: list[int] = []
        if not self._caching:
            return found
        for block_hash in hashes[: (tokens - 1) // self.block_size]:
            blocks = self._index.get(block_hash)
            if blocks is None:
                break
            found.append(next(iter(blocks)))
        return found

    def unheld(self, blocks: Iterable[int]) -> int:
        """How many of these are in the free queue: taking them uses up free blocks."""
        return sum(1 for block in blocks if self._references[block] == 0)

    def hold(self, blocks: Iterable[int]) -> None:
        """Adds a reference to blocks found by `prefix`."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def take(self, count: int) -> list[int]:
        """`count` blocks, emptied. The caller has checked `free`."""
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._forget(block)
            self._references[block] = 1
        return taken

    def fill(self, block: int, content: BlockHash) -> None:
        """The block is full: later sequences that begin alike may use it."""
        if self._caching and self._content[block] is None:
            self._content[block] = content
            self._index.setdefault(content, {})[block] = None

    def release(self, blocks: Iterable[int]) -> None:
        """Drops a reference to each; `blocks` in the order in which they may be taken again."""
        known: list[int] = []
        unknown: list[int] = []
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                (unknown if self._content[block] is None else known).append(block)
        for block in reversed(unknown):
            self._free[block] = None
            self._free.move_to_end(block, last=False)
        for block in known:
            self._free[block] = None

    def _forget(self, block: int) -> None:
        content = self._content[block]
        if content is not None:
            self._content[block] = None
            blocks = self._index[content]
            del blocks[block]
            if not blocks:
                del self._index[content]


def block_hashes(tokens: Sequence[int], block_size: int) -> tuple[BlockHash, ...]:
    """The hash of each full block, chained: equal hashes mean equal content from the sequence's start.

    Built on Python's hash of integers and tuples of them, which is the same in every process.
    """
    hashes: list[BlockHash] = []
    chained: BlockHash = 0
    for end in range(block_size, len(tokens) + 1, block_size):
        chained = hash((chained, *tokens[end - block_size : end]))
        hashes.append(chained)
    return tuple(hashes)
