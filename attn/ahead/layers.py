"""The launches that serving a layer will make on a GPU, which this machine need not have.

A layer's launches are those of its warm-up (:mod:`attn.impls.warm`). Here backend, builder and impl
make them for a :class:`LayerAhead`, which is data: a model's geometry tells it, or an engine that
knows its layers. :mod:`builders.launch.ahead` compiles them into Triton's cache, where the process
that serves the layer finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import Field, StrictBool

from specs.base import Spec
from specs.devices import Device
from specs.dtypes import DTypeField
from specs.engine import EngineConfig
from specs.kv_cache import AnyKVCacheSpec, IndexerSpec
from specs.layouts import KVPacking
from specs.model import LayerGeometry
from specs.rows import INDEXER_PAGE

if TYPE_CHECKING:
    import torch

    from builders.launch.call import KernelCall


class LayerAhead(Spec):
    """A layer that will be served, as one rank sees it, and the engine's settings for it."""

    backend: str
    """The library's backend that serves the layer: a key of ``LAUNCHES``."""
    layer: LayerGeometry
    """Heads are those of the rank."""
    dtype: DTypeField
    """Model dtype."""
    spec: Annotated[AnyKVCacheSpec, Field(discriminator="kind")]
    """Spec of the layer's KV cache."""
    engine: EngineConfig
    """Settings of the layer's builder."""
    non_causal: StrictBool = False
    """Steps may be non-causal."""
    mm_ranges: StrictBool = False
    """Steps may have multimodal ranges."""
    shared_prefix: StrictBool = False
    """Steps may have a common prefix."""
    output_quant: StrictBool = False
    """Outputs may be quantised to e4m3."""


def launches_of(ahead: LayerAhead, device: Device) -> list[KernelCall]:
    """The launches that serving a layer makes on a GPU.

    Args:
        ahead: the layer. Its builder's tables and plans are made on the CPU for a moment.
        device: the GPU, an NVIDIA one that need not be there.

    Raises:
        ValueError: the backend's launches are not known here, the device is no NVIDIA GPU, or
            whatever the backend's builder and impl refuse.
    """
    from builders.launch.absent import absent_gpu
    from builders.launch.call import collected_calls

    if ahead.backend not in LAUNCHES:
        names = ", ".join(LAUNCHES)
        raise ValueError(f"backend must be one of {names}, got {ahead.backend!r}")
    capability, multiprocessors = device.compute_capability, device.num_multiprocessors
    if capability is None or multiprocessors is None:
        raise ValueError(f"device must be an NVIDIA GPU, got {device.name}")
    with (
        collected_calls() as calls,
        absent_gpu(capability, multiprocessors) as gpu,
    ):
        LAUNCHES[ahead.backend](ahead, gpu)
    return calls


def _dense(ahead: LayerAhead, gpu: torch.device) -> None:
    import torch

    from attn.impls.base import LayerScales
    from attn.impls.dense.triton_attn import TritonAttentionImpl
    from builders.dense.triton_attn import TritonAttentionMetadataBuilder

    layer, dtype = ahead.layer, ahead.dtype.torch
    config = ahead.engine.replace(
        num_heads=layer.num_heads,
        logits_soft_cap=layer.logits_soft_cap,
        has_sinks=layer.has_sinks,
    )
    is_encoder = ahead.spec.kind == "encoder_only_attention"
    impl = TritonAttentionImpl(
        layer.num_heads,
        layer.head_size,
        layer.scale,
        layer.num_kv_heads,
        [1.0] * layer.num_heads if layer.use_alibi else None,
        layer.sliding_window,
        ahead.spec.cache_dtype.value,
        layer.logits_soft_cap,
        "encoder_only" if is_encoder else "decoder",
        sinks=torch.zeros(layer.num_heads, dtype=dtype, device=gpu) if layer.has_sinks else None,
        attention_chunk_size=layer.attention_chunk_size,
        head_size_v=layer.head_size_v,
    )
    impl.process_weights_after_loading(dtype)
    builder = TritonAttentionMetadataBuilder(ahead.spec, ["layer"], config, gpu)
    kv_cache = ahead.spec.layout(packing=KVPacking.PACKED).allocate(2, gpu)
    for scale in _output_scales(ahead, gpu):
        impl.warm_up(
            *(LayerScales.of(device=gpu), kv_cache, builder, dtype),
            output_scale=scale,
            non_causal=ahead.non_causal,
            mm_ranges=ahead.mm_ranges,
            shared_prefix=ahead.shared_prefix,
        )


