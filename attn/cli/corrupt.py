"""Deliberate faults, each a bug that attention code has had; the checks of a run must see them.

A fault changes a triple at its interface: constructor arguments, the batch before ``build``, the
cache write, the query or the output. It therefore works with every backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attn.backends.base import AttentionBackend
from attn.cli.faults import Fault
from attn.impls.base import LayerScales
from builders.batch import CommonAttentionMetadata
from specs.model import LayerGeometry, LayerKind


def applies_to(fault: Fault, layer: LayerGeometry, quantized: bool) -> bool:
    """True where a layer has the feature that the fault breaks.

    Args:
        fault: the fault.
        layer: the layer's geometry.
        quantized: the layer's cache is quantised with a scale outside the rows.
    """
    latent = layer.kind in (LayerKind.MLA, LayerKind.SPARSE_MLA)
    needs: dict[Fault, bool] = {
        Fault.WINDOW_OFF_BY_ONE: layer.sliding_window is not None,
        Fault.DROPPED_SINK: layer.has_sinks,
        Fault.WRONG_SOFT_CAP: layer.logits_soft_cap is not None,
        Fault.SHIFTED_ALIBI: layer.use_alibi,
        Fault.WRONG_CHUNK: layer.attention_chunk_size is not None,
        Fault.WRONG_KV_SCALE: quantized,
        Fault.SWAPPED_KV: not latent,
        Fault.WRONG_GROUP: 1 < layer.num_kv_heads < layer.num_heads and not latent,
    }
    return needs.get(fault, True)


def corrupt_backend(backend: type[AttentionBackend], fault: Fault) -> type[AttentionBackend]:
    """A subclass of ``backend`` whose builder and impl have the fault."""
    base_builder, base_impl = backend.get_builder_cls(), backend.get_impl_cls()
    builder = type(f"Corrupt{base_builder.__name__}", (base_builder,), _builder_methods(fault))
    mixin = _MLAFaults if backend.is_mla() else _DenseFaults
    impl = type(f"Corrupt{base_impl.__name__}", (mixin, base_impl), {"fault": fault})
    return type(
        f"Corrupt{backend.__name__}",
        (backend,),
        {
            "get_builder_cls": staticmethod(lambda: builder),
            "get_impl_cls": staticmethod(lambda: impl),
        },
    )


def _builder_methods(fault: Fault) -> dict[str, Callable[..., Any]]:
    change = {
        Fault.PERMUTED_BLOCK_TABLE: _permute_block_table,
        Fault.UNMASKED_TAIL: _lengthen,
    }.get(fault)
    if change is None:
        return {}

    def build(
        self: Any,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        batch = change(common_attn_metadata, self.kv_cache_spec.block_size)
        base = type(self).__mro__[1]
        return base.build(self, common_prefix_len, batch, fast_build)  # type: ignore[attr-defined]

    return {"build": build}


def _permute_block_table(
    batch: CommonAttentionMetadata, block_size: int
) -> CommonAttentionMetadata:
    """Exchange the first and the last block of every request.

    Attention does not depend on the order of its keys, so that exchanging two fully visible blocks
    would change nothing. The last block is partly filled or partly masked.
    """
    table = batch.block_table_tensor.clone()
    last = ((batch.seq_lens.long() + block_size - 1) // block_size - 1).clamp(min=0)
    rows = torch.arange(len(table), device=table.device)
    first_block = table[:, 0].clone()
    table[rows, 0] = table[rows, last]
    table[rows, last] = first_block
    return batch.replace(block_table_tensor=table)


def _lengthen(batch: CommonAttentionMetadata, block_size: int) -> CommonAttentionMetadata:
    """Lengthen every request by one key, where its last block has room for the key."""
    room = (batch.seq_lens > 0) & (batch.seq_lens % block_size != 0)
    lens = torch.where(room, batch.seq_lens + 1, batch.seq_lens)
    bound = batch.seq_lens_cpu_upper_bound
    if bound is not None:
        bound = bound + room.to(bound)
    return batch.replace(
        seq_lens=lens, max_seq_len=batch.max_seq_len + 1, seq_lens_cpu_upper_bound=bound
    )


def _off(layer: Any) -> LayerScales:
    """The layer with KV scales 10 % too large."""
    return LayerScales(layer._q_scale, layer._k_scale * 1.1, layer._v_scale * 1.1)


def _wrong_slots(fault: Fault, slots: torch.Tensor, num_slots: int) -> torch.Tensor:
    if fault is Fault.WRONG_SLOT:
        return torch.where(slots >= 0, (slots + 1) % num_slots, slots)
    if fault is Fault.LOST_WRITE:
        slots = slots.clone()
        written = torch.nonzero(slots >= 0).flatten()
        slots[written[-1:]] = -1
    return slots


class _Faults:
    """Base of the mixins: the fault, and faults of an output."""

    fault: Fault
    _last: torch.Tensor | None = None

    def _spoil(self, output: torch.Tensor) -> None:
        if self.fault is Fault.ZEROS:
            output.zero_()
        elif self.fault is Fault.STALE_OUTPUT:
            fresh = output.clone()
            if self._last is not None and self._last.shape == output.shape:
                output.copy_(self._last)
            else:
                output.zero_()
            self._last = fresh


class _DenseFaults(_Faults):
    """Faults of a dense impl."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values, fault = list(args), self.fault
        if fault is Fault.WRONG_SCALE:
            values[2] *= 1.1
        elif fault is Fault.SHIFTED_ALIBI and values[4] is not None:
            values[4] = torch.as_tensor(values[4]).roll(1)
        elif fault is Fault.WINDOW_OFF_BY_ONE and values[5] is not None:
            values[5] += 1
        elif fault is Fault.WRONG_SOFT_CAP and values[7] is not None:
            values[7] *= 2
        elif fault is Fault.DROPPED_SINK:
            kwargs.pop("sinks", None)
        elif fault is Fault.WRONG_CHUNK and kwargs.get("attention_chunk_size"):
            kwargs["attention_chunk_size"] *= 2
        super().__init__(*values, **kwargs)

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        if self.fault is Fault.SWAPPED_KV:
            key, value = value, key
        slots = _wrong_slots(self.fault, slot_mapping, kv_cache.shape[0] * kv_cache.shape[2])
        base: Any = super()
        base.do_kv_cache_update(layer, key, value, kv_cache, slots)

    def forward(self, layer: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        impl: Any = self
        base: Any = super()
        if self.fault is Fault.WRONG_KV_SCALE:
            layer = _off(layer)
        if self.fault is Fault.WRONG_GROUP:
            group = impl.num_queries_per_kv
            order = torch.arange(impl.num_heads).view(group, -1).T.flatten()
            query = query[:, order]
        output: torch.Tensor = base.forward(layer, query, *args, **kwargs)
        if self.fault is Fault.WRONG_GROUP:
            heads = output.view(output.shape[0], impl.num_heads, -1)
            heads.copy_(heads[:, torch.argsort(order)])
        self._spoil(output)
        return output


class _MLAFaults(_Faults):
    """Faults of an MLA impl."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = list(args)
        if self.fault is Fault.WRONG_SCALE:
            values[2] *= 1.1
        elif self.fault is Fault.WINDOW_OFF_BY_ONE and values[5] is not None:
            # One key less, because a window longer than the planned one would be refused.
            values[5] -= 1
        super().__init__(*values, **kwargs)

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        slots = _wrong_slots(self.fault, slot_mapping, kv_cache.shape[0] * kv_cache.shape[1])
        base: Any = super()
        base.do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slots, *args, **kwargs)

    def forward_mqa(
        self, q: Any, kv_cache: torch.Tensor, metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        base: Any = super()
        if self.fault is Fault.WRONG_KV_SCALE:
            layer = _off(layer)
        out, lse = base.forward_mqa(q, kv_cache, metadata, layer)
        self._spoil(out)
        return out, lse

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        base: Any = super()
        if self.fault is Fault.WRONG_KV_SCALE:
            k_scale = k_scale * 1.1
        base.forward_mha(q, kv_c_normed, k_pe, kv_cache, metadata, k_scale, output, output_scale)
        self._spoil(output)
