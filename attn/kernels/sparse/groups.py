"""Groups of arguments of the portable kernels of listed rows.

:mod:`attn.kernels.lang.groups` has more.
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl

from attn.kernels.lang.groups import OptionalTensor


class Query(NamedTuple):
    """The step's queries, and the factor of their products with keys."""

    query_ptr: tl.tensor
    """``[T, NUM_HEADS, WIDTH]``, the absorbed part of queries."""
    rotary_ptr: tl.tensor
    """``[T, NUM_HEADS, ROPE]``, the rotary part of queries."""
    query_token: tl.tensor
    """int32, elements from a token's absorbed part to the next one's."""
    query_head: tl.tensor
    """int32, elements from a head's absorbed part to the next one's."""
    rotary_token: tl.tensor
    """int32, elements from a token's rotary part to the next one's."""
    rotary_head: tl.tensor
    """int32, elements from a head's rotary part to the next one's."""
    scale: tl.tensor
    """fp32, factor of the products."""


class Cache(NamedTuple):
    """The latent cache of a layer; offsets of its rows are in units of the rows' alignment."""

    latent_ptr: tl.tensor
    """``[N, BLOCK_SIZE, WIDTH]``, latent parts as they are stored."""
    rope_ptr: tl.tensor
    """``[N, BLOCK_SIZE, ROPE]``, rotary parts as they are stored."""
    scales_ptr: OptionalTensor
    """``[N, BLOCK_SIZE, WIDTH / 128]`` fp32, factors of latent elements; read with SCALED."""
    factor_ptr: OptionalTensor
    """One fp32, the factor of all elements; None where there is none."""
    BLOCK_SIZE: tl.constexpr
    """int, tokens of a page."""
    BLOCK_UNITS: tl.constexpr
    """int, units from a page to the next one."""
    ROW_UNITS: tl.constexpr
    """int, units from a row to the next one of its page."""
    LATENT_UNIT: tl.constexpr
    """int, elements of latent parts in a unit."""
    ROPE_UNIT: tl.constexpr
    """int, elements of rotary parts in a unit."""
    SCALE_UNIT: tl.constexpr
    """int, factors in a unit."""
    WIDTH: tl.constexpr
    """int, elements of a latent part."""
    ROPE: tl.constexpr
    """int, elements of a rotary part."""
    KIND: tl.constexpr
    """int, how elements are stored: a kind of :mod:`attn.kernels.lang.stored`."""
    SCALED: tl.constexpr
    """bool, whether each 128 latent elements have a factor."""
    HARDWARE_E4M3: tl.constexpr
    """bool, whether the GPU has instructions for e4m3."""
    ROW_BYTES: tl.constexpr = 0
    """int, bytes of a row; read by prefetches."""


class Lists(NamedTuple):
    """The rows that each query token attends."""

    ids_ptr: tl.tensor
    """``[T, topk]`` int32, number of each listed row; -1 for none."""
    lens_ptr: OptionalTensor
    """``[T]`` int32, entries of each list; None where all lists have ``topk``."""
    ids_row: tl.tensor
    """int32, elements from a token's list to the next one's."""
    topk: tl.tensor
    """int32, most entries of a list."""


class Tile(NamedTuple):
    """The tile of heads by listed rows that a program computes at a time, and how it walks a list.

    The switches from SPAN to HOLDS_NEXT are those of
    :func:`attn.kernels.sparse.attend.sparse_mla_kernel`. The last two are those of
    :func:`attn.kernels.sparse.attend_many.sparse_mla_many_kernel`.
    """

    NUM_HEADS: tl.constexpr
    """int, query heads."""
    HEAD_TILES: tl.constexpr
    """int, tiles into which the heads are cut."""
    ROWS: tl.constexpr
    """int, heads of a tile, padding included."""
    KV_TILE: tl.constexpr
    """int, entries of a list that a step takes."""
    SEGMENT: tl.constexpr
    """int, entries of a segment."""
    SEGMENTS: tl.constexpr
    """int, most segments of a list."""
    COMPUTE: tl.constexpr
    """Type of the products' operands."""
    STAGES: tl.constexpr
    """int, steps that are under way."""
    SPAN: tl.constexpr = 1
    """int, segments that a program takes."""
    FOLDS: tl.constexpr = False
    """bool, whether a program closes a state at the end of each of several segments."""
    CARRIES_IDS: tl.constexpr = False
    """bool, whether entries are loaded two steps ahead."""
    HOLDS_NEXT: tl.constexpr = False
    """bool, whether the next step's latent parts are held in registers."""
    WHOLE_STEPS: tl.constexpr = False
    """bool, whether ``topk`` is a multiple of KV_TILE."""
    SHRINKS: tl.constexpr = False
    """bool, whether elements are made 2^-32 times as large as they are."""
