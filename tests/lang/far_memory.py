"""Tensors with elements further apart than 32-bit offsets reach, in memory that is mostly unused.

Linux provides a page of such memory only when a process first writes to it.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from attn.testing.dense_trial import DenseTrial
from attn.testing.latent_trial import LatentTrial
from attn.testing.trial import Trial

_NO_RESERVE = 0x4000
"""Linux's ``MAP_NORESERVE``; Python has a name for it from 3.13 on."""
BEHIND = 1 << 34
"""Zero bytes before a tensor: an offset that has lost its upper bits points there."""
PAGE_BYTES = 1 << 30
"""Bytes from one page of a cache to the next.

In elements this stride fits 32 bits, but its product with the number of a page soon does not."""


def far_bytes(count: int) -> Tensor:
    """Allocate ``[count]`` uint8, all zero, with zeros before it."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, BEHIND + count, flags=flags)
    return torch.frombuffer(memory, dtype=torch.uint8)[BEHIND:]


def spread(x: Tensor, axis: int, stride: int) -> Tensor:
    """Copy ``x`` with ``stride`` elements between indices of an axis; other axes keep theirs."""
    strides = [*x.stride()]
    strides[axis] = stride
    last = sum((size - 1) * step for size, step in zip(x.shape, strides, strict=True))
    memory = far_bytes((last + 1) * x.element_size()).view(x.dtype)
    far = memory.as_strided(x.shape, strides, memory.storage_offset())
    far.view(torch.uint8).copy_(x.view(torch.uint8))
    return far


@contextmanager
def far_pages() -> Iterator[None]:
    """Give trials with padded pages a page size of :data:`PAGE_BYTES`."""

    def page_bytes(self: Any) -> int:
        return PAGE_BYTES

    def allocate(self: Any) -> Tensor:
        return far_bytes(self.paging.num_blocks * PAGE_BYTES)

    with (
        mock.patch.object(DenseTrial, "page_bytes", property(page_bytes)),
        mock.patch.object(LatentTrial, "page_bytes", property(page_bytes)),
        mock.patch.object(Trial, "allocate", allocate),
    ):
        yield
