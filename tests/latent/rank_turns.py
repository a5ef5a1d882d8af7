"""Ranks of one process that exchange rows as ranks of several processes do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError, Lock
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Gather = Callable[[Tensor], Tensor]
"""Given a rank's rows, the rows of all ranks one after the other."""
MOST_SECONDS = 900.0
"""How long a rank waits for the others, which may run kernels in Triton's interpreter."""


def in_turns(works: Sequence[Callable[[Gather], T]]) -> list[T]:
    """Do the work of every rank, each until it sends rows; then each goes on with those of all.

    Args:
        works: by rank; each is given the function that sends its rows and returns those of all.

    Returns:
        What each gives.

    Raises:
        AssertionError: a rank sent rows more often than another.
    """
    sent: list[list[Tensor]] = [[] for _ in works]

    def check() -> None:
        counts = [len(rows) for rows in sent]
        assert len(set(counts)) == 1, f"ranks sent rows {counts} times"

    turn, everybody = Lock(), Barrier(len(works), check, MOST_SECONDS)

    def wait() -> None:
        """Let the other ranks work until each has come as far."""
        turn.release()
        try:
            everybody.wait()
        finally:
            turn.acquire()

    def done(number: int) -> T:
        def gather(rows: Tensor) -> Tensor:
            sent[number].append(rows.clone())
            at = len(sent[number]) - 1
            wait()
            return torch.cat([other[at] for other in sent])

        with turn:
            try:
                result = works[number](gather)
                wait()
            except BaseException:
                everybody.abort()
                raise
        return result

    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(done, number) for number in range(len(works))]
    errors = [future.exception() for future in futures]
    # Where one rank fails, the others only notice that it does not come.
    own = [error for error in errors if error and not isinstance(error, BrokenBarrierError)]
    if own:
        raise own[0]
    return [future.result() for future in futures]
