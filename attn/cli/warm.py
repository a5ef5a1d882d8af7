"""Filling Triton's cache with the kernels that a model's layers will launch in vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from attn.ahead.layers import LAUNCHES, LayerAhead, launches_of
from attn.integrations.vllm import choice, settings
from attn.integrations.vllm.choice import LayerKind
from builders.device import interprets
from specs.devices import Device
from specs.dtypes import CacheDType
from specs.engine import EngineConfig, SpeculativeConfig
from specs.model import LayerGeometry, ModelGeometry

if TYPE_CHECKING:
    from builders.launch.call import KernelCall

LARGE_GPU: Final = 70 * 2**30
"""Bytes of memory from which vLLM lets a step have ``MANY_REQUESTS`` by default."""
MANY_REQUESTS: Final = 1024
FEW_REQUESTS: Final = 256
MLA_BLOCK: Final = 64
"""Tokens of a block of latent rows in vLLM, and in all others ``DENSE_BLOCK``."""
DENSE_BLOCK: Final = 16


@dataclass(frozen=True)
class Wanted:
    """Which layers shall be served, on which GPU, by an engine with which limits."""

    model: ModelGeometry
    """The layers of one rank."""
    device: Device
    """Present or not."""
    kv_cache_dtype: CacheDType
    block_size: int | None
    """Tokens of a block; None for vLLM's default."""
    max_model_len: int | None
    """Longest sequence, in tokens; None for the model's."""
    max_num_seqs: int | None
    """Most requests in a step; None for vLLM's default on this GPU."""
    max_num_batched_tokens: int
    speculative: int
    """Drafts per step."""

    def engine(self) -> EngineConfig:
        """The engine's settings."""
        most = MANY_REQUESTS if _is_large(self.device) else FEW_REQUESTS
        drafts = self.speculative
        return EngineConfig(
            max_model_len=self.max_model_len or self.model.max_position_embeddings,
            max_num_seqs=self.max_num_seqs or most,
            max_num_batched_tokens=self.max_num_batched_tokens,
            speculative=SpeculativeConfig(num_speculative_tokens=drafts) if drafts else None,
            kernels=settings.kernels(),
            fp8_mla_queries=settings.fp8_mla_queries(),
        )


@dataclass(frozen=True)
class Warmed:
    """What became of the kernels."""

    compiled: int
    cached: int
    """Kernels that were in the cache already."""
    failed: int


def warm(wanted: Wanted, jobs: int, log: Callable[[str], None]) -> Warmed:
    """Compile the kernels of a model's layers into Triton's cache.

    Args:
        wanted: layers, GPU and limits.
        jobs: threads that compile.
        log: gets each line for the user.

    Raises:
        ValueError: the device is no NVIDIA GPU, Triton's interpreter is on, or a layer that no
            backend of the library's own kernels serves with these settings.
    """
    capability = wanted.device.compute_capability
    if capability is None:
        raise ValueError(f"--device must be an NVIDIA GPU, got {wanted.device.name}")
    if interprets():
        raise ValueError("TRITON_INTERPRET must not be set: interpreted kernels are not compiled")
    from builders.launch.ahead import cache_folder, compile_ahead

    begin = time.monotonic()
    calls: list[KernelCall] = []
    for layer, indices in wanted.model.groups():
        name = f"{len(indices)} {layer.label} {'layer' if len(indices) == 1 else 'layers'}"
        backend = _backend_of(layer, wanted)
        if backend not in LAUNCHES:
            log(f"{name}: not compiled, {backend}'s kernels come with their package")
            continue
        made = [
            call for one in layers_ahead(layer, wanted) for call in launches_of(one, wanted.device)
        ]
        log(f"{name}: {backend}")
        calls += made
    outcomes = compile_ahead(
        calls,
        capability,
        jobs,
        lambda one: log(
            f"  {one.kernel}: {one.compiled} compiled, {one.cached} in the cache already, "
            f"{one.seconds:.1f} s" + (f"; {one.error}" if one.error else "")
        ),
    )
    warmed = Warmed(
        compiled=sum(one.compiled for one in outcomes),
        cached=sum(one.cached for one in outcomes),
        failed=sum(bool(one.error) for one in outcomes),
    )
    log(
        f"{warmed.compiled} kernels compiled for {wanted.device.name} (compute capability "
        f"{capability}), {warmed.cached} were in the cache, "
        f"{time.monotonic() - begin:.1f} s, {jobs} jobs; cache: {cache_folder()}"
    )
    return warmed


def layers_ahead(layer: LayerGeometry, wanted: Wanted) -> list[LayerAhead]:
    """What to compile for a layer: vLLM may send short prompts of sparse layers either way."""
    model, is_sparse = wanted.model, layer.index_topk is not None
    size = wanted.block_size or (MLA_BLOCK if layer.kind.is_mla else DENSE_BLOCK)
    engine = wanted.engine()
    return [
        LayerAhead(
            backend=_backend_of(layer, wanted),
            layer=layer,
            dtype=model.dtype,
            spec=layer.kv_cache_spec(size, model.dtype, wanted.kv_cache_dtype),
            engine=engine.replace(dense_short_prompts=is_dense),
        )
        for is_dense in ((False, True) if is_sparse else (False,))
    ]


def _backend_of(layer: LayerGeometry, wanted: Wanted) -> str:
    """The backend that the vLLM plugin gives a layer.

    Raises:
        ValueError: no backend serves the kind of layer, or this one refuses the layer.
    """
    from attn.registry import AttentionBackendEnum
    from attn.selector import refusals

    kind = LayerKind.of(layer.kind.is_mla, layer.index_topk is not None)
    found = choice.chosen(wanted.device.kind, is_routed=True).get(kind)
    if found is None:
        raise ValueError(choice.lacking(kind, wanted.device.kind))
    request = layer.selector_config(wanted.model.dtype, wanted.kv_cache_dtype, wanted.block_size)
    reasons = refusals(AttentionBackendEnum[found], request, wanted.device)
    if reasons:
        raise ValueError(f"{found} refuses a {layer.label} layer: {'; '.join(reasons)}")
    return found


def _is_large(device: Device) -> bool:
    return (device.memory_bytes or 0) >= LARGE_GPU and "a100" not in device.name.lower()
