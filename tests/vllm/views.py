"""KV cache tensors as each version of vLLM's worker makes them."""

from __future__ import annotations

from typing import Any

import torch
import vllm.v1.kv_cache_interface as interface
from torch import Tensor

from attn.integrations.vllm import compat


def cache_view(
    spec: Any,
    num_blocks: int,
    backend: Any,
    kernel_block_size: int | None = None,
    cache_dtype: str = "auto",
    layout: str = "NHD",
    fill_byte: int = 0xFF,
) -> Tensor:
    """One layer's cache, with every byte ``fill_byte``.

    Args:
        spec: vLLM's.
        num_blocks: of ``spec.block_size`` tokens.
        backend: vLLM's backend class.
        kernel_block_size: tokens that kernels see as a block; None is the spec's.
        cache_dtype: the engine's ``kv_cache_dtype``.
        layout: NHD or HND.
        fill_byte: poison.
    """
    kernel = kernel_block_size or spec.block_size
    raw = torch.full((num_blocks * spec.page_size_bytes,), fill_byte, dtype=torch.uint8)
    if not compat.BACKENDS_SHAPE_CACHES:
        order = interface.KVCacheLayout[{"NHD": "LBNHC", "HND": "LBHNC"}[layout]]
        tensor = interface.KVCacheTensor(
            size=raw.numel(),
            layers=["layer"],
            layer_stride=raw.numel(),
            block_stride=spec.page_size_bytes,
        )
        views = interface.create_kv_cache_views(
            raw.view(torch.int8), spec, num_blocks, order, tensor, kernel
        )
        return views[0]
    from vllm.v1.attention.backends.utils import set_kv_cache_layout
    from vllm.v1.worker.gpu.attn_utils import _reshape_attention_kv_cache

    set_kv_cache_layout(layout)
    blocks = num_blocks * (spec.block_size // kernel)
    unquantised = spec.kv_quant_mode == interface.KVQuantMode.NONE
    shape = backend.get_kv_cache_shape(
        blocks,
        kernel,
        spec.num_kv_heads,
        spec.head_size,
        cache_dtype_str="auto" if unquantised else cache_dtype,
    )
    return _reshape_attention_kv_cache(
        raw.view(torch.int8), spec, shape, backend.get_kv_cache_stride_order(), blocks, None
    )
