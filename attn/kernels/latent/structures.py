"""Structures of the Hopper latent kernels: groups of arguments that only these kernels have.

:mod:`attn.kernels.lang.structures` has the structures that they share with other kernels, and says
how structures are made. Triton reads the types of fields from the annotations of a class. This
module must therefore not postpone annotations.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from attn.kernels.lang.compat import aggregate
from attn.kernels.lang.structures import Descriptor, Value


@aggregate
class LatentCache:
    """The paged cache of a latent layer: rows of 512 latent and 64 rotary columns."""

    k_desc: tma.tensor_descriptor
    """Descriptor of rows ``[N, BLOCK_SIZE, columns]`` in boxes ``[1, RUN, 64]``. A row has 576
    columns of 16 bits, or 288 words of two e4m3."""
    rope_desc: Descriptor
    """Descriptor of the same rows in boxes as wide as the rotary part; None where ``k_desc`` serves
    for that part too."""
    table_ptr: gl.tensor
    """``[R, table_row]`` int32, pages of the requests."""
    table_row: Value
    """int32, elements of a row of the table."""
    k_scale_ptr: Value
    """One fp32, factor of keys and values in e4m3; None for a cache of another type."""
    BLOCK_SIZE: gl.constexpr
    """int, tokens of a page."""


@aggregate
class CausalBounds:
    """Bounds of the keys that a part's queries see, which hold for all tiles of keys."""

    limit: gl.tensor
    """``[ROWS]`` int32, the last key that each query sees."""
    all_high: Value
    """int32, the key after the last that all queries see."""
    kv_len: Value
    """int32, number of the request's keys."""


@aggregate
class NarrowRing:
    """The ring of stages in shared memory through which the narrow kernel's latent rows arrive.

    TMA writes boxes. Products read the same memory as keys and as values, which are the left half
    of the latent columns, their right half, and for keys the rotary columns.
    """

    left_boxes: gl.shared_memory_descriptor
    """``[STAGES * BOXES * KV_TILE / RUN, 1, RUN, 64]``, left halves as TMA writes them: elements of
    16 bits, or words of two e4m3."""
    right_boxes: gl.shared_memory_descriptor
    """``[STAGES * BOXES * KV_TILE / RUN, 1, RUN, 64]``, right halves as TMA writes them."""
    rope_boxes: gl.shared_memory_descriptor
    """``[STAGES * KV_TILE / RUN, 1, RUN, columns]``, rotary parts as TMA writes them."""
    k_left: gl.shared_memory_descriptor
    """``[STAGES, KV_TILE, 256]``, left halves as keys."""
    k_right: gl.shared_memory_descriptor
    """``[STAGES, KV_TILE, 256]``, right halves as keys."""
    k_rope: gl.shared_memory_descriptor
    """``[STAGES, KV_TILE, 64]``, rotary parts as keys."""
    v_left: gl.shared_memory_descriptor
    """``[STAGES, KV_TILE, BOXES * 64]``, left halves as values: words of two elements with E4M3."""
    v_right: gl.shared_memory_descriptor
    """``[STAGES, KV_TILE, BOXES * 64]``, right halves as values."""
    left_rows: gl.shared_memory_descriptor
    """``[STAGES * BOXES * KV_TILE, 32]`` int32, rows of the boxes of left halves."""
    right_rows: gl.shared_memory_descriptor
    """``[STAGES * BOXES * KV_TILE, 32]`` int32, rows of the boxes of right halves."""
    full: gl.shared_memory_descriptor
    """``[STAGES, 1]`` mbarriers: the rows are there."""
    empty: gl.shared_memory_descriptor
    """``[STAGES, 1]`` mbarriers: the rows have been read."""
    STAGES: gl.constexpr
    """int, tiles that the ring holds."""
    BOXES: gl.constexpr
    """int, boxes of 64 columns that make up half of a row's latent columns."""
    ROW_BYTES: gl.constexpr
    """int, bytes of a row."""
    KV_TILE: gl.constexpr
    """int, tokens of a tile."""
    RUN: gl.constexpr
    """int, tokens of a box: they lie in one page."""


@aggregate
class NarrowRoom:
    """The shared memory of the narrow kernel's consumer."""

    q_left: gl.shared_memory_descriptor
    """``[16, 256]``, the queries' left halves. With an e4m3 cache, columns are in the order that
    ``_query_of`` in ``attn/kernels/latent/hopper_narrow/consumer.py`` explains."""
    q_right: gl.shared_memory_descriptor
    """``[16, 256]``, the queries' right halves, in the same order."""
    q_rope: gl.shared_memory_descriptor
    """``[16, 64]``, the queries' rotary parts, in the same order."""
    exchange: gl.shared_memory_descriptor
    """``[16, 8]`` fp32, the maximum of each row in each warp."""
    turned: gl.shared_memory_descriptor
    """``[16, KV_TILE]``, weights on their way to the layout of an operand."""


@aggregate
class KeptQueries:
    """The columns of a part's queries that stay in registers, as the first operand of products."""

    left: gl.tensor
    """``[16, 128]``, the first columns of the left half."""
    rope: gl.tensor
    """``[16, 64]``, the rotary columns."""


@aggregate
class NarrowState:
    """Attention over tiles of a segment, as products add it up.

    Each half of the output's columns has two accumulators. With an e4m3 cache these are the even
    and the odd columns of the half; otherwise they are its first and its second half.
    """

    m: gl.tensor
    """``[16]`` fp32, maxima of the products."""
    l: gl.tensor
    """``[16, 32]`` fp32, sums of the weights, one for each thread of a row."""
    left0: gl.tensor
    """``[16, 128]`` fp32, even or first columns of the left half."""
    left1: gl.tensor
    """``[16, 128]`` fp32, odd or last columns of the left half."""
    right0: gl.tensor
    """``[16, 128]`` fp32, even or first columns of the right half."""
    right1: gl.tensor
    """``[16, 128]`` fp32, odd or last columns of the right half."""
