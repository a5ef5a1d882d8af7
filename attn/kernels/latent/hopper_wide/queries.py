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

from attn.kernels.dense.tile import power_of_two_guard
from attn.kernels.lang.compat import reinterpret, thread_barrier
from attn.kernels.lang.constants import LOG2E
from attn.kernels.lang.opaque import opaque_zero
from attn.kernels.latent.hopper_wide.parts import HALF


@gluon.jit
def query_rows(token, count, in_group, tile, LAYOUT: gl.constexpr):
    """Tokens and heads of a work item's query rows, and which are real; ``[64]`` each.

    The rows are those of ``count`` tokens from ``token`` on, and of heads from ``in_group`` on.
    """
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT)) + opaque_zero()
    head = in_group + row % tile.TILE_HEADS
    wanted = (row < count * tile.TILE_HEADS) & (head < tile.GROUP)
    return token + row // tile.TILE_HEADS, head, wanted


@gluon.jit
def load_queries(token, count, in_group, walks, query, room, tile, W: gl.constexpr):
    """Copy the queries of a work item to shared memory; each of two warp groups copies its half.

    No product still reads the previous item's queries: the caller has the sums of all its weights.
    Over e4m3 the groups meet here. ``walks`` is how often they came here for earlier items.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    if tile.E4M3:
        # Eight times zero: the compiler has to know that a thread's columns are aligned.
        column += 8 * opaque_zero()
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
    if tile.E4M3:
        scale = gl.load(room.scale_ptr)
        # The maxima are converted, not the elements: those would be kept in fp32 for later.
        most = gl.maximum(gl.maximum(gl.abs(p0), gl.abs(p1)), gl.maximum(gl.abs(p2), gl.abs(p3)))
        if W == 0:
            most = gl.maximum(most, gl.abs(rotary))
        down = _agreed_guard(gl.max(most.to(gl.float32), 1), scale, walks, query, room, W)
        boxes = reinterpret(
            room.q_boxes, gl.float8e4nv, [8, 64, 128], gl.NVMMASharedLayout(128, 8, 2)
        )
        # With a constant in place of ``z`` addresses would be computed at the start and spilled.
        z = opaque_zero()
        small = boxes.index(z + 4 * W)
        large = boxes.index(z + 4 * W + 1)
        _store_terms(p0, down, room.TERMS, small.slice(0, 64, dim=1), large.slice(0, 64, dim=1))
        _store_terms(p1, down, room.TERMS, small.slice(64, 64, dim=1), large.slice(64, 64, dim=1))
        small = boxes.index(z + 4 * W + 2)
        large = boxes.index(z + 4 * W + 3)
        _store_terms(p2, down, room.TERMS, small.slice(0, 64, dim=1), large.slice(0, 64, dim=1))
        _store_terms(p3, down, room.TERMS, small.slice(64, 64, dim=1), large.slice(64, 64, dim=1))
        if W == 0:
            ropes = reinterpret(
                room.q_rope, gl.float8e4nv, [2, 64, 64], gl.NVMMASharedLayout(64, 8, 2)
            )
            _store_terms(rotary, down, room.TERMS, ropes.index(z), ropes.index(z + 1))
    else:
        room.q_boxes.index(W * 4).store(p0)
        room.q_boxes.index(W * 4 + 1).store(p1)
        room.q_boxes.index(W * 4 + 2).store(p2)
        room.q_boxes.index(W * 4 + 3).store(p3)
        if W == 0:
            room.q_rope.index(0).store(rotary)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(room.loaded.index(0), count=1)


@gluon.jit
def _store_terms(part, down, TERMS: gl.constexpr, small, large):
    """Store the terms of rows of queries times ``down``, a power of two for each row."""
    x = (part.to(gl.float32) * down[:, None]).to(gl.float16)
    rounded = x.to(gl.float8e4nv)
    large.store(rounded)
    if TERMS == 2:
        small.store((x - rounded.to(gl.float16)).to(gl.float8e4nv))


@gluon.jit
def cache_scale(room):
    """The scale of an e4m3 cache, fp32, behind the first queries.

    It is in shared memory: a load from where the engine keeps it could wait for memory.
    """
    return gl.max(room.scale.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _agreed_guard(most, scale, walks, query, room, W: gl.constexpr):
    """Powers of two by which rows of queries are multiplied, ``[64]`` fp32.

    ``most`` ``[64]`` are the largest magnitudes in the warp group's part of the rows. Warp group 0
    stores the factors of the rows' products, and ``scale``, that of the cache. It was loaded with
    the queries, so that its own way from memory costs no time.
    """
    ROWS: gl.constexpr = most.type.layout
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    z = opaque_zero()
    room.row_numbers.index(z + W).store(most)
    if W == 0:
        room.scale.store(gl.full([1], scale, gl.float32, ONE))
    thread_barrier()
    mbarrier.arrive(room.loaded.index(1), count=1)
    mbarrier.wait(room.loaded.index(1), walks & 1)
    most = gl.maximum(most, room.row_numbers.index(z + 1 - W).load(ROWS))
    # 2^3 less than for fp16: e4m3 has numbers up to 448.
    down, up = power_of_two_guard(most)
    if W == 0:
        # e4m3 has no infinity. Without this a row that has one, or an element that the guard does
        # not bring into range, would get numbers.
        up = gl.where(most < 2.0**114, 8.0 * up, float("nan"))
        room.factors.store(up * (scale * query.scale * LOG2E))
    return 0.125 * down
