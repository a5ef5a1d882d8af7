"""The indexer of sparse attention, by kernels on a GPU, by the reference elsewhere."""

from __future__ import annotations

from typing import Final

import torch

from attn.ops.dispatch import converts_float8, has_kernel
from attn.reference import indexer as reference
from builders.device import device_facts, runs_gluon
from builders.sparse.arguments import IndexerKeys, RequestPages
from builders.sparse.hopper_tiles import index_tile_of
from builders.sparse.tiles import IndexTile
from specs.dtypes import DType
from specs.rows import INDEXER_PAGE, SCALE_BYTES

_E4M3: Final = torch.float8_e4m3fn
_QUERIES: Final = (_E4M3, torch.float16, torch.bfloat16, torch.float32)


def write_index_keys(k_index: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Quantise keys and write them: saturated e4m3, with one fp32 power-of-two scale per key.

    The bytes are those that vLLM stores. A key without an element of at least 1e-4 gets the scale
    of a key with one.

    Args:
        k_index: ``[T, Di]``; rows past ``len(slots)`` are padding.
        kv_cache: ``[N, 64, Di + 4]`` uint8; in a block all keys come first, then all scales.
        slots: ``[<= T]`` integer, ``block * 64 + offset``; -1 skips.

    Raises:
        ValueError: tensors that do not fit together, or blocks of another size.
    """
    _check_pages(kv_cache, k_index.shape[-1])
    if k_index.dim() != 2 or k_index.stride(-1) != 1 or len(slots) > len(k_index):
        raise ValueError(
            f"k_index must be [>= {len(slots)}, Di] with dense rows, got {list(k_index.shape)} in "
            f"strides {k_index.stride()}"
        )
    if len(slots) == 0:
        return
    if not has_kernel(k_index):
        reference.write_index_keys(k_index, kv_cache, slots.long())
        return
    from attn.kernels.sparse.indexer.launch import write_keys_call
    from builders.launch.launcher import launch

    hardware = converts_float8(k_index.device)
    launch(write_keys_call(k_index, kv_cache, slots.contiguous(), hardware_e4m3=hardware))


def gather_index_keys(
    kv_cache: torch.Tensor, slots: torch.Tensor, data: torch.Tensor, scale: torch.Tensor
) -> None:
    """Copy cached keys and their scales to compact rows, as they are stored.

    Args:
        kv_cache: ``[N, 64, Di + 4]`` uint8, planar blocks.
        slots: ``[S]`` int32, ``block * 64 + offset``; -1 leaves the row unwritten.
        data: ``[S, Di]`` e4m3, contiguous, written.
        scale: ``[S]`` fp32, contiguous, written.

    Raises:
        ValueError: tensors that do not fit together, or blocks of another size.
    """
    width = kv_cache.shape[-1] - SCALE_BYTES
    _check_pages(kv_cache, width)
    shape = (len(slots), width)
    if data.dtype != _E4M3 or tuple(data.shape) != shape or not data.is_contiguous():
        raise ValueError(
            f"data must be contiguous float8_e4m3fn {[*shape]}, got {list(data.shape)} of "
            f"{data.dtype} in strides {data.stride()}"
        )
    _check_scales(scale, data)
    if len(slots) == 0:
        return
    if not has_kernel(scale):
        reference.gather_index_keys(kv_cache, slots, data, scale)
        return
    from attn.kernels.sparse.indexer.launch import gather_keys_call
    from builders.launch.launcher import launch

    launch(gather_keys_call(kv_cache, slots.contiguous(), data, scale))


def paged_index_logits(
    q_index: torch.Tensor,
    weights: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    requests: torch.Tensor | None,
    kv_lens: torch.Tensor,
    logits: torch.Tensor,
    tile: IndexTile | None = None,
) -> None:
    """``logits[t, s] = k_scale[s] * sum over heads of weights[t, h] * relu(q[t, h] . k[s])``.

    Args:
        q_index: ``[T, Hi, Di]``, e4m3 (its scale is part of the weights) or a model dtype.
        weights: ``[T, Hi]`` fp32.
        kv_cache: ``[N, 64, Di + 4]`` uint8, planar blocks.
        block_table: ``[R, blocks]`` int32; entries past a row's last key are not read.
        requests: ``[T]`` int32 row of ``block_table`` for each query row; None where query row t
            has table row t.
        kv_lens: ``[T]`` int32, keys that each row sees.
        logits: ``[T, M]`` fp32, written at the first ``kv_lens[t]`` columns of row t. Larger
            lengths are cut to M and to the width of ``block_table``.
        tile: the launch record; None for the usual one.

    Raises:
        ValueError: tensors that do not fit together, or blocks of another size.
    """
    _check_pages(kv_cache, q_index.shape[-1])
    _check_queries(q_index, weights, logits)
    if len(q_index) == 0:
        return
    if not has_kernel(logits):
        reference.paged_index_logits(
            q_index, weights, kv_cache, block_table, requests, kv_lens, logits
        )
        return
    from attn.kernels.sparse.indexer.launch import paged_logits_call
    from builders.launch.launcher import launch

    launch(
        paged_logits_call(
            *(q_index, weights, kv_cache, RequestPages(block_table, requests), kv_lens, logits),
            tile or _tile_for(q_index),
            hardware_e4m3=converts_float8(q_index.device),
        )
    )


def _tile_for(q_index: torch.Tensor) -> IndexTile:
    """The launch record of logits of these queries."""
    if not runs_gluon(q_index.device):
        return IndexTile()
    kind, dtype = device_facts(q_index.device).kind, DType.parse(q_index.dtype)
    return index_tile_of(kind, dtype, q_index.shape[1], q_index.shape[2])


def ragged_index_logits(
    q_index: torch.Tensor,
    weights: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    logits: torch.Tensor,
    tile: IndexTile | None = None,
) -> None:
    """The logits of :func:`paged_index_logits` over compact keys instead of pages.

    Column i of row t is the logit of key ``starts[t] + i``.

    Args:
        q_index: ``[T, Hi, Di]``.
        weights: ``[T, Hi]`` fp32.
        data: ``[S, Di]`` e4m3 keys.
        scale: ``[S]`` fp32 scale of each key.
        starts: ``[T]`` int32, first key of each row's request.
        ends: ``[T]`` int32, one past the last key that the row sees, which makes the mask causal.
        logits: ``[T, M]`` fp32, written at the first ``ends[t] - starts[t]`` columns of row t; M is
            at least the largest of these counts.
        tile: the launch record; None for the usual one.

    Raises:
        ValueError: tensors that do not fit together.
    """
    _check_queries(q_index, weights, logits)
    if data.dtype != _E4M3 or data.shape[1:] != q_index.shape[2:] or data.stride(-1) != 1:
        raise ValueError(
            f"data must be float8_e4m3fn [S, {q_index.shape[2]}] with dense rows, got "
            f"{list(data.shape)} of {data.dtype} in strides {data.stride()}"
        )
    _check_scales(scale, data)
    if len(q_index) == 0:
        return
    if not has_kernel(logits):
        reference.ragged_index_logits(q_index, weights, data, scale, starts, ends, logits)
        return
    from attn.kernels.sparse.indexer.launch import ragged_logits_call
    from builders.launch.launcher import launch

    launch(
        ragged_logits_call(
            *(q_index, weights, IndexerKeys(data, scale), starts, ends, logits),
            tile or _tile_for(q_index),
            hardware_e4m3=converts_float8(q_index.device),
        )
    )


def select_topk(
    logits: torch.Tensor,
    lens: torch.Tensor,
    out: torch.Tensor,
    out_lens: torch.Tensor | None = None,
    *,
    pages: RequestPages | None = None,
    offsets: torch.Tensor | None = None,
    tile: IndexTile | None = None,
) -> None:
    """Write the positions of each row's largest logits in ascending order, then -1.

    Among equal logits the lower positions are taken; NaN counts as less than every number. A row
    with at most ``topk`` logits lists all its positions.

    Rows take half the time where they begin at 16 bytes: where M and the stride of rows are
    multiples of four. Where M is more than 16,384, memory is allocated for the best ``topk`` of
    each 16,384 logits, 8 bytes for each.

    Args:
        logits: ``[T, M]`` fp32; the first ``lens[t]`` of row t are read.
        lens: ``[T]`` int32, logits of each row.
        out: ``[T, topk]`` int32, written.
        out_lens: ``[T]`` int32, written: number of entries of each row that are not -1.
        pages: the pages of each row's request; with them, slots are written instead of positions.
        offsets: ``[T]`` int32, added to each row's positions.
        tile: the launch record; None for the usual one.

    Raises:
        ValueError: tensors that do not fit together.
    """
    if logits.dtype != torch.float32 or logits.stride(-1) != 1 or len(logits) != len(out):
        raise ValueError(
            f"logits must be float32 [{len(out)}, M] with dense rows, got {list(logits.shape)} of "
            f"{logits.dtype} in strides {logits.stride()}"
        )
    if out.dtype != torch.int32 or out.stride(-1) != 1:
        raise ValueError(
            f"out must be int32 with dense rows, got {out.dtype} in strides {out.stride()}"
        )
    if pages is not None and offsets is not None:
        raise ValueError("pages and offsets must not both be given, got both")
    if len(out) == 0:
        return
    given = logits, lens, out, out_lens, pages, offsets
    if not has_kernel(logits):
        reference.select_topk(*given)
        return
    from attn.kernels.sparse.indexer.select_launch import select_topk_calls
    from builders.launch.launcher import launch

    for call in select_topk_calls(*given, tile or IndexTile()):
        launch(call)


def select_widths(longest: int, topk: int) -> tuple[int, ...]:
    """Widths of logits for a warm-up of :func:`select_topk`.

    Together with a launch over the shortest rows they compile every variant for logits whose rows
    begin at 16 bytes.

    Args:
        longest: most logits of a row.
        topk: entries of a list.
    """
    short, segment = IndexTile().select_short, IndexTile().segment_of(topk)
    # Longer than a short row; in segments; with more candidates than a segment has logits.
    longer = (short, segment, segment // topk * segment)
    return tuple(width + 4 for width in longer if width < longest)


def _check_pages(kv_cache: torch.Tensor, width: int) -> None:
    row = width + SCALE_BYTES
    if kv_cache.dim() != 3 or kv_cache.shape[1] != INDEXER_PAGE:
        raise ValueError(
            f"kv_cache of the indexer must be [N, {INDEXER_PAGE}, {row}]: its pages are planar, of "
            f"{INDEXER_PAGE} tokens, got {list(kv_cache.shape)}"
        )
    if kv_cache.shape[2] != row or kv_cache.dtype != torch.uint8 or width & (width - 1):
        raise ValueError(
            f"kv_cache of the indexer must be uint8 with rows of {row} bytes, a power of two and "
            f"{SCALE_BYTES}, got {list(kv_cache.shape)} of {kv_cache.dtype}"
        )


def _check_scales(scale: torch.Tensor, data: torch.Tensor) -> None:
    if scale.shape != data.shape[:1] or scale.dtype != torch.float32 or not scale.is_contiguous():
        raise ValueError(
            f"scale must be contiguous float32 [{len(data)}], got {list(scale.shape)} of "
            f"{scale.dtype}"
        )


def _check_queries(q_index: torch.Tensor, weights: torch.Tensor, logits: torch.Tensor) -> None:
    if q_index.dim() != 3 or q_index.stride(-1) != 1 or q_index.dtype not in _QUERIES:
        names = ", ".join(str(dtype) for dtype in _QUERIES)
        raise ValueError(
            f"q_index must be [T, Hi, Di] with dense rows, of {names}, got {list(q_index.shape)} "
            f"of {q_index.dtype} in strides {q_index.stride()}"
        )
    if weights.shape != q_index.shape[:2] or weights.stride(-1) != 1:
        raise ValueError(
            f"weights must be {list(q_index.shape[:2])} with dense rows, got "
            f"{list(weights.shape)} in strides {weights.stride()}"
        )
    if len(logits) != len(q_index) or logits.stride(-1) != 1:
        raise ValueError(
            f"logits must be [{len(q_index)}, M] with dense rows, got {list(logits.shape)} in "
            f"strides {logits.stride()}"
        )
