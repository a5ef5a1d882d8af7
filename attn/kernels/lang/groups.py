"""Groups: arguments that plain Triton kernels hand together from one device function to the next.

A launch has flat arguments, and a kernel makes the groups from them. A field costs no more than an
argument: the PTX is the same. A field in capitals is a constexpr. Gluon kernels have such groups in
:mod:`attn.kernels.lang.structures`; a function that reads fields by their names takes either kind.

Groups are NamedTuples, since Triton compiles them and its interpreter runs them. Triton 3.6.0 to
3.9.0 all compile groups that keep these rules (``tests/lang/test_groups.py`` runs an example):

- A group with constexprs is made among the arguments of a call, and is never assigned to a name:
  an assignment turns its constexprs into tensors. A parameter keeps them, through all calls.
- A function returns tensors, or a group of tensors alone. Triton turns returned constexprs into
  tensors, and 3.6.0 cannot return None.
- A group of tensors alone may be assigned, carried by a loop and changed by a branch. A name that
  does this always holds the same kind of group.
- No field of a group is a group: 3.6.0 loses the constexprs inside.
- A field may be None where no function reads it; it then is a constexpr.
- No field is called ``type`` or ``values``, which are Triton's, or ``count`` or ``index``, which
  are every tuple's.
- A function is called with one kind of group for a parameter in all of a kernel. To the compiler,
  two groups with fields of the same types in the same order are alike.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import triton.language as tl

OptionalTensor: TypeAlias = tl.tensor | None
"""The type of a field that may be None."""


class Mask(NamedTuple):
    """The rules that say which keys a query sees, and pointers to each request's own rules."""

    causal_ptr: OptionalTensor
    """``[R]`` bool, whether each request is causal; read where CAUSAL is 2."""
    prefix_ptr: OptionalTensor
    """``[R]`` int32, number of each request's first keys that all its queries see; read with
    RSWA."""
    ranges_ptr: OptionalTensor
    """``[R, num_ranges, 2]`` int32, first and last position of ranges; read with RANGES.

    Tokens of a range see each other. An unused range has its first position above its last."""
    num_ranges: tl.tensor
    """int32, number of ranges of a request."""
    window: tl.tensor
    """int32, number of keys that a query sees, its own included; read with WINDOW, RSWA, CLAMP."""
    chunk: tl.tensor
    """int32, tokens of a chunk; read with CHUNK."""
    lookback: tl.tensor
    """int32, number of chunks that a query sees before its own chunk."""
    CAUSAL: tl.constexpr
    """0: no query is causal; 1: every query is causal; 2: ``causal_ptr`` says it per request."""
    WINDOW: tl.constexpr
    """bool, whether queries see a window only."""
    CHUNK: tl.constexpr
    """bool, whether queries see chunks only."""
    RSWA: tl.constexpr
    """bool, whether queries see a window and their request's prefix only."""
    RANGES: tl.constexpr
    """bool, whether requests have ranges."""
    CLAMP: tl.constexpr
    """bool, whether ranges end at the window."""


class Stripe(NamedTuple):
    """The keys that one rank has, see :class:`builders.splitkv.stripe.Stripe`."""

    size: tl.tensor
    """int32, number of ranks."""
    rank: tl.tensor
    """int32, number of this rank."""
    interleave: tl.tensor
    """int32, consecutive tokens that a rank has."""
    DCP: tl.constexpr
    """bool, whether the cache holds the keys of one rank only; if not, nothing else is read."""


class Plan(NamedTuple):
    """The plan of split KV, and the counters that its programs share.

    :class:`builders.splitkv.record.SplitPlan` describes both. A row of the plan is query tokens of
    one request with one segment group of its keys. A work item is a row of the plan in one head
    loop.
    """

    rows_ptr: tl.tensor
    """``[max rows, ROW_FIELDS]`` int32, the rows of the plan."""
    total_ptr: tl.tensor
    """``[2]`` int32: rows of the step, and the KV tiles that the groups share."""
    starts_ptr: tl.tensor
    """``[groups + 1, 2]`` int32: the work item and the segment at which each group starts."""
    shares_ptr: tl.tensor
    """``[groups, SHARE_FIELDS]`` int32, the share of each group of programs."""
    counters_ptr: tl.tensor
    """int32, how much has arrived: ``[groups, HEADS]`` segments, then
    ``[groups, HEADS, HEAD_LOOPS]`` segment groups. All are zero between launches."""
    groups: tl.tensor
    """int32, number of groups of programs."""
    HEADS: tl.constexpr
    """int, programs of a group: one for each tile of heads that the group takes at a time."""
    HEAD_LOOPS: tl.constexpr
    """int, how many times the groups walk the keys until all tiles of heads are done."""
    SLOTS: tl.constexpr
    """int, state slots for segments that a program lends."""
    SEGMENT_GROUPS: tl.constexpr
    """int, most segment groups of a request's keys."""
    AREA: tl.constexpr
    """int, state slots of a program in all."""
    SEGMENT_UNIT: tl.constexpr
    """int, length of a KV tile in the unit of segment starts: KV_TILE, or a fraction of it where
    segments are longer."""
    DEPENDS_ON_BATCH: tl.constexpr = False
    """bool, whether work items are cut between any two KV tiles, so that bits depend on the
    batch."""


