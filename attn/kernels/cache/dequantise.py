"""The kernel that dequantises rows of a paged cache to the model's type, for a step's prefills.

The cache is ``[N, BLOCK_SIZE, Hk, D]`` of 8-bit elements in any strides, read as 16-bit words. The
workspace that is written is ``[W, Hk, PAGE, D]``, dense. The layer's scales are not applied: the
attention kernel multiplies by them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from attn.kernels.lang.numerics import round_to, to_float32
from attn.kernels.lang.stored import plane_of
from builders.launch.launcher import Launcher
from specs.base import power_of_two

if TYPE_CHECKING:
    from builders.splitkv.record import DequantisedKeys

_TOKENS = 32
"""Tokens that a program holds in registers at a time."""


@triton.jit
def _dequantise_rows(
    rows_ptr,
    out_ptr,
    blocks,
    tokens,
    places,
    live,
    written,
    block_stride,
    token_stride,
    SIZE: tl.constexpr,
    WORDS: tl.constexpr,
    KIND: tl.constexpr,
    DECODE: tl.constexpr,
):
    """Dequantise the rows of some tokens of one head, into rows ``places`` of the workspace.

    Tokens that are not ``written`` keep what the workspace holds. Tokens that are ``written`` but
    not ``live`` become zeros, and their rows of the cache are not read.
    """
    column = tl.arange(0, WORDS)
    there = live[:, None] & (column < SIZE // 2)[None, :]
    at = blocks * block_stride + tokens * token_stride
    words = tl.load(rows_ptr + at[:, None] + column[None, :], mask=there, other=0)
    low, high = plane_of(words, 0, KIND, DECODE), plane_of(words, 1, KIND, DECODE)
    wide = round_to(to_float32(tl.interleave(low, high)), out_ptr.dtype.element_ty)
    element = tl.arange(0, 2 * WORDS)
    there = written[:, None] & (element < SIZE)[None, :]
    tl.store(out_ptr + places[:, None] * SIZE + element[None, :], wide, mask=there)


@triton.jit(
    do_not_specialize=["table_row"],
    do_not_specialize_on_alignment=["sources_ptr", "total_ptr", "table_ptr", "seq_lens_ptr"],
)
def dequantise_kernel(
    key_ptr,
    value_ptr,
    wide_key_ptr,
    wide_value_ptr,
    sources_ptr,
    total_ptr,
    table_ptr,
    seq_lens_ptr,
    table_row,
    k_block: tl.int64,
    k_token: tl.int64,
    k_head: tl.int64,
    v_block: tl.int64,
    v_token: tl.int64,
    v_head: tl.int64,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    K_WORDS: tl.constexpr,
    V_WORDS: tl.constexpr,
    KIND: tl.constexpr,
    DECODE: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Write one head of one page of the workspace; grid ``(pages, HEADS)``.

    The grid has at least as many pages as are in use. No slot behind a request's last key is read,
    and its place in the workspace keeps what it holds. No slot before the first visible key is read
    either, since its block may be freed; zeros are written in its place.
    """
    page = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    if page < tl.load(total_ptr):
        req = tl.load(sources_ptr + 3 * page).to(tl.int64)
        first = tl.load(sources_ptr + 3 * page + 1) * PAGE
        seen = tl.load(sources_ptr + 3 * page + 2)
        kv_len = tl.load(seq_lens_ptr + req)
        row_ptr = table_ptr + req * table_row
        place = (page * HEADS + head) * PAGE
        for skipped in range(0, PAGE, TOKENS):
            here = skipped + tl.arange(0, TOKENS)
            token = first + here
            written = token < kv_len
            live = written & (token >= seen)
            block = tl.load(row_ptr + token // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
            inside = (token % BLOCK_SIZE).to(tl.int64)
            _dequantise_rows(
                key_ptr + head * k_head, wide_key_ptr, block, inside, place + here, live, written,
                k_block, k_token, K_SIZE, K_WORDS, KIND, DECODE,
            )  # fmt: skip
            _dequantise_rows(
                value_ptr + head * v_head, wide_value_ptr, block, inside, place + here, live,
                written, v_block, v_token, V_SIZE, V_WORDS, KIND, DECODE,
            )  # fmt: skip


_VARYING = (
    "key_ptr",
    "value_ptr",
    "wide_key_ptr",
    "wide_value_ptr",
    "sources_ptr",
    "total_ptr",
    "table_ptr",
    "seq_lens_ptr",
    "table_row",
)


def dequantise_launcher(
    words: tuple[Any, Any], dequantised: DequantisedKeys, kind: int, decode: int
) -> Launcher:
    """The launcher of :func:`dequantise_kernel` for one layer.

    Args:
        words: keys and values ``[N, P, Hk, D / 2]`` of the cache, as 16-bit words.
        dequantised: the workspace.
        kind: how the cache stores its elements, a kind of :mod:`attn.kernels.lang.stored`.
        decode: PLAIN, PTX or PTX_SM89 of that module.
    """
    key, value = words
    page, heads, k_size = dequantised.key.shape[1:]
    v_size = dequantised.value.shape[3]
    fixed: dict[str, Any] = {
        "HEADS": heads,
        "BLOCK_SIZE": key.shape[1],
        "K_SIZE": k_size,
        "V_SIZE": v_size,
        "K_WORDS": power_of_two(k_size // 2),
        "V_WORDS": power_of_two(v_size // 2),
        "KIND": kind,
        "DECODE": decode,
        "PAGE": page,
        "TOKENS": _TOKENS,
    }
    for name, rows in (("k", key), ("v", value)):
        axes = zip(("block", "token", "head"), rows.stride()[:3], strict=True)
        fixed |= {f"{name}_{axis}": stride for axis, stride in axes}
    return Launcher(dequantise_kernel, fixed, _VARYING)
