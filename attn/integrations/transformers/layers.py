"""Layers of a model as our triples: the impl of each layer, and the builder that layers share."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, TypeVar

import torch

from attn.impls.base import LayerScales
from attn.impls.dense.cached import detached
from attn.integrations.transformers.steps import Step
from attn.registry import AttentionBackendEnum
from builders.base import AttentionMetadataBuilder
from builders.batch import CommonAttentionMetadata
from specs.attention import AttentionType
from specs.base import power_of_two
from specs.dtypes import DType
from specs.engine import EngineConfig
from specs.kv_cache import (
    AnyKVCacheSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from specs.layouts import KVViews

T = TypeVar("T")

SCRATCH_PAGE: Final = 128
"""Tokens of a page of the pages that a call's own keys and values are written to."""


@dataclass(frozen=True)
class LayerKind:
    """What one builder serves: layers of the same geometry, whose steps have the same lengths."""

    backend: str
    device: torch.device
    stream: int
    """Handle of the CUDA stream: a plan's buffers belong to one stream. 0 without a GPU."""
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    role: AttentionType
    window: int | None
    """Keys that a query sees, itself included; encoders see as many to each side."""
    block_size: int
    pool: int
    """Number of the layer's group of pages; 0 outside of continuous batching."""

    def spec(self) -> AnyKVCacheSpec:
        """The KV cache spec of such layers."""
        fields: dict[str, Any] = {
            "block_size": self.block_size,
            "dtype": DType.parse(self.dtype),
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "head_size_v": self.head_size_v,
        }
        if self.role is AttentionType.ENCODER_ONLY:
            return EncoderOnlyAttentionSpec(**fields, sliding_window=self.window)
        if self.role is AttentionType.ENCODER_DECODER:
            return CrossAttentionSpec(**fields)
        if self.window is not None:
            return SlidingWindowSpec(**fields, sliding_window=self.window)
        return FullAttentionSpec(**fields)


