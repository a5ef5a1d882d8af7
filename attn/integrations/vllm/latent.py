"""Our latent (MLA) triples as vLLM subclasses.

vLLM's layer absorbs queries and projects outputs. Our impl gets latent queries and attends. For
prefill it expands latent rows with the up-projections that vLLM's layer keeps for its own use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from vllm.logger import init_logger

from attn.integrations.vllm import ahead, compat, translate
from attn.integrations.vllm.common import CommonBackend, served_line
from builders.checks.step_limits import StepLimits
from specs.attention import AttentionSelectorConfig

logger = init_logger("vllm.attn_backends")

BLOCK_SIZE = 64
"""Tokens of a block of latent rows, if the user asks for no size."""


class LatentBackend(CommonBackend):
    """Methods of a latent backend that differ for vLLM."""

    @classmethod
    def get_kv_cache_shape(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """The shape ``[N, P, L + r]``, in elements of the storage dtype.

        Raises:
            ValueError: no kernel takes this block size.
        """
        cls.check_block_size(block_size)
        return num_blocks, block_size, head_size

    @classmethod
    def validate(cls, config: AttentionSelectorConfig, device_capability: Any) -> list[str]:
        """Every reason why not; vLLM's own way to keep the up-projections may be one."""
        if compat.hides_dcp():
            config = config.replace(use_dcp=True)
        reasons = super().validate(config, device_capability)
        variables = compat.quantised_up_projections()
        if variables:
            reasons.append(f"quantised up-projections not supported ({', '.join(variables)})")
        return reasons

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int = 16) -> int:
        """64 tokens, unless the default is larger or no kernel takes 64.

        The Hopper kernels read 64 rows at a time: one load from a block of 64, four from blocks of
        16.
        """
        ours: Any = super()
        preferred = max(default_block_size, BLOCK_SIZE)
        taken = ours.supports_block_size(preferred)
        return int(ours.get_preferred_block_size(preferred if taken else default_block_size))

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """True where a row has the same bits in any batch, given how its prompt is cut into chunks.

        vLLM's own latent backends declare batch invariance in the same sense. Prefix caching and
        chunked prefill change the chunks of a prompt, and with them its bits.
        """
        return bool(cls.capabilities.row_bits)  # type: ignore[attr-defined]

    @classmethod
    def get_kv_cache_stride_order(
        cls, include_num_layers_dimension: bool = False
    ) -> tuple[int, ...]:
        """The logical order: latent rows have no head axis, and layers are not interleaved."""
        return tuple(range(3 + include_num_layers_dimension))


class LatentImpl:
    """Methods of a latent impl that differ for vLLM.

    vLLM's layer splits and dequantises ``kv_b_proj`` when weights are loaded, and again when they
    are reloaded. The impl fetches the two resulting tensors from the layer at every use and keeps
    no copy, which would be stale after a reload.
    """

    vllm_layer: Any = None
    """The ``MLAAttention`` that owns the impl; None until a builder sets it."""
    backend: type[Any]
    """The backend class that vLLM knows."""
    dcp_world_size: int

    def __init__(self, num_heads: int, *args: Any, **extras: Any) -> None:
        """Take vLLM's arguments.

        Raises:
            ValueError: a sliding window under decode context parallelism, of which vLLM does not
                ask when it selects; or an argument that our impl refuses.
        """
        base: Any = super()
        base.__init__(num_heads, *args, **extras)
        window = self.sliding_window  # type: ignore[attr-defined]
        if self.dcp_world_size > 1 and window is not None:
            raise ValueError(
                f"decode_context_parallel_size {self.dcp_world_size} does not go together with a "
                "sliding window"
            )
        ahead.offer(self)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Do nothing: ``kv_b_proj`` may be packed here, and vLLM's layer splits it afterwards."""

    @property
    def W_UK(self) -> torch.Tensor:  # noqa: N802
        """``[L, H, P]`` up-projection of keys, from the weights that vLLM loaded last."""
        up_k: torch.Tensor = self._layer().W_UK_T
        return up_k.permute(2, 0, 1)

    @property
    def W_UV(self) -> torch.Tensor:  # noqa: N802
        """``[L, H, V]`` up-projection of values, from the weights that vLLM loaded last."""
        up_v: torch.Tensor = self._layer().W_UV
        return up_v.transpose(0, 1)

    def _layer(self) -> Any:
        if self.vllm_layer is None:
            raise ValueError("a metadata builder of the layer's group must be made first")
        return self.vllm_layer


