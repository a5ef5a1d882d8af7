"""Checks of the tensors that callers pass to impls and operations, for kernels and reference.

The checks compare shapes and types alone: they read no device and keep nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from specs.cache_write import Rotation
from specs.dtypes import CacheDType, KVQuantMode
from specs.layouts import KVViews

REFERENCE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Model types that the reference computes in."""


class DenseSizes(Protocol):
    """Sizes of a dense layer that its tensors must fit."""

    @property
    def num_heads(self) -> int:
        """Query heads."""

    @property
    def num_kv_heads(self) -> int:
        """KV heads."""

    @property
    def head_size(self) -> int:
        """Columns of a query and of a key."""

    @property
    def head_size_v(self) -> int:
        """Columns of a value."""

    @property
    def cache_dtype(self) -> CacheDType:
        """KV cache dtype of the layer."""


def check_dense(
    layer: DenseSizes,
    query: torch.Tensor,
    keys: KVViews,
    output: torch.Tensor,
    *,
    dtypes: Sequence[torch.dtype],
    output_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> None:
    """Check that the tensors of a forward fit the layer.

    Args:
        layer: sizes and cache type of the layer.
        query: ``[T, H, D]``.
        keys: views of the cache, or an encoder's ``[T, Hk, D]`` rows.
        output: ``[T, H, Dv]``.
        dtypes: types of queries that are served.
        output_scale: the ``output_scale`` of ``forward``.
        lse: the ``output_lse`` of ``forward``.
        scales: K and V scale of the layer, checked for a cache with one scale per tensor or per
            head.

    Raises:
        ValueError: a tensor does not fit; the message names the argument and both values.
    """
    if query.dtype not in dtypes:
        raise ValueError(f"query must be one of {_names(dtypes)}, got {query.dtype}")
    check_rows("query", query, (layer.num_heads, layer.head_size))
    check_rows("output", output, (layer.num_heads, layer.head_size_v))
    _check_output_type(query.dtype, output, output_scale)
    if lse is not None:
        if lse.dtype != torch.float32:
            raise ValueError(f"output_lse must be float32, got {lse.dtype}")
        check_rows("output_lse", lse, (layer.num_heads,))
    key, value = keys.key, keys.value
    page = key.shape[1:2] if key.dim() == 4 else ()
    for name, rows, size in (("key", key, layer.head_size), ("value", value, layer.head_size_v)):
        check_rows(name, rows, (*page, layer.num_kv_heads, size // layer.cache_dtype.packing))
    if key.dim() == 3 and not key.dtype == value.dtype == query.dtype:
        raise ValueError(
            f"key and value must have query's dtype {query.dtype}, got {key.dtype} and "
            f"{value.dtype}"
        )
    if layer.cache_dtype.quant_mode is KVQuantMode.FP8_PER_TENSOR:
        k_scale, v_scale = scales
        for name, factor in (("k_scale", k_scale), ("v_scale", v_scale)):
            check_scale(name, factor, (1, layer.num_kv_heads))
        if k_scale is not None and v_scale is not None and k_scale.numel() != v_scale.numel():
            raise ValueError(
                f"k_scale and v_scale must both be per tensor or both per head, got "
                f"{k_scale.numel()} and {v_scale.numel()} elements"
            )


def check_lengths(
    num_tokens: int, first: torch.Tensor, second: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Check that every tensor has a row for each token of the step.

    Args:
        num_tokens: tokens of the step.
        first: the query, or an encoder's key.
        second: the output, or an encoder's value.
        lse: ``[T, H]``, or None.

    Raises:
        ValueError: a tensor has fewer rows.
    """
    if first.shape[0] < num_tokens or second.shape[0] < num_tokens:
        raise ValueError(
            f"query, key, value and output must have at least num_actual_tokens ({num_tokens}) "
            f"rows, got {first.shape[0]} and {second.shape[0]}"
        )
    if lse is not None and lse.shape[0] < num_tokens:
        raise ValueError(
            f"output_lse must have at least num_actual_tokens ({num_tokens}) rows, got "
            f"{lse.shape[0]}"
        )


def check_given(**tensors: torch.Tensor | None) -> None:
    """Check that tensors, passed by the names of a call's arguments, are not None.

    Raises:
        ValueError: a tensor is None; the message names it.
    """
    for name, tensor in tensors.items():
        needed(name, tensor)


def needed(name: str, tensor: torch.Tensor | None) -> torch.Tensor:
    """The tensor of an argument that must not be None.

    Args:
        name: name of the argument.
        tensor: value of the argument.

    Raises:
        ValueError: the tensor is None; the message names the argument.
    """
    if tensor is None:
        raise ValueError(f"{name} is needed, got None")
    return tensor


def check_rows(name: str, rows: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Check the shape of rows, and that their last dimension is dense.

    Args:
        name: name of the argument.
        rows: ``[T, *shape]``.
        shape: shape of a row.

    Raises:
        ValueError: the rows have another shape or are not dense; the message names argument, shape
            and strides.
    """
    if rows.shape[1:] != shape:
        wanted = ", ".join(["*", *(str(size) for size in shape)])
        raise ValueError(f"{name} must have shape [{wanted}], got {list(rows.shape)}")
    if rows.stride(-1) != 1 and shape[-1] > 1:
        raise ValueError(
            f"{name} must be contiguous in its last dimension, got strides {rows.stride()}"
        )


def check_scale(name: str, scale: torch.Tensor | None, counts: tuple[int, ...]) -> None:
    """Check that a scale is given, in fp32, for the tensor or for each head.

    Args:
        name: name of the argument.
        scale: the scale to check.
        counts: numbers of elements that the scale may have.

    Raises:
        ValueError: the scale is missing or does not fit; the message names argument, shape and
            type.
    """
    if scale is None:
        raise ValueError(f"{name} is needed, got None")
    if scale.dtype != torch.float32 or scale.numel() not in counts or not scale.is_contiguous():
        wanted = " or ".join(str(count) for count in dict.fromkeys(counts))
        raise ValueError(
            f"{name} must be contiguous float32 of {wanted} elements, got shape "
            f"{list(scale.shape)} of {scale.dtype}"
        )


def scales_of(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V scale of a layer.

    Args:
        layer: an ``attn.impls.base.AttentionLayer``.

    Raises:
        ValueError: the layer lacks one; the message names it.
    """
    try:
        scales: tuple[torch.Tensor, torch.Tensor] = layer._k_scale, layer._v_scale
    except AttributeError:
        raise _no_scale(layer, "_k_scale", "_v_scale") from None
    return scales


def k_scale_of(layer: Any) -> torch.Tensor:
    """K scale of a layer; a latent cache has no other scale.

    Args:
        layer: an ``attn.impls.base.AttentionLayer``.

    Raises:
        ValueError: the layer lacks its K scale.
    """
    try:
        scale: torch.Tensor = layer._k_scale
    except AttributeError:
        raise _no_scale(layer, "_k_scale") from None
    return scale


def _no_scale(layer: Any, *names: str) -> ValueError:
    missing = [name for name in names if not hasattr(layer, name)]
    return ValueError(
        f"layer must have {' and '.join(missing)}, a float32 tensor, got a "
        f"{type(layer).__name__} without"
    )


def check_written(
    key: torch.Tensor,
    value: torch.Tensor,
    views: KVViews,
    slot_mapping: torch.Tensor,
    cache_dtype: CacheDType,
) -> None:
    """Check that the keys and values of a cache write fit the cache and each other.

    Args:
        key: ``[T, Hk, D]``.
        value: ``[T, Hk, Dv]``.
        views: K and V of the cache.
        slot_mapping: ``[<= T]`` int64.
        cache_dtype: KV cache dtype.

    Raises:
        ValueError: a tensor does not fit; the message names the argument and both values.
    """
    if key.dim() != 3:
        raise ValueError(f"key must be [T, Hk, D], got shape {tuple(key.shape)}")
    if value.dtype != key.dtype:
        raise ValueError(f"value must have key's dtype {key.dtype}, got {value.dtype}")
    if slot_mapping.dtype != torch.int64 or slot_mapping.dim() != 1:
        raise ValueError(
            f"slot_mapping must be [T] int64, got shape {tuple(slot_mapping.shape)} of "
            f"{slot_mapping.dtype}"
        )
    check_counts(key, value, len(slot_mapping))
    pages = views.key.shape[:2]
    for name, rows, stored, scales in (
        ("key", key, views.key, views.key_scale),
        ("value", value, views.value, views.value_scale),
    ):
        expected = (*pages, rows.shape[1], rows.shape[2] // cache_dtype.packing)
        if tuple(stored.shape) != expected:
            raise ValueError(
                f"views.{name} must have shape {expected} for {name} of shape "
                f"{tuple(rows.shape)}, got {tuple(stored.shape)}"
            )
        if scales is not None and tuple(scales.shape) != expected[:3]:
            raise ValueError(
                f"views.{name}_scale must have shape {expected[:3]}, got {tuple(scales.shape)}"
            )


def check_counts(key: torch.Tensor, value: torch.Tensor, num_slots: int) -> None:
    """Check that a cache write has a value for each key, and no more slots than keys.

    Args:
        key: ``[T, Hk, D]``.
        value: ``[T, Hk, Dv]``.
        num_slots: length of the slot mapping.

    Raises:
        ValueError: keys and values differ in tokens or heads, or there are more slots than tokens.
    """
    if value.dim() != 3 or value.shape[:2] != key.shape[:2]:
        raise ValueError(
            f"value must be [{key.shape[0]}, {key.shape[1]}, Dv] like key, got shape "
            f"{tuple(value.shape)}"
        )
    if num_slots > len(key):
        raise ValueError(f"slot_mapping must have at most key's {len(key)} rows, got {num_slots}")


def check_kv_scale(name: str, scale: torch.Tensor, num_kv_heads: int) -> None:
    """Check a scale of a cache write, for the tensor or for each KV head.

    Args:
        name: name of the argument.
        scale: fp32 scalar or ``[Hk]``.
        num_kv_heads: KV heads of the key.

    Raises:
        ValueError: the scale has another type or shape.
    """
    shape = tuple(scale.shape)
    if scale.dtype != torch.float32 or (scale.numel() != 1 and shape != (num_kv_heads,)):
        raise ValueError(
            f"{name} must be a float32 scalar or [{num_kv_heads}], got shape {shape} of "
            f"{scale.dtype}"
        )


def check_rotated(
    query: torch.Tensor,
    key: torch.Tensor,
    rotation: Rotation,
    num_slots: int,
    dtypes: Sequence[torch.dtype],
) -> None:
    """Check that queries, positions and table of a rotation fit the key.

    Args:
        query: ``[T, H, D]``.
        key: ``[T, Hk, D]``.
        rotation: at least ``num_slots`` positions, and the table.
        num_slots: length of the slot mapping.
        dtypes: types of tables that are served.

    Raises:
        ValueError: a tensor does not fit; the message names the argument and both values.
    """
    positions, cos_sin_cache, _ = rotation
    head_size = key.shape[2]
    if query.dim() != 3 or query.shape[2] != head_size or query.dtype != key.dtype:
        raise ValueError(
            f"query must be [T, H, {head_size}] of {key.dtype} like key, got shape "
            f"{tuple(query.shape)} of {query.dtype}"
        )
    if query.stride(-1) != 1:
        raise ValueError(f"query must have contiguous rows, got strides {query.stride()}")
    if positions.dim() != 1 or positions.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"positions must be [T] int64 or int32, got shape {tuple(positions.shape)} of "
            f"{positions.dtype}"
        )
    if len(positions) < num_slots:
        raise ValueError(
            f"positions must have a row for each of {num_slots} slots, got {len(positions)}"
        )
    if len(positions) > 1 and positions.stride(0) != 1:
        raise ValueError(f"positions must be contiguous, got strides {positions.stride()}")
    shape = tuple(cos_sin_cache.shape)
    if len(shape) != 2 or shape[1] % 2 or not 0 < shape[1] <= head_size:
        raise ValueError(
            f"cos_sin_cache must be [max_position, rotary_dim] with an even rotary_dim up to "
            f"{head_size}, got shape {shape}"
        )
    if cos_sin_cache.dtype not in dtypes or cos_sin_cache.stride(-1) != 1:
        raise ValueError(
            f"cos_sin_cache must be {_names(dtypes)} with contiguous rows, got "
            f"{cos_sin_cache.dtype} with strides {cos_sin_cache.stride()}"
        )


# -- Latent layers.


class LatentSizes(Protocol):
    """Sizes of a latent layer that its tensors must fit."""

    @property
    def num_heads(self) -> int:
        """Query heads H."""

    @property
    def kv_lora_rank(self) -> int:
        """Columns of a latent, L."""

    @property
    def qk_rope_head_dim(self) -> int:
        """Columns of a rotary key, r."""

    @property
    def qk_head_dim(self) -> int:
        """Columns of an expanded key."""

    @property
    def v_head_dim(self) -> int:
        """Columns of an expanded value, V."""


def latent_query(
    layer: LatentSizes,
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    num_heads: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split an absorbed query into its two parts and check that they fit the layer.

    Args:
        layer: sizes of the layer.
        q: the query of ``forward_mqa``: one tensor ``[T, H, L + r]``, or its two parts.
        num_heads: H where ranks share the keys (DCP); None for the layer's heads.

    Returns:
        ``[T, H, L]`` and ``[T, H, r]``.

    Raises:
        ValueError: the query has another shape, or its parts have two types.
    """
    rank, rope = layer.kv_lora_rank, layer.qk_rope_head_dim
    heads = layer.num_heads if num_heads is None else num_heads
    if isinstance(q, tuple):
        query, rotary = q
        # A tensor's len takes longer than its shape.
        tokens = query.shape[0]
        is_right = query.shape == (tokens, heads, rank) and rotary.shape == (tokens, heads, rope)
        if not is_right or query.dtype != rotary.dtype:
            raise ValueError(
                f"q must be a pair [T, {heads}, {rank}] and [T, {heads}, {rope}] of one type, got "
                f"{list(query.shape)} of {query.dtype} and {list(rotary.shape)} of {rotary.dtype}"
            )
        return query, rotary
    if q.shape[1:] != (heads, rank + rope):
        raise ValueError(f"q must have shape [*, {heads}, {rank + rope}], got {list(q.shape)}")
    return q[..., :rank], q[..., rank:]


def check_count(name: str, rows: torch.Tensor, num_tokens: int) -> None:
    """Check that a tensor has a row for each token of the step.

    Args:
        name: name of the argument.
        rows: ``[T, ...]``.
        num_tokens: tokens of the step, or of one phase of it.

    Raises:
        ValueError: the tensor has fewer rows.
    """
    if rows.shape[0] < num_tokens:
        raise ValueError(
            f"{name} must have a row for each of the step's {num_tokens} tokens, got "
            f"{rows.shape[0]}"
        )


def check_latent_rows(
    layer: LatentSizes,
    kv_c_normed: torch.Tensor,
    k_pe: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
) -> None:
    """Check that new latent rows fit the layer and their slots.

    Args:
        layer: sizes of the layer.
        kv_c_normed: ``[T, L]``.
        k_pe: ``[T, 1, r]`` or ``[T, r]``.
        slot_mapping: ``[<= T]`` int64.
        k_scale: fp32 scalar.

    Raises:
        ValueError: a tensor is None or does not fit; the message names the argument and both
            values.
    """
    check_given(kv_c_normed=kv_c_normed, k_pe=k_pe, k_scale=k_scale)
    _check_latent(layer, kv_c_normed, k_pe)
    if len(k_pe) != len(kv_c_normed):
        raise ValueError(f"k_pe must have kv_c_normed's {len(kv_c_normed)} rows, got {len(k_pe)}")
    if slot_mapping.dtype != torch.int64 or slot_mapping.dim() != 1:
        raise ValueError(
            f"slot_mapping must be [T] int64, got shape {tuple(slot_mapping.shape)} of "
            f"{slot_mapping.dtype}"
        )
    if len(slot_mapping) > len(kv_c_normed):
        raise ValueError(
            f"slot_mapping must have at most kv_c_normed's {len(kv_c_normed)} rows, got "
            f"{len(slot_mapping)}"
        )


def check_expanded(
    layer: LatentSizes,
    q: torch.Tensor,
    kv_c_normed: torch.Tensor,
    k_pe: torch.Tensor,
    output: torch.Tensor,
    num_tokens: int,
    output_scale: torch.Tensor | None = None,
) -> None:
    """Check that the tensors of an expanded prefill fit the layer and the step's prefill rows.

    Args:
        layer: sizes of the layer.
        q: ``[T, H, P + r]``.
        kv_c_normed: ``[T, L]``.
        k_pe: ``[T, 1, r]`` or ``[T, r]``.
        output: ``[T, H * V]`` or ``[T, H, V]``.
        num_tokens: tokens of the prefill rows.
        output_scale: the ``output_scale`` of ``forward_mha``.

    Raises:
        ValueError: a tensor is None or does not fit; the message names the argument and both
            values.
    """
    check_given(kv_c_normed=kv_c_normed, k_pe=k_pe)
    shape = layer.num_heads, layer.qk_head_dim
    if q.shape[1:] != shape:
        raise ValueError(f"q must have shape [*, {shape[0]}, {shape[1]}], got {list(q.shape)}")
    _check_latent(layer, kv_c_normed, k_pe)
    if kv_c_normed.dtype != q.dtype:
        raise ValueError(
            f"kv_c_normed and k_pe must have q's dtype {q.dtype}, got {kv_c_normed.dtype}"
        )
    check_latent_output(layer, q.dtype, output, output_scale)
    named = {"q": q, "kv_c_normed": kv_c_normed, "k_pe": k_pe, "output": output}
    for name, rows in named.items():
        check_count(name, rows, num_tokens)


def check_latent_output(
    layer: LatentSizes,
    query_dtype: torch.dtype,
    output: torch.Tensor,
    output_scale: torch.Tensor | None = None,
) -> None:
    """Check that the output of a latent layer has the layer's shape and type.

    Args:
        layer: sizes of the layer.
        query_dtype: type of the layer's queries.
        output: ``[T, H * V]`` or ``[T, H, V]``.
        output_scale: scale of an fp8 output; None for another type.

    Raises:
        ValueError: the output has another shape or type.
    """
    heads, size = layer.num_heads, layer.v_head_dim
    if output.shape[1:] not in ((heads * size,), (heads, size)):
        raise ValueError(f"output must have shape [*, {heads * size}], got {list(output.shape)}")
    _check_output_type(query_dtype, output, output_scale)


def _check_latent(layer: LatentSizes, kv_c_normed: torch.Tensor, k_pe: torch.Tensor) -> None:
    rank, rope = layer.kv_lora_rank, layer.qk_rope_head_dim
    if kv_c_normed.shape[1:] != (rank,):
        raise ValueError(f"kv_c_normed must have shape [*, {rank}], got {list(kv_c_normed.shape)}")
    if k_pe.shape[1:] not in ((rope,), (1, rope)):
        raise ValueError(f"k_pe must have shape [*, {rope}], got {list(k_pe.shape)}")
    if k_pe.dtype != kv_c_normed.dtype:
        raise ValueError(
            f"k_pe must have kv_c_normed's dtype {kv_c_normed.dtype}, got {k_pe.dtype}"
        )


def _check_output_type(
    query: torch.dtype, output: torch.Tensor, scale: torch.Tensor | None
) -> None:
    # fp32 is allowed for scratch that is merged later.
    allowed = {query, torch.float32} if scale is None else {torch.float8_e4m3fn}
    if output.dtype not in allowed:
        given = "without" if scale is None else "with"
        names = " or ".join(sorted(str(dtype) for dtype in allowed))
        raise ValueError(f"output must be {names} {given} an output_scale, got {output.dtype}")
    if scale is not None:
        check_scale("output_scale", scale, (1,))


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)
