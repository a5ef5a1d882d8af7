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
from specs.cache_write import Rotation, UnrotatedLatents

HALF_MULTIPLE = 16
"""Half a rotary part must be a multiple of this number of elements, which one thread rotates."""
MODEL_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class FlashInferRope:
    """``mla_rope_quantize_fp8`` of the installed version."""

    version: str
    function: Any

    def run(
        self,
        latents: UnrotatedLatents,
        rotation: Rotation,
        scales: tuple[float, float],
        q_out: torch.Tensor,
        k_out: torch.Tensor,
    ) -> None:
        """Rotate, quantise and write the two outputs, in one launch.

        Args:
            latents: queries and latent rows in fp16 or bf16.
            rotation: positions ``[T]``, each inside the table, and the table ``[max_position, r]``
                in fp32; both contiguous.
            scales: scales of ``q_out`` and ``k_out``: real = stored * scale.
            q_out: ``[T, H, L + r]`` e4m3, written.
            k_out: ``[T, L + r]`` e4m3, written.

        Raises:
            ValueError: a type or width that FlashInfer's kernel does not take.
        """
        q_nope, q_pe, kv_c, k_pe = latents
        positions, cos_sin_cache, is_neox = rotation
        q_scale, k_scale = scales
        rank, rope = q_nope.shape[-1], q_pe.shape[-1]
        if q_nope.dtype not in MODEL_DTYPES:
            names = " or ".join(map(str, MODEL_DTYPES))
            raise ValueError(f"q_nope must be {names} for FlashInfer, got {q_nope.dtype}")
        if rope % (2 * HALF_MULTIPLE):
            raise ValueError(
                f"q_pe must have a multiple of {2 * HALF_MULTIPLE} elements for FlashInfer, got "
                f"{rope}"
            )
        if not cos_sin_cache.is_contiguous() or not positions.is_contiguous():
            raise ValueError(
                "cos_sin_cache and positions must be contiguous for FlashInfer, got strides "
                f"{cos_sin_cache.stride()} and {positions.stride()}"
            )
        self.function(
            q_pe,
            k_pe,
            q_nope,
            kv_c,
            cos_sin_cache,
            positions,
            is_neox=is_neox,
            quantize_dtype=torch.float8_e4m3fn,
            quant_scale_q=1.0 / q_scale,
            quant_scale_kv=1.0 / k_scale,
            q_rope_out=q_out[..., rank:],
            k_rope_out=k_out[..., rank:],
            q_nope_out=q_out[..., :rank],
            k_nope_out=k_out[..., :rank],
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