class LatentBuilder:
    """A builder made from vLLM's objects. It takes vLLM's batches, which have the same fields."""

    label: str
    """Our name and vLLM's, for the log."""
    phase_kernels: Mapping[str, str]
    step_limits: StepLimits
    depends_on_chunks: ClassVar[bool] = True
    """A prompt's bits depend on how it is cut into chunks, even with batch invariance."""

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
            layer_names: layers of the group; their weights are loaded.
            vllm_config: vLLM's.
            device: where the records' tensors live.

        Raises:
            ValueError: layers with different numbers of query heads, or whatever our builder
                refuses.
        """
        layers = translate.layers_of(vllm_config, layer_names)
        heads = translate.query_heads(vllm_config, layers)
        dtype = vllm_config.model_config.dtype
        rope = {layer.qk_rope_head_dim for layer in layers} or {64}
        spec = translate.kv_cache_spec(
            kv_cache_spec, vllm_config.cache_config.cache_dtype, dtype, max(rope)
        ).replace(page_size_padded=None)
        ranks = translate.dcp_ranks(layers)
        config = translate.engine_config(vllm_config, kv_cache_spec, heads, *ranks)
        scales = {layer.impl.scale for layer in layers}
        if len(scales) == 1:
            config = config.replace(softmax_scale=scales.pop())
        ours: Any = super()
        ours.__init__(spec, layer_names, config, device)
        # vLLM's block tables are as wide as its longest sequence needs, but dummy batches before a
        # capture have longer lengths, so the table's width is not checked.
        self.step_limits = self.step_limits.without_table()
        for layer in layers:
            layer.impl.vllm_layer = layer
            layer.impl.all_gather = compat.gather_ranks if ranks[0] > 1 else None
        logger.info("%s", served_line(self.label, spec, heads, layer_names, self.phase_kernels))
        if self.depends_on_chunks and config.batch_invariant:
            _warn_of_chunks(self.label, vllm_config)
        if device.type == "cuda":
            features = compat.features_of(vllm_config, kv_cache_spec)
            with ahead.warming_up():
                warm_up(self, layers, features.output_quant)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Which batches a captured graph can replay, as a member of vLLM's enumeration."""
        ours: Any = super()
        level = ours.get_cudagraph_support(vllm_config, kv_cache_spec)
        return compat.cudagraph_support(level.value)


def _warn_of_chunks(label: str, vllm_config: Any) -> None:
    """Log that prefix caching cuts prompts by what was served before, where it is on."""
    if vllm_config.cache_config.enable_prefix_caching:
        logger.warning(
            "%s: with batch invariance a prompt has the same bits where it is cut into the same "
            "chunks, and prefix caching cuts it by what was served before; turn it off by "
            "--no-enable-prefix-caching",
            label,
        )


class _Unwrapped:
    """Our builder's own methods, without the overrides of vLLM's wrapper factories."""

    def __init__(self, builder: Any) -> None:
        ours: Any = super(LatentBuilder, builder)
        self.device = builder.device
        self.warm_up_steps = getattr(ours, "warm_up_steps", None)


def warm_up(builder: Any, layers: Sequence[Any], quantises: bool) -> None:
    """Compile the kernels of the layers' steps, on a cache of two blocks with the engine's layout.

    vLLM's profiling run has no metadata and therefore compiles nothing.

    Args:
        builder: builder of the layers' group.
        layers: vLLM's modules of the layers; their weights are loaded.
        quantises: a compiler pass may fuse the output's fp8 quantisation.
    """
    plain, spec = _Unwrapped(builder), builder.kv_cache_spec
    if plain.warm_up_steps is None:
        return
    kv_cache = spec.layout().allocate(2, builder.device)
    scale = torch.ones((), device=builder.device)
    warmed = set()
    for layer in layers:
        impl = layer.impl
        variant_key = (impl.kv_cache_dtype, impl.qk_nope_head_dim, impl.v_head_dim)
        if variant_key in warmed:
            continue
        warmed.add(variant_key)
        for output_scale in (None, scale) if quantises else (None,):
            impl.warm_up(layer, kv_cache, plain, spec.dtype.torch, output_scale=output_scale)
