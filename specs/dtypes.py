"""Data types: one mapping between strings, enums and torch, for tensors and for KV caches."""

from __future__ import annotations

from enum import IntEnum, StrEnum, unique
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import BeforeValidator

from specs.base import Spec

if TYPE_CHECKING:
    import torch


@unique
class DType(StrEnum):
    """Element type of a tensor; the value is torch's name."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    INT64 = "int64"
    INT32 = "int32"
    INT8 = "int8"
    UINT8 = "uint8"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _ITEMSIZE[self]

    @property
    def is_floating(self) -> bool:
        """True for floating-point formats, 8-bit ones included."""
        return self.value.startswith(("float", "bfloat"))

    @property
    def torch(self) -> torch.dtype:
        """The torch dtype of this name."""
        import torch

        dtype = getattr(torch, self.value)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @classmethod
    def parse(cls, value: Any) -> DType:
        """From a member, a string (``"bfloat16"``, ``"bf16"``, ``"torch.half"``) or a torch dtype.

        Raises:
            ValueError: nothing of that name; the message lists the names.
        """
        name = str(value).lower().removeprefix("torch.")
        name = _DTYPE_ALIASES.get(name, name)
        try:
            return cls(name)
        except ValueError:
            allowed = ", ".join(member.value for member in cls)
            raise ValueError(f"unknown dtype {value!r}; expected one of {allowed}") from None


_ITEMSIZE: Final = {
    DType.FLOAT64: 8,
    DType.FLOAT32: 4,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.FLOAT8_E4M3FN: 1,
    DType.FLOAT8_E5M2: 1,
    DType.INT64: 8,
    DType.INT32: 4,
    DType.INT8: 1,
    DType.UINT8: 1,
}

_DTYPE_ALIASES: Final = {
    "double": "float64",
    "fp64": "float64",
    "float": "float32",
    "fp32": "float32",
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


@unique
class KVQuantMode(IntEnum):
    """How a KV cache is quantised; the values are vLLM's, and no two are equal."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4
    NVFP4 = 5
    TURBOQUANT_K8V4 = 6
    TURBOQUANT_4BIT_NC = 7
    TURBOQUANT_K3V4_NC = 8
    TURBOQUANT_3BIT_NC = 9
    NVFP4_DS_MLA = 10
    ULTRAQUANT_4BIT = 11
    OCTAVE_K3V4 = 12
    OCTAVE_K3V3 = 13
    OCTAVE_K3V3_COMPACT = 14
    FP8_DS_MLA = 15
    """vLLM files ``fp8_ds_mla`` under per-tensor fp8, although its rows carry block scales."""

    @property
    def is_per_token_head(self) -> bool:
        """One scale for each (token, KV head), stored inline in the row."""
        return self in _PER_TOKEN_HEAD_MODES


_PER_TOKEN_HEAD_MODES: Final = frozenset(
    {
        KVQuantMode.INT8_PER_TOKEN_HEAD,
        KVQuantMode.FP8_PER_TOKEN_HEAD,
        KVQuantMode.INT4_PER_TOKEN_HEAD,
    }
)


@unique
class CacheDType(StrEnum):
    """``kv_cache_dtype`` strings: the union of vLLM 0.26's and 0.33's.

    A string that no backend serves is still a member, so that it is refused as
    "kv_cache_dtype not supported" and not as a parse error.
    """

    AUTO = "auto"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FP8 = "fp8"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    FP8_INC = "fp8_inc"
    FP8_DS_MLA = "fp8_ds_mla"
    NVFP4_DS_MLA = "nvfp4_ds_mla"
    TURBOQUANT_K8V4 = "turboquant_k8v4"
    TURBOQUANT_4BIT_NC = "turboquant_4bit_nc"
    TURBOQUANT_K3V4_NC = "turboquant_k3v4_nc"
    TURBOQUANT_3BIT_NC = "turboquant_3bit_nc"
    OCTAVE_K3V4 = "octave_k3v4"
    OCTAVE_K3V3 = "octave_k3v3"
    OCTAVE_K3V3_COMPACT = "octave_k3v3_compact"
    ULTRAQUANT_4BIT = "ultraquant_4bit"
    INT4_PER_TOKEN_HEAD = "int4_per_token_head"
    INT8_PER_TOKEN_HEAD = "int8_per_token_head"
    FP8_PER_TOKEN_HEAD = "fp8_per_token_head"
    NVFP4 = "nvfp4"
    NVFP4_4OVER6 = "nvfp4_4over6"

    @classmethod
    def parse(cls, value: Any) -> CacheDType:
        """From a member, its string, or None (meaning ``auto``).

        Raises:
            ValueError: a string that is no member; the message lists them.
        """
        if value is None:
            return cls.AUTO
        name = str(value).lower()
        name = {"fp16": "float16", "half": "float16", "bf16": "bfloat16"}.get(name, name)
        try:
            return cls(name)
        except ValueError:
            allowed = ", ".join(member.value for member in cls)
            raise ValueError(
                f"unknown kv_cache_dtype {value!r}; expected one of {allowed}"
            ) from None

    @property
    def quant_mode(self) -> KVQuantMode:
        """The quantisation of this cache's values."""
        return _CACHE_FORMATS[self].quant_mode

    @property
    def is_quantized(self) -> bool:
        """True unless the cache holds plain 16- or 32-bit floats."""
        return self.quant_mode is not KVQuantMode.NONE

    @property
    def has_row_format(self) -> bool:
        """True when this library knows the bytes of a row (every cache that a backend serves)."""
        return _CACHE_FORMATS[self].element is not None or not self.is_quantized

    def element(self, model_dtype: DType) -> DType:
        """Type of one stored element (int4 pairs are ``uint8``); ``auto`` is the model's type.

        Raises:
            NotImplementedError: a format whose row layout this library does not know.
        """
        element = _CACHE_FORMATS[self].element
        if element is not None:
            return element
        if self is CacheDType.AUTO:
            return model_dtype
        raise NotImplementedError(f"kv_cache_dtype {self.value!r} has no row format here")

    def storage(self, model_dtype: DType) -> DType:
        """Type of the cache tensor as an engine allocates it; kernels view it as :meth:`element`.

        Quantised bytes are ``uint8``, int8 rows ``int8``.
        """
        if self is CacheDType.INT8_PER_TOKEN_HEAD:
            return DType.INT8
        return DType.UINT8 if self.is_quantized else self.element(model_dtype)

    @property
    def packing(self) -> int:
        """Values per stored element: 2 for int4, else 1."""
        return 2 if self is CacheDType.INT4_PER_TOKEN_HEAD else 1


