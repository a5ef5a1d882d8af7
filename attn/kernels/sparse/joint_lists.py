"""Joint lists: the listed keys of neighbouring tokens, each of them once, as one list.

The heads of a few tokens fill the rows of a product that the heads of one token leave empty. The
lists of neighbouring tokens of a prompt have most keys in common, so that a kernel which attends
the tokens together reads far fewer rows. An entry of a joint list is the number of a row of the
cache; its highest bits say which of the tokens list that row.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from builders.launch.call import KernelCall
from builders.sparse.arguments import JointLists, TopkLists

_VARYING: Final = ["num_tokens", "table_width"]
_ANYWHERE: Final = [
    *("ids_ptr", "visible_ptr", "reqs_ptr", "block_table_ptr", "entries_ptr", "counts_ptr"),
]
_STEP: Final = 2048
"""Positions of one step of the walk over a window."""


@triton.jit
def _mark(
    ids_ptr, visible_ptr, marks_ptr, token, first, ids_row, here, BYTE: tl.constexpr,
    TOPK: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Set byte BYTE of the mark of each position of a window that a token lists.

    The window begins at position ``first``. A token that is not ``here`` marks nothing.
    """
    column = tl.arange(0, TILE)
    visible = tl.load(visible_ptr + token, mask=here, other=0)
    row = ids_ptr + token.to(tl.int64) * ids_row
    position = tl.load(row + column, mask=(column < TOPK) & here, other=-1)
    at = position - first
    inside = (position >= 0) & (position < visible) & (at >= 0) & (at < WINDOW)
    # A mark has four bytes. Marks of the tokens from the fourth on lie a window further.
    place = (BYTE // 4 * WINDOW + at) * 4 + BYTE % 4
    tl.store(marks_ptr + place, place * 0 + 1, mask=inside)


@triton.jit
def _bits_of(marks):
    """The four bytes of marks, each 0 or 1, as four bits."""
    return (marks | (marks >> 7) | (marks >> 14) | (marks >> 21)) & 15


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def join_lists_kernel(
    ids_ptr,
    visible_ptr,
    reqs_ptr,
    block_table_ptr,
    marks_ptr,
    words_ptr,
    entries_ptr,
    counts_ptr,
    num_tokens,
    ids_row: tl.int64,
    table_row: tl.int64,
    table_width,
    TOPK: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    STEP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Join the lists ``[T, TOPK]`` of every TOKENS tokens; grid ``(programs,)``.

    Joint lists are ``[cdiv(T, TOKENS), TOKENS * TOPK]``, and their lengths go to ``counts_ptr``;
    entries past a length are not written. Tokens of several requests may meet in a group: their
    entries follow one another. ``marks_ptr`` and ``words_ptr`` are the bytes and the words of marks
    ``[programs, cdiv(TOKENS, 4), WINDOW]``, zero before and after a launch. TILE is a power of two,
    at least TOPK.
    """
    PLANES: tl.constexpr = (TOKENS + 3) // 4
    mine = tl.program_id(0).to(tl.int64) * (PLANES * WINDOW)
    marks = marks_ptr + mine * 4
    words = words_ptr + mine
    groups = tl.cdiv(num_tokens, TOKENS)
    for group in range(tl.program_id(0), groups, tl.num_programs(0)):
        # The interpreter counts groups with numbers of Python.
        number = tl.zeros([], tl.int32) + group
        out = entries_ptr + number.to(tl.int64) * (TOKENS * TOPK)
        count = tl.zeros([], tl.int32)
        begin = number * TOKENS
        stop = tl.minimum(begin + TOKENS, num_tokens)
        first_token = begin
        while begin < stop:
            # The tokens of one request, which lie side by side.
            req = tl.load(reqs_ptr + begin)
            end = begin
            longest = tl.zeros([], tl.int32)
            for i in tl.static_range(TOKENS):
                token = first_token + i
                there = (token >= begin) & (token < stop)
                here = there & (tl.load(reqs_ptr + token, mask=there, other=-1) == req)
                end += here.to(tl.int32)
                longest = tl.maximum(longest, tl.load(visible_ptr + token, mask=here, other=0))
            # A key that no entry of the table is for has no row.
            longest = tl.minimum(longest, table_width * PAGE_SIZE)
            table = block_table_ptr + req.to(tl.int64) * table_row
            for window in range(0, longest, WINDOW):
                for i in tl.static_range(TOKENS):
                    token = first_token + i
                    here = (token >= begin) & (token < end)
                    _mark(
                        ids_ptr, visible_ptr, marks, token, window, ids_row, here, i, TOPK, TILE,
                        WINDOW,
                    )  # fmt: skip
                # Other threads read the marks.
                tl.debug_barrier()
                for low in range(window, tl.minimum(longest, window + WINDOW), STEP):
                    at = low - window + tl.arange(0, STEP)
                    members = _bits_of(tl.load(words + at))
                    tl.store(words + at, tl.zeros([STEP], tl.int32))
                    if PLANES > 1:
                        more = words + WINDOW + at
                        members |= _bits_of(tl.load(more)) << 4
                        tl.store(more, tl.zeros([STEP], tl.int32))
                    position = window + at
                    listed = (members != 0) & (position < longest)
                    ones = listed.to(tl.int32)
                    place = count + tl.cumsum(ones, 0) - 1
                    block = tl.load(table + position // PAGE_SIZE, mask=listed, other=0)
                    slot = block * PAGE_SIZE + position % PAGE_SIZE
                    tl.store(out + place, slot | (members << (32 - TOKENS)), mask=listed)
                    count += tl.sum(ones, 0)
                # Marks are zero again before others are set.
                tl.debug_barrier()
            begin = end
        tl.store(counts_ptr + group, count)


def join_lists_call(
    lists: TopkLists, block_table: torch.Tensor, block_size: int, joint: JointLists
) -> KernelCall:
    """The launch of :func:`attn.ops.joint_lists.join_lists`, which checks the arguments."""
    topk, planes = lists.ids.shape[1], joint.marks.shape[1]
    window = joint.marks.shape[2]
    arguments = {
        "ids_ptr": lists.ids,
        "visible_ptr": lists.visible_lens,
        "reqs_ptr": lists.reqs,
        "block_table_ptr": block_table,
        "marks_ptr": joint.marks.view(torch.uint8),
        "words_ptr": joint.marks,
        "entries_ptr": joint.entries,
        "counts_ptr": joint.counts,
        "num_tokens": len(lists.ids),
        "ids_row": lists.ids.stride(0),
        "table_row": block_table.stride(0),
        "table_width": block_table.shape[1],
        "TOPK": topk,
        "TILE": triton.next_power_of_2(topk),
        "TOKENS": joint.tokens,
        "WINDOW": window,
        "STEP": min(_STEP, window),
        "PAGE_SIZE": block_size,
    }
    assert planes == -(-joint.tokens // 4)
    programs = min(len(joint.marks), len(joint.entries))
    return KernelCall(join_lists_kernel, (programs,), arguments, num_warps=8)
