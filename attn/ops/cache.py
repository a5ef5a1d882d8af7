"""Dense cache writes, with and without RoPE: by kernels on a GPU, by the reference elsewhere."""

from __future__ import annotations

import torch

from attn.ops.dispatch import converts_float8, has_kernel
from attn.reference import cache as reference
from attn.reference.rope import rotate_in_place
from specs.cache_write import CacheTarget, Rotation
from specs.dtypes import CacheDType
from specs.layouts import KVViews


def write_kv(key: torch.Tensor, value: torch.Tensor, target: CacheTarget) -> None:
    """Write new keys and values into a dense cache, quantised as the cache is.

    Args:
        key: ``[T, Hk, D]``; rows past the last slot are padding.
        value: ``[T, Hk, Dv]``.
        target: the cache and the slot of each row.

    Raises:
        ValueError: tensors that do not fit together.
        NotImplementedError: a cache dtype or head size that no kernel writes.
    """
    if not has_kernel(key):
        reference.write_kv(key, value, target)
        return
    from attn.kernels.cache.write import write_kv_launch

    write_kv_launch(key, value, target, hardware_e4m3=converts_float8(key.device)).launch()


def write_stored_rows(
    rows: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], slot_mapping: torch.Tensor
) -> None:
    """Write latent rows that are in the cache's 8-bit type already, byte by byte; one launch.

    Args:
        rows: ``[T, L + r]``, dense; L and r are even.
        cache: ``[N, P, L]`` and ``[N, P, r]`` views of the cache; strides are even.
        slot_mapping: ``[<= T]`` int64; -1 skips.
    """
    # Two elements are viewed as one fp16 number, which the write kernel copies bit by bit.
    pairs = rows.view(torch.float16)[:, None]
    latent, rope = (part.view(torch.float16)[:, :, None] for part in cache)
    width = latent.shape[-1]
    one = torch.ones((), device=rows.device)
    target = CacheTarget(KVViews(rope, latent), slot_mapping, one, one, CacheDType.AUTO)
    write_kv(pairs[..., width:], pairs[..., :width], target)


def rope_and_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotation: Rotation,
    target: CacheTarget,
) -> None:
    """Rotate query and key in place, then write the rotated keys and the values; one launch.

    Args:
        query: ``[T, H, D]``; rows past the last position stay unchanged.
        key: ``[T, Hk, D]``; rows past the last position stay unchanged, and a row with slot -1 is
            rotated but not written.
        value: ``[T, Hk, Dv]``.
        rotation: positions of the rows, at least one for each slot, and the table.
        target: the cache and the slot of each row.

    Raises:
        ValueError: tensors that do not fit together.
        NotImplementedError: a cache dtype or head size that no kernel writes.
    """
    if not has_kernel(key):
        for rows in (query, key):
            rotate_in_place(rows, rotation)
        reference.write_kv(key, value, target)
        return
    from attn.kernels.cache.write import rope_and_write_kv_call
    from builders.launch.launcher import launch

    hardware = converts_float8(key.device)
    launch(rope_and_write_kv_call(query, key, value, rotation, target, hardware_e4m3=hardware))
