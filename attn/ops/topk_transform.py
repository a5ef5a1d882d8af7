"""Conversion of an indexer's top-k lists to the entries that an attention kernel reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attn.ops.dispatch import has_kernel
from attn.reference import topk_transform as reference
from builders.checks.debug import debug_enabled
from builders.sparse.arguments import TopkLists
from specs.sparse_mla import IndexKind

if TYPE_CHECKING:
    from builders.launch.launcher import Launch


def transform_topk(
    lists: TopkLists,
    kind: IndexKind,
    out: torch.Tensor,
    *,
    block_table: torch.Tensor | None = None,
    block_size: int = 1,
    offsets: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> None:
    """Convert positions in a row's request to the kernel's entries; one launch.

    -1 stays -1 and duplicates stay. A position that the row does not see becomes -1, so that
    neither this launch nor the attention kernel reads anything for it. Under DCP a position of
    another rank's key becomes -1 too.

    Args:
        lists: the positions; their requests are indices into ``block_table`` and ``offsets``.
        kind: the result: slots of the cache (``PAGED``); the position plus the request's offset
            (``RAGGED``); or the entry's own index in ``out``, for a compact buffer with one row for
            each entry (``GATHERED``).
        out: ``[T, width]`` int32, contiguous, written; -1 past ``topk``.
        block_table: ``[R, max_blocks]`` int32, for slots.
        block_size: tokens per block.
        offsets: ``[R]`` int32 first row of each request's context, for ``RAGGED``.
        slots: ``[T, width]`` int32, contiguous, written for ``GATHERED``: the cache slots that the
            rows of the buffer are to be read from.
        counts: ``[T]`` int32, written: the number of entries that are not -1, which are moved to
            the front. With None every entry stays in its place.

    Raises:
        ValueError: tensors do not fit together or do not fit the kind; in debug mode also a
            position that a row with keys does not see (lists of padding rows may be stale).
    """
    launch = topk_launch(
        *(lists, kind, out),
        block_table=block_table,
        block_size=block_size,
        offsets=offsets,
        slots=slots,
        counts=counts,
    )
    if launch is not None:
        launch.launch()
    elif out.shape[0]:
        reference.transform_topk(lists, kind, out, block_table, block_size, offsets, slots, counts)


def topk_launch(
    lists: TopkLists,
    kind: IndexKind,
    out: torch.Tensor,
    *,
    block_table: torch.Tensor | None = None,
    block_size: int = 1,
    offsets: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> Launch | None:
    """The launch of :func:`transform_topk`, checked and prepared; it can be made several times.

    Arguments and errors are those of :func:`transform_topk`.

    Returns:
        None where there is no row, or where no kernel can take them.
    """
    _check(lists, kind, out, block_table, offsets, slots, counts)
    if debug_enabled():
        check_positions(lists)
    if out.shape[0] == 0 or not has_kernel(out):
        return None
    from attn.kernels.sparse.topk_transform import topk_transform_launch

    given = block_table, block_size, offsets, slots, counts
    return topk_transform_launch(lists, kind.value, out, *given)


def _check(
    lists: TopkLists,
    kind: IndexKind,
    out: torch.Tensor,
    block_table: torch.Tensor | None,
    offsets: torch.Tensor | None,
    slots: torch.Tensor | None,
    counts: torch.Tensor | None,
) -> None:
    ids, visible_lens, reqs = lists[:3]
    if ids.dim() != 2 or ids.dtype != torch.int32 or ids.stride(-1) != 1:
        raise ValueError(
            f"ids must be [T, topk] int32 with dense rows, got {list(ids.shape)} of {ids.dtype} in "
            f"strides {ids.stride()}"
        )
    # A tensor's len takes longer than its shape.
    rows, topk = ids.shape
    if out.dim() != 2 or out.shape[0] != rows or out.shape[1] < topk:
        raise ValueError(
            f"out must be [{rows}, width] with a width of at least {topk}, got {list(out.shape)}"
        )
    width = out.shape[1]
    _check_written("out", out, (rows, width))
    _check_written("visible_lens", visible_lens, (rows,))
    _check_written("reqs", reqs, (rows,))
    if slots is not None:
        _check_written("slots", slots, (rows, width))
    if counts is not None:
        _check_written("counts", counts, (rows,))
    needs = {"offsets": offsets} if kind is IndexKind.RAGGED else {"block_table": block_table}
    if kind is IndexKind.GATHERED:
        needs["slots"] = slots
    for name, tensor in needs.items():
        if (
            tensor is None
            or tensor.dtype != torch.int32
            or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1)
        ):
            given = "None" if tensor is None else f"{tensor.dtype} in strides {tensor.stride()}"
            raise ValueError(
                f"{name} must be int32 with dense rows for {kind.value} entries, got {given}"
            )


def _check_written(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape or tensor.dtype != torch.int32 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous int32 {list(shape)}, got {list(tensor.shape)} of "
            f"{tensor.dtype} in strides {tensor.stride()}"
        )


def check_positions(lists: TopkLists) -> None:
    """Refuse positions that a row does not see; for debug mode, since it reads device values.

    Raises:
        ValueError: a row with keys lists a position that is not there.
    """
    ids, visible_lens = lists.ids, lists.visible_lens
    wrong = ((ids < -1) | (ids >= visible_lens[:, None])) & (visible_lens[:, None] > 0)
    if bool(wrong.any()):
        row, column = (int(index) for index in torch.nonzero(wrong)[0])
        raise ValueError(
            f"ids[{row}, {column}] must be -1 or below visible_lens[{row}] "
            f"({int(visible_lens[row])}), got {int(ids[row, column])}"
        )
