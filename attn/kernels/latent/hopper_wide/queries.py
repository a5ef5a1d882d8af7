"""Queries of the wide Hopper latent kernel, on their way to the shared memory of products.

**Over e4m3** products of scores are of e4m3, of which each query element becomes a sum of two. A
row is multiplied by a power of two first, so that its largest element is in [2^7, 2^8). An
element's large term is the element rounded to e4m3, and its small term is the rest. Both have four
significant bits, so together they have the eight of bf16: an element is exact down to 2^-9 of the
row's largest, and a smaller one errs by at most 2^-17 of it. Two terms hold nine of fp16's eleven
bits, so queries of fp16 go to another kernel (``builders/latent/choice.py``).

An engine may ask for large terms alone (``EngineConfig.fp8_mla_queries``): products take half the
time, and an element errs by up to a sixteenth of itself.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attn.kernels.dense.tile import halves_of, power_of_two_guard
from attn.kernels.lang.compat import reinterpret, thread_barrier
from attn.kernels.lang.constants import LOG2E
from attn.kernels.lang.opaque import opaque_zero
from attn.kernels.latent.hopper_wide.parts import HALF

LARGER = gl.constexpr("max.xorsign.abs.bf16x2 $0, $1, $2;")
"""The larger magnitudes of two pairs of bf16 numbers; their signs are products of signs."""
ROUNDED = gl.constexpr(
    "{ .reg .b32 a, b, c, d; .reg .b16 x, y; shl.b32 a, $1, 16; and.b32 b, $1, 0xFFFF0000;"
    " shl.b32 c, $2, 16; and.b32 d, $2, 0xFFFF0000; cvt.rn.satfinite.e4m3x2.f32 x, b, a;"
    " cvt.rn.satfinite.e4m3x2.f32 y, d, c; mov.b32 $0, {x, y}; }"
)
"""Two pairs of bf16 numbers as four of e4m3. The compiler's conversion takes more instructions."""


@gluon.jit
def query_rows(
    token, count, in_group, tile, LAYOUT: gl.constexpr, first=0, NUMBER: gl.constexpr = 64
):
    """Tokens and heads of NUMBER query rows from ``first`` on, and which are real; ``[NUMBER]``.

    The rows of the work item are those of ``count`` tokens from ``token`` on, and of heads from
    ``in_group`` on.
    """
    row = first + gl.arange(0, NUMBER, layout=gl.SliceLayout(1, LAYOUT)) + opaque_zero()
    head = in_group + row % tile.TILE_HEADS
    wanted = (row < count * tile.TILE_HEADS) & (head < tile.GROUP)
    return token + row // tile.TILE_HEADS, head, wanted


@gluon.jit
def load_queries(token, count, in_group, walks, query, room, tile, W: gl.constexpr):
    """Copy the queries of a work item to shared memory; each of two warp groups copies its half.

    No product still reads the previous item's queries: the caller has the sums of all its weights.
    Over e4m3 the groups meet here. ``walks`` is how often they came here for earlier items.
    """
    if tile.E4M3:
        _load_terms(token, count, in_group, walks, query, room, tile, W)
    else:
        _load_half(token, count, in_group, query, room, tile, W)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(room.loaded.index(0), count=1)


