"""Tensors whose elements lie further apart than 32 bits reach, in memory that nobody pays for.

Linux gives a page of memory to the process that writes it, and to nobody before.
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
"""Linux's ``MAP_NORESERVE``, which Python names from 3.13 on."""
BEHIND = 1 << 34
"""Bytes before a tensor: where an offset points that has lost its upper bits, nothing is but
zeros."""
PAGE_BYTES = 1 << 30
"""From one page of a cache to the next: in elements a stride that fits 32 bits, whose products with
the numbers of a few pages do not."""


def far_bytes(count: int) -> Tensor:
    """``[count]`` uint8, all zero."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, BEHIND + count, flags=flags)
    return torch.frombuffer(memory, dtype=torch.uint8)[BEHIND:]


def spread(x: Tensor, axis: int, stride: int) -> Tensor:
    """The elements of ``x`` with ``stride`` from one index of an axis to the next; the other axes
    keep their strides.
    """
    strides = [*x.stride()]
    strides[axis] = stride
    last = sum((size - 1) * step for size, step in zip(x.shape, strides, strict=True))
    memory = far_bytes((last + 1) * x.element_size()).view(x.dtype)
    far = memory.as_strided(x.shape, strides, memory.storage_offset())
    far.view(torch.uint8).copy_(x.view(torch.uint8))
    return far


@contextmanager
def far_pages() -> Iterator[None]:
    """Trials with padded pages have pages of :data:`PAGE_BYTES`."""

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
