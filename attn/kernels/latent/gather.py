"""Rows of queries and of outputs moved between a batch's tokens and a kernel's padded rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attn.kernels.lang.numerics import decode_e4m3, divide, encode_e4m3, round_to, to_float32
from builders.launch.call import KernelCall

_TILE = 512
_VARYING = ["scale"]
_ANYWHERE = ["index_ptr", "flag_ptr"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def pack_query_kernel(
    nope_ptr,
    rope_ptr,
    index_ptr,
    out_ptr,
    scale,
    nope_token: tl.int64,
    nope_head: tl.int64,
    rope_token: tl.int64,
    rope_head: tl.int64,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    INDEXED: tl.constexpr,
    E4M3: tl.constexpr,
    FROM_E4M3: tl.constexpr,
    HARDWARE_E4M3: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write token ``index[i]`` as row i of ``[S, HEADS, RANK + ROPE]``; grid ``(S, HEADS)``.

    Rows of index -1 are zeros. With E4M3, a row is ``x / scale`` as e4m3 patterns. With FROM_E4M3,
    the inputs are e4m3 patterns, and a row is their values times ``scale``.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    token = row
    if INDEXED:
        token = tl.load(index_ptr + row).to(tl.int64)
    there = token >= 0
    out = out_ptr + (row * HEADS + head) * (RANK + ROPE)
    column = tl.arange(0, TILE)
    for at in tl.static_range(0, RANK + ROPE, TILE):
        here = at + column
        is_nope = here < RANK
        is_rope = (here >= RANK) & (here < RANK + ROPE)
        x = tl.load(
            nope_ptr + token * nope_token + head * nope_head + here,
            mask=there & is_nope,
            other=0,
        )
        y = tl.load(
            rope_ptr + token * rope_token + head * rope_head + here - RANK,
            mask=there & is_rope,
            other=0,
        )
        x = tl.where(is_nope, x, y)
        if E4M3:
            code = encode_e4m3(divide(to_float32(x), scale), HARDWARE_E4M3)
            tl.store(out + here, code, mask=is_nope | is_rope)
        elif FROM_E4M3:
            real = decode_e4m3(x, HARDWARE_E4M3).to(tl.float32) * scale
            real = round_to(real, out_ptr.dtype.element_ty)
            tl.store(out + here, real, mask=is_nope | is_rope)
        else:
            tl.store(out + here, x, mask=is_nope | is_rope)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def unpack_state_kernel(
    padded_ptr,
    padded_lse_ptr,
    index_ptr,
    flag_ptr,
    out_ptr,
    lse_ptr,
    scale,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    FLAGGED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write row ``index[i]`` as token i of ``[T, WIDTH]``, and its LSE times ``scale``; grid
    ``(T,)``.

    Where the index is -1 or the token is flagged, the output is zero and the LSE -inf.
    """
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(index_ptr + token).to(tl.int64)
    there = row >= 0
    if FLAGGED:
        there = there & (tl.load(flag_ptr + token) == 0)
    column = tl.arange(0, TILE)
    for at in range(0, WIDTH, TILE):
        here = at + column
        x = tl.load(padded_ptr + row * WIDTH + here, mask=there & (here < WIDTH), other=0.0)
        tl.store(out_ptr + token * WIDTH + here, x, mask=here < WIDTH)
    head = tl.arange(0, HEAD_WIDTH)
    lse = tl.load(
        padded_lse_ptr + row * HEADS + head, mask=there & (head < HEADS), other=float("-inf")
    )
    tl.store(lse_ptr + token * HEADS + head, lse * scale, mask=head < HEADS)


def pack_query_call(
    nope: torch.Tensor,
    rope: torch.Tensor,
    index: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
    *,
    hardware_e4m3: bool,
) -> KernelCall:
    """The launch of :func:`attn.ops.gather.pack_query`, which explains and checks the arguments."""
    rank, width = nope.shape[2], rope.shape[2]
    is_e4m3, was_e4m3 = (one.dtype == torch.float8_e4m3fn for one in (out, nope))
    arguments = {
        "nope_ptr": nope.view(torch.uint8) if was_e4m3 else nope,
        "rope_ptr": rope.view(torch.uint8) if was_e4m3 else rope,
        "index_ptr": index,
        "out_ptr": out.view(torch.uint8) if is_e4m3 else out,
        "scale": scale,
        "nope_token": nope.stride(0),
        "nope_head": nope.stride(1),
        "rope_token": rope.stride(0),
        "rope_head": rope.stride(1),
        "HEADS": nope.shape[1],
        "RANK": rank,
        "ROPE": width,
        "INDEXED": index is not None,
        "E4M3": is_e4m3,
        "FROM_E4M3": was_e4m3,
        "HARDWARE_E4M3": hardware_e4m3,
        "TILE": _TILE,
    }
    return KernelCall(pack_query_kernel, (len(out), nope.shape[1]), arguments, num_warps=2)


def unpack_state_call(
    padded: torch.Tensor,
    padded_lse: torch.Tensor,
    index: torch.Tensor,
    flags: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> KernelCall:
    """The launch of :func:`attn.ops.gather.unpack_state`, which explains the arguments."""
    heads = out.shape[1]
    arguments = {
        "padded_ptr": padded,
        "padded_lse_ptr": padded_lse,
        "index_ptr": index,
        "flag_ptr": None if flags is None else flags.view(torch.uint8),
        "out_ptr": out,
        "lse_ptr": lse,
        "scale": scale,
        "WIDTH": heads * out.shape[2],
        "HEADS": heads,
        "HEAD_WIDTH": triton.next_power_of_2(heads),
        "FLAGGED": flags is not None,
        "TILE": 1024,
    }
    return KernelCall(unpack_state_kernel, (len(index),), arguments, num_warps=4)
