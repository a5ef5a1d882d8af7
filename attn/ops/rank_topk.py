"""Lists of sparse attention over keys that several ranks share (DCP), by kernels or the reference.

Each rank lists the best of its own keys. The best of all keys are among those that ranks list, so
ranks exchange only these candidates.
"""

from __future__ import annotations

import torch

from attn.ops.dispatch import has_kernel
from attn.ops.indexer import select_topk
from attn.reference import rank_topk as reference
from builders.splitkv.stripe import Stripe


def pack_candidates(logits: torch.Tensor, lists: torch.Tensor, stripe: Stripe) -> torch.Tensor:
    """The candidates of a rank, ready to be exchanged.

    Args:
        logits: ``[T, M]`` fp32: logits of the rank's own keys.
        lists: ``[T, topk]`` int32: places of the best among the rank's own keys, -1 for none.
        stripe: the keys that the rank keeps.

    Returns:
        ``[2, T, topk]`` int32: the bits of each candidate's logit, and its position in the request,
        -1 for none.

    Raises:
        ValueError: tensors that do not fit together.
    """
    if logits.dtype != torch.float32 or len(logits) != len(lists) or logits.stride(-1) != 1:
        raise ValueError(
            f"logits must be float32 [{len(lists)}, M] with dense rows, got {list(logits.shape)} "
            f"of {logits.dtype} in strides {logits.stride()}"
        )
    if lists.dtype != torch.int32 or lists.stride(-1) != 1:
        raise ValueError(
            f"lists must be int32 with dense rows, got {lists.dtype} in strides {lists.stride()}"
        )
    if not has_kernel(logits):
        return reference.pack_candidates(logits, lists, stripe)
    from attn.kernels.sparse.indexer.ranks import pack_candidates_call
    from builders.launch.launcher import launch

    out = lists.new_empty((2, *lists.shape))
    if len(lists):
        launch(pack_candidates_call(logits, lists, stripe, out))
    return out


def merge_candidates(
    candidates: torch.Tensor, lens: torch.Tensor, room: torch.Tensor, out: torch.Tensor
) -> None:
    """Write the positions of the best candidates of all ranks in ascending order, then -1.

    The result is that of :func:`attn.ops.indexer.select_topk` over the logits of all keys. Among
    candidates with equal logits, lower positions are taken first. A row that sees at most ``topk``
    keys lists them all.

    Args:
        candidates: ``[ranks, 2, T, topk]`` int32, contiguous: those of :func:`pack_candidates`, of
            all ranks.
        lens: ``[T]`` int32: keys that each row sees, those of all ranks counted.
        room: ``[T, M]`` fp32, written; no row sees more than M keys.
        out: ``[T, topk]`` int32, written.

    Raises:
        ValueError: tensors that do not fit together.
    """
    shape = candidates.shape
    if (
        candidates.dim() != 4
        or shape[1:] != (2, *out.shape)
        or candidates.dtype != torch.int32
        or not candidates.is_contiguous()
    ):
        raise ValueError(
            f"candidates must be contiguous int32 {['ranks', 2, *out.shape]}, got {list(shape)} "
            f"of {candidates.dtype} in strides {candidates.stride()}"
        )
    if room.dtype != torch.float32 or len(room) != len(out) or room.stride(-1) != 1:
        raise ValueError(
            f"room must be float32 [{len(out)}, M] with dense rows, got {list(room.shape)} of "
            f"{room.dtype} in strides {room.stride()}"
        )
    if len(out) == 0:
        return
    if not has_kernel(room):
        reference.merge_candidates(candidates, lens, out)
        return
    from attn.kernels.sparse.indexer.ranks import spread_candidates_call
    from builders.launch.launcher import launch

    # Among keys that no rank lists, none is better than a listed one.
    room.fill_(float("-inf"))
    launch(spread_candidates_call(candidates, room))
    select_topk(room, lens, out)
