"""Top-k lists of an indexer as an attention kernel reads them; one launch."""

from __future__ import annotations

import torch

from attn.ops.dispatch import has_kernel
from attn.reference import topk_transform as reference
from builders.checks.debug import debug_enabled
from specs.sparse_mla import IndexKind


def transform_topk(
    ids: torch.Tensor,
    visible_lens: torch.Tensor,
    reqs: torch.Tensor,
    kind: IndexKind,
    out: torch.Tensor,
    *,
    block_table: torch.Tensor | None = None,
    block_size: int = 1,
    offsets: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> None:
    """Tokens of a row's request to what the kernel counts; -1 stays -1, duplicates stay.

    An id that a row does not see becomes -1: nothing is read for it, here or later.

    Args:
        ids: ``[T, topk]`` int32 positions in the row's request, -1 for none; dense rows.
        visible_lens: ``[T]`` int32 keys that each row sees.
        reqs: ``[T]`` int32 request of each row, in ``block_table`` and ``offsets``.
        kind: what entries become: slots of the cache; the id plus the request's offset; or places
            in ``out``, one row of a compact buffer for each.
        out: ``[T, width]`` int32, contiguous, written; -1 past ``topk``.
        block_table: ``[R, max_blocks]`` int32, for slots.
        block_size: tokens per block.
        offsets: ``[R]`` int32 first row of each request's context, for ``RAGGED``.
        slots: ``[T, width]`` int32, contiguous, written for ``GATHERED``: what the rows of the
            buffer are to be read from.
        counts: ``[T]`` int32, written: the entries that are not -1, which then come first. None
            leaves all entries where they stand.

    Raises:
        ValueError: tensors that do not fit together, or the kind; when debugging, an id that a row
            with keys does not see (lists of padding rows are stale).
    """
    _check(ids, visible_lens, reqs, kind, out, block_table, offsets, slots, counts)
    if debug_enabled():
        _check_ids(ids, visible_lens)
    if len(out) == 0:
        return
    if has_kernel(out):
        from attn.kernels.sparse.topk_transform import topk_transform_call
        from builders.launch.launcher import launch

        launch(
            topk_transform_call(
                *(ids, visible_lens, reqs, kind.value, out),
                *(block_table, block_size, offsets, slots, counts),
            )
        )
        return
    reference.transform_topk(
        *(ids, visible_lens, reqs, kind, out),
        *(block_table, block_size, offsets, slots, counts),
    )


def _check(
    ids: torch.Tensor,
    visible_lens: torch.Tensor,
    reqs: torch.Tensor,
    kind: IndexKind,
    out: torch.Tensor,
    block_table: torch.Tensor | None,
    offsets: torch.Tensor | None,
    slots: torch.Tensor | None,
    counts: torch.Tensor | None,
) -> None:
    if ids.dim() != 2 or ids.dtype != torch.int32 or ids.stride(-1) != 1:
        raise ValueError(
            f"ids must be [T, topk] int32 with dense rows, got {list(ids.shape)} of {ids.dtype} in "
            f"strides {ids.stride()}"
        )
    rows = len(ids)
    if out.dim() != 2 or len(out) != rows or out.shape[1] < ids.shape[1]:
        raise ValueError(
            f"out must be [{rows}, width] with a width of at least {ids.shape[1]}, got "
            f"{list(out.shape)}"
        )
    written = {"out": out, "slots": slots, "counts": counts}
    for name, tensor in {"visible_lens": visible_lens, "reqs": reqs, **written}.items():
        if tensor is None:
            continue
        shape = [*out.shape] if name in ("out", "slots") else [rows]
        if [*tensor.shape] != shape or tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous int32 {shape}, got {list(tensor.shape)} of "
                f"{tensor.dtype} in strides {tensor.stride()}"
            )
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


def _check_ids(ids: torch.Tensor, visible_lens: torch.Tensor) -> None:
    """Reads device values: for debugging."""
    wrong = ((ids < -1) | (ids >= visible_lens[:, None])) & (visible_lens[:, None] > 0)
    if bool(wrong.any()):
        row, column = (int(index) for index in torch.nonzero(wrong)[0])
        raise ValueError(
            f"ids[{row}, {column}] must be -1 or below visible_lens[{row}] "
            f"({int(visible_lens[row])}), got {int(ids[row, column])}"
        )
