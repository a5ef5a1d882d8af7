"""One latent-attention layer's step around an impl's two paths: absorb, attend, project."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attn.reference.mla import absorb_query, project_latent_output
from builders.checks.tensors import check_latent_output, k_scale_of

if TYPE_CHECKING:
    from attn.impls.base import AttentionLayer, MLAAttentionImpl
    from attn.impls.sparse.indexer import IndexInputs


def mla_attention(
    impl: MLAAttentionImpl,
    layer: AttentionLayer,
    q: torch.Tensor,
    kv_c_normed: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    attn_metadata: Any,
    output: torch.Tensor,
    index: IndexInputs | None = None,
) -> torch.Tensor:
    """Attention of a step; its latent rows are in the cache already, and decode rows come first.

    vLLM's ``MLAAttention`` does the same around an impl's ``forward_mha`` and ``forward_mqa``.

    Args:
        impl: an MLA impl after ``process_weights_after_loading``.
        layer: the layer's scales.
        q: ``[T, H, P + r]``, nope then rope.
        kv_c_normed: ``[T, L]``.
        k_pe: ``[T, r]``.
        kv_cache: ``[N, block_size, row]``.
        attn_metadata: the record of the impl's builder; None is a profiling call.
        output: ``[T, H * V]``, written in place; rows past the batch's tokens are not touched.
        index: inputs of a sparse layer's own indexer
            (``attn.impls.sparse.indexer.SparseIndexer``), which then runs first; None for a layer
            without an indexer of its own.

    Returns:
        ``output``.

    Raises:
        ValueError: tensors that do not fit the layer or the step.
    """
    if attn_metadata is None:
        return output.zero_()
    check_latent_output(impl, q.dtype, output)
    if index is not None:
        impl.indexer.forward(index)
    decodes, tokens = attn_metadata.num_decode_tokens, attn_metadata.num_actual_tokens
    if attn_metadata.num_prefill_tokens:
        prefill = slice(decodes, tokens)
        impl.forward_mha(
            q[prefill],
            kv_c_normed[prefill],
            k_pe[prefill],
            kv_cache,
            attn_metadata,
            k_scale_of(layer),
            output[prefill],
        )
    if decodes:
        nope = impl.qk_nope_head_dim
        q_nope, q_pe = q[:decodes, :, :nope], q[:decodes, :, nope:]
        absorbed = absorb_query(q_nope, impl.W_UK)
        latent, _ = impl.forward_mqa((absorbed, q_pe), kv_cache, attn_metadata, layer)
        values = project_latent_output(latent, impl.W_UV)
        output[:decodes] = values.flatten(1).to(output.dtype)
    return output
