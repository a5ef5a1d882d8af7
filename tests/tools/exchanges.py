"""Exchanges between partitions of a program, for racecheck to judge: see
:mod:`tests.tools.sanitize`.
"""

from __future__ import annotations

from typing import Final

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attn.kernels.lang.compat import arrive_behind_gathers, async_gather, thread_barrier

WARPS: Final = 4
COPIED: Final = 4 * 32 * WARPS
"""Numbers that the threads of a partition copy at a time: 16 bytes each."""


@gluon.jit
def give(record, full, WARPS: gl.constexpr):
    """Every thread writes a number of its own; after a barrier of all threads, one arrives."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    record.store((gl.arange(0, 32 * WARPS, LAYOUT) + 5).to(gl.int64))
    thread_barrier()
    mbarrier.arrive(full, count=1)


@gluon.jit
def take(out_ptr, record, full, AT: gl.constexpr):
    """Wait for the record, and write out the number that thread AT stored in it."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(full, 0)
    gl.store(out_ptr, gl.max(record.slice(AT, 1).load(LAYOUT), 0))


@gluon.jit
def snatch(out_ptr, record, full, AT: gl.constexpr):
    """Read the record without waiting until it is full, which is a race."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gl.store(out_ptr, gl.max(record.slice(AT, 1).load(LAYOUT), 0))
    mbarrier.wait(full, 0)


@gluon.jit
def exchange_kernel(out_ptr, AT: gl.constexpr, RACES: gl.constexpr, WARPS: gl.constexpr):
    """Hand one number from the second partition to the first."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    record = gl.allocate_shared_memory(gl.int64, [32 * WARPS], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    thread_barrier()
    if RACES:
        gl.warp_specialize(
            [(snatch, (out_ptr, record, full, AT)), (give, (record, full, WARPS))], [WARPS], [96]
        )
    else:
        gl.warp_specialize(
            [(take, (out_ptr, record, full, AT)), (give, (record, full, WARPS))], [WARPS], [96]
        )


@gluon.jit
def copy(in_ptr, record, full, empty, ROUNDS: gl.constexpr, WARPS: gl.constexpr):
    """Copy numbers to a record asynchronously, whose copies arrive themselves; ROUNDS times."""
    COPIED: gl.constexpr = record.shape[0]
    at = in_ptr + gl.arange(0, COPIED, gl.BlockedLayout([4], [32], [WARPS], [0]))
    for turn in gl.static_range(ROUNDS):
        # A fresh barrier lets parity 1 pass at once.
        mbarrier.wait(empty, (turn & 1) ^ 1)
        async_gather(record, at + turn * COPIED)
        arrive_behind_gathers(full, increment_count=False)


@gluon.jit
def take_copies(out_ptr, record, full, empty, ROUNDS: gl.constexpr, WARPS: gl.constexpr):
    """Write out the numbers, most of which other threads copied, and give the record back."""
    COPIED: gl.constexpr = record.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    at = out_ptr + gl.arange(0, COPIED, LAYOUT)
    for turn in gl.static_range(ROUNDS):
        mbarrier.wait(full, turn & 1)
        gl.store(at + turn * COPIED, record.load(LAYOUT))
        thread_barrier()
        mbarrier.arrive(empty, count=1)


@gluon.jit
def copies_kernel(out_ptr, in_ptr, COPIED: gl.constexpr, ROUNDS: gl.constexpr, WARPS: gl.constexpr):
    """Copy numbers by way of a record that the second partition fills and the first one reads."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    record = gl.allocate_shared_memory(gl.int32, [COPIED], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=32 * WARPS)
    mbarrier.init(empty, count=1)
    thread_barrier()
    gl.warp_specialize(
        [
            (take_copies, (out_ptr, record, full, empty, ROUNDS, WARPS)),
            (copy, (in_ptr, record, full, empty, ROUNDS, WARPS)),
        ],
        [WARPS],
        [96],
    )


def exchange_copies(rounds: int) -> None:
    """Launch :func:`copies_kernel`, and check the copies.

    Args:
        rounds: times that the record is filled; from the second time on, once it was given back.
    """
    numbers = torch.randint(1 << 30, (rounds * COPIED,), dtype=torch.int32, device="cuda")
    out = torch.zeros_like(numbers)
    copies_kernel[(1,)](out, numbers, COPIED=COPIED, ROUNDS=rounds, WARPS=WARPS, num_warps=WARPS)
    assert torch.equal(out, numbers)


def exchange(at: int, races: bool) -> int | None:
    """Launch :func:`exchange_kernel`.

    Args:
        at: the thread whose number is read; thread 0 arrives at the barrier.
        races: read the number without waiting for it.

    Returns:
        What was read; None where it could be anything.
    """
    out = torch.zeros((), dtype=torch.int64, device="cuda")
    exchange_kernel[(1,)](out, AT=at, RACES=races, WARPS=WARPS, num_warps=4)
    read = int(out)
    if races:
        return None
    assert read == at + 5
    return read