def _latent(ahead: LayerAhead, gpu: torch.device) -> None:
    from attn.impls.base import LayerScales
    from attn.impls.latent.triton_mla import TritonMLAImpl
    from builders.latent.triton_mla import TritonMLAMetadataBuilder

    impl = TritonMLAImpl(**_latent_arguments(ahead, gpu))
    impl.process_weights_after_loading(ahead.dtype.torch)
    builder = TritonMLAMetadataBuilder(ahead.spec, ["layer"], _latent_config(ahead), gpu)
    kv_cache = ahead.spec.layout().allocate(2, gpu)
    for scale in _output_scales(ahead, gpu):
        given = LayerScales.of(device=gpu), kv_cache, builder, ahead.dtype.torch
        impl.warm_up(*given, output_scale=scale)


def _sparse(ahead: LayerAhead, gpu: torch.device) -> None:
    import torch

    from attn.impls.base import LayerScales
    from attn.impls.sparse.sparse_mla import SparseMLAImpl
    from builders.sparse.sparse_mla import SparseMLAMetadataBuilder

    topk, dtype = ahead.layer.index_topk, ahead.dtype.torch
    config = _latent_config(ahead).replace(index_topk=topk)
    rows = config.max_num_batched_tokens
    lists = torch.empty(rows, topk or 1, dtype=torch.int32, device=gpu)
    indexer = SimpleNamespace(topk_indices_buffer=lists)
    impl = SparseMLAImpl(**_latent_arguments(ahead, gpu), indexer=indexer)
    impl.process_weights_after_loading(dtype)
    builder = SparseMLAMetadataBuilder(ahead.spec, ["layer"], config, gpu)
    kv_cache = ahead.spec.layout().allocate(2, gpu)
    for scale in _output_scales(ahead, gpu):
        impl.warm_up(LayerScales.of(device=gpu), kv_cache, builder, dtype, output_scale=scale)
    if ahead.layer.indexer is not None:
        _index(ahead, config, gpu)


def _index(ahead: LayerAhead, config: EngineConfig, gpu: torch.device) -> None:
    import torch

    from attn.impls.sparse.indexer import SparseIndexer
    from builders.sparse.indexer import IndexerMetadataBuilder

    sizes, dtype = ahead.layer.indexer, ahead.dtype
    assert sizes is not None
    heads, width = sizes.index_n_heads, sizes.index_head_dim
    spec = IndexerSpec(block_size=INDEXER_PAGE, index_head_dim=width, dtype=dtype)
    builder = IndexerMetadataBuilder(spec, ["layer"], config.replace(num_heads=heads), gpu)
    query = torch.zeros(1, heads, width, device=gpu).to(torch.float8_e4m3fn)
    key = torch.zeros(1, width, dtype=dtype.torch, device=gpu)
    kv_cache = spec.layout().allocate(2, gpu)
    lists = torch.empty(builder.threshold + 1, sizes.index_topk, dtype=torch.int32, device=gpu)
    SparseIndexer(lists).warm_up(query, key, kv_cache, builder)


def _latent_config(ahead: LayerAhead) -> EngineConfig:
    layer = ahead.layer
    return ahead.engine.replace(num_heads=layer.num_heads, softmax_scale=layer.scale)


def _latent_arguments(ahead: LayerAhead, gpu: torch.device) -> dict[str, Any]:
    """The arguments of a latent impl, with up-projections of the model dtype."""
    import torch

    layer, sizes = ahead.layer, ahead.layer.mla
    assert sizes is not None
    columns = layer.num_heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)
    weight = torch.zeros(columns, sizes.kv_lora_rank, dtype=ahead.dtype.torch, device=gpu)
    return {
        "num_heads": layer.num_heads,
        "head_size": sizes.latent_size,
        "scale": layer.scale,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": layer.sliding_window,
        "kv_cache_dtype": ahead.spec.cache_dtype.value,
        "kv_lora_rank": sizes.kv_lora_rank,
        "qk_nope_head_dim": sizes.qk_nope_head_dim,
        "qk_rope_head_dim": sizes.qk_rope_head_dim,
        "qk_head_dim": sizes.qk_head_dim,
        "v_head_dim": sizes.v_head_dim,
        "kv_b_proj": SimpleNamespace(weight=weight),
    }


def _output_scales(ahead: LayerAhead, gpu: torch.device) -> tuple[torch.Tensor | None, ...]:
    """The scale of each kind of output; None for the model dtype."""
    import torch

    if not ahead.output_quant:
        return (None,)
    return None, torch.ones((), device=gpu)


LAUNCHES: Final[Mapping[str, Callable[[LayerAhead, torch.device], None]]] = {
    "TRITON_ATTN": _dense,
    "TRITON_MLA": _latent,
    "SPARSE_MLA": _sparse,
}
"""For each backend of the library's own kernels the function that makes a layer's launches."""
