"""Pinned memory of FlashInfer's plans, kept as it is until the GPU has it.

A wrapper's plan writes its lists into pinned memory of the wrapper and queues a copy of them. The
next plan writes into the same memory, so that a host which runs ahead of the GPU, as engines do
that schedule asynchronously, would change the lists of the step before under its copy: wrong keys
at best, an illegal address at worst.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch

MEMORY = "_pin_memory_int_workspace_buffer"
"""A wrapper's attribute: uint8, pinned. 0.7 has it of MLA from the first plan on, a new one each
time, which torch would give to others as soon as the wrapper forgets it."""


class PlanMemory:
    """The pinned memory that copies are queued of; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # With an event behind each copy.
        self._queued: deque[tuple[torch.Tensor, Any]] = deque()

    def __len__(self) -> int:
        """Plans whose copies were queued when one was looked for last."""
        return len(self._queued)

    def provide(self, wrapper: Any) -> None:
        """Give a wrapper, before it is planned, memory that no queued copy reads."""
        with self._lock:
            self._forget()
            own = getattr(wrapper, MEMORY, None)
            if own is not None and any(own is queued for queued, _ in self._queued):
                # Torch gives pinned memory that nothing holds any more before it asks for new.
                pinned = torch.empty(own.shape, dtype=own.dtype, pin_memory=own.is_pinned())
                setattr(wrapper, MEMORY, pinned)

    def hold(self, wrapper: Any) -> None:
        """Keep what the plan just made is copied from, until the GPU is that far."""
        own = getattr(wrapper, MEMORY, None)
        if own is None or wrapper.device.type != "cuda":
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(wrapper.device))
        with self._lock:
            self._queued.append((own, event))

    def _forget(self) -> None:
        while self._queued and self._queued[0][1].query():
            self._queued.popleft()


PLAN_MEMORY = PlanMemory()
"""Of all wrappers."""
