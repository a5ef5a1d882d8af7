"""The listed keys of neighbouring tokens, each of them once, as one list."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attn.ops.dispatch import has_kernel
from attn.ops.topk_transform import check_positions
from attn.reference import joint_lists as reference
from builders.checks.debug import debug_enabled
from builders.sparse.arguments import JointLists, TopkLists
from builders.sparse.joint import MOST_JOINED
from specs.base import cdiv

if TYPE_CHECKING:
    from builders.launch.launcher import Launch


def join_lists(
    lists: TopkLists, block_table: torch.Tensor, block_size: int, joint: JointLists
) -> None:
    """Join the lists of every few neighbouring tokens; one launch.

    Entries come by rising position, request after request. A position that a token lists twice
    counts once. A position that a token does not see is left out.

    Args:
        lists: the positions; tokens of a request are neighbours.
        block_table: ``[R, max_blocks]`` int32.
        block_size: tokens of a block.
        joint: its entries and counts are written. The cache has fewer than ``2 ** (32 - tokens)``
            rows.

    Raises:
        ValueError: tensors that do not fit together, or lists of which a rank keeps a part; in
            debug mode also a position that a row with keys does not see.
    """
    launch = join_launch(lists, block_table, block_size, joint)
    if launch is not None:
        launch.launch()
    elif len(joint.entries):
        reference.join_lists(lists, block_table, block_size, joint)


def join_launch(
    lists: TopkLists, block_table: torch.Tensor, block_size: int, joint: JointLists
) -> Launch | None:
    """The launch of :func:`join_lists`, checked and prepared; it can be made several times.

    Arguments and errors are those of :func:`join_lists`.

    Returns:
        None where there is no list, or where no kernel can take them.
    """
    _check(lists, block_table, joint)
    if debug_enabled():
        check_positions(lists)
    if len(joint.entries) == 0 or not has_kernel(joint.entries):
        return None
    from attn.kernels.sparse.joint_lists import join_lists_launch

    return join_lists_launch(lists, block_table, block_size, joint)


def can_join(
    joint: JointLists, query: torch.Tensor, rotary: torch.Tensor, kv_cache: torch.Tensor
) -> bool:
    """Whether the kernel that attends joint lists reads these tensors.

    Their rows start at multiples of the bytes that a thread copies, and the numbers of the cache's
    rows leave the highest bits of an entry free.

    Args:
        joint: room for the lists.
        query: ``[T, H, L]``.
        rotary: ``[T, H, r]``.
        kv_cache: ``[N, P, row]``.
    """
    if not has_kernel(query):
        return False
    # Imported late: the module needs Gluon, which other GPUs can do without.
    from attn.kernels.sparse.hopper_launch import is_aligned

    rows = kv_cache.shape[0] * kv_cache.shape[1]
    return rows < (1 << (32 - joint.tokens)) and is_aligned(query, rotary, kv_cache)


def _check(lists: TopkLists, block_table: torch.Tensor, joint: JointLists) -> None:
    ids, tokens = lists.ids, joint.tokens
    if tokens not in (2, 4, MOST_JOINED):
        raise ValueError(f"tokens must be 2, 4 or {MOST_JOINED}, got {tokens}")
    if lists.stripe is not None:
        raise ValueError("lists must be of a rank that has all keys, got a stripe of them")
    if ids.dim() != 2 or ids.dtype != torch.int32 or ids.stride(-1) != 1:
        raise ValueError(
            f"ids must be [T, topk] int32 with dense rows, got {list(ids.shape)} of {ids.dtype} in "
            f"strides {ids.stride()}"
        )
    rows, topk = ids.shape
    groups = cdiv(rows, tokens)
    wanted = {
        "visible_lens": (lists.visible_lens, [rows]),
        "reqs": (lists.reqs, [rows]),
        "entries": (joint.entries, [groups, tokens * topk]),
        "counts": (joint.counts, [groups]),
        "marks": (joint.marks, [len(joint.marks), joint.marks.shape[-1]]),
    }
    for name, (tensor, shape) in wanted.items():
        if [*tensor.shape] != shape or tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous int32 {shape}, got {list(tensor.shape)} of "
                f"{tensor.dtype} in strides {tensor.stride()}"
            )
    if block_table.dtype != torch.int32 or (
        block_table.shape[-1] > 1 and block_table.stride(-1) != 1
    ):
        raise ValueError(
            f"block_table must be int32 with dense rows, got {block_table.dtype} in strides "
            f"{block_table.stride()}"
        )
