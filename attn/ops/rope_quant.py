"""RoPE, quantisation to e4m3 and cache write of absorbed queries and latent rows: one launch."""

from __future__ import annotations

import torch

from attn.ops.cache import write_stored_rows
from attn.ops.dispatch import converts_float8, has_kernel
from attn.reference.quant import saturate
from attn.reference.rope import apply_rope
from builders.checks.tensors import check_given
from builders.vendor.flashinfer_parts import rope as flashinfer_rope
from specs.cache_write import Rotation, UnrotatedLatents

E4M3 = torch.float8_e4m3fn


def rope_quantize(
    latents: UnrotatedLatents,
    rotation: Rotation,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    q_out: torch.Tensor,
    k_out: torch.Tensor | None = None,
    cache: tuple[torch.Tensor, torch.Tensor] | None = None,
    slot_mapping: torch.Tensor | None = None,
) -> None:
    """Rotate both rotary parts in fp32 and store queries and latent rows in e4m3.

    Values are rounded once and clamped to e4m3's range. FlashInfer's ``mla_rope_quantize_fp8``,
    which takes the reciprocals of the scales, computes the same; here the cache write of the rows
    is part of the launch.

    Args:
        latents: queries and latent rows, which stay unchanged.
        rotation: positions ``[T]`` and the table ``[max_position, r]`` in fp32.
        q_scale: fp32 scalar on the device: real = stored * scale.
        k_scale: fp32 scalar on the device: real = stored * scale.
        q_out: ``[T, H, L + r]`` e4m3, contiguous, written.
        k_out: ``[T, L + r]`` e4m3, contiguous, written; or None.
        cache: ``[N, P, L]`` and ``[N, P, r]`` e4m3 views of a paged cache, written; or None.
        slot_mapping: ``[<= T]`` int64 slots of ``cache``; -1 skips.

    Raises:
        ValueError: a piece is missing, or tensors do not fit together; the message names it.
    """
    _check(latents, rotation)
    _check_outputs(latents, q_out, k_out, cache, slot_mapping)
    for name, scale in (("q_scale", q_scale), ("k_scale", k_scale)):
        if scale.numel() != 1 or scale.dtype != torch.float32:
            raise ValueError(
                f"{name} must be a float32 scalar, got {list(scale.shape)} of {scale.dtype}"
            )
    q_nope, q_pe, kv_c, k_pe = latents
    if len(q_nope) == 0:
        return
    if has_kernel(q_nope):
        from attn.kernels.latent.rope_quant import rope_quantize_call
        from builders.launch.launcher import launch

        hardware = converts_float8(q_nope.device)
        given = latents, rotation, (q_scale, k_scale), q_out, k_out, cache, slot_mapping
        launch(rope_quantize_call(*given, hardware_e4m3=hardware))
        return
    positions, cos_sin_cache, is_neox = rotation
    inside = (positions >= 0) & (positions < len(cos_sin_cache))

    def turned(rows: torch.Tensor) -> torch.Tensor:
        wide = rows.float()
        rotated = apply_rope(wide, positions.where(inside, 0), cos_sin_cache, is_neox)
        return rotated.where(inside[:, None, None], wide)

    query = torch.cat([q_nope.float(), turned(q_pe)], -1)
    rows = torch.cat([kv_c.float(), turned(k_pe[:, None])[:, 0]], -1)
    q_out.copy_(saturate(query / q_scale, E4M3))
    stored = saturate(rows / k_scale, E4M3)
    if k_out is not None:
        k_out.copy_(stored)
    if cache is not None and slot_mapping is not None:
        kept = slot_mapping >= 0
        slots, new = slot_mapping[kept], stored[: len(slot_mapping)][kept]
        block, offset = slots // cache[0].shape[1], slots % cache[0].shape[1]
        rank = q_nope.shape[2]
        for view, part in zip(cache, (new[:, :rank], new[:, rank:]), strict=True):
            view.view(torch.uint8)[block, offset] = part.contiguous().view(torch.uint8)