@gluon.jit
def _load_half(token, count, in_group, query, room, tile, W: gl.constexpr):
    """Copy half of the columns of the queries, over 16 bits; group 0 also copies rotary columns."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    tokens, head, wanted = query_rows(token, count, in_group, tile, LAYOUT)
    at = query.absorbed_at(tokens, head)[:, None] + (W * HALF + column)[None, :]
    rotary_at = query.rotary_at(tokens, head)[:, None] + column[None, :]
    mask = wanted[:, None]
    # All loads are under way before the first is waited for.
    p0 = gl.load(at, mask=mask, other=0.0)
    p1 = gl.load(at + 64, mask=mask, other=0.0)
    p2 = gl.load(at + 128, mask=mask, other=0.0)
    p3 = gl.load(at + 192, mask=mask, other=0.0)
    if W == 0:
        rotary = gl.load(rotary_at, mask=mask, other=0.0)
    room.q_boxes.index(W * 4).store(p0)
    room.q_boxes.index(W * 4 + 1).store(p1)
    room.q_boxes.index(W * 4 + 2).store(p2)
    room.q_boxes.index(W * 4 + 3).store(p3)
    if W == 0:
        room.q_rope.index(0).store(rotary)


@gluon.jit
def _load_terms(token, count, in_group, walks, query, room, tile, W: gl.constexpr):
    """Copy half of the rows of the queries, as e4m3: a warp has all of a row, and its maximum."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 8], [4, 1, 8], [4, 1, 1], [2, 1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    HALF_ROWS: gl.constexpr = 32
    FIRST: gl.constexpr = W * HALF_ROWS
    z = opaque_zero()
    # Eight times zero: the compiler has to know that a thread's columns are aligned.
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))) + 8 * z
    run = 64 * gl.arange(0, 8, layout=gl.SliceLayout(0, ROWS))
    tokens, head, _ = query_rows(token, count, in_group, tile, ROWS, FIRST, HALF_ROWS)
    # A row that is not real gets the query of one that is. Zeros would occupy registers longer.
    tokens = gl.minimum(tokens, token + count - 1)
    head = gl.minimum(head, tile.GROUP - 1)
    at = query.absorbed_at(tokens, head)[:, None, None] + column[None, None, :]
    # All loads are under way before the first is waited for.
    latent = gl.load(at + run[None, :, None])
    rotary = gl.load(query.rotary_at(tokens, head)[:, None, None] + column[None, None, :])
    # The producer waits for this before it asks for the second block.
    mbarrier.arrive(room.loaded.index(1), count=1)
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    latent = gl.reshape(latent, [HALF_ROWS, 2 * HALF])
    latent = gl.convert_layout(latent, FLAT, assert_trivial=True)
    rotary = gl.convert_layout(gl.reshape(rotary, [HALF_ROWS, 64]), FLAT, assert_trivial=True)
    most = _largest_of(latent, rotary)
    # 2^3 less than for fp16: e4m3 has numbers up to 448.
    down, up = power_of_two_guard(most)
    # e4m3 has no infinity. Without this a row that has one, or an element that the guard does not
    # bring into range, would get numbers.
    up = gl.where(most < 2.0**114, 8.0 * up, float("nan"))
    factor = cache_scale(room) * query.scale * LOG2E
    # No weight of the previous item is computed any more.
    room.factors.slice(FIRST, HALF_ROWS, dim=0).store(up * factor)
    # The terms are stored where the other group's output of the previous item was.
    mbarrier.wait(room.loaded.index(1), walks & 1)
    # A power of two is bf16, and so is its product with an element.
    down = (0.125 * down).to(rotary.dtype)
    terms = reinterpret(
        room.q_boxes, gl.float8e4nv, [2, 64, 2 * HALF], gl.NVMMASharedLayout(128, 8, 2)
    )
    ropes = reinterpret(room.q_rope, gl.float8e4nv, [2, 64, 64], gl.NVMMASharedLayout(64, 8, 2))
    # With a constant in place of ``z`` addresses would be computed at the start and spilled.
    _store_terms(rotary, down, room.TERMS, ropes, z, FIRST)
    _store_terms(latent, down, room.TERMS, terms, z, FIRST)


@gluon.jit
def _largest_of(latent, rotary):
    """The largest magnitude of each row, fp32.

    Both are bf16: ``latent`` ``[rows, 512]``, ``rotary`` ``[rows, 64]``.
    """
    most = latent
    for _ in gl.static_range(3):
        first, second = halves_of(most)
        most = _larger(first, second)
    most = gl.convert_layout(most, rotary.type.layout, assert_trivial=True)
    return gl.max(gl.abs(_larger(most, rotary)).to(gl.float32), 1)


@gluon.jit
def _larger(x, y):
    """The larger magnitudes of bf16 numbers; their signs mean nothing."""
    return gl.inline_asm_elementwise(LARGER, "=r,r,r", [x, y], dtype=x.dtype, is_pure=True, pack=2)


@gluon.jit
def _rounded(x):
    """bf16 numbers rounded to e4m3."""
    return gl.inline_asm_elementwise(
        ROUNDED, "=r,r,r", [x], dtype=gl.float8e4nv, is_pure=True, pack=4
    )


@gluon.jit
def _store_terms(part, down, TERMS: gl.constexpr, terms, at, FIRST: gl.constexpr):
    """Store the terms of rows of queries times ``down``, a power of two for each row.

    Rows from FIRST on of ``terms[at]`` get large terms, rows of ``terms[at + 1]`` small terms.
    """
    large = terms.index(at).slice(FIRST, part.shape[0], dim=0)
    if TERMS == 2:
        x = (part.to(gl.float32) * down.to(gl.float32)[:, None]).to(gl.float16)
        rounded = x.to(gl.float8e4nv)
        large.store(rounded)
        small = terms.index(at + 1).slice(FIRST, part.shape[0], dim=0)
        small.store((x - rounded.to(gl.float16)).to(gl.float8e4nv))
    else:
        large.store(_rounded(part * down[:, None]))


@gluon.jit
def store_scale(scale, room):
    """Store the scale of an e4m3 cache, where both groups of columns find it."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    room.scale.store(gl.full([1], scale, gl.float32, ONE))


@gluon.jit
def cache_scale(room):
    """The scale of an e4m3 cache, fp32, behind the first queries.

    It is in shared memory: a load from where the engine keeps it could wait for memory.
    """
    return gl.max(room.scale.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
