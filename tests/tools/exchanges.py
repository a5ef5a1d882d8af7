"""Exchanges between partitions of a program, for racecheck to judge: see
:mod:`tests.tools.sanitize`.
"""

from __future__ import annotations

from typing import Final

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attn.kernels.lang.compat import thread_barrier

WARPS: Final = 4


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
