"""Launches of the cache write: tiles, formats, and checks of the arguments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final, cast

import torch
import triton

from attn.kernels.cache.write_kernel import write_kv_kernel
from attn.kernels.lang.memory import alignment, as_bytes
from builders.checks.kernel_limits import HEAD_SIZES, MODEL_DTYPES
from builders.checks.tensors import check_counts, check_kv_scale, check_rotated, check_written
from builders.launch.call import KernelCall, LaunchOptions
from builders.launch.launcher import Launch, Launcher
from specs.cache_write import CacheTarget, Rotation
from specs.dtypes import CacheDType
from specs.layouts import KVViews

NUM_WARPS: Final = 4

_FORMATS: Final = {
    CacheDType.AUTO: "float",
    CacheDType.FLOAT16: "float",
    CacheDType.BFLOAT16: "float",
    CacheDType.FP8: "e4m3",
    CacheDType.FP8_E4M3: "e4m3",
    CacheDType.FP8_INC: "e4m3",
    CacheDType.FP8_E5M2: "e5m2",
    CacheDType.INT8_PER_TOKEN_HEAD: "int8",
    CacheDType.FP8_PER_TOKEN_HEAD: "fp8",
    CacheDType.INT4_PER_TOKEN_HEAD: "int4",
}
_STORED: Final = {
    "float": MODEL_DTYPES,
    "e4m3": (torch.float8_e4m3fn,),
    "e5m2": (torch.float8_e5m2,),
    "int8": (torch.int8,),
    "fp8": (torch.float8_e4m3fn,),
    "int4": (torch.uint8,),
}


@dataclass(frozen=True)
class WriteConfig:
    """Launch configuration of a cache write."""

    rows: int
    """Rows of a program; a row is one head of one token."""
    num_warps: int = NUM_WARPS


_VARYING: Final = (
    *("key", "value", "key_cache", "value_cache", "key_scales", "value_scales"),
    *("slot_mapping", "k_scale", "v_scale", "num_slots", "num_tokens"),
)
# A plain write comes once per layer and step. `builders.launch.launcher.launch` of a call that is
# made anew would take the host 48 us, of which 28 make the call and 17 find its launcher; with a
# launcher that is kept here it takes 15 us (Triton 3.7.1, a stand-in for the driver).
_launchers: dict[tuple[Any, ...], Launcher] = {}
"""Launchers by variant key, shared by all layers: the layers of a model write alike."""


def write_kv_launch(
    key: torch.Tensor,
    value: torch.Tensor,
    target: CacheTarget,
    *,
    hardware_e4m3: bool,
) -> Launch:
    """The launch of :func:`write_kv_call`, made by a launcher that is kept.

    Everything that does not depend on the number of tokens is checked and prepared once for each
    variant, so that later launches of the variant cost little.

    Args:
        key: ``[T, Hk, D]``; rows past the last slot are padding. Heads of any strides.
        value: ``[T, Hk, Dv]``; rows past the last slot are padding. Heads of any strides.
        target: the cache and the slot of each row.
        hardware_e4m3: the GPU converts to 8-bit floats (compute capability 8.9 and later).

    Raises:
        ValueError: shapes, strides or dtypes that do not fit together.
        NotImplementedError: a model dtype, cache dtype or head size outside the kernel's.
    """
    views, slot_mapping, k_scale, v_scale, cache_dtype = target
    variant = (
        cache_dtype,
        hardware_e4m3,
        *(_variant_of(x) for x in (key, value)),
        *(None if x is None else (_variant_of(x), x.shape[0]) for x in views),
        *((x.dtype, x.shape, x.stride()) for x in (k_scale, v_scale)),
        (slot_mapping.dtype, slot_mapping.dim(), slot_mapping.stride()[-1:]),
    )
    launcher = _launchers.get(variant)
    if launcher is None:
        made = write_kv_call(key, value, target, hardware_e4m3=hardware_e4m3).arguments
        fixed = {name: x for name, x in made.items() if name not in _VARYING}
        launcher = _launchers[variant] = Launcher(
            write_kv_kernel, fixed, _VARYING, options=LaunchOptions(num_warps=NUM_WARPS)
        )
    count, rows = len(slot_mapping), cast("int", launcher.arguments["ROWS"])
    check_counts(key, value, count)
    is_scaled = launcher.arguments["FORMAT"] in ("e4m3", "e5m2")
    varying = {
        "key": key,
        "value": value,
        "key_cache": as_bytes(views.key),
        "value_cache": as_bytes(views.value),
        "key_scales": views.key_scale,
        "value_scales": views.value_scale,
        "slot_mapping": slot_mapping,
        "k_scale": k_scale if is_scaled else None,
        "v_scale": v_scale if is_scaled else None,
        "num_slots": count,
        "num_tokens": count,
    }
    return launcher.bind((_cdiv(count * key.shape[1], rows),), varying)


def _variant_of(x: torch.Tensor) -> tuple[Any, ...]:
    """The part of the variant key that stands for a tensor; its number of rows is left out.

    Only whether there is more than one row counts: the alignment of a single row does not depend on
    the stride to a second.
    """
    return x.dtype, x.device, x.shape[1:], x.shape[0] > 1, x.stride(), x.data_ptr() % 16


@cache
def write_config(head_size: int, head_size_v: int, smallest_itemsize: int) -> WriteConfig:
    """The tile that gives each thread 16 bytes of the smaller of model and cache elements."""
    tile = NUM_WARPS * 32 * 16 // smallest_itemsize
    return WriteConfig(max(1, tile // triton.next_power_of_2(max(head_size, head_size_v))))


def write_kv_call(
    key: torch.Tensor,
    value: torch.Tensor,
    target: CacheTarget,
    *,
    hardware_e4m3: bool,
) -> KernelCall:
    """The launch that writes new keys and values into a dense cache, quantised as the cache is.

    Args:
        key: ``[T, Hk, D]``; rows past the last slot are padding. Heads of any strides.
        value: ``[T, Hk, Dv]``; rows past the last slot are padding. Heads of any strides.
        target: the cache and the slot of each row.
        hardware_e4m3: the GPU converts to 8-bit floats (compute capability 8.9 and later).

    Raises:
        ValueError: shapes, strides or dtypes that do not fit together.
        NotImplementedError: a model dtype, cache dtype or head size outside the kernel's.
    """
    arguments = _write_arguments(key, value, target)
    num_slots = arguments["num_slots"]
    arguments |= {
        **{name: None for name in ("query", "positions", "cos_sin")},
        **{name: 0 for name in ("num_query_tokens", "max_position", "cos_sin_stride")},
        **{name: 0 for name in ("query_stride_t", "query_stride_h")},
        "num_tokens": num_slots,
        "QUERY_HEADS": 0,
        "QUERY_ROWS": 1,
        "QUERY_ALIGN": 1,
        "TABLE_ALIGN": 1,
        "ROTARY_DIM": 0,
        "IS_NEOX": True,
        "HARDWARE_E4M3": hardware_e4m3,
    }
    grid = _cdiv(num_slots * key.shape[1], arguments["ROWS"])
    return KernelCall(write_kv_kernel, (grid,), arguments, num_warps=NUM_WARPS)


def rope_and_write_kv_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotation: Rotation,
    target: CacheTarget,
    *,
    hardware_e4m3: bool,
) -> KernelCall:
    """The launch that rotates query and key in place and writes rotated keys and values.

    Args:
        query: ``[T, H, D]``; rows past the last position are left as they are.
        key: ``[T, Hk, D]``; rows past the last position are left as they are. A row with a
            negative slot is rotated, but not written to the cache.
        value: ``[T, Hk, Dv]``; rows past the last slot are padding. Heads of any strides.
        rotation: positions of the rows, at least one for each slot, and the table in fp32 or the
            model's type.
        target: the cache and the slot of each row.
        hardware_e4m3: the GPU converts to 8-bit floats (compute capability 8.9 and later).

    Raises:
        ValueError: shapes, strides or dtypes that do not fit together, of query, positions and
            table too.
        NotImplementedError: a model dtype, cache dtype or head size outside the kernel's.
    """
    arguments = _write_arguments(key, value, target)
    check_rotated(query, key, rotation, arguments["num_slots"], MODEL_DTYPES)
    positions, cos_sin_cache, is_neox = rotation
    num_tokens = min(len(key), len(positions))
    num_query_tokens = min(len(query), len(positions))
    # Only the rotating elements of a query are touched. They are few beside a wide value, so a
    # program takes more rows of a query than of key and value.
    rotary_dim = cos_sin_cache.shape[1]
    query_rows = write_config(rotary_dim, rotary_dim, query.element_size()).rows
    arguments |= {
        "query": query,
        "positions": positions,
        "cos_sin": cos_sin_cache,
        "num_tokens": num_tokens,
        "num_query_tokens": num_query_tokens,
        "max_position": cos_sin_cache.shape[0],
        "cos_sin_stride": cos_sin_cache.stride(0),
        "query_stride_t": query.stride(0),
        "query_stride_h": query.stride(1),
        "QUERY_HEADS": query.shape[1],
        "QUERY_ROWS": query_rows,
        "QUERY_ALIGN": alignment(query),
        "TABLE_ALIGN": alignment(cos_sin_cache),
        "ROTARY_DIM": rotary_dim,
        "IS_NEOX": is_neox,
        "HARDWARE_E4M3": hardware_e4m3,
    }
    grid = _cdiv(num_tokens * key.shape[1], arguments["ROWS"])
    grid += _cdiv(num_query_tokens * query.shape[1], query_rows)
    return KernelCall(write_kv_kernel, (grid,), arguments, num_warps=NUM_WARPS)


def _cdiv(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _write_arguments(
    key: torch.Tensor,
    value: torch.Tensor,
    target: CacheTarget,
) -> dict[str, Any]:
    """Check the tensors; return the kernel's arguments that do not concern RoPE."""
    views, slot_mapping, k_scale, v_scale, cache_dtype = target
    form = _format_of(key, views, cache_dtype)
    check_written(key, value, views, slot_mapping, cache_dtype)
    _check_layout(key, value, views, slot_mapping)
    arguments: dict[str, Any] = {}
    for name, rows in (("key", key), ("value", value)):
        arguments[name] = rows
        arguments[f"{name}_stride_t"], arguments[f"{name}_stride_h"], _ = rows.stride()
        arguments[f"{name.upper()}_ALIGN"] = alignment(rows)
    for name, stored in (("key_cache", views.key), ("value_cache", views.value)):
        arguments[name] = as_bytes(stored)
        arguments |= _strides(name, stored)
        arguments[f"{name.upper()}_ALIGN"] = alignment(stored)
    for name, inline in (("key_scales", views.key_scale), ("value_scales", views.value_scale)):
        arguments[name] = inline
        arguments |= _strides(name, inline)
    is_scaled = form in ("e4m3", "e5m2")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if is_scaled:
            check_kv_scale(name, scale, key.shape[1])
        arguments[name] = scale if is_scaled else None
        arguments[f"{name}_stride"] = scale.stride(0) if is_scaled and scale.numel() > 1 else 0
    itemsize = min(key.element_size(), views.key.element_size())
    return arguments | {
        "slot_mapping": slot_mapping,
        "num_slots": len(slot_mapping),
        "HEADS": key.shape[1],
        "HEAD_SIZE": key.shape[2],
        "HEAD_SIZE_V": value.shape[2],
        "BLOCK_SIZE": views.key.shape[1],
        "FORMAT": form,
        "ROWS": write_config(key.shape[2], value.shape[2], itemsize).rows,
    }


