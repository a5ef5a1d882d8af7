"""Kernels that clear: rows without keys get output 0 and LSE -inf, slots without tokens get 0."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from builders.launch.call import KernelCall
from builders.launch.launcher import MOST_LAUNCHERS, Launch, Launcher
from specs.sentinels import NULL_BLOCK_ID

_TILE = 1024
_NULL_BLOCK = tl.constexpr(NULL_BLOCK_ID)


@triton.jit(do_not_specialize=["out_row", "lse_row"], do_not_specialize_on_alignment=["flag_ptr"])
def clear_kernel(
    out_ptr,
    lse_ptr,
    flag_ptr,
    out_row,
    lse_row,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Clear the rows whose flag is set; grid ``(T,)``.

    Output rows ``[T, WIDTH]`` become 0, and LSE rows ``[T, HEADS]`` become -inf. Other rows are
    neither read nor written.
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(flag_ptr + row) != 0:
        column = tl.arange(0, TILE)
        for at in range(0, WIDTH, TILE):
            zero = tl.zeros([TILE], out_ptr.dtype.element_ty)
            tl.store(out_ptr + row * out_row + at + column, zero, mask=at + column < WIDTH)
        head = tl.arange(0, HEAD_WIDTH)
        empty = tl.full([HEAD_WIDTH], float("-inf"), tl.float32)
        tl.store(lse_ptr + row * lse_row + head, empty, mask=head < HEADS)


@triton.jit(
    do_not_specialize=["page_row"], do_not_specialize_on_alignment=["pages_ptr", "kv_lens_ptr"]
)
def clear_tails_kernel(
    key_ptr,
    value_ptr,
    pages_ptr,
    kv_lens_ptr,
    page_row,
    k_block: tl.int64,
    k_token: tl.int64,
    k_head: tl.int64,
    v_block: tl.int64,
    v_token: tl.int64,
    v_head: tl.int64,
    PAGE_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Zero the slots behind a request's last key, in the page of that key; grid ``(R, Hk)``.

    A program has one head of one request. No other slot is written. Block 0 is never written: it
    holds no request's keys, and table rows without keys point there. A request without keys has no
    page.
    """
    req = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    kv_len = tl.load(kv_lens_ptr + req)
    first = kv_len % PAGE_SIZE
    if first != 0:
        page = tl.load(pages_ptr + req * page_row + kv_len // PAGE_SIZE).to(tl.int64)
        column = tl.arange(0, WIDTH)
        zero = tl.zeros([TOKENS, WIDTH], tl.int16)
        for skipped in range(0, PAGE_SIZE, TOKENS):
            slot = skipped + tl.arange(0, TOKENS)
            there = (slot >= first) & (slot < PAGE_SIZE) & (page != _NULL_BLOCK)
            there = there[:, None] & (column < SIZE)[None, :]
            slot = slot.to(tl.int64)
            at = page * k_block + slot * k_token + head * k_head
            tl.store(key_ptr + at[:, None] + column[None, :], zero, mask=there)
            at = page * v_block + slot * v_token + head * v_head
            tl.store(value_ptr + at[:, None] + column[None, :], zero, mask=there)


def clear_tails_call(
    key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor, kv_lens: torch.Tensor
) -> Launch:
    """The launch of :func:`attn.ops.clear.clear_tails`, with its arguments."""
    # A zero of any element type is all bits zero, so the kernel clears 16-bit words.
    words = key.view(torch.int16), value.view(torch.int16)
    shape = words[0].shape
    strides = words[0].stride()[:3], words[1].stride()[:3]
    launcher = _tails_launcher(shape[1], shape[3], strides, pages.stride(0))
    varying = {
        "key_ptr": words[0],
        "value_ptr": words[1],
        "pages_ptr": pages,
        "kv_lens_ptr": kv_lens,
    }
    return launcher.bind((kv_lens.shape[0], shape[2]), varying)


@lru_cache(maxsize=MOST_LAUNCHERS)
def _tails_launcher(
    page_size: int, size: int, strides: tuple[tuple[int, ...], tuple[int, ...]], page_row: int
) -> Launcher:
    """The launcher for caches and tables with these strides.

    It is kept, because every layer of every step launches the kernel on the same strides.
    """
    fixed: dict[str, Any] = {
        "page_row": page_row,
        "PAGE_SIZE": page_size,
        "SIZE": size,
        "WIDTH": triton.next_power_of_2(size),
        "TOKENS": min(triton.next_power_of_2(page_size), _TILE // 64),
    }
    for name, own in zip("kv", strides, strict=True):
        axes = zip(("block", "token", "head"), own, strict=True)
        fixed |= {f"{name}_{axis}": stride for axis, stride in axes}
    varying = ("key_ptr", "value_ptr", "pages_ptr", "kv_lens_ptr")
    return Launcher(clear_tails_kernel, fixed, varying)


def clear_call(out: torch.Tensor, lse: torch.Tensor, flags: torch.Tensor) -> KernelCall:
    """The launch that makes flagged rows neutral.

    Args:
        out: ``[T, H, D]``, dense in its last two axes, written.
        lse: ``[T, H]`` fp32, dense in its last axis, written.
        flags: ``[<= T]`` bool.
    """
    width, heads = out.shape[1] * out.shape[2], out.shape[1]
    arguments = {
        "out_ptr": out,
        "lse_ptr": lse,
        "flag_ptr": flags.view(torch.uint8),
        "out_row": out.stride(0),
        "lse_row": lse.stride(0),
        "WIDTH": width,
        "HEADS": heads,
        "HEAD_WIDTH": triton.next_power_of_2(heads),
        "TILE": _TILE,
    }
    return KernelCall(clear_kernel, (len(flags),), arguments, num_warps=4)
