"""What FlashInfer's ``plan`` is told: a batch in CSR form, on host and device, and a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np


@dataclass(slots=True)
class CsrOnHost:
    """Lengths of consecutive requests in the form that ``plan`` reads: int32, on the host."""

    qo_indptr: torch.Tensor
    """``[R + 1]``: first query row of each request, from 0."""
    kv_indptr: torch.Tensor
    """``[R + 1]``: first page of each request in the page list, from 0."""
    last_page_len: torch.Tensor
    """``[R]``: tokens in the last page; 0 without pages."""
    kv_lens: torch.Tensor
    """``[R]``: tokens in all pages."""
    num_tokens: int
    """Query rows of all requests."""
    num_pages: int

    @property
    def query_lens(self) -> np.ndarray:
        """``[R]`` query rows of each request."""
        starts = self.qo_indptr.numpy()
        lens: np.ndarray = starts[1:] - starts[:-1]
        return lens

    @property
    def max_query_len(self) -> int:
        """Most query rows of a request; 0 without requests."""
        lens = self.query_lens
        return int(lens.max()) if lens.size else 0

    @property
    def max_kv_len(self) -> int:
        """Most keys of a request; 0 without requests."""
        lens = self.kv_lens.numpy()
        return int(lens.max()) if lens.size else 0


@dataclass(frozen=True, slots=True)
class CsrOnDevice:
    """Consecutive requests in the form that kernels read: int32, on the device.

    A CUDA graph keeps the addresses of these tensors.
    """

    qo_indptr: torch.Tensor
    """``[R + 1]``: first query row of each request, from 0."""
    kv_indptr: torch.Tensor
    """``[R + 1]``: first page of each request in ``kv_indices``, from 0."""
    last_page_len: torch.Tensor
    """``[R]``: tokens in the last page of each request."""
    kv_indices: torch.Tensor
    """``[>= pages]``: pages of all requests; for a graph, with room for its largest step."""


@dataclass(frozen=True)
class LayerSizes:
    """The facts about a layer that ``plan`` needs."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    page_size: int
    query_dtype: torch.dtype
    kv_dtype: torch.dtype
    sliding_window: int | None
    """Visible keys, the token's own included."""
    logits_soft_cap: float | None