def rope_quantize_by_flashinfer(
    latents: UnrotatedLatents,
    rotation: Rotation,
    q_scale: float,
    k_scale: float,
    q_out: torch.Tensor,
    k_out: torch.Tensor | None = None,
    cache: tuple[torch.Tensor, torch.Tensor] | None = None,
    slot_mapping: torch.Tensor | None = None,
) -> None:
    """:func:`rope_quantize` by FlashInfer's function, followed by a cache write of the rows.

    The bits equal those of :func:`rope_quantize`, except where fp32 arithmetic leaves a value
    between two e4m3 neighbours and rounds it to either.

    Args:
        latents: queries and latent rows in fp16 or bf16, which stay unchanged.
        rotation: positions ``[T]``, each inside the table, which FlashInfer does not check; and the
            table ``[max_position, r]`` in fp32, contiguous.
        q_scale: number on the host: real = stored * scale.
        k_scale: number on the host: real = stored * scale.
        q_out: ``[T, H, L + r]`` e4m3, contiguous, written.
        k_out: ``[T, L + r]`` e4m3, contiguous, written; None allocates it.
        cache: ``[N, P, L]`` and ``[N, P, r]`` e4m3 views of a paged cache, written; or None.
        slot_mapping: ``[<= T]`` int64 slots of ``cache``; -1 skips.

    Raises:
        ValueError: a piece is missing, tensors do not fit together, or FlashInfer does not take
            them.
        FlashInferUnavailableError: FlashInfer cannot be used here; the message says why.
    """
    _check(latents, rotation)
    _check_outputs(latents, q_out, k_out, cache, slot_mapping)
    flashinfer = flashinfer_rope.load_rope()
    if len(q_out) == 0:
        return
    if k_out is None:
        k_out = torch.empty((len(q_out), q_out.shape[-1]), dtype=E4M3, device=q_out.device)
    flashinfer.run(latents, rotation, (q_scale, k_scale), q_out, k_out)
    if cache is not None and slot_mapping is not None:
        write_stored_rows(k_out, cache, slot_mapping)


def _check(latents: UnrotatedLatents, rotation: Rotation) -> None:
    q_nope, q_pe, kv_c, k_pe = latents
    positions, cos_sin_cache, _ = rotation
    check_given(k_pe=k_pe, cos_sin_cache=cos_sin_cache)
    tokens, heads, rank = q_nope.shape
    rope = q_pe.shape[-1]
    for name, rows, shape in (
        ("q_pe", q_pe, (tokens, heads, rope)),
        ("kv_c", kv_c, (tokens, rank)),
        ("k_pe", k_pe, (tokens, rope)),
    ):
        if tuple(rows.shape) != shape or rows.dtype != q_nope.dtype:
            raise ValueError(
                f"{name} must be {[*shape]} of {q_nope.dtype} like q_nope, got {[*rows.shape]} of "
                f"{rows.dtype}"
            )
    for name, rows in (("q_nope", q_nope), ("q_pe", q_pe), ("kv_c", kv_c), ("k_pe", k_pe)):
        if rows.stride(-1) != 1:
            raise ValueError(f"{name} must have contiguous rows, got strides {rows.stride()}")
    if tuple(positions.shape) != (tokens,) or positions.is_floating_point():
        raise ValueError(
            f"positions must be [{tokens}] integer, got {[*positions.shape]} of {positions.dtype}"
        )
    table = tuple(cos_sin_cache.shape)
    if len(table) != 2 or table[1] != rope or rope % 2 or cos_sin_cache.dtype != torch.float32:
        raise ValueError(
            f"cos_sin_cache must be [max_position, {rope}] float32, got {[*table]} of "
            f"{cos_sin_cache.dtype}"
        )


def _check_outputs(
    latents: UnrotatedLatents,
    q_out: torch.Tensor,
    k_out: torch.Tensor | None,
    cache: tuple[torch.Tensor, torch.Tensor] | None,
    slot_mapping: torch.Tensor | None,
) -> None:
    tokens, heads, rank = latents.q_nope.shape
    rope = latents.q_pe.shape[2]
    for name, out, shape in (
        ("q_out", q_out, (tokens, heads, rank + rope)),
        ("k_out", k_out, (tokens, rank + rope)),
    ):
        if out is None:
            continue
        if tuple(out.shape) != shape or out.dtype != E4M3 or not out.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous float8_e4m3fn of shape {[*shape]}, got {out.dtype} of "
                f"{[*out.shape]}"
            )
    if (cache is None) != (slot_mapping is None):
        raise ValueError("cache and slot_mapping must be given together, got one of them")
    if cache is None or slot_mapping is None:
        return
    for part, width in zip(cache, (rank, rope), strict=True):
        if part.dim() != 3 or part.shape[2] != width or part.dtype != E4M3:
            raise ValueError(
                f"cache must hold float8_e4m3fn [N, P, {width}], got {part.dtype} of "
                f"{[*part.shape]}"
            )
    if len(slot_mapping) > tokens or slot_mapping.dtype != torch.int64:
        raise ValueError(
            f"slot_mapping must be int64 of at most {tokens} entries, got {slot_mapping.dtype} of "
            f"{len(slot_mapping)}"
        )
