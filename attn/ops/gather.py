"""Copies of queries to a kernel's padded rows, of its states back to the batch's tokens, and of
cached rows.
"""

from __future__ import annotations

import math

import torch

from attn.ops.dispatch import converts_float8, has_kernel
from attn.reference.quant import saturate
from builders.latent.prefill import PagedRows

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def gather_paged(cache: torch.Tensor, paged: PagedRows) -> torch.Tensor:
    """Copy rows of a paged cache, as they are stored, request by request.

    Args:
        cache: ``[N, block_size, row]``, dense in its rows.
        paged: the rows. Table entries past a request's rows may be anything, and are not followed.

    Returns:
        ``[R, span, row]``. What stands behind a request's last row means nothing.
    """
    block_size, itemsize = cache.shape[1], cache.element_size()
    steps = (size * itemsize for size in (cache.stride(0), cache.stride(1), cache.shape[2]))
    # Rows are copied as words, as few as their addresses allow.
    words = cache.view(_WORDS[math.gcd(8, *steps, cache.data_ptr())])
    place = torch.arange(paged.span, dtype=torch.int32, device=cache.device)
    is_there = place < paged.lens[:, None]
    token = torch.where(is_there, paged.starts[:, None] + place, 0)
    column = torch.div(token, block_size, rounding_mode="floor")
    blocks = torch.where(is_there, paged.block_table.gather(1, column.long()), 0)
    return words[blocks.long(), (token - column * block_size).long()].view(cache.dtype)


def pack_query(
    nope: torch.Tensor,
    rope: torch.Tensor,
    index: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Write to row i of ``out`` the query of token ``index[i]``, nope and rope side by side; one
    launch.

    Args:
        nope: ``[T, H, L]``, any strides with dense rows.
        rope: ``[T, H, r]``, any strides with dense rows.
        index: ``[S]`` int32 token of each row, -1 for a row of zeros; None where row i is token i.
        scale: real = stored * scale, for an e4m3 ``out`` or an e4m3 query; otherwise values are
            copied and the scale is unused.
        out: ``[S, H, L + r]``, contiguous, written. For a query in a model dtype it has that dtype
            or e4m3, with values clamped to e4m3's range; for an e4m3 query any 16- or 32-bit type.

    Raises:
        ValueError: tensors that do not fit together.
    """
    shape = (len(out), nope.shape[1], nope.shape[2] + rope.shape[2])
    if tuple(out.shape) != shape or not out.is_contiguous() or rope.shape[:2] != nope.shape[:2]:
        raise ValueError(
            f"out must be contiguous of shape {[*shape]} for queries {[*nope.shape]} and "
            f"{[*rope.shape]}, got {[*out.shape]} in strides {out.stride()}"
        )
    if (index is None and len(nope) < len(out)) or (index is not None and len(index) != len(out)):
        listed = len(nope) if index is None else len(index)
        raise ValueError(f"out must have a row for each of {listed}, got {len(out)}")
    if nope.dtype == out.dtype == torch.float8_e4m3fn:
        raise ValueError("a query that is e4m3 already must be given as bytes to be packed as such")
    if len(out) == 0:
        return
    if has_kernel(nope):
        from attn.kernels.latent.gather import pack_query_call
        from builders.launch.launcher import launch

        hardware = converts_float8(nope.device)
        launch(pack_query_call(nope, rope, index, scale, out, hardware_e4m3=hardware))
        return
    rows = torch.cat([nope, rope], -1)
    if nope.dtype == torch.float8_e4m3fn:
        rows = (rows.float() * scale).to(out.dtype)
    if index is not None:
        chosen = rows[index.clamp(min=0).long()]
        rows = chosen.masked_fill(index[:, None, None] < 0, 0)
    rows = rows[: len(out)]
    is_e4m3 = out.dtype == torch.float8_e4m3fn
    out.copy_(saturate(rows.float() / scale, out.dtype) if is_e4m3 else rows)


def unpack_state(
    padded: torch.Tensor,
    padded_lse: torch.Tensor,
    index: torch.Tensor,
    flags: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Write to token i the state of row ``index[i]``, zero and -inf for tokens without keys; one
    launch.

    Args:
        padded: ``[S, H, L]``, contiguous.
        padded_lse: ``[S, H]`` fp32, contiguous.
        index: ``[T]`` int32 row of each token; -1 for a token without a row.
        flags: ``[T]`` bool, True for tokens without keys; None where every token has keys.
        scale: multiplies the log-sum-exp: ln 2 where ``padded_lse`` is in base 2, else 1.
        out: ``[>= T, H, L]``, contiguous, written.
        lse: ``[>= T, H]`` fp32, contiguous, written.
    """
    count = len(index)
    if count == 0:
        return
    if has_kernel(padded):
        from attn.kernels.latent.gather import unpack_state_call
        from builders.launch.launcher import launch

        launch(unpack_state_call(padded, padded_lse, index, flags, scale, out, lse))
        return
    gone = index < 0 if flags is None else (index < 0) | flags
    rows = index.clamp(min=0).long()
    out[:count] = padded[rows].masked_fill(gone[:, None, None], 0)
    lse[:count] = (padded_lse[rows] * scale).masked_fill(gone[:, None], float("-inf"))