class _CacheFormat(Spec):
    quant_mode: KVQuantMode = KVQuantMode.NONE
    element: DType | None = None


_E4M3 = _CacheFormat(quant_mode=KVQuantMode.FP8_PER_TENSOR, element=DType.FLOAT8_E4M3FN)
_CACHE_FORMATS: Final = {
    CacheDType.AUTO: _CacheFormat(),
    CacheDType.FLOAT16: _CacheFormat(element=DType.FLOAT16),
    CacheDType.BFLOAT16: _CacheFormat(element=DType.BFLOAT16),
    CacheDType.FP8: _E4M3,
    CacheDType.FP8_E4M3: _E4M3,
    CacheDType.FP8_INC: _E4M3,
    CacheDType.FP8_E5M2: _CacheFormat(
        quant_mode=KVQuantMode.FP8_PER_TENSOR, element=DType.FLOAT8_E5M2
    ),
    CacheDType.FP8_DS_MLA: _CacheFormat(quant_mode=KVQuantMode.FP8_DS_MLA, element=DType.UINT8),
    CacheDType.NVFP4_DS_MLA: _CacheFormat(quant_mode=KVQuantMode.NVFP4_DS_MLA),
    CacheDType.TURBOQUANT_K8V4: _CacheFormat(quant_mode=KVQuantMode.TURBOQUANT_K8V4),
    CacheDType.TURBOQUANT_4BIT_NC: _CacheFormat(quant_mode=KVQuantMode.TURBOQUANT_4BIT_NC),
    CacheDType.TURBOQUANT_K3V4_NC: _CacheFormat(quant_mode=KVQuantMode.TURBOQUANT_K3V4_NC),
    CacheDType.TURBOQUANT_3BIT_NC: _CacheFormat(quant_mode=KVQuantMode.TURBOQUANT_3BIT_NC),
    CacheDType.OCTAVE_K3V4: _CacheFormat(quant_mode=KVQuantMode.OCTAVE_K3V4),
    CacheDType.OCTAVE_K3V3: _CacheFormat(quant_mode=KVQuantMode.OCTAVE_K3V3),
    CacheDType.OCTAVE_K3V3_COMPACT: _CacheFormat(quant_mode=KVQuantMode.OCTAVE_K3V3_COMPACT),
    CacheDType.ULTRAQUANT_4BIT: _CacheFormat(quant_mode=KVQuantMode.ULTRAQUANT_4BIT),
    CacheDType.INT4_PER_TOKEN_HEAD: _CacheFormat(
        quant_mode=KVQuantMode.INT4_PER_TOKEN_HEAD, element=DType.UINT8
    ),
    CacheDType.INT8_PER_TOKEN_HEAD: _CacheFormat(
        quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD, element=DType.INT8
    ),
    CacheDType.FP8_PER_TOKEN_HEAD: _CacheFormat(
        quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD, element=DType.FLOAT8_E4M3FN
    ),
    CacheDType.NVFP4: _CacheFormat(quant_mode=KVQuantMode.NVFP4),
    CacheDType.NVFP4_4OVER6: _CacheFormat(quant_mode=KVQuantMode.NVFP4),
}

DTypeField = Annotated[DType, BeforeValidator(DType.parse)]
"""A ``DType`` field that also takes a torch dtype or an alias such as ``"bf16"``."""

CacheDTypeField = Annotated[CacheDType, BeforeValidator(CacheDType.parse)]
"""A ``CacheDType`` field that also takes None, meaning ``auto``."""
