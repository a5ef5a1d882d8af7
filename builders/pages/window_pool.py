"""Translation of an engine's blocks and slots to those of a smaller pool for window layers.

Some engines keep fewer tokens of window layers than of other layers. They give one block table for
all layers, and a map from each of its blocks to the block of the smaller pool that holds the same
tokens.
"""

from __future__ import annotations

import torch

from specs.sentinels import NULL_BLOCK_ID, PAD_SLOT_ID


def translate_blocks(block_table: torch.Tensor, block_map: torch.Tensor) -> torch.Tensor:
    """Translate a block table to the pool's blocks.

    Args:
        block_table: ``[R, max_blocks]`` int32; entries past a row's last block may be anything, and
            become any block of the pool.
        block_map: ``[N]`` int32: the pool's block for each block, 0 where there is none (any more).

    Returns:
        ``[R, max_blocks]`` int32.
    """
    return block_map[block_table.clamp(0, len(block_map) - 1).long()].to(torch.int32)


def translate_slots(
    slot_mapping: torch.Tensor, block_map: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Translate slots of new tokens to the pool; -1 for a token without a slot in the pool.

    Args:
        slot_mapping: ``[T]`` int64; -1 for a token without a slot.
        block_map: ``[N]`` int32: the pool's block for each block, 0 where there is none (any more).
        block_size: tokens per block.

    Returns:
        ``[T]`` int64.
    """
    blocks = (slot_mapping // block_size).clamp(0, len(block_map) - 1)
    own = block_map[blocks].long()
    is_kept = (slot_mapping >= 0) & (own != NULL_BLOCK_ID)
    return torch.where(is_kept, own * block_size + slot_mapping % block_size, PAD_SLOT_ID)
