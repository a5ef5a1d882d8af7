"""Pinned memory of FlashInfer's plans, kept unchanged until the GPU has copied it.

A wrapper's plan writes its lists into the wrapper's pinned memory and queues a copy to the GPU. The
next plan writes into the same memory. A host that runs ahead of the GPU, as in engines that
schedule asynchronously, would overwrite the previous step's lists before they are copied. Kernels
would then read wrong keys or illegal addresses.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch

MEMORY = "_pin_memory_int_workspace_buffer"
"""Name of a wrapper's attribute that holds the pinned uint8 memory. In 0.7 the MLA wrapper
allocates it anew in each plan, and torch may reuse the old one as soon as the wrapper drops it."""


class PlanMemory:
    """Pinned memories with queued copies; the object may be used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Each memory has an event that is recorded after its copy.
        self._queued: deque[tuple[torch.Tensor, Any]] = deque()

    def __len__(self) -> int:
        """Number of memories whose copy was still queued at the last call of :meth:`provide`."""
        return len(self._queued)

    def provide(self, wrapper: Any) -> None:
        """Before a plan, give the wrapper a memory that no queued copy reads."""
        with self._lock:
            self._forget()
            own = getattr(wrapper, MEMORY, None)
            if own is not None and any(own is queued for queued, _ in self._queued):
                # torch reuses pinned memory that was released, so this seldom allocates.
                pinned = torch.empty(own.shape, dtype=own.dtype, pin_memory=own.is_pinned())
                setattr(wrapper, MEMORY, pinned)

    def hold(self, wrapper: Any) -> None:
        """After a plan, keep the wrapper's memory until the GPU has made the plan's copy."""
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
"""The memories of all wrappers of this process."""
