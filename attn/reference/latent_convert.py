"""Latent rows gathered by slots and converted between formats, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from attn.reference.cache import latent_values
from attn.reference.quant import power_of_two_above, quantize_blocks, saturate
from specs.rows import LATENT_BLOCK, LatentFormat, RowFormat


def gather_fields(
    fields: Mapping[str, torch.Tensor], slots: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Fields ``[S, count]`` of the rows at ``[S]`` slots; slot -1 gives zeros, with scales of 1.

    Args:
        fields: name and ``[N, P, count]`` tensor of each field.
        slots: ``[S]`` integer; a slot may be listed more than once.
    """
    block_size = fields["nope"].shape[1]
    there = slots >= 0
    index = slots.clamp(min=0).long()
    gathered = {}
    for name, field in fields.items():
        is_float8 = field.dtype == torch.float8_e4m3fn
        # Not every device has indexed reads of 8-bit floats, but all have them of bytes.
        plain = field.view(torch.uint8) if is_float8 else field
        if len(slots) == 0:
            rows = plain.new_empty((0, field.shape[2]))
        else:
            rows = plain[index // block_size, index % block_size]
        rows = torch.where(there[:, None], rows, 1 if name == "scale" else 0)
        gathered[name] = rows.view(field.dtype) if is_float8 else rows
    return gathered


def convert_fields(
    fields: Mapping[str, torch.Tensor],
    source: RowFormat,
    target: RowFormat,
    k_scale: torch.Tensor,
    snap_scales: bool = False,
) -> dict[str, torch.Tensor]:
    """Fields ``[S, count]`` of ``target`` rows, made from the fields of ``source`` rows.

    Args:
        fields: name and ``[S, count]`` tensor of each source field.
        source: format of ``fields``.
        target: format of the result; an equal format returns the fields unchanged.
        k_scale: fp32 scalar, used by rows with one scale per tensor.
        snap_scales: make block scales the next power of two not below ``k_scale``, which rounds
            elements again; else block scales are ``k_scale``, and elements stay unchanged.
    """
    formats = LatentFormat(source.name), LatentFormat(target.name)
    if formats[0] is formats[1]:
        return dict(fields)
    model = target["nope"].dtype.torch
    if formats[1] is LatentFormat.BF16:
        real = latent_values(dict(fields), k_scale, source, torch.float32)
        rank = target["nope"].count
        parts = {"nope": real[:, :rank], "rope": real[:, rank:]}
        return {field.name: saturate(parts[field.name], model) for field in target.fields}
    rope = fields.get("rope")
    if formats[0] is LatentFormat.BF16:
        nope, scale = quantize_blocks(fields["nope"])
    else:
        nope, scale = _with_block_scales(fields["nope"], k_scale, snap_scales)
        if rope is not None:
            rope = rope.float() * k_scale.reshape(())
    converted = {"nope": nope, "scale": scale}
    if rope is not None:
        converted["rope"] = saturate(rope, target["rope"].dtype.torch)
    return converted


def _with_block_scales(
    nope: torch.Tensor, k_scale: torch.Tensor, snap_scales: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn e4m3 ``[S, L]`` with one scale into e4m3 with ``[S, L // 128]`` block scales."""
    k_scale = k_scale.float().reshape(())
    scale = k_scale
    if snap_scales:
        scale = power_of_two_above(k_scale)
        nope = saturate(nope.float() * (k_scale / scale), torch.float8_e4m3fn)
    return nope, scale.expand(len(nope), nope.shape[1] // LATENT_BLOCK).contiguous()
