"""Replan: a faster plan for a wrapper that FlashInfer has planned once.

FlashInfer's own ``plan`` looks up its module in every call, copies each array to the GPU separately
and, in 0.6, finds the longest request by a loop over elements of a tensor. The actual planning is
one call of the module. :func:`replan` makes that call with the arguments that ``plan`` passes, over
arrays that are on the GPU already. It also writes every attribute of the wrapper in which two
batches of one layer differ. A test compares both, attribute by attribute.
"""

from __future__ import annotations

from typing import Any

from builders.vendor.flashinfer_parts.csr import CsrOnDevice, CsrOnHost, LayerSizes

FA2_ENDS: dict[tuple[int, ...], tuple[int, ...]] = {
    (0, 6, 14): (-1, False, 0),
    (0, 7, 2): (-1, False, 0, 0),
}
"""The last arguments of fa2's planning, for each version. They mean: a fixed split size (-1: none),
whether splitting is off, CTAs of a kernel that runs beside, and the query length of every request
(0: not given)."""


def can_replan(version: tuple[int, ...], wrapper: Any) -> bool:
    """True for a wrapper with a plan, in a version whose planning call is known.

    Args:
        version: FlashInfer's version.
        wrapper: a prefill or decode wrapper.
    """
    is_planned = getattr(wrapper, "_plan_info", None) is not None
    # The decode kernel without tensor cores has another planning call.
    return version in FA2_ENDS and is_planned and getattr(wrapper, "use_tensor_cores", True)


def replan(
    version: tuple[int, ...],
    wrapper: Any,
    csr: CsrOnHost,
    on_device: CsrOnDevice,
    sizes: LayerSizes,
    *,
    causal: bool,
) -> None:
    """Plan another batch for the layer that a wrapper was planned for, without waiting for the GPU.

    Args:
        version: FlashInfer's version.
        wrapper: a wrapper for which :func:`can_replan` is True.
        csr: lengths of the requests, on the host.
        on_device: lengths and pages on the device; for a graph, its wrapper's own tensors.
        sizes: the layer's sizes.
        causal: the mask of the first plan; False for decodes of one token.

    Raises:
        ValueError: the batch has more rows than a graph's first plan.
    """
    reqs, is_graph = csr.kv_lens.shape[0], wrapper.is_cuda_graph_enabled
    rows = getattr(wrapper, "_max_total_num_rows", None) or csr.num_tokens
    if csr.num_tokens > rows:
        raise ValueError(f"a graph's step must have at most {rows} rows, got {csr.num_tokens}")
    if not is_graph:
        wrapper._qo_indptr_buf = on_device.qo_indptr
        wrapper._paged_kv_indptr_buf = on_device.kv_indptr
        wrapper._paged_kv_last_page_len_buf = on_device.last_page_len
        wrapper._paged_kv_indices_buf = on_device.kv_indices
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
        is_graph,
        sizes.head_size,
        sizes.head_size,
        causal,
        -1 if window is None else window - 1,
        *(FA2_ENDS[version] if wrapper._backend == "fa2" else ()),
    )
