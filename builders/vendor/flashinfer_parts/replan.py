"""The next plan of a wrapper that FlashInfer has planned once.

FlashInfer's own ``plan`` looks its module up anew, copies each array to the GPU by itself and, in
0.6, finds the longest request by a loop over elements of a tensor. The planning proper is one call
of the module. Here it is made with the arguments that ``plan`` makes, over arrays that the GPU has
already; of what ``plan`` leaves in a wrapper, all that differs between two batches of one layer is
written. A test compares both, attribute by attribute.
"""

from __future__ import annotations

from typing import Any

from builders.vendor.flashinfer_parts.csr import CsrOnDevice, CsrOnHost, LayerSizes

FA2_ENDS: dict[tuple[int, ...], tuple[int, ...]] = {
    (0, 6, 14): (-1, False, 0),
    (0, 7, 2): (-1, False, 0, 0),
}
"""By version, the last arguments of fa2's planning: pages of a cut that is fixed (none), whether
rows stay whole, CTAs of another kernel beside, and tokens of every request (not said)."""


def can_replan(version: tuple[int, ...], wrapper: Any) -> bool:
    """A wrapper has a plan, of a version whose planning is known.

    Args:
        version: of FlashInfer.
        wrapper: of prefills, or of decodes.
    """
    is_planned = getattr(wrapper, "_plan_info", None) is not None
    # The kernel of decodes without tensor cores plans otherwise.
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
    """Plan another batch for the layer that a wrapper was planned for; nothing is waited for.

    Args:
        version: of FlashInfer.
        wrapper: that :func:`can_replan`.
        csr: lengths.
        on_device: the same; of a graph, its own tensors.
        sizes: the layer.
        causal: as in the first plan; decodes of one token are not.

    Raises:
        ValueError: more rows than a graph's first plan had.
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
