"""Physical blocks of one KV cache group, and the block tables of the requests that own them."""

from __future__ import annotations

from random import Random

from specs.base import cdiv
from specs.kv_cache import (
    AnyKVCacheSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from specs.sentinels import NULL_BLOCK_ID


class OutOfBlocksError(RuntimeError):
    """A request needs more blocks than are free; no block was allocated."""


def first_visible_token(spec: AnyKVCacheSpec, position: int) -> int:
    """First token that a query at ``position``, or any later query, can see.

    Args:
        spec: spec of the group's cache.
        position: absolute position of the query, from 0.
    """
    if isinstance(spec, SlidingWindowSpec | SlidingWindowMLASpec):
        return max(position - spec.sliding_window + 1, 0)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        chunk = position // spec.attention_chunk_size - spec.chunk_lookback
        return max(chunk, 0) * spec.attention_chunk_size
    return 0


class BlockAllocator:
    """Allocator of one KV cache group's blocks, with the block table of every request."""

    tables: dict[int, list[int]]
    """For each request id the physical block of each logical block; the null block where a logical
    block is out of sight."""

    def __init__(
        self, num_blocks: int, block_size: int, spec: AnyKVCacheSpec, *, seed: int = 0
    ) -> None:
        """
        Args:
            num_blocks: blocks of the cache tensor, reserved ones included. Block 0 is reserved;
                so are the blocks of static sinks, which follow it.
            block_size: tokens per block; must be the spec's.
            spec: spec of the group's cache.
            seed: seed of the order in which blocks are allocated.

        Raises:
            TypeError: the blocks of this kind of spec do not follow a decoder's tokens.
            ValueError: all blocks are reserved, or the block sizes differ.
        """
        if isinstance(spec, CrossAttentionSpec | EncoderOnlyAttentionSpec):
            raise TypeError(f"spec must describe decoder self-attention, got {spec.kind!r}")
        if block_size != spec.block_size:
            raise ValueError(
                f"block_size must be the spec's block_size ({spec.block_size}), got {block_size}"
            )
        reserved = NULL_BLOCK_ID + 1
        if isinstance(spec, SinkFullAttentionSpec):
            reserved += spec.reserved_blocks
        if num_blocks <= reserved:
            raise ValueError(
                f"num_blocks must exceed the number of reserved blocks ({reserved}), "
                f"got {num_blocks}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.spec = spec
        self.capacity = num_blocks - reserved
        """Blocks that requests can own together."""
        self.tables = {}
        self._free = list(range(reserved, num_blocks))
        self._random = Random(seed)
        # Number of logical blocks at the front of each table that trim has replaced by null.
        self._num_trimmed: dict[int, int] = {}

    @property
    def free_blocks(self) -> int:
        """Number of blocks that no request owns."""
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Number of blocks that requests own."""
        return self.capacity - len(self._free)

    def can_grow(self, request_id: int, num_tokens: int) -> bool:
        """True when :meth:`grow` would succeed."""
        return self._num_missing(request_id, num_tokens) <= len(self._free)

    def grow(self, request_id: int, num_tokens: int) -> None:
        """Extend the table of a request, new or known, to cover its first ``num_tokens`` tokens.

        Args:
            request_id: any integer that names the request.
            num_tokens: KV length to cover; a table never shrinks.

        Raises:
            OutOfBlocksError: too few free blocks; nothing is changed.
        """
        missing = self._num_missing(request_id, num_tokens)
        if missing > len(self._free):
            raise OutOfBlocksError(
                f"request {request_id} needs {missing} more blocks of {self.block_size} to hold "
                f"{num_tokens} tokens, got {len(self._free)} free of {self.capacity}"
            )
        table = self.tables.setdefault(request_id, [])
        table.extend(self._take() for _ in range(missing))

    def trim(self, request_id: int, first_visible_token: int) -> None:
        """Free the blocks that lie wholly before a token; their entries become the null block.

        Args:
            request_id: a request with a table.
            first_visible_token: first token that any later query can see.
        """
        table = self._table(request_id)
        start = self._num_trimmed.get(request_id, 0)
        stop = min(first_visible_token // self.block_size, len(table))
        if stop <= start:
            return
        self._free.extend(table[start:stop])
        table[start:stop] = [NULL_BLOCK_ID] * (stop - start)
        self._num_trimmed[request_id] = stop

    def release(self, request_id: int) -> None:
        """Free all blocks of a request and forget its table."""
        table = self._table(request_id)
        self._free.extend(table[self._num_trimmed.pop(request_id, 0) :])
        del self.tables[request_id]

    def min_blocks_for(self, num_tokens: int, num_inflight: int) -> int:
        """Number of blocks that suffice to compute a request when no other request has blocks.

        Args:
            num_tokens: KV length of the request at its end.
            num_inflight: most tokens of one step.
        """
        return self.spec.num_blocks_for(num_tokens, num_inflight)

    def _num_missing(self, request_id: int, num_tokens: int) -> int:
        if num_tokens < 0:
            raise ValueError(f"num_tokens must not be negative, got {num_tokens}")
        held = len(self.tables.get(request_id, ()))
        return max(cdiv(num_tokens, self.block_size) - held, 0)

    def _table(self, request_id: int) -> list[int]:
        table = self.tables.get(request_id)
        if table is None:
            raise ValueError(f"request_id must name a request with a table, got {request_id}")
        return table

    def _take(self) -> int:
        # A random free block, so that tables stay scattered in whatever order blocks are freed.
        pick = self._random.randrange(len(self._free))
        self._free[pick], self._free[-1] = self._free[-1], self._free[pick]
        return self._free.pop()
