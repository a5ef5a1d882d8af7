"""One of our triples as three vLLM subclasses.

Our classes have vLLM's methods already, so each subclass inherits from our class first and from
vLLM's base class second. This module holds only the differences: results in vLLM's types, and
arguments of vLLM's types that are translated to ours. Some wrapper factories of vLLM make further
subclasses of the builder and the impl.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionBackend as VllmBackend
from vllm.v1.attention.backend import AttentionImpl as VllmImpl
from vllm.v1.attention.backend import AttentionMetadataBuilder as VllmBuilder
from vllm.v1.attention.backend import MLAAttentionImpl as VllmMLAImpl
from vllm.v1.kv_cache_interface import get_kv_quant_mode

from attn.backends.base import AttentionBackend
from attn.impls.base import AttentionImpl
from attn.impls.sparse.sparse_mla import SparseMLAImpl
from attn.integrations.vllm import ahead, compat, translate
from attn.integrations.vllm.common import CommonBackend, served_line
from attn.integrations.vllm.latent import LatentBackend, LatentBuilder, LatentImpl
from attn.integrations.vllm.sparse import SparseBackend, SparseBuilder, SparseImpl
from builders.checks.step_limits import StepLimits
from specs.attention import AttentionCGSupport, AttentionSelectorConfig, AttentionType
from specs.dtypes import CacheDType
from specs.layouts import DenseKVLayout, KVPacking

logger = init_logger("vllm.attn_backends")

CASCADE_PREFIX = 256
"""Shortest shared prefix, in tokens, that is attended in a pass of its own."""
CASCADE_REQS = 8
"""Fewest requests whose shared prefix is attended in a pass of its own."""


class DenseBackend(CommonBackend):
    """Methods of a dense backend that differ for vLLM."""

    supports_kv_cache_update_bypass = True

    @classmethod
    def get_kv_cache_shape(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """The packed shape ``[N, Hk, P, K width + V width]``, in elements of the storage dtype.

        Raises:
            ValueError: no kernel takes this block size.
        """
        cls.check_block_size(block_size)
        return DenseKVLayout(
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            cache_dtype=CacheDType.parse(cache_dtype_str),
            packing=KVPacking.PACKED,
        ).logical_shape(num_blocks)

    @classmethod
    def get_kv_cache_stride_order(
        cls, include_num_layers_dimension: bool = False
    ) -> tuple[int, ...]:
        """The stride order that vLLM is set to, NHD or HND; kernels take both."""
        return compat.packed_stride_order(include_num_layers_dimension)

    @classmethod
    def validate(cls, config: AttentionSelectorConfig, device_capability: Any) -> list[str]:
        """Every reason why not; the layout that vLLM's caches get here may be one."""
        reasons = super().validate(config, device_capability)
        ours: Any = cls
        layout = ours.layout_reason(KVPacking.PACKED, False, device_capability)
        return reasons if layout is None else [*reasons, layout]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """The spec with room for inline scales in every row; vLLM 0.33 calls this."""
        if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_per_token_head:
            return spec
        ours = translate.kv_cache_spec(spec)
        return dataclasses.replace(spec, state_content_bytes=ours.layout().row.nbytes)


