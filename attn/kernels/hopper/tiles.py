"""The tiles of a step: which of them a program takes, and where one of them is."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn.kernels.masks import last_visible
from builders.kernels import first_visible


@gluon.jit
def wide(stride):
    """A stride, which is not negative, as int64: of a signed one, copies of the sign would be kept
    in registers for the whole kernel.
    """
    return stride.to(gl.uint32).to(gl.int64)


@gluon.jit
def work_at(turn, programs):
    """Number of the program's tile of that turn."""
    place = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, place, programs - 1 - place)


@gluon.jit
def share_of(num_tiles_ptr, programs, HEADS: gl.constexpr):
    """How many tiles this program takes.

    Rounds of all programs go forth and back, so that nobody always gets the longer tiles.
    """
    num_tiles = gl.load(num_tiles_ptr)
    total = num_tiles * HEADS
    rounds = total // programs
    return rounds + (work_at(rounds, programs) < total).to(gl.int32)


@gluon.jit
def tile_at(
    turn, tile_starts_ptr, num_tiles_ptr, query_start_ptr, seq_lens_ptr, causal_ptr, ranges_ptr,
    num_reqs, programs, num_ranges, window, chunk, lookback, HEADS: gl.constexpr,
    TOKENS: gl.constexpr, KV_TILE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    CHUNK: gl.constexpr, RANGES: gl.constexpr, CLAMP: gl.constexpr,
):  # fmt: skip
    """The program's tile of that turn.

    Returns tile of heads, request, its first row of the query, the tile's first token, tokens and
    keys of the request, whether it is causal, and the tiles of keys ``[low, high)``, one at least.
    """
    num_tiles = gl.load(num_tiles_ptr)
    work = work_at(turn, programs)
    head = work % HEADS
    # The last tiles see most keys: they start first.
    tile = num_tiles - 1 - work // HEADS
    req = 0
    above = num_reqs
    while above - req > 1:
        middle = (req + above) // 2
        go = gl.load(tile_starts_ptr + middle) <= tile
        req = gl.where(go, middle, req)
        above = gl.where(go, above, middle)
    token = (tile - gl.load(tile_starts_ptr + req)) * TOKENS
    begin = gl.load(query_start_ptr + req)
    query_len = gl.load(query_start_ptr + req + 1) - begin
    kv_len = gl.load(seq_lens_ptr + req)
    first = gl.maximum(kv_len - query_len, 0) + token
    last = gl.maximum(kv_len - query_len, 0) + gl.minimum(token + TOKENS, query_len) - 1
    causal = 1
    if CAUSAL == 2:
        causal = gl.load(causal_ptr + req).to(gl.int32)
    ranges = ranges_ptr
    if RANGES:
        ranges = ranges_ptr + req.to(gl.int64) * num_ranges * 2
    start = first_visible(
        first, last, window, chunk, lookback, ranges, num_ranges, WINDOW or CHUNK, CHUNK, RANGES,
        CLAMP,
    )  # fmt: skip
    stop = last_visible(
        last, kv_len, causal, window, ranges, num_ranges, first, CAUSAL, WINDOW, CHUNK, False,
        RANGES,
    )  # fmt: skip
    low = start // KV_TILE
    high = gl.maximum((stop + KV_TILE - 1) // KV_TILE, low + 1)
    return head, req, begin, token, query_len, kv_len, causal, start, low, high
