"""FlashInfer's wrapper of absorbed latent attention, called in one way whatever the version.

0.6 takes flat metadata, and the base of the log-sum-exp when it runs; 0.7 wants one object of
metadata, and to be told of layouts and of the log-sum-exp when it plans.
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
    """What ``plan`` asks about a latent layer."""

    num_heads: int
    """That the kernel is told; more than the layer has where those do not fill its tiles."""
    rank: int
    rope_size: int
    page_size: int
    scale: float
    """Multiplies q.k; a plan holds it."""
    query_dtype: torch.dtype
    kv_dtype: torch.dtype

    @property
    def is_fp8(self) -> bool:
        """Rows are e4m3, with a scale per tensor."""
        return self.kv_dtype == torch.float8_e4m3fn


@dataclass(frozen=True)
class LatentCsrBuffers:
    """Reserved device tensors, int32, whose addresses a CUDA graph keeps."""

    qo_indptr: torch.Tensor
    """``[R + 1]``."""
    kv_indptr: torch.Tensor
    """``[R + 1]``."""
    kv_indices: torch.Tensor
    """``[most pages]``."""
    kv_lens: torch.Tensor
    """``[R]``."""


@dataclass(frozen=True)
class LatentCall:
    """One run of a planned wrapper."""

    q_nope: torch.Tensor
    """``[T, H, L]``, any strides with dense rows."""
    q_pe: torch.Tensor
    """``[T, H, r]``, likewise."""
    latent: torch.Tensor
    """``[N, P, L]``, likewise."""
    rope: torch.Tensor
    """``[N, P, r]``, likewise."""
    output: torch.Tensor
    """``[T, H, L]``, dense, written."""
    lse: torch.Tensor
    """``[T, H]`` fp32, dense, written: natural logarithm."""
    scale: float | None
    """Of both parts of an e4m3 row; None of others."""


@dataclass(frozen=True)
class FlashInferLatent:
    """``BatchMLAPagedAttentionWrapper`` of the installed version."""

    version: str
    wrapper_cls: Any
    metadata_cls: Any
    """0.7's object of metadata; None before."""

    @property
    def is_recent(self) -> bool:
        """0.7 or later."""
        return numbers_of(self.version) >= RECENT

    def wrapper(
        self, workspace: torch.Tensor, kernel: str, buffers: LatentCsrBuffers | None = None
    ) -> Any:
        """A wrapper for rows of any length; with ``buffers`` for one CUDA graph.

        Args:
            workspace: uint8, device.
            kernel: ``fa2`` or ``fa3``.
            buffers: of the graph's number of requests; None outside graphs.
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
        """Plan rows; the device is not waited for.

        Args:
            wrapper: of :meth:`wrapper`.
            csr: lengths, each at least 1.
            indices: ``[csr.num_pages]`` int32 pages, device.
            sizes: the layer.
            causal: bottom-right aligned; else every key is seen.
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
            wrapper: as it was planned last.
            call: tensors of the planned types.
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
        FlashInferUnavailableError: it is missing, of another version, or fails to import.
    """
    version, (mla,) = checked_modules("mla")
    with complete(version):
        recent = numbers_of(version) >= RECENT
        metadata = mla.MLAPlanMetadata if recent else None
        return FlashInferLatent(version, mla.BatchMLAPagedAttentionWrapper, metadata)