class DenseImpl:
    """Methods of a dense impl that differ for vLLM."""

    ours: type[AttentionImpl]
    backend: type[Any]
    """The backend class that vLLM knows."""
    kv_cache_dtype: str
    dcp_world_size: int

    def __init__(self, num_heads: int, *args: Any, **extras: Any) -> None:
        """Take vLLM's ten arguments by position, and further arguments by name.

        Raises:
            ValueError: decode context parallelism with a mask that excludes it or with several KV
                heads per rank; or an argument that our impl refuses.
        """
        base: Any = super()
        base.__init__(num_heads, *args, **extras)
        self.gathered: Any = None
        ahead.offer(self)
        mine: Any = self
        if self.dcp_world_size == 1 or not mine.attn_type.is_cached:
            return
        self._check_dcp()
        ranks, sinks = self.dcp_world_size, extras.get("sinks")
        if sinks is not None:
            # NaN stands for the sinks of all ranks' heads until every rank has loaded its weights.
            extras = {**extras, "sinks": sinks.new_full((num_heads * ranks,), math.nan)}
        self.gathered = self.ours(num_heads * ranks, *args, **extras)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Process our impl's weights; under DCP, also gather the sinks of all ranks' heads."""
        base: Any = super()
        base.process_weights_after_loading(act_dtype)
        mine: Any = self
        own, gathered = mine.sinks, self.gathered
        if gathered is None:
            return
        if own is not None:
            # Copied in place: a graph captured before a reload of weights reads the same tensor.
            gathered.sinks.copy_(compat.dcp_group().all_gather(own.detach().contiguous(), dim=0))
        gathered.process_weights_after_loading(act_dtype)

    def _check_dcp(self) -> None:
        mine: Any = self
        config = get_current_vllm_config()
        model = config.model_config
        refused = {
            "cross attention": mine.attn_type is AttentionType.ENCODER_DECODER,
            "a sliding window": mine.sliding_window is not None,
            "chunks": mine.rules.attention_chunk_size is not None,
            "ALiBi": mine.alibi_slopes is not None,
            "multimodal ranges": model is not None and bool(model.is_mm_prefix_lm),
            "R-SWA": model is not None and compat.rswa_window(config, None) is not None,
            f"{mine.num_kv_heads} KV heads per rank": mine.num_kv_heads != 1,
        }
        names = ", ".join(name for name, is_asked in refused.items() if is_asked)
        if names:
            raise ValueError(
                f"decode_context_parallel_size {self.dcp_world_size} does not go together with "
                f"{names}"
            )

    @property
    def kv_quant_mode(self) -> Any:
        """The cache's quantisation, as a member of vLLM's enumeration."""
        return get_kv_quant_mode(self.kv_cache_dtype)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Our impl's forward; under DCP a rank attends with all ranks' heads over its own tokens.

        Raises:
            NotImplementedError: fused output quantisation is asked for under DCP.
        """
        if self.gathered is None or attn_metadata is None:
            base: Any = super()
            given = (layer, query, key, value, kv_cache, attn_metadata, output)
            result: torch.Tensor = base.forward(*given, output_scale, output_block_scale)
            return result
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output quantisation is not fused under DCP")
        group, tokens = compat.dcp_group(), attn_metadata.num_actual_tokens
        everyone = group.all_gather(query[:tokens].contiguous(), dim=1)
        parts = torch.empty_like(everyone)
        lse = everyone.new_empty(everyone.shape[:2], dtype=torch.float32)
        self.gathered.forward(
            *(layer, everyone, None, None, kv_cache, attn_metadata, parts), output_lse=lse
        )
        output[:tokens] = compat.merge_ranks(parts, lse, group).view_as(output[:tokens])
        return output

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """False under DCP, where the output to quantise comes from the merge, not from a kernel."""
        base: Any = super()
        return self.gathered is None and bool(base.fused_output_quant_supported(quant_key))