def _strides(name: str, x: torch.Tensor | None) -> dict[str, int]:
    strides = (0, 0, 0) if x is None else x.stride()[:3]
    return {f"{name}_stride_{axis}": stride for axis, stride in zip("nph", strides, strict=True)}


# -- Checks of the arguments.


def _format_of(key: torch.Tensor, views: KVViews, cache_dtype: CacheDType) -> str:
    """The name of the cache's format; checks every dtype against it."""
    form = _FORMATS.get(cache_dtype)
    if form is None:
        raise NotImplementedError(f"kv_cache_dtype {cache_dtype.value!r} has no cache-write kernel")
    if key.dtype not in MODEL_DTYPES:
        raise NotImplementedError(f"key must be float16, bfloat16 or float32, got {key.dtype}")
    is_inline = cache_dtype.quant_mode.is_per_token_head
    for name, stored, scales in (
        ("key", views.key, views.key_scale),
        ("value", views.value, views.value_scale),
    ):
        if stored.dtype not in _STORED[form]:
            names = " or ".join(str(dtype) for dtype in _STORED[form])
            raise ValueError(
                f"views.{name} must be {names} for {cache_dtype.value!r}, got {stored.dtype}"
            )
        if (scales is not None) != is_inline:
            needed = "a tensor" if is_inline else "None"
            raise ValueError(
                f"views.{name}_scale must be {needed} for {cache_dtype.value!r}, got "
                f"{'None' if scales is None else tuple(scales.shape)}"
            )
        if scales is not None and scales.dtype != torch.float32:
            raise ValueError(f"views.{name}_scale must be float32, got {scales.dtype}")
    return form


def _check_layout(
    key: torch.Tensor, value: torch.Tensor, views: KVViews, slot_mapping: torch.Tensor
) -> None:
    """Check that sizes and strides are such that the kernel takes them."""
    if len(slot_mapping) > 1 and slot_mapping.stride(0) != 1:
        raise ValueError(f"slot_mapping must be contiguous, got strides {slot_mapping.stride()}")
    for name, rows, stored in (("key", key, views.key), ("value", value, views.value)):
        size = rows.shape[2]
        if size not in HEAD_SIZES:
            raise NotImplementedError(
                f"{name} head size must be a multiple of {HEAD_SIZES.step} from "
                f"{HEAD_SIZES.start} to {HEAD_SIZES.stop - 1}, got {size}"
            )
        for what, x in ((name, rows), (f"views.{name}", stored)):
            if x.stride(-1) != 1:
                raise ValueError(f"{what} must have contiguous rows, got strides {x.stride()}")
