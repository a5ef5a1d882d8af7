"""The base classes of impls: one for dense attention, one for MLA.

An impl is the third part of a triple (backend, builder, impl). It launches the kernels that the
builder's record names, and decides nothing itself. Constructor arguments and method names are those
of vLLM v1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from attn.reference.mla import split_kv_b_proj
from specs.attention import AttentionType
from specs.dtypes import CacheDType, KVQuantMode
from specs.positions import cut_window


class AttentionLayer(Protocol):
    """The scales that a layer offers to its impl, with real = stored * scale."""

    _q_scale: torch.Tensor
    """fp32 scalar, device."""
    _k_scale: torch.Tensor
    """fp32 scalar, or ``[Hk]`` per head, device."""
    _v_scale: torch.Tensor


@dataclass
class LayerScales:
    """A minimal :class:`AttentionLayer`: scales and nothing else."""

    _q_scale: torch.Tensor
    _k_scale: torch.Tensor
    _v_scale: torch.Tensor

    @classmethod
    def of(
        cls, k: float = 1.0, v: float = 1.0, q: float = 1.0, device: torch.device | str = "cpu"
    ) -> LayerScales:
        """Make per-tensor scales from numbers."""
        return cls(*(torch.tensor(scale, device=device) for scale in (q, k, v)))


class AttentionImplBase:
    """The constructor and the flags that dense and MLA impls share."""

    is_sparse: ClassVar[bool] = False
    can_return_lse_for_decode: bool = False
    """Whether decode rows can return their log-sum-exp, as decode context parallelism needs."""
    lse_base_on_e: bool = True
    """Always True: the LSE is a natural logarithm. The LSE of a vendor's kernel is converted where
    that kernel is called."""
    supports_pcp: bool = False
    supports_dcp: bool = False
    supports_mtp_with_cp_non_trivial_interleave_size: bool = False
    supports_quant_query_input: bool = False
    """Whether the query may arrive in fp8 over an fp8 cache; if not, it has the model dtype."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: Sequence[float] | torch.Tensor | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        """
        Args:
            num_heads: query heads H of this rank.
            head_size: query and key head size D; for MLA the latent and rotary sizes together.
            scale: multiplies q.k before the softmax.
            num_kv_heads: KV heads Hk; None means ``num_heads``.
            alibi_slopes: ``[H]`` position bias per head, or None.
            sliding_window: visible keys including the token itself, or None for all.
            kv_cache_dtype: a ``CacheDType`` string.
            logits_soft_cap: c of ``c * tanh(score / c)``; None or 0 is off.
            attn_type: an ``AttentionType`` string.
            kv_sharing_target_layer_name: layer whose cache this one reads, or None.

        Raises:
            TypeError: a size that is no integer.
            ValueError: a value out of range; the message names argument and value.
        """
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, number in (
            ("num_heads", num_heads),
            ("head_size", head_size),
            ("num_kv_heads", num_kv_heads),
        ):
            if not is_integer(number):
                raise TypeError(f"{name} must be an integer, got {number!r}")
            if number < 1:
                raise ValueError(f"{name} must be positive, got {number}")
        for name, value in (("scale", scale), ("logits_soft_cap", logits_soft_cap or 0.0)):
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {value!r}")
        if not (sliding_window is None or is_integer(sliding_window)):
            raise TypeError(f"sliding_window must be an integer or None, got {sliding_window!r}")
        if attn_type not in list(AttentionType):
            allowed = ", ".join(kind.value for kind in AttentionType)
            raise ValueError(f"attn_type must be one of {allowed}, got {attn_type!r}")
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads})"
            )
        if sliding_window is not None and sliding_window < 1:
            raise ValueError(f"sliding_window must be positive or None, got {sliding_window}")
        if logits_soft_cap is not None and logits_soft_cap < 0:
            raise ValueError(f"logits_soft_cap must be positive or None, got {logits_soft_cap}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.num_queries_per_kv = num_heads // num_kv_heads
        self.alibi_slopes = per_head("alibi_slopes", alibi_slopes, num_heads)
        self.sliding_window = cut_window(sliding_window)
        self.kv_cache_dtype = kv_cache_dtype
        self.cache_dtype = CacheDType.parse(kv_cache_dtype)
        self.logits_soft_cap = logits_soft_cap or None
        self.attn_type = AttentionType(attn_type)
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    @property
    def kv_quant_mode(self) -> KVQuantMode:
        """How the cache is quantised."""
        return self.cache_dtype.quant_mode

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Prepare the impl once the model's weights are in place; dense impls need nothing."""

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Whether ``forward`` takes an ``output_scale`` for this quantisation."""
        return False


class AttentionImpl(AttentionImplBase, ABC):
    """The base class of dense attention (MHA, GQA, MQA)."""

    @abstractmethod
    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
        *,
        output_lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention of this step's tokens over the paged cache, into ``output``.

        Args:
            layer: scales of the layer.
            query: ``[T, H, D]``.
            key: ``[T, Hk, D]``, read by encoders only; decoders read the cache.
            value: ``[T, Hk, Dv]``, read by encoders only; decoders read the cache.
            kv_cache: the layer's cache, packed or split; ignored by encoders.
            attn_metadata: the record of this triple's builder; None is a profiling call that
                fills ``output`` with zeros.
            output: ``[T, H, Dv]`` or ``[T, H * Dv]``, written in place; rows past
                ``num_actual_tokens`` are not touched.
            output_scale: fp32 scalar; ``output`` is then fp8 and holds result / scale.
            output_block_scale: not supported by any kernel here.
            output_lse: ``[T, H]`` fp32 to receive the natural log-sum-exp (sinks included), or
                None. This argument is not in vLLM's ``forward``.

        Returns:
            ``output``.
        """

    @abstractmethod
    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write this step's keys and values; slot -1 is skipped, quantised values saturate.

        Args:
            layer: scales of the layer.
            key: ``[T, Hk, D]``.
            value: ``[T, Hk, Dv]``.
            kv_cache: the layer's cache.
            slot_mapping: ``[T]`` int64; may be shorter than ``key`` when the batch is padded.
        """

    def fused_rope_kvcache_supported(self) -> bool:
        """Whether :meth:`do_rope_and_kv_cache_update` may be called."""
        return False

    def do_rope_and_kv_cache_update(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        kv_cache: torch.Tensor,
        layer_slot_mapping: torch.Tensor,
    ) -> None:
        """Rotate query and key in place and write the cache, in one call.

        Args:
            layer: scales of the layer.
            query: ``[T, H, D]``, rotated in place.
            key: ``[T, Hk, D]``, rotated in place.
            value: ``[T, Hk, Dv]``.
            positions: ``[T]`` int64.
            cos_sin_cache: ``[max_position, rotary_dim]``: cosines, then sines.
            is_neox: rotate halves (True) or interleaved pairs (False).
            kv_cache: the layer's cache.
            layer_slot_mapping: ``[T]`` int64.
        """
        raise NotImplementedError(f"{type(self).__name__} has no fused RoPE and KV cache write")


class MLAAttentionImpl(AttentionImplBase, ABC):
    """Multi-head latent attention: absorbed decode (MQA) and expanded prefill (MHA)."""

    supports_sliding_window: ClassVar[bool] = False
    """Whether a layer may have a sliding window."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: Sequence[float] | torch.Tensor | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        q_lora_rank: int | None = None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Callable[..., Any],
        indexer: Any = None,
        q_pad_num_heads: int | None = None,
    ) -> None:
        """Take the ten arguments of every impl, then vLLM's keyword arguments for MLA.

        Args:
            num_heads: query heads H of this rank.
            head_size: ``kv_lora_rank + qk_rope_head_dim``.
            scale: multiplies q.k before the softmax.
            num_kv_heads: 1.
            alibi_slopes: must be None.
            sliding_window: visible keys including the token itself, where the impl supports it.
            kv_cache_dtype: a ``CacheDType`` string.
            logits_soft_cap: must be None.
            attn_type: must be decoder.
            kv_sharing_target_layer_name: layer whose cache this one reads, or None.
            q_lora_rank: rank of the query projection, or None.
            kv_lora_rank: L.
            qk_nope_head_dim: P.
            qk_rope_head_dim: r.
            qk_head_dim: P + r.
            v_head_dim: V.
            kv_b_proj: linear layer from the latent to each head's K and V, with
                ``weight [H * (P + V), L]``.
            indexer: selects tokens for sparse layers; has ``topk_indices_buffer [max_tokens, K]``.
            q_pad_num_heads: heads to pad the query to, or None.

        Raises:
            NotImplementedError: an argument that must be None, or another ``attn_type``.
            ValueError: sizes that do not add up; the message names them.
        """
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
        )
        refused = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": None if self.supports_sliding_window else sliding_window,
            "logits_soft_cap": logits_soft_cap,
        }
        given = [f"{name}={value}" for name, value in refused.items() if value is not None]
        if given:
            raise NotImplementedError(f"MLA does not support {', '.join(given)}")
        if self.attn_type is not AttentionType.DECODER:
            raise NotImplementedError(f"MLA does not support attn_type={self.attn_type.value}")
        if head_size != kv_lora_rank + qk_rope_head_dim:
            raise ValueError(
                f"head_size must be kv_lora_rank + qk_rope_head_dim "
                f"({kv_lora_rank} + {qk_rope_head_dim}), got {head_size}"
            )
        if qk_head_dim != qk_nope_head_dim + qk_rope_head_dim:
            raise ValueError(
                f"qk_head_dim must be qk_nope_head_dim + qk_rope_head_dim "
                f"({qk_nope_head_dim} + {qk_rope_head_dim}), got {qk_head_dim}"
            )
        self.q_lora_rank = q_lora_rank
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.qk_head_dim = qk_head_dim
        self.v_head_dim = v_head_dim
        self.kv_b_proj = kv_b_proj
        self.indexer = indexer
        self.q_pad_num_heads = q_pad_num_heads
        self._up_projections: tuple[torch.Tensor, torch.Tensor] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Split the weight of ``kv_b_proj`` into up-projections of K and V, in ``act_dtype``."""
        weight: torch.Tensor = self.kv_b_proj.weight  # type: ignore[attr-defined]
        self._up_projections = split_kv_b_proj(
            weight.to(act_dtype), self.num_heads, self.qk_nope_head_dim, self.v_head_dim
        )

    @property
    def W_UK(self) -> torch.Tensor:  # noqa: N802
        """Up-projection ``[L, H, P]`` of K, after :meth:`process_weights_after_loading`."""
        return self._loaded()[0]

    @property
    def W_UV(self) -> torch.Tensor:  # noqa: N802
        """Up-projection ``[L, H, V]`` of V, after :meth:`process_weights_after_loading`."""
        return self._loaded()[1]

    def _loaded(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._up_projections is None:
            raise ValueError("process_weights_after_loading must be called first")
        return self._up_projections

    @abstractmethod
    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Compute the batch's prefill rows over keys and values that are expanded for every head.

        The context comes from the cache.

        Args:
            q: ``[T_prefill, H, P + r]``, nope then rope.
            kv_c_normed: ``[T_prefill, L]`` new latents.
            k_pe: ``[T_prefill, 1, r]`` or ``[T_prefill, r]`` new rotary keys.
            kv_c_and_k_pe_cache: ``[N, block_size, row]``.
            attn_metadata: the record of this triple's builder.
            k_scale: fp32 scalar of a per-tensor fp8 cache.
            output: ``[T_prefill, H * V]``, written in place.
            output_scale: fp32 scalar; ``output`` is then fp8.
        """

    @abstractmethod
    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the batch's decode (and verify) rows in latent space, with absorbed queries.

        Args:
            q: ``[T_decode, H, L + r]``, or the pair ``[T_decode, H, L]``, ``[T_decode, H, r]``.
            kv_c_and_k_pe_cache: ``[N, block_size, row]``.
            attn_metadata: the record of this triple's builder.
            layer: scales of the layer.

        Returns:
            ``[T_decode, H, L]`` latent output and ``[T_decode, H]`` fp32 natural LSE (or None).
        """

    @abstractmethod
    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write this step's latent rows; slot -1 is skipped, quantised values saturate.

        Args:
            kv_c_normed: ``[T, L]``.
            k_pe: ``[T, 1, r]`` or ``[T, r]``.
            kv_cache: ``[N, block_size, row]``.
            slot_mapping: ``[T]`` int64.
            kv_cache_dtype: a ``CacheDType`` string.
            k_scale: fp32 scalar: real = stored * scale.
            skip_scale: True where the values are scaled already.
        """

    def fused_rope_kvcache_supported(self) -> bool:
        """Whether :meth:`do_rope_and_kv_cache_update` may be called."""
        return False

    def do_rope_and_kv_cache_update(
        self,
        q_pe: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Rotate queries and keys in place and write this step's latent rows, in one call.

        Queries and keys are rotated in place, as by an engine's own rotation, because later calls
        read them: ``q_pe`` is a slice of the query that :meth:`forward_mha` takes whole and
        :meth:`forward_mqa` takes as half of a pair, and expanded prefill reads ``k_pe``. No code of
        vLLM calls this method: its fusion pass calls the operator
        ``concat_and_cache_mla_rope_fused``, which has these arguments.

        Args:
            q_pe: ``[T, H, r]``, in any strides that leave rows dense; rotated in place.
            kv_c_normed: ``[T, L]``.
            k_pe: ``[T, 1, r]`` or ``[T, r]``; rotated in place, with slot -1 too.
            positions: ``[T]`` integer; a row whose position is outside the table is padding.
            cos_sin_cache: ``[max_position, r]``: cosines, then sines; fp32 or the model's type.
            is_neox: rotate halves (True) or interleaved pairs (False).
            kv_cache: ``[N, block_size, row]``.
            slot_mapping: ``[T]`` int64.
            kv_cache_dtype: a ``CacheDType`` string.
            k_scale: fp32 scalar: real = stored * scale.
            skip_scale: True where the values are scaled already.
        """
        raise NotImplementedError(f"{type(self).__name__} has no fused RoPE and KV cache write")


def check_scale(k_scale: torch.Tensor | None, cache_dtype: CacheDType) -> None:
    """Check that a per-tensor fp8 cache of latent rows comes with its scale.

    Raises:
        ValueError: the scale is None, or not one fp32 number; the message names the KV cache dtype
            and what was given.
    """
    if cache_dtype.quant_mode is not KVQuantMode.FP8_PER_TENSOR:
        return
    if k_scale is None or k_scale.numel() != 1 or k_scale.dtype != torch.float32:
        got = "None" if k_scale is None else f"{list(k_scale.shape)} of {k_scale.dtype}"
        raise ValueError(
            f"k_scale must be a float32 scalar for kv_cache_dtype {cache_dtype.value!r}, got {got}"
        )


def is_integer(number: object) -> bool:
    """Whether ``number`` is an ``int``; ``True`` and ``False`` do not count."""
    return isinstance(number, int) and not isinstance(number, bool)


def per_head(
    name: str, values: Sequence[float] | torch.Tensor | None, num_heads: int
) -> torch.Tensor | None:
    """Make a tensor ``[H]`` of one number per head; None stays None.

    A tensor of floats is kept, not copied, since weights may be loaded into it later. A list
    becomes fp32.

    Raises:
        ValueError: the shape is not ``[H]``; the message gives ``name`` and both shapes.
    """
    if values is None:
        return None
    if isinstance(values, torch.Tensor) and values.is_floating_point():
        tensor = values
    else:
        tensor = torch.as_tensor(values, dtype=torch.float32)
    if tuple(tensor.shape) != (num_heads,):
        raise ValueError(f"{name} must have shape [{num_heads}], got {list(tensor.shape)}")
    return tensor
