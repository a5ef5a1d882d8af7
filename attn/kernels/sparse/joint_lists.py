"""Joint lists: the listed keys of neighbouring tokens, each of them once, as one list.

The heads of a few tokens fill the rows of a product that the heads of one token leave empty. The
lists of neighbouring tokens of a prompt have most keys in common, so that a kernel which attends
the tokens together reads far fewer rows. An entry of a joint list is the number of a row of the
cache; its highest bits say which of the tokens list that row.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch
import triton
import triton.language as tl

from builders.launch.call import LaunchOptions
from builders.launch.launcher import Launch, Launcher
from builders.sparse.arguments import JointLists, TopkLists

_VARYING: Final = ["num_tokens", "table_width"]
_ANYWHERE: Final = [
    *("ids_ptr", "visible_ptr", "reqs_ptr", "block_table_ptr", "entries_ptr", "counts_ptr"),
]


_WARPS: Final = 8
"""Warps of a program."""
_STEP: Final = 4 * 32 * _WARPS
"""Positions of one step of the walk over a window: a word of marks for each thread."""


@triton.jit
def _bytes_set(marks):
    """For each of the four bytes of marks, uint32, a bit in its place: 1 unless the byte is 0."""
    # A carry out of the lowest seven bits says that one of them is set.
    return ((((marks & 0x7F7F7F7F) + 0x7F7F7F7F) | marks) >> 7) & 0x01010101


@triton.jit
def _write_entries(
    marks, position, place, table, out, there, TOKENS: tl.constexpr, PAGE_SIZE: tl.constexpr
):  # fmt: skip
    """Write the entries of four positions for each word of marks.

    Args:
        marks: ``[N]`` uint32, the marks of positions from ``position`` on.
        position: ``[N]`` int32, multiples of 4.
        place: ``[N]`` int32, where in the list the first of the entries goes.
        table: pointer to the request's row of the block table.
        out: pointer to the list.
        there: ``[N]`` bool, whether the request has the first of the positions.
        TOKENS: tokens of a list.
        PAGE_SIZE: tokens of a block.
    """
    # Mostly four positions lie in one block.
    ALIKE: tl.constexpr = PAGE_SIZE % 4 == 0
    block = tl.load(table + position // PAGE_SIZE, mask=there, other=0)
    for i in tl.static_range(4):
        members = (marks >> (8 * i)) & 255
        listed = members != 0
        if not ALIKE:
            block = tl.load(table + (position + i) // PAGE_SIZE, mask=listed, other=0)
        slot = block * PAGE_SIZE + (position + i) % PAGE_SIZE
        entry = slot | (members << (32 - TOKENS)).to(tl.int32, bitcast=True)
        tl.store(out + place, entry, mask=listed)
        place += listed.to(tl.int32)


@triton.jit
def _listed(
    ids_ptr, visible_ptr, reqs_ptr, token, here, req, ids_row, TOPK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The positions ``[TILE]`` that a token lists and sees; -1 where there is none.

    A token that is not ``here``, or of another request than ``req``, lists none.
    """
    column = tl.arange(0, TILE)
    here = here & (tl.load(reqs_ptr + token, mask=here, other=-1) == req)
    visible = tl.load(visible_ptr + token, mask=here, other=0)
    at = ids_ptr + token.to(tl.int64) * ids_row + column
    ids = tl.load(at, mask=(column < TOPK) & here, other=-1)
    return tl.where(ids < visible, ids, -1)


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
    entries follow one another. A program marks the positions of a window, a byte for each with a
    bit for each token, and then walks the marks. ``marks_ptr`` and ``words_ptr`` are the bytes and
    the words of marks ``[programs, WINDOW // 4]``, zero before and after a launch. TILE is a power
    of two, at least TOPK.
    """
    mine = tl.program_id(0).to(tl.int64) * (WINDOW // 4)
    marks = marks_ptr + mine * 4
    words = words_ptr + mine
    member = tl.arange(0, TOKENS)
    groups = tl.cdiv(num_tokens, TOKENS)
    for group in tl.range(tl.program_id(0), groups, tl.num_programs(0), disable_licm=True):
        # The interpreter counts groups with numbers of Python.
        number = tl.zeros([], tl.int32) + group
        out = entries_ptr + number.to(tl.int64) * (TOKENS * TOPK)
        token = number * TOKENS + member
        real = token < num_tokens
        req_of = tl.load(reqs_ptr + token, mask=real, other=-1)
        visible = tl.load(visible_ptr + token, mask=real, other=0)
        count = tl.zeros([], tl.int32)
        begin = tl.zeros([], tl.int32)
        stop = tl.sum(real.to(tl.int32), 0)
        while begin < stop:
            # The tokens of one request, which lie side by side.
            req = tl.max(tl.where(member == begin, req_of, -1), 0)
            here = (member >= begin) & (req_of == req)
            # A key that no entry of the table is for has no row.
            longest = tl.max(tl.where(here, visible, 0), 0)
            longest = tl.minimum(longest, table_width * PAGE_SIZE)
            table = block_table_ptr + req.to(tl.int64) * table_row
            for first in tl.range(0, longest, WINDOW, disable_licm=True):
                width = tl.minimum(longest - first, WINDOW)
                # The list of the next token is loaded while this one's is marked.
                ids = _listed(
                    ids_ptr, visible_ptr, reqs_ptr, number * TOKENS, stop > 0, req, ids_row, TOPK,
                    TILE,
                )  # fmt: skip
                for i in tl.static_range(TOKENS):
                    after = ids
                    if i + 1 < TOKENS:
                        after = _listed(
                            ids_ptr, visible_ptr, reqs_ptr, number * TOKENS + i + 1, i + 1 < stop,
                            req, ids_row, TOPK, TILE,
                        )  # fmt: skip
                    place = ids - first
                    inside = (ids >= 0) & (place >= 0) & (place < width)
                    # A position that a token lists twice is marked twice alike.
                    known = tl.zeros([TILE], tl.uint8)
                    if i > 0:
                        known = tl.load(marks + place, mask=inside, other=0)
                    tl.store(marks + place, known | (1 << i), mask=inside)
                    # Other threads read the marks.
                    tl.debug_barrier()
                    ids = after
                # Marks come from the L2 cache, so they are loaded a step ahead.
                ahead = tl.load(words + tl.arange(0, STEP // 4))
                for low in tl.range(0, width, STEP, disable_licm=True):
                    word = low // 4 + tl.arange(0, STEP // 4)
                    marked = ahead.to(tl.uint32, bitcast=True)
                    tl.store(words + word, tl.zeros([STEP // 4], tl.int32))
                    more = word * 4 + STEP < width
                    ahead = tl.load(words + word + STEP // 4, mask=more, other=0)
                    flags = _bytes_set(marked)
                    ones = flags + (flags >> 16)
                    ones = ((ones + (ones >> 8)) & 7).to(tl.int32)
                    before = count + tl.cumsum(ones, 0) - ones
                    there = word * 4 < width
                    _write_entries(
                        marked, first + word * 4, before, table, out, there, TOKENS, PAGE_SIZE
                    )
                    count += tl.sum(ones, 0)
                # Marks are zero again before others are set.
                tl.debug_barrier()
            begin += tl.sum(here.to(tl.int32), 0)
        tl.store(counts_ptr + group, count)


def join_lists_launch(
    lists: TopkLists, block_table: torch.Tensor, block_size: int, joint: JointLists
) -> Launch:
    """The launch of :func:`attn.ops.joint_lists.join_lists`, which checks the arguments.

    The launcher of its variant prepares it, and is kept.
    """
    ids, marks = lists.ids, joint.marks
    tensors = (ids, lists.visible_lens, lists.reqs, block_table, marks, joint.entries, joint.counts)
    places = tuple(tensor.is_cuda for tensor in tensors)
    sizes = ids.shape[1], joint.tokens, 4 * marks.shape[1], block_size
    varying = {
        "ids_ptr": ids,
        "visible_ptr": lists.visible_lens,
        "reqs_ptr": lists.reqs,
        "block_table_ptr": block_table,
        "marks_ptr": marks.view(torch.uint8),
        "words_ptr": marks,
        "entries_ptr": joint.entries,
        "counts_ptr": joint.counts,
        "num_tokens": len(ids),
        "ids_row": ids.stride(0),
        "table_row": block_table.stride(0),
        "table_width": block_table.shape[1],
    }
    programs = min(len(marks), len(joint.entries))
    return _launcher(*sizes, places).bind((programs,), varying)


@lru_cache(maxsize=256)
def _launcher(
    topk: int, tokens: int, window: int, block_size: int, places: tuple[bool, ...]
) -> Launcher:
    """The launcher for lists of these sizes; ``places`` say which tensors are on a GPU."""
    fixed = {
        "TOPK": topk,
        "TILE": triton.next_power_of_2(topk),
        "TOKENS": tokens,
        "WINDOW": window,
        "STEP": min(_STEP, window),
        "PAGE_SIZE": block_size,
    }
    # Two programs of 128 registers fit a multiprocessor.
    options = LaunchOptions(num_warps=_WARPS, max_registers=128)
    return Launcher(join_lists_kernel, fixed, options=options, is_typed=True)
