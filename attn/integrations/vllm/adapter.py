"""One of our triples as three vLLM subclasses.

Our classes have vLLM's methods already, so each subclass inherits from ours first and from vLLM's
base second; what stands here is what differs: vLLM's own types, and objects of vLLM's that are
translated on the way in. Wrapper factories of vLLM subclass builder and impl once more.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
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
from attn.integrations.vllm import compat, translate
from attn.integrations.vllm.common import CommonBackend, served_line
from attn.integrations.vllm.latent import LatentBackend, LatentBuilder, LatentImpl
from builders.checks.step_limits import StepLimits
from specs.attention import AttentionCGSupport, AttentionSelectorConfig, AttentionType
from specs.dtypes import CacheDType
from specs.layouts import DenseKVLayout, KVPacking

logger = init_logger("vllm.attn_backends")

CASCADE_PREFIX = 256
"""Shortest shared prefix, in tokens, that is worth a pass of its own."""
CASCADE_REQS = 8
"""Fewest requests that a pass of its own over their shared prefix is worth."""


class DenseBackend(CommonBackend):
    """What a dense backend says to vLLM otherwise than to us."""

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
        """Packed: ``[N, Hk, P, K width + V width]`` in elements of the storage dtype.

        Raises:
            ValueError: a block size that no kernel takes.
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
        """In the order that vLLM is set to, NHD or HND: kernels take both."""
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
        """The spec with rows that hold their inline scales too; asked for by vLLM 0.33."""
        if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_per_token_head:
            return spec
        ours = translate.kv_cache_spec(spec)
        return dataclasses.replace(spec, state_content_bytes=ours.layout().row.nbytes)


class DenseImpl:
    """What a dense impl says to vLLM otherwise than to us."""

    ours: type[AttentionImpl]
    kv_cache_dtype: str
    dcp_world_size: int

    def __init__(self, num_heads: int, *args: Any, **extras: Any) -> None:
        """VLLM's ten arguments by position, and extras.

        Raises:
            ValueError: decode context parallelism with a mask that does not go together with it,
                or with several KV heads per rank; or whatever our impl refuses.
        """
        base: Any = super()
        base.__init__(num_heads, *args, **extras)
        self.gathered: Any = None
        mine: Any = self
        if self.dcp_world_size == 1 or not mine.attn_type.is_cached:
            return
        self._check_dcp()
        ranks, sinks = self.dcp_world_size, extras.get("sinks")
        if sinks is not None:
            # Of the heads of all ranks; not known before every rank has loaded its own.
            extras = {**extras, "sinks": sinks.new_full((num_heads * ranks,), math.nan)}
        self.gathered = self.ours(num_heads * ranks, *args, **extras)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """As our impl's. Under DCP each rank then has the sinks of the heads of all."""
        base: Any = super()
        base.process_weights_after_loading(act_dtype)
        mine: Any = self
        own, gathered = mine.sinks, self.gathered
        if gathered is None:
            return
        if own is not None:
            # In place: a graph that was captured before a reload reads the same tensor.
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
        """How the cache is quantised, as vLLM names it."""
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
        """As our impl's. Under DCP every rank attends with the heads of all over its own tokens.

        Raises:
            NotImplementedError: a fused output quantisation under DCP.
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
        """Not under DCP: what is quantised there is not what a kernel writes."""
        base: Any = super()
        return self.gathered is None and bool(base.fused_output_quant_supported(quant_key))


class DenseBuilder:
    """A builder made from vLLM's objects. Batches are taken as they are: ours have their fields."""

    shares_prefix: bool
    label: str
    """Our name and vLLM's, for the log."""
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
        # Those of vLLM hold its longest sequence; dummy batches before a capture can be longer.
        self.step_limits = self.step_limits.without_table()
        logger.info("%s", served_line(self.label, spec, heads, layer_names))
        if device.type == "cuda":
            warm_up(self, layers, compat.features_of(vllm_config, kv_cache_spec))

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Which batches a captured graph can replay, as vLLM names it.

        Graphs are captured without multimodal ranges, so prompts that have some need eager steps.
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
        """A shared prefix is worth a pass of its own; asked for by vLLM 0.26 only."""
        masks = use_alibi or use_sliding_window or use_local_attention
        enough = common_prefix_len >= CASCADE_PREFIX and len(query_lens) >= CASCADE_REQS
        return self.shares_prefix and enough and not masks and dcp_world_size == 1


class _Unwrapped:
    """Our builder's own methods, whatever a wrapper factory has put over them."""

    def __init__(self, builder: Any) -> None:
        ours: Any = super(DenseBuilder, builder)
        self.device = builder.device
        self.build = ours.build
        self.warm_up_batches = getattr(ours, "warm_up_batches", None)


def warm_up(builder: Any, layers: Sequence[Any], features: compat.Features) -> None:
    """Compile what the layers' steps launch, on a cache of two blocks laid out like the engine's.

    vLLM's profiling run comes without metadata and so compiles nothing.

    Args:
        builder: of the layers' group.
        layers: vLLM's modules.
        features: what their steps can ask for.
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
        likeness = (layer.impl.kv_cache_dtype, plain_rules, tensors)
        if likeness in warmed:
            continue
        warmed.add(likeness)
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
    """The vLLM backend class of one of our backends.

    Args:
        backend: ours.
        member: the name that vLLM is to know it by.
        module: where the class is an attribute.
        name: of the attribute.

    Raises:
        ValueError: a backend of sparse layers; there is no adapter for it yet.
    """
    impl, builder = backend.get_impl_cls(), backend.get_builder_cls()
    if backend.is_sparse():
        raise ValueError(f"{backend.get_name()} serves sparse layers, {member} cannot stand for it")
    parts: tuple[type, type, type] = (DenseBackend, DenseImpl, DenseBuilder)
    base: type = VllmImpl
    if backend.is_mla():
        parts, base = (LatentBackend, LatentImpl, LatentBuilder), VllmMLAImpl

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
    return made_cls
