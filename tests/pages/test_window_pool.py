"""Blocks and slots of a window's own pool agree with loops."""

from __future__ import annotations

import torch

from builders.pages.window_pool import translate_blocks, translate_slots

BLOCK_MAP = torch.tensor([0, 7, 0, 3, 1], dtype=torch.int32)


def test_entries_become_the_pools_and_wild_ones_stay_inside_it() -> None:
    table = torch.tensor([[1, 3, 2**30], [4, 2, -5]], dtype=torch.int32)
    own = translate_blocks(table, BLOCK_MAP)
    assert own.dtype == torch.int32
    assert own[:, :2].tolist() == [[7, 3], [1, 0]]
    assert set(own[:, 2].tolist()) <= set(BLOCK_MAP.tolist())


def test_slots_keep_their_offset_and_those_without_a_block_are_skipped() -> None:
    slots = torch.tensor([1 * 16 + 5, 3 * 16, 4 * 16 + 15, -1, 2 * 16 + 3])
    own = translate_slots(slots, BLOCK_MAP, 16)
    assert own.dtype == torch.int64
    assert own.tolist() == [7 * 16 + 5, 3 * 16, 1 * 16 + 15, -1, -1]
