"""What does not change from step to step of SPARSE_MLA's layers, and what of it is not served."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from builders.sparse.choice import NAME, SparseSetup
from builders.vendor.trtllm_parts.mha_choice import capability_of
from specs.engine import EngineConfig
from specs.kv_cache import AnyKVCacheSpec, MLAAttentionSpec
from specs.sparse_mla import SparseKernel

ROW_WIDTHS = (512, 64)
"""Latent and rotary part of a row, for every kernel but the library's own; the widest of its."""
LEAST_WIDTH = 32
"""Of either part: the narrowest that is written."""
_PARTS = (LEAST_WIDTH, 64, 128, 256, 512)
ROW_SIZES = tuple(
    sorted({one + other for one in _PARTS for other in _PARTS if one + other <= sum(ROW_WIDTHS)})
)
"""Widths of whole rows of the library's own kernel: of two powers of two each."""


def setup_of(spec: AnyKVCacheSpec, config: EngineConfig, device: torch.device) -> SparseSetup:
    """What does not change from step to step, of a group's layers.

    Raises:
        ValueError: a spec or setting that is not served; with every reason.
    """
    if not isinstance(spec, MLAAttentionSpec):
        raise ValueError(
            f"kv_cache_spec must be MLAAttentionSpec for {NAME}, got {type(spec).__name__}"
        )
    heads, topk = config.num_heads, spec.topk or config.index_topk
    reasons = []
    if heads is None:
        reasons.append(f"vllm_config.num_heads is needed by {NAME}, got None")
    if topk is None:
        reasons.append(f"topk of the spec, or vllm_config.index_topk, is needed by {NAME}")
    if config.index_topk not in (None, topk):
        reasons.append(f"index_topk must be the spec's topk ({topk}), got {config.index_topk}")
    size = config.parallel.decode_context_parallel_size
    if size > 1:
        reasons.append(f"decode_context_parallel_size must be 1, got {size}")
    if not spec.cache_dtype.is_quantized and spec.cache_dtype.element(spec.dtype) is not spec.dtype:
        reasons.append(
            f"kv_cache_dtype must be quantised or the model's {spec.dtype.value}, got "
            f"{spec.cache_dtype.value!r}"
        )
    reasons += _width_reasons(spec)
    kernels = config.kernels.sparse.prefill, config.kernels.sparse.decode
    others = [one.value for one in kernels if one is not SparseKernel.TRITON_SPARSE]
    widths = spec.kv_lora_rank, spec.qk_rope_head_dim
    if others and widths != ROW_WIDTHS:
        reasons.append(
            f"rows must be {ROW_WIDTHS[0]} + {ROW_WIDTHS[1]} wide for {others[0]}, got "
            f"{widths[0]} + {widths[1]}: use triton_sparse"
        )
    if others and config.batch_invariant:
        reasons.append(
            f"batch_invariant must be False for {others[0]}, got True: use triton_sparse"
        )
    if reasons:
        raise ValueError(f"{NAME}: {'; '.join(reasons)}")
    assert heads is not None
    assert topk is not None
    layout = spec.layout()
    return SparseSetup(
        layout=spec.latent_format,
        prefill=kernels[0],
        decode=kernels[1],
        num_heads=heads,
        topk=topk,
        block_size=spec.block_size,
        dtype=spec.dtype,
        capability=capability_of(device),
        has_padded_pages=layout.page_size_bytes != layout.content_bytes,
    )


def _width_reasons(spec: MLAAttentionSpec) -> Iterator[str]:
    """Why the library's own kernel has no tile for such rows."""
    parts = {"kv_lora_rank": spec.kv_lora_rank, "qk_rope_head_dim": spec.qk_rope_head_dim}
    for name, width in parts.items():
        if width < LEAST_WIDTH or width & (width - 1):
            yield f"{name} must be a power of two from {LEAST_WIDTH} on, got {width}"
    if sum(parts.values()) > sum(ROW_WIDTHS):
        yield f"rows must be at most {sum(ROW_WIDTHS)} wide, got {sum(parts.values())}"
