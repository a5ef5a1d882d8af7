"""FlashInfer's wrapper of absorbed latent attention, with one interface for all versions.

0.6 takes metadata as separate arguments, and the base of the log-sum-exp in ``run``. 0.7 takes one
metadata object, and layouts and the base of the log-sum-exp in ``plan``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from builders.vendor.flashinfer_parts.calls import RECENT, numbers_of
from builders.vendor.flashinfer_parts.csr import CsrOnHost
from builders.vendor.flashinfer_parts.install import checked_modules, complete
from builders.vendor.flashinfer_parts.pinned import PLAN_MEMORY


@dataclass(frozen=True)
class LatentSizes:
    """The facts about a latent layer that ``plan`` needs."""

    num_heads: int
    """Heads that the kernel is given: the layer's, padded to a power of two."""
    rank: int
    rope_size: int
    page_size: int
    scale: float
    """Multiplies q.k; a part of the plan."""
    query_dtype: torch.dtype
    kv_dtype: torch.dtype

    @property
    def is_fp8(self) -> bool:
        """True for rows of e4m3 with one scale per tensor."""
        return self.kv_dtype == torch.float8_e4m3fn


@dataclass(frozen=True)
class LatentCsrBuffers:
    """Device tensors of a CUDA graph's wrapper, int32; the graph keeps their addresses."""

    qo_indptr: torch.Tensor
    """``[R + 1]``: first query row of each request."""
    kv_indptr: torch.Tensor
    """``[R + 1]``: first page of each request in ``kv_indices``."""
    kv_indices: torch.Tensor
    """``[most pages]``: pages of all requests."""
    kv_lens: torch.Tensor
    """``[R]``: keys of each request."""


@dataclass(frozen=True)
class LatentCall:
    """One run of a planned wrapper."""

    q_nope: torch.Tensor
    """``[T, H, L]``, any strides with dense rows."""
    q_pe: torch.Tensor
    """``[T, H, r]``, any strides with dense rows."""
    latent: torch.Tensor
    """``[N, P, L]``, any strides with dense rows."""
    rope: torch.Tensor
    """``[N, P, r]``, any strides with dense rows."""
    output: torch.Tensor
    """``[T, H, L]``, dense, written."""
    lse: torch.Tensor
    """``[T, H]`` fp32, dense, written: natural logarithm."""
    scale: float | None
    """Scale of both parts of an e4m3 row: real = stored * scale; None for other rows."""


@dataclass(frozen=True)
class FlashInferLatent:
    """``BatchMLAPagedAttentionWrapper`` of the installed version."""

    version: str
    wrapper_cls: Any
    metadata_cls: Any
    """Class of 0.7's metadata object; None before 0.7."""

    @property
    def is_recent(self) -> bool:
        """True for version 0.7 or later."""
        return numbers_of(self.version) >= RECENT

    def wrapper(
        self, workspace: torch.Tensor, kernel: str, buffers: LatentCsrBuffers | None = None
    ) -> Any:
        """Make a wrapper for requests of any length.

        Args:
            workspace: uint8, device.
            kernel: ``fa2`` or ``fa3``.
            buffers: for a CUDA graph, buffers for its number of requests; None outside graphs.
        """
        given: dict[str, Any] = {}
        if buffers is not None:
            given = {
                "use_cuda_graph": True,
                "qo_indptr": buffers.qo_indptr,
                "kv_indptr": buffers.kv_indptr,
                "kv_indices": buffers.kv_indices,
                "kv_len_arr": buffers.kv_lens,
            }
        return self.wrapper_cls(workspace, backend=kernel, **given)

    def plan(
        self,
        wrapper: Any,
        csr: CsrOnHost,
        indices: torch.Tensor,
        sizes: LatentSizes,
        *,
        causal: bool,
    ) -> None:
        """Plan requests without waiting for the device.

        Args:
            wrapper: a wrapper made by :meth:`wrapper`.
            csr: lengths of the requests, each at least 1.
            indices: ``[csr.num_pages]`` int32 pages, device.
            sizes: the layer's sizes.
            causal: causal mask, aligned at the bottom right; else every key is seen.
        """
        given: dict[str, Any] = {
            "qo_indptr": csr.qo_indptr,
            "kv_indptr": csr.kv_indptr,
            "kv_indices": indices,
            "kv_len_arr": csr.kv_lens,
        }
        if self.is_recent:
            given = {
                "metadata": self.metadata_cls.csr(**given),
                "query_layout": "split",
                "kv_cache_layout": "split",
                "lse_mode": "basee",
            }
        PLAN_MEMORY.provide(wrapper)
        wrapper.plan(
            **given,
            num_heads=sizes.num_heads,
            head_dim_ckv=sizes.rank,
            head_dim_kpe=sizes.rope_size,
            page_size=sizes.page_size,
            causal=causal,
            sm_scale=sizes.scale,
            q_data_type=sizes.query_dtype,
            kv_data_type=sizes.kv_dtype,
        )
        PLAN_MEMORY.hold(wrapper)

    def run(self, wrapper: Any, call: LatentCall) -> None:
        """Attend the planned rows.

        Args:
            wrapper: a planned wrapper; its latest plan is run.
            call: tensors of the types that were planned.
        """
        given: dict[str, Any]
        if self.is_recent:
            given = {"query": (call.q_nope, call.q_pe), "kv_cache": (call.latent, call.rope)}
        else:
            given = {
                "q_nope": call.q_nope,
                "q_pe": call.q_pe,
                "ckv_cache": call.latent,
                "kpe_cache": call.rope,
            }
        if call.scale is not None:
            given |= {"ckv_scale": call.scale, "kpe_scale": call.scale}
        wrapper.run(
            **given, out=call.output, lse=call.lse, return_lse=True, return_lse_base_on_e=True
        )


@cache
def load_latent() -> FlashInferLatent:
    """The wrapper of the installed FlashInfer.

    Raises:
        FlashInferUnavailableError: FlashInfer is missing, of another version, or fails to import.
    """
    version, (mla,) = checked_modules("mla")
    with complete(version):
        recent = numbers_of(version) >= RECENT
        metadata = mla.MLAPlanMetadata if recent else None
        return FlashInferLatent(version, mla.BatchMLAPagedAttentionWrapper, metadata)
