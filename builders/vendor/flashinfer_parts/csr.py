"""What FlashInfer's ``plan`` is told: a batch in CSR form, on host and device, and a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np


@dataclass(slots=True)
class CsrOnHost:
    """Lengths of consecutive requests as ``plan`` reads them: all int32, on the host."""

    qo_indptr: torch.Tensor
    """``[R + 1]``: rows of the query."""
    kv_indptr: torch.Tensor
    """``[R + 1]``: pages."""
    last_page_len: torch.Tensor
    """``[R]``: tokens in the last page; 0 without pages."""
    kv_lens: torch.Tensor
    """``[R]``: tokens in all pages."""
    num_tokens: int
    """Rows of the query."""
    num_pages: int

    @property
    def query_lens(self) -> np.ndarray:
        """``[R]``."""
        starts = self.qo_indptr.numpy()
        lens: np.ndarray = starts[1:] - starts[:-1]
        return lens

    @property
    def max_query_len(self) -> int:
        """0 without requests."""
        lens = self.query_lens
        return int(lens.max()) if lens.size else 0

    @property
    def max_kv_len(self) -> int:
        """0 without requests."""
        lens = self.kv_lens.numpy()
        return int(lens.max()) if lens.size else 0


@dataclass(frozen=True, slots=True)
class CsrOnDevice:
    """Consecutive requests as kernels read them: int32, on the device. A CUDA graph keeps their
    addresses.
    """

    qo_indptr: torch.Tensor
    """``[R + 1]``, from 0."""
    kv_indptr: torch.Tensor
    """``[R + 1]``, from 0."""
    last_page_len: torch.Tensor
    """``[R]``."""
    kv_indices: torch.Tensor
    """``[>= pages]``; of a graph, as many as any of its steps may have."""


@dataclass(frozen=True)
class LayerSizes:
    """What ``plan`` asks about a layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    page_size: int
    query_dtype: torch.dtype
    kv_dtype: torch.dtype
    sliding_window: int | None
    """Visible keys, the token's own included."""
    logits_soft_cap: float | None
