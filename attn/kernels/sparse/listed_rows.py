"""Listed latent rows: reading a list, finding a row, converting its elements, weighting it.

The portable kernels and the Hopper kernels of sparse attention share these pieces.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn.kernels.lang.numerics import INTERPRETED, decode_e4m3, saturate_to

SPREAD = (
    " prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424;"
    " shr.u32 d, a, 4; and.b32 d, d, 0x07F007F0; and.b32 a, a, 0x80008000; or.b32 a, a, d;"
    " shr.u32 d, b, 4; and.b32 d, d, 0x07F007F0; and.b32 b, b, 0x80008000; or.b32 b, b, d;"
)
"""PTX that turns four e4m3 in $2 into pairs of bf16 in a and b; d is scratch. It moves the bits of
an e4m3 number to bf16's places, where they are 2^-120 times the number."""
E4M3_TO_BF16 = tl.constexpr(
    "{ .reg .b32 a, b, c, d, z; mov.b32 z, 0x80008000; mov.b32 c, 0x7B807B80;"
    + SPREAD
    + " fma.rn.bf16x2 a, a, c, z; fma.rn.bf16x2 b, b, c, z;"
    " fma.rn.bf16x2 $0, a, $3, z; fma.rn.bf16x2 $1, b, $4, z; }"
)
"""PTX that multiplies four e4m3 in $2 by the factors in $3 and $4, to pairs of bf16 in $0 and $1.
It is exact where the factors are powers of two."""
_E4M3_TO_UNSCALED_BF16 = tl.constexpr(
    "{ .reg .b32 a, b, c, d, z; mov.b32 z, 0x80008000; mov.b32 c, 0x7B807B80;"
    + SPREAD
    + " fma.rn.bf16x2 $0, a, c, z; fma.rn.bf16x2 $1, b, c, z; }"
)


@triton.jit
def row_offsets(ids, block, stride, BLOCK_SIZE: tl.constexpr):
    """int64 offsets of listed rows in units of the rows' alignment; an id of -1 has none."""
    if BLOCK_SIZE == 1:
        offset = ids.to(tl.int64) * stride
    else:
        slot = tl.maximum(ids, 0)
        offset = (slot // BLOCK_SIZE).to(tl.int64) * block
        offset += (slot % BLOCK_SIZE).to(tl.int64) * stride
    return offset


@triton.jit
def listed_ids(ids_ptr, tile, length, KV_TILE: tl.constexpr):
    """Listed rows of one step of KV_TILE entries; entries from ``length`` on are -1, not loaded."""
    at = tile * KV_TILE + tl.arange(0, KV_TILE)
    return tl.load(ids_ptr + at, mask=at < length, other=-1)


@triton.jit
def elements_of(stored, factors, KIND: tl.constexpr, SCALED: tl.constexpr, COMPUTE: tl.constexpr,
                HARDWARE_E4M3: tl.constexpr):  # fmt: skip
    """Stored elements ``[KV, WIDTH]``, converted to the type of the products.

    With SCALED they are multiplied by ``factors`` ``[KV, BLOCKS]``, one for each WIDTH / BLOCKS
    elements.
    """
    KV: tl.constexpr = stored.shape[0]
    WIDTH: tl.constexpr = stored.shape[1]
    if KIND == 0:
        elements = stored.to(COMPUTE)
    elif tl.bfloat16 == COMPUTE and not INTERPRETED:
        if SCALED:
            narrow = factors.to(tl.bfloat16)
            BLOCKS: tl.constexpr = factors.shape[1]
            wide = tl.broadcast_to(narrow[:, :, None], [KV, BLOCKS, WIDTH // BLOCKS])
            wide = tl.reshape(wide, [KV, WIDTH])
            elements = tl.inline_asm_elementwise(
                E4M3_TO_BF16, "=r,=r,r,r,r", [stored, wide], dtype=tl.bfloat16, is_pure=True, pack=4
            )
        else:
            elements = tl.inline_asm_elementwise(
                _E4M3_TO_UNSCALED_BF16, "=r,=r,r", [stored], dtype=tl.bfloat16, is_pure=True, pack=4
            )
    else:
        real = decode_e4m3(stored, HARDWARE_E4M3).to(tl.float32)
        if SCALED:
            blocks = tl.reshape(real, [KV, factors.shape[1], WIDTH // factors.shape[1]])
            real = tl.reshape(blocks * factors[:, :, None], [KV, WIDTH])
        elements = saturate_to(real, COMPUTE)
    return elements


@triton.jit
def weights_of(scores, m, there, scale):
    """New maxima, factors for old sums and weights, from ``[ROWS, KV]`` scores."""
    scores = tl.where(there[None, :], scores, float("-inf"))
    top = tl.maximum(m, tl.max(scores, 1) * scale)
    base = tl.where(top == float("-inf"), 0.0, top)
    # The fma is explicit: a compiler could contract the two operations in one kernel and not in
    # another.
    weights = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + scale, -base[:, None]))
    return top, tl.exp2(m - base), weights
