"""Dense layers in SGLang: our triple over separate pools of keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch

from attn.impls.base import LayerScales
from attn.impls.dense.cached import detached
from attn.integrations.sglang import checks, compat
from attn.integrations.sglang.backend import SlotBackend, log_served, rows_of
from attn.integrations.sglang.steps import Step
from attn.registry import AttentionBackendEnum
from builders.base import AttentionMetadataBuilder
from specs.base import power_of_two
from specs.dtypes import DType
from specs.engine import EngineConfig, SpeculativeConfig
from specs.kv_cache import AnyKVCacheSpec, FullAttentionSpec, SlidingWindowSpec
from specs.layouts import KVViews

BACKEND: Final = "TRITON_ATTN"

CACHE_DTYPES: Final = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}
"""Names of the quantised types of a cache; others are stored as they are."""


@dataclass(frozen=True)
class LayerKind:
    """What one builder serves: layers of the same geometry over the same pool."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    window: int | None
    """Keys that a query sees, itself included; None for all."""
    in_window_pool: bool
    cache_dtype: str

    def spec(self, page_size: int, dtype: torch.dtype) -> AnyKVCacheSpec:
        """The KV cache spec of such layers."""
        fields: dict[str, Any] = {
            "block_size": page_size,
            "dtype": DType.parse(dtype),
            "cache_dtype": self.cache_dtype,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "head_size_v": self.head_size_v,
        }
        if self.window is not None:
            return SlidingWindowSpec(**fields, sliding_window=self.window)
        return FullAttentionSpec(**fields)


@dataclass(eq=False)
class PoolLayer:
    """One layer: its impl, and its pages."""

    impl: Any
    kind: LayerKind
    key: torch.Tensor
    """``[N, P, Hk, D]`` view of the pool."""
    address: int
    scales: LayerScales


