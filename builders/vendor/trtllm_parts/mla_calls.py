"""FlashInfer's direct calls of latent attention, with one interface for every version."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from builders.vendor.flashinfer_parts.calls import RECENT, numbers_of
from builders.vendor.flashinfer_parts.install import checked_modules, complete

NO_BLOCK_SCALE = -1.0
"""Scale argument for an output that is not fp4; this library has no fp4 outputs."""


@dataclass(frozen=True)
class LatentDecodeCall:
    """Arguments for absorbed rows of one query length over a latent cache."""

    query: torch.Tensor
    """``[R, Tq, H, L + r]`` in the cache's type, contiguous."""
    cache: torch.Tensor
    """``[N, P, L + r]``."""
    output: torch.Tensor
    """``[R, Tq, H, L]`` bf16, contiguous, written."""
    lse: torch.Tensor
    """``[R * Tq, H]`` fp32, contiguous, written in base 2."""
    pages: torch.Tensor
    """``[R, width]`` int32, contiguous."""
    kv_lens: torch.Tensor
    """``[R]`` int32, the rows' own tokens included."""
    max_kv_len: int
    """Bound of ``kv_lens``, equal in all steps, because kernels choose their tiles by it."""
    workspace: torch.Tensor
    """uint8 scratch of this kernel alone, zeroed when made."""
    counters: torch.Tensor
    """uint8 counters of this kernel alone, zeroed when made."""
    nope_size: int
    """``qk_nope_head_dim`` of a head's query before absorption."""
    rank: int
    qk_scale: float | torch.Tensor
    """Multiplies the products of stored queries and keys; a number, or an fp32 scalar."""
    v_scale: float | torch.Tensor
    """Multiplies the sums of stored latents; a number, or an fp32 scalar."""
    topk: int = 0
    """Length of top-k lists where ``pages`` holds ``[R, Tq, topk]`` int32 slots; 0 for pages."""


@dataclass(frozen=True)
class RaggedCall:
    """Arguments for expanded rows of consecutive requests."""

    query: torch.Tensor
    """``[T, H, D]``, 16-bit or e4m3."""
    key: torch.Tensor
    """``[S, H, D]`` in the query's type."""
    value: torch.Tensor
    """``[S, H, Dv]`` in the query's type."""
    output: torch.Tensor
    """``[T, H, Dv]`` of the model's type, written."""
    lse: torch.Tensor | None
    """``[T, H]`` fp32, written in base 2; None where it is not needed."""
    query_starts: torch.Tensor
    """``[R + 1]`` int32 first query row of each request."""
    kv_starts: torch.Tensor
    """``[R + 1]`` int32 first key of each request."""
    kv_lens: torch.Tensor
    """``[R]`` int32 keys of each request."""
    max_query_len: int
    max_kv_len: int
    workspace: torch.Tensor
    """uint8 scratch of this kernel alone, zeroed when made."""
    qk_scale: float
    """Multiplies the products of stored queries and keys."""
    v_scale: float
    """Multiplies the sums of stored values."""
    causal: bool


@dataclass(frozen=True)
class LatentCalls:
    """The functions of the installed version for latent attention."""

    version: str
    decode_function: Any
    ragged_function: Any

    @property
    def is_recent(self) -> bool:
        """True for version 0.7 or later."""
        return numbers_of(self.version) >= RECENT

    def decode(self, call: LatentDecodeCall) -> None:
        """Decode, verify or draft-extend by trtllm-gen."""
        given: dict[str, Any] = {}
        if self.is_recent:
            # 0.6 has no such argument: its counters are at the start of the workspace.
            given["multi_ctas_kv_counter_buffer"] = call.counters
        if call.topk:
            given["sparse_mla_top_k"] = call.topk
        self.decode_function(
            call.query,
            call.cache.unsqueeze(1),
            call.workspace,
            call.nope_size,
            call.rank,
            call.query.shape[-1] - call.rank,
            call.pages,
            call.kv_lens,
            call.max_kv_len,
            out=call.output,
            bmm1_scale=call.qk_scale,
            bmm2_scale=call.v_scale,
            backend="trtllm-gen",
            lse=call.lse,
            return_lse=True,
            **given,
        )

    def ragged(self, call: RaggedCall) -> None:
        """Expanded prefill by trtllm-gen."""
        self.ragged_function(
            call.query,
            call.key,
            call.value,
            call.workspace,
            call.kv_lens,
            call.max_query_len,
            call.max_kv_len,
            call.qk_scale,
            call.v_scale,
            NO_BLOCK_SCALE,
            len(call.kv_lens),
            -1,
            call.query_starts,
            call.kv_starts,
            None,
            call.causal,
            call.lse is not None,
            out=call.output,
            lse=call.lse,
        )


@cache
def load_latent_calls() -> LatentCalls:
    """The functions of the installed FlashInfer.

    Raises:
        FlashInferUnavailableError: FlashInfer is missing, of another version, or fails to import.
    """
    version, (mla, prefill) = checked_modules("mla", "prefill")
    with complete(version):
        return LatentCalls(
            version,
            mla.trtllm_batch_decode_with_kv_cache_mla,
            prefill.trtllm_ragged_attention_deepseek,
        )
