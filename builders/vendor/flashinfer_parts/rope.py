"""FlashInfer's rotation and quantisation of latent queries and keys, with one interface.

FlashInfer's kernel does not check that positions are inside the rotary table, multiplies by
reciprocals of scales, and does not write rows to the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from builders.vendor.flashinfer_parts.install import checked_modules, complete

HALF_MULTIPLE = 16
"""Half a rotary part must be a multiple of this number of elements, which one thread rotates."""
MODEL_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class RopeQuantizeCall:
    """Arguments for T tokens; the four inputs are fp16 or bf16, with dense rows in any strides."""

    q_nope: torch.Tensor
    """``[T, H, L]``, absorbed."""
    q_pe: torch.Tensor
    """``[T, H, r]``, not rotated."""
    kv_c: torch.Tensor
    """``[T, L]``."""
    k_pe: torch.Tensor
    """``[T, r]``, not rotated."""
    positions: torch.Tensor
    """``[T]`` int32 or int64, inside the table."""
    cos_sin_cache: torch.Tensor
    """``[max_position, r]`` fp32, contiguous: cosines, then sines."""
    is_neox: bool
    """The pair of element i is i + r / 2 (True) or its neighbour (False)."""
    q_scale: float
    """Scale of ``q_out``: real = stored * scale."""
    k_scale: float
    """Scale of ``k_out``: real = stored * scale."""
    q_out: torch.Tensor
    """``[T, H, L + r]`` e4m3, written."""
    k_out: torch.Tensor
    """``[T, L + r]`` e4m3, written."""


@dataclass(frozen=True)
class FlashInferRope:
    """``mla_rope_quantize_fp8`` of the installed version."""

    version: str
    function: Any

    def run(self, call: RopeQuantizeCall) -> None:
        """Rotate, quantise and write the two outputs, in one launch.

        Raises:
            ValueError: a type or width that FlashInfer's kernel does not take.
        """
        rank, rope = call.q_nope.shape[-1], call.q_pe.shape[-1]
        if call.q_nope.dtype not in MODEL_DTYPES:
            names = " or ".join(map(str, MODEL_DTYPES))
            raise ValueError(f"q_nope must be {names} for FlashInfer, got {call.q_nope.dtype}")
        if rope % (2 * HALF_MULTIPLE):
            raise ValueError(
                f"q_pe must have a multiple of {2 * HALF_MULTIPLE} elements for FlashInfer, got "
                f"{rope}"
            )
        if not call.cos_sin_cache.is_contiguous() or not call.positions.is_contiguous():
            raise ValueError(
                "cos_sin_cache and positions must be contiguous for FlashInfer, got strides "
                f"{call.cos_sin_cache.stride()} and {call.positions.stride()}"
            )
        self.function(
            call.q_pe,
            call.k_pe,
            call.q_nope,
            call.kv_c,
            call.cos_sin_cache,
            call.positions,
            is_neox=call.is_neox,
            quantize_dtype=torch.float8_e4m3fn,
            quant_scale_q=1.0 / call.q_scale,
            quant_scale_kv=1.0 / call.k_scale,
            q_rope_out=call.q_out[..., rank:],
            k_rope_out=call.k_out[..., rank:],
            q_nope_out=call.q_out[..., :rank],
            k_nope_out=call.k_out[..., :rank],
        )


@cache
def load_rope() -> FlashInferRope:
    """The function of the installed FlashInfer.

    Raises:
        FlashInferUnavailableError: FlashInfer is missing, of another version, or fails to import.
    """
    version, (rope,) = checked_modules("rope")
    with complete(version):
        return FlashInferRope(version, rope.mla_rope_quantize_fp8)
