"""The attention function of ``attn_implementation="attn"``, which every layer of a model calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attn.integrations.transformers import compat, steps
from attn.integrations.transformers.layers import (
    SCRATCH_PAGE,
    Layer,
    LayerKind,
    Scores,
    layer_of,
    stream_of,
)
from specs.attention import AttentionType

UNSERVED = {
    "position_bias": "a bias by position",
    "sinks": "sinks of each token",
    "indices": "lists of tokens",
    "block_indices": "lists of blocks",
}
"""Arguments of other models' layers that no kernel here reads, in words."""

_chosen: list[str | None] = [None]
"""Name of the backend that :func:`choose` named."""


def choose(backend: str | None) -> None:
    """Set the backend of the calls that follow; None chooses by the device."""
    _chosen[0] = backend


def backend_on(device: torch.device) -> str:
    """Name of the backend that serves layers on a device."""
    return _chosen[0] or ("TRITON_ATTN" if device.type == "cuda" else "TORCH_REF")


@dataclass(frozen=True)
class Call:
    """One call of a layer."""

    module: torch.nn.Module
    query: torch.Tensor
    """``[B, H, S, D]``."""
    key: torch.Tensor
    """``[B, Hk, S_k, D]``."""
    value: torch.Tensor
    """``[B, Hk, S_k, Dv]``."""
    scores: Scores
    window: int | None
    """Keys that a query sees, itself included; None for all."""

    def layer(self, role: AttentionType, block_size: int = SCRATCH_PAGE, pool: int = 0) -> Layer:
        """The module's layer for calls of this role and page size."""
        query, device = self.query, self.query.device
        kind = LayerKind(
            backend=backend_on(device),
            device=device,
            stream=stream_of(device),
            dtype=query.dtype,
            num_heads=query.shape[1],
            num_kv_heads=self.key.shape[1],
            head_size=query.shape[3],
            head_size_v=self.value.shape[3],
            role=role,
            window=self.window,
            block_size=block_size,
            pool=pool,
        )
        return layer_of(self.module, kind, self.scores)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of one layer; Transformers' signature.

    Args:
        module: the layer; ``layer_idx`` and ``is_causal`` are read.
        query: ``[B, H, S, D]``; in a continuous batch ``[1, H, T, D]``.
        key: ``[B, Hk, S_k, D]``, heads not repeated.
        value: ``[B, Hk, S_k, Dv]``.
        attention_mask: ``[B, S_k]`` bool, True where a key is no padding; or None.
        **kwargs: ``scaling``, ``sliding_window``, ``softcap``, ``s_aux`` (sinks), ``is_causal``,
            and what :func:`compat.packed_step` reads of a continuous batch.

    Returns:
        ``[B, S, H, Dv]``, and None for weights, which no kernel keeps. Rows of padding are zero.

    Raises:
        NotImplementedError: the call asks for something that no kernel here computes.
        ValueError: tensors that do not fit together, or that the backend does not serve.
    """
    _check_served(module, query, kwargs)
    packed, key, value = compat.packed_step(module, key, value, kwargs)
    window = kwargs.get("sliding_window")
    if window is None and packed is not None:
        window = getattr(module, "sliding_window", None)
    scale = kwargs.get("scaling")
    scores = Scores(
        query.shape[3] ** -0.5 if scale is None else float(scale),
        kwargs.get("softcap"),
        kwargs.get("s_aux"),
    )
    call = Call(module, query, key, value, scores, window or None)
    if packed is not None:
        return _over_pages(call, packed) if packed.pages else _packed(call, packed), None
    if attention_mask is not None and attention_mask.shape != (key.shape[0], key.shape[2]):
        raise NotImplementedError(
            "attn_implementation 'attn' takes a mask of padding "
            f"[batch, keys] = [{key.shape[0]}, {key.shape[2]}], got {list(attention_mask.shape)}: "
            "take attn_implementation 'sdpa'"
        )
    causal = kwargs.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    return _rectangle(call, attention_mask, bool(causal)), None


def _check_served(module: torch.nn.Module, query: torch.Tensor, kwargs: dict[str, Any]) -> None:
    """Refuse what no kernel here computes."""
    for name, words in UNSERVED.items():
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"attn_implementation 'attn' does not serve {words} ({name}) of "
                f"{type(module).__name__}: take attn_implementation 'sdpa' or 'eager'"
            )
    if kwargs.get("output_attentions"):
        raise NotImplementedError(
            "attn_implementation 'attn' keeps no attention weights (output_attentions=True): take "
            "attn_implementation 'eager'"
        )
    if query.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            "attn_implementation 'attn' has no backward pass: call the model in torch.no_grad(), "
            "or take attn_implementation 'sdpa'"
        )


def _over_pages(call: Call, packed: compat.PackedStep) -> torch.Tensor:
    """A call of continuous batching over its own pages: write the new keys, attend all."""
    assert packed.pages is not None
    keys, values = packed.pages
    size, tokens = keys.shape[1], call.query.shape[2]
    layer = call.layer(AttentionType.DECODER, size, packed.pool)
    step = layer.group.step(
        packed.query_start_loc, layer.number, lambda: steps.over_pages(packed, tokens, size)
    )
    # The impl keeps what it made for these views, so that they have to be the same ones each time.
    views = _by_head(layer, keys, values)
    return _attend_cached(
        layer, step, _rows(call.query), _rows(call.key), _rows(call.value), views
    )[None]


def _packed(call: Call, packed: compat.PackedStep) -> torch.Tensor:
    """A packed call that brings all keys of its requests."""
    layer = call.layer(AttentionType.DECODER, pool=packed.pool)
    lengths = steps.Lengths(
        packed.query_start_loc,
        packed.key_start_loc,
        call.query.shape[2],
        packed.max_query_len,
        packed.max_seq_len,
    )
    keys, size = call.key.shape[2], layer.group.kind.block_size
    step = layer.group.step(
        packed.query_start_loc, layer.number, lambda: steps.over_scratch(lengths, keys, size)
    )
    scratch = layer.group.scratch(step.scratch_pages)
    rows = _rows(call.query), _rows(call.key), _rows(call.value)
    return _attend_cached(layer, step, *rows, scratch)[None]


def _rectangle(call: Call, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    """A call of ``generate`` or of an encoder: B rows of as many tokens."""
    batch, heads, new, _ = call.query.shape
    shape, device = (batch, new, call.key.shape[2]), call.query.device
    token = (shape, mask)
    if not causal and shape[1] == shape[2] and (mask is None or call.window is not None):
        layer = call.layer(AttentionType.ENCODER_ONLY)
        step = layer.group.step(token, layer.number, lambda: steps.of_rows(mask, shape, device))
        rows = [_taken(_rows(x), step.queries) for x in (call.query, call.key, call.value)]
        output = rows[0].new_zeros(len(rows[0]), heads, call.value.shape[3])
        nothing = call.query.new_empty(0)
        layer.impl.forward(layer.scales, *rows, nothing, step.record, output)
    else:
        if not causal and call.window is not None:
            raise NotImplementedError(
                f"attn_implementation 'attn' does not serve a window ({call.window}) of "
                f"{shape[1]} queries over {shape[2]} other keys: take attn_implementation 'sdpa'"
            )
        role = AttentionType.DECODER if causal else AttentionType.ENCODER_DECODER
        layer = call.layer(role)
        size = layer.group.kind.block_size
        step = layer.group.step(
            token,
            layer.number,
            lambda: steps.of_rectangle(mask, shape, size, device, is_cross=not causal),
        )
        scratch = layer.group.scratch(step.scratch_pages)
        query = _taken(_rows(call.query), step.queries)
        output = _attend_cached(layer, step, query, _rows(call.key), _rows(call.value), scratch)
    if step.queries is not None:
        whole = output.new_zeros(batch * new, *output.shape[1:])
        output = whole.index_copy_(0, step.queries, output)
    return output.view(batch, new, *output.shape[1:])


def _attend_cached(
    layer: Layer,
    step: steps.Step,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Write keys and values to a cache and attend it; ``[T, H, Dv]``, zero in rows of padding."""
    layer.impl.take(cache[1])
    layer.impl.do_kv_cache_update(layer.scales, key, value, cache[0], step.batch.slot_mapping)
    output = query.new_zeros(len(query), query.shape[1], value.shape[2])
    layer.impl.forward(layer.scales, query, key, value, cache[0], step.record, output)
    return output


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """``[B, H, S, D]`` as dense rows ``[B * S, H, D]``.

    Strides that change with S would ask for another compiled variant in every step.
    """
    return tensor.transpose(1, 2).flatten(0, 1).contiguous()


def _taken(rows: torch.Tensor, which: torch.Tensor | None) -> torch.Tensor:
    return rows if which is None else rows.index_select(0, which)


def _by_head(
    layer: Layer, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[N, Hk, P, D]`` views of pages ``[N, P, Hk, D]``, the same objects for the same pages."""
    kept = layer.views
    if kept is None or kept[0] is not keys or kept[1] is not values:
        kept = layer.views = (keys, values, keys.transpose(1, 2), values.transpose(1, 2))
    return kept[2], kept[3]