class DenseBuilder:
    """A builder made from vLLM's objects. It takes vLLM's batches, which have the same fields."""

    shares_prefix: bool
    label: str
    """Our name and vLLM's, for the log."""
    phase_kernels: Mapping[str, str]
    step_limits: StepLimits

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: Sequence[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        """
        Args:
            kv_cache_spec: vLLM's, cut to the kernel's block size.
            layer_names: layers of the group.
            vllm_config: vLLM's.
            device: where the records' tensors live.

        Raises:
            ValueError: layers with different numbers of query heads, decode context parallelism
                of a cache whose keys are not divided over ranks, or whatever our builder refuses.
        """
        layers = translate.layers_of(vllm_config, layer_names)
        heads = translate.query_heads(vllm_config, layers)
        stored = translate.kv_cache_spec(
            kv_cache_spec, vllm_config.cache_config.cache_dtype, vllm_config.model_config.dtype
        )
        rules = [layer.impl.rules for layer in layers if hasattr(layer.impl, "rules")]
        spec = translate.planned_spec(stored, rules)
        dcp = getattr(stored, "dcp_sharded", False) and translate.dcp_ranks(layers)
        if not dcp and any(getattr(layer.impl, "gathered", None) is not None for layer in layers):
            raise ValueError(
                f"decode_context_parallel_size {translate.dcp_ranks(layers)[0]} does not go "
                f"together with {type(kv_cache_spec).__name__}: its keys are not divided over ranks"
            )
        config = translate.engine_config(vllm_config, kv_cache_spec, heads, *(dcp or (1, 0)))
        caps = {rule.logits_soft_cap for rule in rules}
        if len(caps) == 1:
            config = config.replace(logits_soft_cap=caps.pop())
        sinks = (getattr(layer.impl, "sinks", None) for layer in layers)
        config = config.replace(has_sinks=any(one is not None for one in sinks))
        ours: Any = super()
        ours.__init__(spec, layer_names, config, device)
        # vLLM's block tables are as wide as its longest sequence needs, but dummy batches before a
        # capture have longer lengths, so the table's width is not checked.
        self.step_limits = self.step_limits.without_table()
        logger.info("%s", served_line(self.label, spec, heads, layer_names, self.phase_kernels))
        if device.type == "cuda":
            with ahead.warming_up():
                warm_up(self, layers, compat.features_of(vllm_config, kv_cache_spec))

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Which batches a captured graph can replay, as a member of vLLM's enumeration.

        Graphs are captured without multimodal ranges, so prompts with such ranges run eagerly.
        """
        ours: Any = super()
        level = ours.get_cudagraph_support(vllm_config, kv_cache_spec)
        if vllm_config.model_config.is_mm_prefix_lm:
            level = min(level, AttentionCGSupport.UNIFORM_BATCH)
        return compat.cudagraph_support(level.value)

    def use_cascade_attention(
        self,
        common_prefix_len: int,
        query_lens: Any,
        num_query_heads: int,
        num_kv_heads: int,
        use_alibi: bool,
        use_sliding_window: bool,
        use_local_attention: bool,
        num_sms: int,
        dcp_world_size: int,
    ) -> bool:
        """True where a shared prefix gets a pass of its own; only vLLM 0.26 calls this."""
        masks = use_alibi or use_sliding_window or use_local_attention
        enough = common_prefix_len >= CASCADE_PREFIX and len(query_lens) >= CASCADE_REQS
        return self.shares_prefix and enough and not masks and dcp_world_size == 1


class _Unwrapped:
    """Our builder's own methods, without the overrides of vLLM's wrapper factories."""

    def __init__(self, builder: Any) -> None:
        ours: Any = super(DenseBuilder, builder)
        self.device = builder.device
        self.build = ours.build
        self.warm_up_batches = getattr(ours, "warm_up_batches", None)


def warm_up(builder: Any, layers: Sequence[Any], features: compat.Features) -> None:
    """Compile the kernels of the layers' steps, on a cache of two blocks with the engine's layout.

    vLLM's profiling run has no metadata and therefore compiles nothing.

    Args:
        builder: builder of the layers' group.
        layers: vLLM's modules of the layers.
        features: features that the layers' steps can ask for.
    """
    plain, spec = _Unwrapped(builder), builder.kv_cache_spec
    if plain.warm_up_batches is None:
        return
    kv_cache = spec.layout(packing=KVPacking.PACKED).allocate(2, builder.device)
    scale = torch.ones((), device=builder.device)
    warmed = set()
    for layer in layers:
        rules = layer.impl.rules
        tensors = (rules.sinks is None, rules.alibi_slopes is None)
        plain_rules = dataclasses.replace(rules, sinks=None, alibi_slopes=None)
        variant_key = (layer.impl.kv_cache_dtype, plain_rules, tensors)
        if variant_key in warmed:
            continue
        warmed.add(variant_key)
        gathered = layer.impl.gathered
        quantises = features.output_quant and gathered is None
        for output_scale in (None, scale) if quantises else (None,):
            (gathered or layer.impl).warm_up(
                layer,
                kv_cache,
                plain,
                spec.dtype.torch,
                with_lse=gathered is not None,
                output_scale=output_scale,
                non_causal=features.non_causal,
                mm_ranges=features.mm_ranges,
                shared_prefix=features.shared_prefix,
            )


@functools.cache
def adapted(backend: type[AttentionBackend], member: str, module: str, name: str) -> type[Any]:
    """Make the vLLM backend class of one of our backends.

    Args:
        backend: our backend class.
        member: the name in vLLM's registry.
        module: name of the module that has the class as an attribute.
        name: name of that attribute.

    Raises:
        ValueError: a reference backend of sparse layers; its steps are not what vLLM reads.
    """
    impl, builder = backend.get_impl_cls(), backend.get_builder_cls()
    parts: tuple[type, type, type] = (DenseBackend, DenseImpl, DenseBuilder)
    if backend.is_sparse():
        if not issubclass(impl, SparseMLAImpl):
            raise ValueError(
                f"{backend.get_name()} serves sparse layers, {member} cannot stand for it"
            )
        parts = (SparseBackend, SparseImpl, SparseBuilder)
    elif backend.is_mla():
        parts = (LatentBackend, LatentImpl, LatentBuilder)
    base: type = VllmMLAImpl if backend.is_mla() else VllmImpl

    def made(suffix: str, *bases: type, **extra: Any) -> Any:
        known = f"{name}{suffix}"
        where = {"__module__": module, "__qualname__": known, "__doc__": bases[1].__doc__}
        return type(known, bases, where | extra)

    label = f"attn-backends: {backend.get_name()} as {member}"
    impl_cls = made("Impl", parts[1], impl, base, ours=impl)
    builder_cls = made("MetadataBuilder", parts[2], builder, VllmBuilder, label=label)
    made_cls: type[Any] = made(
        "",
        parts[0],
        backend,
        VllmBackend,
        get_name=staticmethod(lambda: member),
        get_impl_cls=staticmethod(lambda: impl_cls),
        get_builder_cls=staticmethod(lambda: builder_cls),
    )
    impl_cls.backend = made_cls
    return made_cls