class Scratch(NamedTuple):
    """Memory in which programs hand states to one another, a slot for each state."""

    states_ptr: tl.tensor
    """``[slots, USED, PLANES * WIDTH]`` fp32, the outputs of states, plane by plane."""
    sums_ptr: tl.tensor
    """``[slots, 2, USED]`` fp32, the maxima and the sums of states."""
    USED: tl.constexpr
    """int, rows of a state that can hold a query; further rows are padding."""
    WIDTH: tl.constexpr
    """int, columns of a plane of outputs, padding included."""
    PLANES: tl.constexpr
    """int, planes of outputs: 1, 2 or 4."""
    FINISH_ROWS: tl.constexpr = 0
    """int, rows that :func:`attn.kernels.dense.query_rows.fold_parts` folds at a time: USED or
    more."""
    FINISH_WIDTH: tl.constexpr = 0
    """int, columns that it folds at a time."""


class Out(NamedTuple):
    """Where results are written, and the factors that they get on the way.

    Registers hold output columns in planes, as :func:`attn.kernels.lang.stored.plane_columns`
    describes. Only functions that write whole planes read COLUMNS, SIZE and KIND.
    """

    out_ptr: tl.tensor
    """``[T, H, SIZE]``; with FP8_OUT of e4m3, as uint8."""
    lse_ptr: OptionalTensor
    """``[T, H]`` fp32; written with LSE."""
    sinks_ptr: OptionalTensor
    """``[H]``, the logit of each head's sink; read with SINKS."""
    output_scale_ptr: OptionalTensor
    """One fp32 by which outputs are divided; read with FP8_OUT."""
    out_token: tl.tensor
    """int32, elements from a token's output to the next one's."""
    out_head: tl.tensor
    """int32, elements from a head's output to the next one's."""
    lse_token: tl.tensor
    """int32, elements from a token's LSE to the next one's."""
    SINKS: tl.constexpr
    """bool, whether heads have sinks."""
    FP8_OUT: tl.constexpr
    """bool, whether outputs are e4m3."""
    LSE: tl.constexpr
    """bool, whether the LSE is written."""
    HARDWARE_E4M3: tl.constexpr = False
    """bool, whether the GPU has instructions for e4m3; read with FP8_OUT."""
    COLUMNS: tl.constexpr = 0
    """int, columns of a plane that are elements of the output; the rest is padding."""
    SIZE: tl.constexpr = 0
    """int, elements of a head's output."""
    KIND: tl.constexpr = 0
    """int, how the cache stores elements: a kind of :mod:`attn.kernels.lang.stored`."""


class State(NamedTuple):
    """Attention over a run of keys; it can be folded with the state of the keys that follow.

    Outputs are in 1, 2 or 4 planes. The fields of further planes hold tensors that nothing reads.
    """

    m: tl.tensor
    """``[ROWS]`` fp32, maxima of the scores, in units of log 2."""
    l: tl.tensor
    """``[ROWS]`` fp32, sums of the weights; within a segment ``[ROWS, KV_TILE]``."""
    acc0: tl.tensor
    """``[ROWS, WIDTH]`` fp32, the first plane of sums of values times weights."""
    acc1: tl.tensor
    """``[ROWS, WIDTH]`` fp32, the second plane."""
    acc2: tl.tensor
    """``[ROWS, WIDTH]`` fp32, the third plane."""
    acc3: tl.tensor
    """``[ROWS, WIDTH]`` fp32, the fourth plane."""


class Rows(NamedTuple):
    """Query rows of a tile, each of one token and one query head."""

    token: tl.tensor
    """``[ROWS]`` int32, the token in the step."""
    head: tl.tensor
    """``[ROWS]`` int32, the query head."""
    wanted: tl.tensor
    """``[ROWS]`` bool, False for padding."""


class Block(NamedTuple):
    """Query rows of a work item: some tokens in a row, for some query heads of one KV head."""

    token: tl.tensor
    """int32, the first token in the step."""
    tokens: tl.tensor
    """int32, number of tokens."""
    kv_head: tl.tensor
    """int32, the KV head."""
    in_group: tl.tensor
    """int32, the first query head, counted from the KV head's first query head."""
