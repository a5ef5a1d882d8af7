"""The next plan of a wrapper that FlashInfer has planned once.

FlashInfer's own ``plan`` looks its module up anew, copies each array to the GPU by itself and, in
0.6, finds the longest request by a loop over elements of a tensor. The planning proper is one call
of the module. Here it is made with the arguments that ``plan`` makes, after one copy; of what
``plan`` leaves in a wrapper, all that differs between two batches of one layer is written. A test
compares both, attribute by attribute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from builders.flashinfer_compat import CsrOnHost, LayerSizes

FA2_ENDS: dict[tuple[int, ...], tuple[int, ...]] = {
    (0, 6, 14): (-1, False, 0),
    (0, 7, 2): (-1, False, 0, 0),
}
"""By version, the last arguments of fa2's planning: pages of a cut that is fixed (none), whether
rows stay whole, CTAs of another kernel beside, and tokens of every request (not said)."""


@dataclass(frozen=True)
class CsrBuffers:
    """Reserved device tensors, int32, whose addresses a CUDA graph keeps."""

    joined: torch.Tensor
    """``[4 * R + 2]``: the lengths as :class:`CsrOnHost` has them."""
    kv_indices: torch.Tensor
    """``[most pages]``."""

    @property
    def num_reqs(self) -> int:
        """Of the graph."""
        return (self.joined.shape[0] - 2) // 4

    def parts(self) -> tuple[torch.Tensor, ...]:
        """As of :func:`parts_of`."""
        return parts_of(self.joined, self.num_reqs)


def parts_of(joined: torch.Tensor, num_reqs: int) -> tuple[torch.Tensor, ...]:
    """``qo_indptr`` ``[R + 1]``, ``kv_indptr`` ``[R + 1]``, ``last_page_len`` ``[R]`` and
    ``kv_lens`` ``[R]`` of a plan's lengths in one piece.
    """
    reqs = num_reqs
    parts: tuple[torch.Tensor, ...] = joined.split_with_sizes((reqs + 1, reqs + 1, reqs, reqs))
    return parts


def replan(
    version: tuple[int, ...],
    wrapper: Any,
    csr: CsrOnHost,
    indices: torch.Tensor,
    sizes: LayerSizes,
    *,
    causal: bool,
    reserved: CsrBuffers | None,
) -> bool:
    """Plan another batch for the layer that a wrapper was planned for; nothing is waited for.

    Args:
        version: of FlashInfer.
        wrapper: of prefills, or of decodes on tensor cores.
        csr: lengths.
        indices: ``[csr.num_pages]`` int32 pages, device; of a graph, in its own buffer already.
        sizes: the layer.
        causal: as in the first plan; decodes of one token are not.
        reserved: the graph's buffers; None outside graphs.

    Returns:
        False where that is left to FlashInfer, nothing done: the wrapper has no plan, its version
        is not known that well, or the batch is not one of the graph.
    """
    end, reqs = FA2_ENDS.get(version), csr.kv_lens.shape[0]
    if end is None or getattr(wrapper, "_plan_info", None) is None:
        return False
    rows = getattr(wrapper, "_max_total_num_rows", None) or csr.num_tokens
    if reserved is not None and (reqs != reserved.num_reqs or csr.num_tokens > rows):
        return False
    if reserved is None:
        parts = parts_of(csr.joined.to(device=indices.device, non_blocking=True), reqs)
        wrapper._qo_indptr_buf, wrapper._paged_kv_indptr_buf = parts[:2]
        wrapper._paged_kv_last_page_len_buf = parts[2]
        wrapper._paged_kv_indices_buf = indices
    else:
        reserved.joined.copy_(csr.joined, non_blocking=True)
    wrapper._batch_size, wrapper._max_kv_len = reqs, csr.max_kv_len
    if hasattr(wrapper, "_qo_indptr_last"):
        wrapper._qo_indptr_last, wrapper._max_q_len = csr.num_tokens, csr.max_query_len
        wrapper._seq_lens_kv = wrapper._seq_lens_q = csr.kv_lens
    window = sizes.sliding_window
    wrapper._plan_info = wrapper._cached_module.plan(
        wrapper._float_workspace_buffer,
        wrapper._int_workspace_buffer,
        wrapper._pin_memory_int_workspace_buffer,
        csr.qo_indptr,
        csr.kv_indptr,
        csr.kv_lens,
        rows,
        reqs,
        sizes.num_heads,
        sizes.num_kv_heads,
        sizes.page_size,
        reserved is not None,
        sizes.head_size,
        sizes.head_size,
        causal,
        -1 if window is None else window - 1,
        *(end if wrapper._backend == "fa2" else ()),
    )
    return True