class Group:
    """Layers of one kind: their builder, the step that they are in, and pages for given keys."""

    def __init__(self, kind: LayerKind) -> None:
        """
        Args:
            kind: what the layers have in common.
        """
        self.kind = kind
        self._limits = (0, 0, 0)
        self._builder: AttentionMetadataBuilder[Any] | None = None
        self._step: Step | None = None
        self._scratch: tuple[torch.Tensor, torch.Tensor] | None = None
        self._replaced: list[object] = []
        """Builders and pages that were too small. CUDA graphs may hold their addresses."""

    def step(self, token: object, layer: int, make: Callable[[], Step]) -> Step:
        """The step that a layer is in: the step of the layers before it, or a new step.

        A layer that comes again is in a new step. So is one in a graph that is being captured,
        after calls outside of it: the graph has to plan each replay.

        Args:
            token: an object, or numbers, that all layers of a step are called with.
            layer: number of the layer.
            make: makes a step of this kind.
        """
        step, captures = self._step, _captures(self.kind.device)
        if (
            step is None
            or layer in step.layers
            or step.captures != captures
            or not _same(step.token, token)
        ):
            step = make()
            step.record = self._record(step.batch)
            step.token, step.captures = token, captures
            self._step = step
        step.layers.add(layer)
        return step

    def scratch(self, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages for the keys and the values of one call, which the next call overwrites.

        Args:
            pages: how many are needed.

        Returns:
            ``[N, Hk, P, D]`` and ``[N, Hk, P, Dv]`` views, N at least ``pages``.
        """
        kept = self._scratch
        if kept is None or len(kept[0]) < pages:
            if kept is not None:
                self._replaced.append(kept)
            kind, count = self.kind, power_of_two(pages)

            def new_pages(size: int) -> torch.Tensor:
                shape = (count, kind.block_size, kind.num_kv_heads, size)
                return torch.zeros(shape, dtype=kind.dtype, device=kind.device).transpose(1, 2)

            kept = self._scratch = _lasting(
                kind.device, lambda: (new_pages(kind.head_size), new_pages(kind.head_size_v))
            )
        return kept

    def _record(self, batch: CommonAttentionMetadata) -> Any:
        """Plan a step; a builder whose limits are too small is replaced.

        What a graph is captured with holds for every replay: the batch's bounds on lengths are
        those of the graph, and the plan is made on the device.
        """
        needed = (batch.num_reqs, batch.num_actual_tokens, batch.max_seq_len)
        if self._builder is None or any(
            asked > limit for asked, limit in zip(needed, self._limits, strict=True)
        ):
            if self._builder is not None:
                self._replaced.append(self._builder)
            self._limits = reqs, tokens, length = (
                power_of_two(max(needed[0], self._limits[0], 8)),
                power_of_two(max(needed[1], self._limits[1], 256)),
                power_of_two(max(needed[2], self._limits[2], 1024)),
            )
            config = EngineConfig(
                max_model_len=length,
                max_num_seqs=reqs,
                max_num_batched_tokens=tokens,
                num_heads=self.kind.num_heads,
                exact_host_lengths=False,
            )
            kind = self.kind
            builder_cls = AttentionBackendEnum[kind.backend].get_class().get_builder_cls()
            self._builder = _lasting(
                kind.device, lambda: builder_cls(kind.spec(), ["layer"], config, kind.device)
            )
        return self._builder.build(0, batch)


@dataclass(eq=False)
class Layer:
    """One layer's impl for calls of one kind."""

    impl: Any
    group: Group
    scales: LayerScales
    sinks: torch.Tensor | None
    number: int
    views: tuple[torch.Tensor, ...] | None = None
    """Pages that the layer attended last, and views of them."""


@dataclass(frozen=True)
class Scores:
    """What a layer does to its scores."""

    scale: float
    soft_cap: float | None = None
    sinks: torch.Tensor | None = field(default=None, compare=False)


_groups: weakref.WeakValueDictionary[LayerKind, Group] = weakref.WeakValueDictionary()
_layers: weakref.WeakKeyDictionary[torch.nn.Module, dict[Any, Layer]] = weakref.WeakKeyDictionary()


def layer_of(module: torch.nn.Module, kind: LayerKind, scores: Scores) -> Layer:
    """The layer of a model's module for calls of a kind; made at the first such call.

    Args:
        module: the attention module.
        kind: what its builder serves.
        scores: scale, soft cap and sinks.

    Raises:
        ValueError: the backend does not serve such a layer.
    """
    kept = _layers.setdefault(module, {})
    layer = kept.get((kind, scores))
    if layer is None or layer.sinks is not scores.sinks:
        group = _groups.get(kind)
        if group is None:
            group = _groups[kind] = Group(kind)
        impl = _with_two_planes(kind.backend)(
            kind.num_heads,
            kind.head_size,
            scores.scale,
            kind.num_kv_heads,
            None,
            kind.window,
            "auto",
            scores.soft_cap,
            kind.role.value,
            None,
            sinks=None if scores.sinks is None else scores.sinks.detach(),
            head_size_v=kind.head_size_v,
        )
        impl.process_weights_after_loading(kind.dtype)
        scales = _lasting(kind.device, lambda: LayerScales.of(device=kind.device))
        layer = kept[kind, scores] = Layer(impl, group, scales, scores.sinks, id(module))
    return layer


@cache
def _with_two_planes(backend: str) -> Any:
    """A backend's impl for caches whose keys and values are two tensors.

    ``kv_cache`` of its methods is the keys ``[N, Hk, P, D]``; ``values`` is set before.
    """
    impl_cls: Any = AttentionBackendEnum[backend].get_class().get_impl_cls()

    class TwoPlanes(impl_cls):  # type: ignore[misc]
        """An impl that takes its values from ``values``."""

        values: torch.Tensor | None = None
        """``[N, Hk, P, Dv]`` values beside the keys of ``kv_cache``."""

        def take(self, values: torch.Tensor) -> None:
            """Set the values that belong to the keys of the calls that follow."""
            if self.values is not values:
                self.values, self._viewed = values, None

        def _split(self, kv_cache: torch.Tensor, model_dtype: torch.dtype) -> KVViews:
            assert self.values is not None
            return detached(KVViews(kv_cache.transpose(1, 2), self.values.transpose(1, 2)))

        if not hasattr(impl_cls, "_split"):
            # Impls that keep no views make them in every call.
            _views = _split

    return TwoPlanes


def stream_of(device: torch.device) -> int:
    """Handle of the stream that a call's kernels run on; 0 without a GPU."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def _lasting(device: torch.device, make: Callable[[], T]) -> T:
    """Make what outlives a step, with memory that no CUDA graph writes to.

    Transformers runs a step before it captures one, and takes that step's memory from the pool that
    all its graphs share. What is kept from such a step would lie where other graphs have their
    temporary tensors. The pool is that of one thread, so that another thread allocates outside it.

    Args:
        device: where the memory is.
        make: allocates it.
    """
    if device.type != "cuda":
        # Tensors that are made in inference mode cannot be written outside of it.
        with torch.inference_mode(False):
            return make()
    stream = torch.cuda.current_stream(device)

    def run() -> T:
        # A new thread is not in inference mode.
        with torch.cuda.device(device), torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def _captures(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _same(kept: object, token: object) -> bool:
    """Whether two tokens are of one step: tensors by identity, numbers by value."""
    if isinstance(kept, tuple) and isinstance(token, tuple):
        return len(kept) == len(token) and all(map(_same, kept, token))
    if isinstance(kept, torch.Tensor) or isinstance(token, torch.Tensor):
        return kept is token
    return kept == token