class DenseBackend(SlotBackend):
    """Serves models of dense layers, full and with windows, over one pool or over two."""

    pools = checks.DENSE_POOLS

    def __init__(self, runner: Any, draft_step: int | None = None) -> None:
        """See :class:`SlotBackend`."""
        super().__init__(runner, draft_step)
        self._layers: dict[Any, PoolLayer] = {}
        self._builders: dict[LayerKind, AttentionMetadataBuilder[Any]] = {}
        self._limits = (self.max_reqs, self._most_tokens())
        self._served = set(self.layers)

    def _most_tokens(self) -> int:
        return power_of_two(max(self.facts.max_tokens, self.max_reqs * self.facts.draft_tokens))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """See the base class."""
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self._grow(max_bs, max_num_tokens)

    def _grow(self, reqs: int, tokens: int) -> None:
        """Replace builders whose limits are too small for a step of this many."""
        if reqs <= self._limits[0] and tokens <= self._limits[1]:
            return
        kept_reqs, kept_tokens = self._limits
        self._limits = max(reqs, kept_reqs), power_of_two(max(tokens, kept_tokens))
        self._replaced.append(self._builders)
        self._builders = {}

    def plan(self, step: Step) -> None:
        """See the base class."""
        self._grow(step.full.num_reqs, step.num_tokens)
        for kind in dict.fromkeys(layer.kind for layer in self._layers.values()):
            self._record(step, kind)

    def _record(self, step: Step, kind: LayerKind) -> Any:
        """A step's record for layers of a kind; the first layer that asks has it built."""
        record = step.records.get(kind)
        if record is None:
            batch = step.window if kind.in_window_pool else step.full
            assert batch is not None
            record = step.records[kind] = self._builder(kind).build(0, batch)
        return record

    def _builder(self, kind: LayerKind) -> AttentionMetadataBuilder[Any]:
        builder = self._builders.get(kind)
        if builder is None:
            builder = self._builders[kind] = self._new_builder(kind)
        return builder

    def warm_up_layers(self) -> None:
        """See the base class."""
        warmed = set()
        for layer, sinks in self._with_sinks():
            # This layer is not kept: that its sinks are what the model will give is a guess.
            key, value = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
            own = self._new_layer(layer, sinks, key, value)
            variant = own.kind, layer.logit_cap, sinks is None
            if variant in warmed:
                continue
            warmed.add(variant)
            own.impl.warm_up(own.scales, own.key, self._builder(own.kind), self.facts.dtype)

    def _with_sinks(self) -> Iterator[tuple[Any, torch.Tensor | None]]:
        """The model's layers, each with the sinks that it will be called with."""
        for module in self.model.modules():
            sinks = getattr(module, "sinks", None)
            for layer in module.children():
                if layer in self._served:
                    yield layer, sinks if isinstance(sinks, torch.Tensor) else None

    def _new_builder(self, kind: LayerKind) -> AttentionMetadataBuilder[Any]:
        facts = self.facts
        drafts = facts.draft_tokens - 1
        config = EngineConfig(
            max_model_len=facts.max_len,
            max_num_seqs=self._limits[0],
            max_num_batched_tokens=self._limits[1],
            num_heads=kind.num_heads,
            speculative=SpeculativeConfig(num_speculative_tokens=drafts) if drafts else None,
            batch_invariant=facts.is_deterministic,
            exact_host_lengths=False,
        )
        builder_cls = AttentionBackendEnum[BACKEND].get_class().get_builder_cls()
        spec = kind.spec(facts.page_size, facts.dtype)
        built: AttentionMetadataBuilder[Any] = builder_cls(spec, ["layers"], config, facts.device)
        words = (
            f"layers of {kind.num_heads} query and {kind.num_kv_heads} KV heads of "
            f"{kind.head_size}, window {kind.window}, {facts.dtype} over {kind.cache_dtype} KV in "
            f"pages of {facts.page_size}"
        )
        log_served(BACKEND, words, built)
        return built

    def _layer(self, layer: Any, sinks: torch.Tensor | None) -> PoolLayer:
        """A model's layer as ours; made at its first call, and anew where its pages have moved."""
        pool = self.token_to_kv_pool
        # These calls wait for keys that are loaded layer by layer.
        key, value = pool.get_kv_buffer(layer.layer_id)
        # Layers that share keys have one number, but may differ in all else.
        known = self._layers.get(layer)
        if known is None or known.address != key.data_ptr():
            known = self._layers[layer] = self._new_layer(layer, sinks, key, value)
        return known

    def _new_layer(
        self, layer: Any, sinks: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor
    ) -> PoolLayer:
        window = layer.sliding_window_size
        kind = LayerKind(
            num_heads=layer.tp_q_head_num,
            num_kv_heads=layer.tp_k_head_num,
            head_size=layer.head_dim,
            head_size_v=layer.v_head_dim,
            # SGLang counts the keys before the query's own.
            window=None if window is None or window < 0 else window + 1,
            in_window_pool=compat.is_in_window_pool(self.token_to_kv_pool, layer.layer_id),
            cache_dtype=cache_name(key.dtype, self.facts.dtype),
        )
        pages = [pages_of(one, self.facts.page_size) for one in (key, value)]
        impl = _with_two_pools()(
            *(kind.num_heads, kind.head_size, layer.scaling, kind.num_kv_heads),
            *(None, kind.window, kind.cache_dtype, layer.logit_cap or None, "decoder", None),
            sinks=None if sinks is None else sinks.detach(),
            head_size_v=kind.head_size_v,
        )
        impl.values = pages[1]
        impl.process_weights_after_loading(self.facts.dtype)
        return PoolLayer(impl, kind, pages[0], key.data_ptr(), scales_of(layer, key.device))

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Write a layer's new keys and values, and attend.

        Args:
            q: ``[T, H * D]`` or ``[T, H, D]``; rows behind the step's tokens are padding.
            k: ``[T, Hk, D]``; None for a layer that shares another layer's keys.
            v: ``[T, Hk, Dv]``.
            layer: SGLang's ``RadixAttention``.
            forward_batch: SGLang's ``ForwardBatch``.
            save_kv_cache: whether ``k`` and ``v`` are written.
            **kwargs: ``sinks`` and ``return_lse``.

        Returns:
            ``[T, H * Dv]``; with ``return_lse`` also ``[T, H]`` fp32, a natural logarithm. Rows of
            padding are zero, their LSE is ``-inf``.

        Raises:
            NotImplementedError: an argument that no kernel reads.
        """
        sinks, return_lse = kwargs.pop("sinks", None), kwargs.pop("return_lse", False)
        checks.refuse_arguments(kwargs)
        own = self._layer(layer, sinks)
        kind, step = own.kind, self.forward_metadata
        query = rows_of(q, kind.num_heads, kind.head_size)
        output = query.new_empty(len(query), kind.num_heads, kind.head_size_v)
        lse = None
        if return_lse:
            lse = query.new_full(query.shape[:2], float("-inf"), dtype=torch.float32)
        if step is None:
            return result_of(output.zero_(), lse)
        tokens = step.num_tokens
        if len(query) > tokens:
            output[tokens:] = 0
        if save_kv_cache and k is not None and v is not None:
            slots = step.new_slots(forward_batch.out_cache_loc, kind.in_window_pool)[:tokens]
            rows = rows_of(k, kind.num_kv_heads, kind.head_size)[:tokens]
            values = rows_of(v, kind.num_kv_heads, kind.head_size_v)[:tokens]
            own.impl.do_kv_cache_update(own.scales, rows, values, own.key, slots)
        record = self._record(step, kind)
        own.impl.forward(own.scales, query, None, None, own.key, record, output, output_lse=lse)
        return result_of(output, lse)


def result_of(output: torch.Tensor, lse: torch.Tensor | None) -> Any:
    """What SGLang expects of a forward."""
    if lse is not None:
        return output, lse
    return output.view(len(output), -1)


def cache_name(stored: torch.dtype, model: torch.dtype) -> str:
    """Our name of a cache's type."""
    if stored == model:
        return "auto"
    return CACHE_DTYPES.get(stored) or DType.parse(stored).value


def scales_of(layer: Any, device: torch.device) -> LayerScales:
    """A layer's scales, which SGLang has as numbers; 1 where it has none."""
    k, v = (getattr(layer, f"{name}_scale_float", None) or 1.0 for name in "kv")
    return LayerScales.of(k, v, device=device)


def pages_of(rows: torch.Tensor, page_size: int) -> torch.Tensor:
    """``[N, P, Hk, D]`` view of a pool's rows.

    Args:
        rows: ``[slots, Hk, D]``, or ``[N, Hk, P, D]`` where SGLang is set to that order.
        page_size: P.
    """
    if rows.dim() == 4:
        return rows.transpose(1, 2)
    whole = len(rows) // page_size
    return rows[: whole * page_size].view(whole, page_size, *rows.shape[1:])


@cache
def _with_two_pools() -> Any:
    """The impl for caches whose keys and values are two tensors.

    ``kv_cache`` of its methods is the keys ``[N, P, Hk, D]``; ``values`` is set once.
    """
    impl_cls: Any = AttentionBackendEnum[BACKEND].get_class().get_impl_cls()

    class TwoPools(impl_cls):  # type: ignore[misc]
        """An impl that takes its values from ``values``."""

        values: torch.Tensor
        """``[N, P, Hk, Dv]`` values beside the keys of ``kv_cache``."""

        def _split(self, kv_cache: torch.Tensor, model_dtype: torch.dtype) -> KVViews:
            return detached(KVViews(kv_cache, self.values))

    return TwoPools
