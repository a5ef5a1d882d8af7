"""The backend part of a triple: static methods that tell its capabilities from one record."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, final

from specs import conflicts
from specs.attention import (
    AttentionCGSupport,
    AttentionSelectorConfig,
    AttentionType,
    BackendCapabilities,
    MlaKernel,
    MultipleOf,
)
from specs.devices import ComputeCapability, Device, kind_of
from specs.dtypes import CacheDType, DType
from specs.kv_cache import AnyKVCacheSpec
from specs.layouts import DenseKVLayout, KVOrder, KVPacking, LatentKVLayout
from specs.rows import latent_format_of

if TYPE_CHECKING:
    import torch

    from attn.impls.base import AttentionImplBase
    from builders.base import AttentionMetadataBuilder


class _ClassProperty:
    """A read-only attribute of a class, computed when read: vLLM reads class attributes."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __get__(self, instance: object, owner: type) -> Any:
        return self.function(owner)


_NO_SYMMETRIC_ALIBI = "symmetric ALiBi (of encoders) not supported"


class AttentionBackend(ABC):
    """Static capabilities of one triple, under vLLM v1's method names; never instantiated.

    A subclass declares ``capabilities`` and the three names; it overrides a method only where data
    cannot say it. Two of vLLM's methods take a layer's request field by field
    (``validate_configuration`` and ``supports_combination``). They are doors: each makes the record
    and calls :meth:`validate` or :meth:`combination_reason`, which a subclass overrides instead.
    """

    capabilities: ClassVar[BackendCapabilities]
    forward_includes_kv_cache_update: ClassVar[bool] = False
    """False: the caller writes the cache through ``do_kv_cache_update`` before ``forward``."""

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """Name of the backend in the registry."""

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImplBase]:
        """The impl of this triple."""

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        """The metadata builder of this triple."""

    @_ClassProperty
    def supported_dtypes(cls: type[AttentionBackend]) -> list[torch.dtype]:  # noqa: N805
        """Model dtypes that the backend serves, as torch dtypes."""
        return [dtype.torch for dtype in cls.capabilities.dtypes]

    @_ClassProperty
    def supported_kv_cache_dtypes(cls: type[AttentionBackend]) -> list[str]:  # noqa: N805
        """``kv_cache_dtype`` strings that the backend serves."""
        return [dtype.value for dtype in cls.capabilities.kv_cache_dtypes]

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Why this machine cannot run the backend although its packages are found, else None.

        The check may import the packages, which takes time: call it last, after every other check.
        """
        return None

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """Module and qualified name of the class."""
        return cls.__module__, cls.__qualname__

    @classmethod
    def get_supported_kernel_block_sizes(
        cls, kv_cache_spec: AnyKVCacheSpec | None = None
    ) -> list[int | MultipleOf]:
        """Kernel block sizes, in tokens."""
        return list(cls.capabilities.block_sizes)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Served head sizes, where they are a list; empty where a range and step define them."""
        return list(cls.capabilities.head_sizes.values)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int = 16) -> int:
        """``default_block_size`` where it is supported, else the smallest supported block size."""
        if cls.supports_block_size(default_block_size):
            return default_block_size
        return min(_base(size) for size in cls.get_supported_kernel_block_sizes())

    @classmethod
    def get_kv_cache_shape(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Logical shape of the cache tensor, in elements of the storage dtype.

        Split ``[N, 2, P, Hk, width]``, latent ``[N, P, width]``.
        """
        if cls.capabilities.is_mla:
            cache_dtype = CacheDType.parse(cache_dtype_str)
            if cache_dtype is CacheDType.FP8_DS_MLA:
                row = latent_format_of(cache_dtype).row()
                return (num_blocks, block_size, row.nbytes)
            return (num_blocks, block_size, head_size)
        return DenseKVLayout(
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            cache_dtype=CacheDType.parse(cache_dtype_str),
        ).logical_shape(num_blocks)

    @classmethod
    def get_kv_cache_stride_order(
        cls, include_num_layers_dimension: bool = False
    ) -> tuple[int, ...]:
        """Logical axes of the cache tensor, outermost in memory first."""
        axes = 3 if cls.capabilities.is_mla else 5
        if not include_num_layers_dimension:
            return tuple(range(axes))
        return (1, 0, *range(2, axes + 1))

    @classmethod
    def kv_cache_layout(cls, spec: AnyKVCacheSpec) -> DenseKVLayout | LatentKVLayout:
        """The layout this backend prefers for a layer: split where K and V have one size."""
        try:
            return spec.layout(KVPacking.SPLIT, KVOrder.NHD)
        except ValueError:
            return spec.layout(KVPacking.PACKED, KVOrder.NHD)

    @classmethod
    def _served_head_sizes(cls) -> str:
        """Every head size that is served, in words."""
        return _listed(cls.get_supported_head_sizes()) or str(cls.capabilities.head_sizes)

    @classmethod
    def _served_block_sizes(cls) -> str:
        """Every kernel block size, in words; an adapter's sizes may be objects of vLLM's."""
        sizes = cls.get_supported_kernel_block_sizes()
        return _listed(
            size if isinstance(size, int) else MultipleOf(base=_base(size)) for size in sizes
        )

    # -- supports_*: one line each over the declared record, overridable one by one.

    @classmethod
    def is_mla(cls) -> bool:
        """True for a backend of latent (MLA) layers, which serves no other layers."""
        return cls.capabilities.is_mla

    @classmethod
    def is_sparse(cls) -> bool:
        """True for a backend of top-k sparse layers, which serves no other layers."""
        return cls.capabilities.is_sparse

    @classmethod
    def is_ssm(cls) -> bool:
        """Always False: state-space layers are not attention."""
        return False

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """True for a declared head size."""
        listed = cls.get_supported_head_sizes()
        return head_size in (listed or cls.capabilities.head_sizes)

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype | DType | str) -> bool:
        """True for a declared model dtype; False for a dtype that the library has no name for."""
        parsed = _parsed(DType.parse, dtype)
        return parsed is not None and parsed.torch in cls.supported_dtypes

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: CacheDType | str | None) -> bool:
        """True for a declared KV cache dtype (None means ``auto``); False for unknown names, as
        engines have formats that this library lacks.
        """
        return _parsed(CacheDType.parse, kv_cache_dtype) in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """True where a declared kernel block size divides ``block_size``, or where it is None."""
        if block_size is None:
            return True
        return block_size > 0 and any(
            block_size % _base(size) == 0 for size in cls.get_supported_kernel_block_sizes()
        )

    @classmethod
    def supports_device(cls, device: Device) -> bool:
        """True where the backend runs on this kind of device."""
        return device.kind in cls.capabilities.device_kinds

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """True where the backend runs on this compute capability; None, of a device without one, is
        judged by :meth:`supports_device`.
        """
        if capability is None:
            return True
        cc = ComputeCapability.model_validate(capability)
        ranges = cls.capabilities.compute_capabilities
        return kind_of(cc) in cls.capabilities.device_kinds and (
            not ranges or any(cc in allowed for allowed in ranges)
        )

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """True for a declared role of the layer (``AttentionType``)."""
        return _parsed(AttentionType, attn_type) in cls.capabilities.attn_types

    @classmethod
    def supports_sink(cls) -> bool:
        """True where per-head sink logits are served."""
        return cls.capabilities.sink

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """True where a sliding window is served."""
        return cls.capabilities.sliding_window

    @classmethod
    def supports_chunked_local(cls) -> bool:
        """True where the kernel masks chunked local attention."""
        return cls.capabilities.chunked_local

    @classmethod
    def supports_logits_soft_cap(cls) -> bool:
        """True where a soft cap (tanh) of the scores is served."""
        return cls.capabilities.logits_soft_cap

    @classmethod
    def supports_alibi(cls) -> bool:
        """True where ALiBi, a linear position bias, is served."""
        return cls.capabilities.alibi

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        """True where ALiBi with the square root of the distance is served."""
        return cls.capabilities.alibi_sqrt

    @classmethod
    def supports_alibi_symmetric(cls) -> bool:
        """True where ALiBi by the distance to keys on both sides (encoders) is served."""
        return cls.capabilities.alibi_symmetric

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """True where bidirectional ranges of multimodal tokens are served."""
        return cls.capabilities.mm_prefix

    @classmethod
    def supports_rswa(cls) -> bool:
        """True where R-SWA, a window with a prefix that stays visible, is served."""
        return cls.capabilities.rswa

    @classmethod
    def supports_non_causal(cls) -> bool:
        """True where non-causal decoder attention is served."""
        return cls.capabilities.non_causal

    @classmethod
    def supports_non_causal_dcp(cls) -> bool:
        """True where non-causal attention under decode context parallelism is served."""
        return cls.capabilities.non_causal_dcp

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """True where K and V scales for each head are served."""
        return cls.capabilities.per_head_quant_scales

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """True where a request has the same bits in any batch and chunking."""
        return cls.capabilities.batch_invariance

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """True where KV transfer between engines is served."""
        return cls.capabilities.kv_connector

    @classmethod
    def supports_pcp(cls) -> bool:
        """True where prefill context parallelism is served."""
        return cls.capabilities.pcp

    @classmethod
    def supports_dcp(cls) -> bool:
        """True where decode context parallelism is served."""
        return cls.capabilities.dcp

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """True where results are right although device and host query lengths disagree."""
        return cls.capabilities.device_cpu_query_lens_mismatch

    @classmethod
    def supports_mla_kernel(cls, mla_kernel: str) -> bool:
        """True for ``auto``; a backend with several kernels overrides this method."""
        return MlaKernel(mla_kernel) is MlaKernel.AUTO

    @classmethod
    def cudagraph_support(cls) -> AttentionCGSupport:
        """The declared level; the builder's ``get_cudagraph_support`` may lower it."""
        return cls.capabilities.cudagraph_support

    @final
    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype | DType | str,
        kv_cache_dtype: CacheDType | str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Build the record and ask :meth:`combination_reason`; vLLM's signature."""
        config = _unchecked(
            head_size=head_size,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            block_size=block_size,
            use_mla=use_mla,
            has_sink=has_sink,
            use_sparse=use_sparse,
            use_mm_prefix=use_mm_prefix,
        )
        return cls.combination_reason(config, device_capability)

    @classmethod
    def combination_reason(
        cls, config: AttentionSelectorConfig, device_capability: Any
    ) -> str | None:
        """A reason why features that are supported singly do not go together; None when they do.

        Args:
            config: what the layer asks; see :meth:`validate` for values of other libraries.
            device_capability: of the GPU; None without one.
        """
        return None

    @classmethod
    def for_phase(cls, phase: str) -> type[AttentionBackend] | None:
        """The backend that takes one phase of a step in a mix of two; None where it cannot.

        Args:
            phase: ``prefill`` (requests of any query length), or ``decode`` (requests with one new
                token, or those of a verify).
        """
        return None if cls.capabilities.is_mla else cls

    @classmethod
    def layout_reason(
        cls, packing: KVPacking, is_padded: bool, device_capability: Any
    ) -> str | None:
        """Why the kernels cannot read a dense cache of such a layout; None where they can.

        Args:
            packing: whether K and V of a token share a row or lie in two planes.
            is_padded: True where blocks have padding between them.
            device_capability: compute capability of the GPU; None for a device without one.
        """
        return None

    @classmethod
    def device_notes(cls, device_capability: Any) -> list[str]:
        """Lines about this backend on a GPU, which the selector adds to its verdict."""
        return []

    @classmethod
    def outside(cls, what: str, value: object, served: object) -> str:
        """The reason against a value outside a limit; an engine's adapter may word it differently.

        Args:
            what: ``head_size``, ``dtype``, ``kv_cache_dtype``, ``block_size``, ``compute
                capability`` or ``attention type``.
            value: the layer's value, or the device's.
            served: every value that is served, in words.
        """
        return f"{what} {value}: {served}"

    @classmethod
    def _layer_limits(cls, config: AttentionSelectorConfig) -> list[tuple[bool, str]]:
        """Pairs for the layer's values: whether the value is served, and the reason if not."""
        declared = cls.capabilities
        return [
            (
                cls.supports_head_size(config.head_size),
                cls.outside("head_size", config.head_size, cls._served_head_sizes()),
            ),
            (
                cls.supports_dtype(config.dtype),
                cls.outside("dtype", _named(DType.parse, config.dtype), _listed(declared.dtypes)),
            ),
            (
                cls.supports_kv_cache_dtype(config.kv_cache_dtype),
                cls.outside(
                    "kv_cache_dtype",
                    _named(CacheDType.parse, config.kv_cache_dtype),
                    _listed(cls.supported_kv_cache_dtypes),
                ),
            ),
            (
                cls.supports_block_size(config.block_size),
                cls.outside("block_size", config.block_size, cls._served_block_sizes()),
            ),
        ]

    @classmethod
    def _device_limits(
        cls, config: AttentionSelectorConfig, device_capability: Any
    ) -> list[tuple[bool, str]]:
        """Whether device and role of a layer are served, and the reason where one is not."""
        declared = cls.capabilities
        return [
            (
                cls.supports_compute_capability(device_capability),
                cls.outside(
                    "compute capability",
                    _named(ComputeCapability.model_validate, device_capability),
                    _listed(declared.compute_capabilities or declared.device_kinds),
                ),
            ),
            (
                cls.supports_attn_type(config.attn_type),
                cls.outside(
                    "attention type",
                    _named(AttentionType, config.attn_type),
                    _listed(declared.attn_types),
                ),
            ),
        ]

    @final
    @classmethod
    def validate_configuration(
        cls,
        head_size: int,
        dtype: torch.dtype | DType | str,
        kv_cache_dtype: CacheDType | str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        use_per_head_quant_scales: bool,
        device_capability: Any,
        attn_type: str,
        has_sliding_window: bool = False,
        use_non_causal: bool = False,
        use_batch_invariant: bool = False,
        use_kv_connector: bool = False,
        use_pcp: bool = False,
        use_adaptive_verification: bool = False,
        use_dcp: bool = False,
        use_rswa: bool = False,
        use_logits_soft_cap: bool = False,
        use_alibi: bool = False,
        use_alibi_sqrt: bool = False,
        use_alibi_symmetric: bool = False,
        use_chunked_local: bool = False,
        mla_kernel: str = MlaKernel.AUTO,
        head_size_v: int | None = None,
    ) -> list[str]:
        """Build the record and ask :meth:`validate`; vLLM's signature.

        vLLM passes the fields of its selector config and ``device_capability``; the last seven
        arguments are ours.
        """
        config = _unchecked(
            head_size=head_size,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            block_size=block_size,
            use_mla=use_mla,
            has_sink=has_sink,
            use_sparse=use_sparse,
            use_mm_prefix=use_mm_prefix,
            use_per_head_quant_scales=use_per_head_quant_scales,
            attn_type=attn_type,
            has_sliding_window=has_sliding_window,
            use_non_causal=use_non_causal,
            use_batch_invariant=use_batch_invariant,
            use_kv_connector=use_kv_connector,
            use_pcp=use_pcp,
            use_adaptive_verification=use_adaptive_verification,
            use_dcp=use_dcp,
            use_rswa=use_rswa,
            use_logits_soft_cap=use_logits_soft_cap,
            use_alibi=use_alibi,
            use_alibi_sqrt=use_alibi_sqrt,
            use_alibi_symmetric=use_alibi_symmetric,
            use_chunked_local=use_chunked_local,
            mla_kernel=mla_kernel,
            head_size_v=head_size_v,
        )
        return cls.validate(config, device_capability)

    @classmethod
    def validate(cls, config: AttentionSelectorConfig, device_capability: Any) -> list[str]:
        """Every reason why this backend cannot serve a layer; [] when it can.

        A value outside a limit is named with what is served (:meth:`outside`), a feature in vLLM's
        words.

        Args:
            config: what the layer asks. It may hold an engine's own values, not validated: torch's
                dtype, None for a cache of ``auto``, or names that this library does not have.
            device_capability: of the GPU, as anything that ``ComputeCapability`` is made from;
                None without one.
        """
        mla_reason = "MLA not supported" if config.use_mla else "non-MLA not supported"
        sparse_reason = "sparse not supported" if config.use_sparse else "non-sparse not supported"
        # An MLA backend serves dense or sparse latent layers; sparseness means nothing elsewhere.
        checks: list[tuple[bool, str]] = [
            *cls._layer_limits(config),
            (
                not config.use_mm_prefix or cls.supports_mm_prefix(),
                "partial multimodal token full attention not supported",
            ),
            (config.use_mla == cls.is_mla(), mla_reason),
            (not config.has_sink or cls.supports_sink(), "attention sinks not supported"),
            (config.use_sparse == cls.is_sparse(), sparse_reason),
            (
                not config.use_per_head_quant_scales or cls.supports_per_head_quant_scales(),
                "per-head quant scales not supported",
            ),
            *cls._device_limits(config, device_capability),
            (
                not config.has_sliding_window or cls.supports_sliding_window(),
                "sliding window not supported",
            ),
            (not config.use_rswa or cls.supports_rswa(), "R-SWA not supported"),
            (
                not config.use_non_causal or cls.supports_non_causal(),
                "non-causal attention not supported",
            ),
            (
                not (config.use_non_causal and config.use_mla and config.use_dcp)
                or cls.supports_non_causal_dcp(),
                "non-causal MLA attention with DCP not supported",
            ),
            (
                not config.use_batch_invariant or cls.supports_batch_invariance(),
                "batch invariance not supported",
            ),
            (
                not config.use_kv_connector or cls.supports_kv_connector(),
                "KV connector not supported",
            ),
            (not config.use_pcp or cls.supports_pcp(), "PCP not supported"),
            (not config.use_dcp or cls.supports_dcp(), "DCP not supported"),
            (
                not config.use_adaptive_verification
                or cls.supports_device_cpu_query_lens_mismatch(),
                "device-cpu query lens mismatch not supported, "
                "this is needed for adaptive verification",
            ),
            (
                not config.use_logits_soft_cap or cls.supports_logits_soft_cap(),
                "logits soft cap not supported",
            ),
            (not config.use_alibi or cls.supports_alibi(), "ALiBi not supported"),
            (not config.use_alibi_sqrt or cls.supports_alibi_sqrt(), "ALiBi-sqrt not supported"),
            (not config.use_alibi_symmetric or cls.supports_alibi_symmetric(), _NO_SYMMETRIC_ALIBI),
            (
                not config.use_chunked_local or cls.supports_chunked_local(),
                "chunked local attention not supported",
            ),
            (
                cls.supports_mla_kernel(config.mla_kernel),
                f"kernel {MlaKernel(config.mla_kernel).value} not supported",
            ),
        ]
        reasons = [reason for served, reason in checks if not served]
        combination = cls.combination_reason(config, device_capability)
        reasons += [] if combination is None else [combination]
        reasons += cls._value_reasons(config, device_capability)
        return reasons + cls._conflict_reasons(config)

    @classmethod
    def _conflict_reasons(cls, config: AttentionSelectorConfig) -> list[str]:
        """Features that the backend has singly and that do not go together."""
        found = {
            conflicts.DCP: config.use_dcp and cls.supports_dcp(),
            conflicts.WINDOW: config.has_sliding_window and cls.supports_sliding_window(),
            conflicts.CHUNKS: config.use_chunked_local and cls.supports_chunked_local(),
            conflicts.ALIBI: config.use_alibi and cls.supports_alibi(),
            conflicts.ALIBI_SQRT: config.use_alibi_sqrt and cls.supports_alibi_sqrt(),
            conflicts.RANGES: config.use_mm_prefix and cls.supports_mm_prefix(),
            conflicts.RSWA: config.use_rswa and cls.supports_rswa(),
            conflicts.NON_CAUSAL: config.use_non_causal and cls.supports_non_causal(),
        }
        features = {name for name, is_there in found.items() if is_there}
        cache_dtype, attn_type = config.kv_cache_dtype, config.attn_type
        has_cache = cls.supports_kv_cache_dtype(cache_dtype)
        if has_cache and CacheDType.parse(cache_dtype).is_quantized:
            features.add(conflicts.QUANTIZED)
        if cls.supports_attn_type(attn_type):
            features.add(conflicts.role(AttentionType(attn_type)))
        return [str(pair) for pair in conflicts.among(features)]

    @classmethod
    def _value_reasons(cls, config: AttentionSelectorConfig, device_capability: Any) -> list[str]:
        """Why values cannot have the head size ``head_size_v``; None means that of keys."""
        size = config.head_size_v
        if size is None or size == config.head_size:
            return []
        if not cls.capabilities.head_size_v:
            return ["head_size_v other than head_size not supported"]
        if not cls.supports_head_size(size):
            return ["head_size_v not supported"]
        values = config.model_copy(update={"head_size": size, "block_size": None})
        combination = cls.combination_reason(values, device_capability)
        return [] if combination is None else [f"head_size_v {size}: {combination}"]


def _unchecked(**fields: Any) -> AttentionSelectorConfig:
    """A layer's request with an engine's values as they are.

    Validation would raise at a name that this library does not have, where a backend is to refuse
    it with a reason.
    """
    return AttentionSelectorConfig.model_construct(**fields)


def _base(size: int | MultipleOf) -> int:
    """The number that must divide a block size; vLLM's ``MultipleOf`` has ``base`` too."""
    return size if isinstance(size, int) else int(size.base)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in values)


def _named(parse: Callable[[Any], Any], value: Any) -> str:
    """The name of a value in messages: this library's name where it has one, else the value."""
    parsed = _parsed(parse, value)
    return str(value if parsed is None else parsed)


def _parsed(parse: Callable[[Any], Any], value: Any) -> Any:
    """The parsed value, or None for a name that this library does not have."""
    try:
        return parse(value)
    except ValueError:
        return None
