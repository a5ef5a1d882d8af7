"""Layers whose keys lie in a pool of their own: the engine's blocks and slots as that pool's.

An engine that keeps less of window layers than of others gives one table for all, and says for each
block of it which block of the smaller pool holds the same tokens.
"""

from __future__ import annotations

import torch

from specs.sentinels import NULL_BLOCK_ID, PAD_SLOT_ID


def translate_blocks(block_table: torch.Tensor, block_map: torch.Tensor) -> torch.Tensor:
    """A table over the pool's blocks.

    Args:
        block_table: ``[R, max_blocks]`` int32; entries past a row's last block may be anything, and
            become any block of the pool.
        block_map: ``[N]`` int32: the pool's block of each block; 0 where it has none (any more).

    Returns:
        ``[R, max_blocks]`` int32.
    """
    return block_map[block_table.clamp(0, len(block_map) - 1).long()].to(torch.int32)


def translate_slots(
    slot_mapping: torch.Tensor, block_map: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Slots of new tokens in the pool; -1 where a token has none, there or at all.

    Args:
        slot_mapping: ``[T]`` int64.
        block_map: as of :func:`translate_blocks`.
        block_size: tokens per block.

    Returns:
        ``[T]`` int64.
    """
    blocks = (slot_mapping // block_size).clamp(0, len(block_map) - 1)
    own = block_map[blocks].long()
    is_kept = (slot_mapping >= 0) & (own != NULL_BLOCK_ID)
    return torch.where(is_kept, own * block_size + slot_mapping % block_size, PAD_SLOT_ID)
