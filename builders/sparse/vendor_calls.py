"""Kernels of others for sparse latent attention: where they come from, and what their calls share.

What is planned hangs on shapes alone, so that a captured graph's plan never changes. Nothing here
waits for the device.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import torch

from builders.sparse.choice import PhasePlan
from builders.vendor.flashinfer_parts import mla_calls as flashinfer_mla_compat
from builders.vendor.flashinfer_parts.lengths import csr_on_host
from builders.vendor.flashinfer_parts.mla_calls import (
    FlashInferLatent,
    LatentCsrBuffers,
    LatentSizes,
)
from builders.vendor.trtllm_parts import mla_calls as trtllm_mla_calls
from builders.vendor.trtllm_parts.mla_calls import LatentCalls
from specs.base import cdiv
from specs.sparse_mla import SparseKernel, SparsePhase, rule_of

RANK, ROPE = 512, 64
WORKSPACE_BYTES = 128 << 20
"""Scratch of FlashInfer's kernels."""
FA3_INSIDE_VLLM: Final = "vllm.vllm_flash_attn"
"""The package around the extension module that its rule names."""
MOST_MULTIPROCESSORS: Final = 256
"""At least those of any GPU: a kernel counts its blocks with as many counters."""


class SparseKernelUnavailableError(RuntimeError):
    """A package is there that its kernel cannot be called from."""


@dataclass(frozen=True)
class FlashMla:
    """FlashMLA's two functions for lists."""

    prefill: Callable[..., Any]
    """``flash_mla_sparse_fwd``."""
    with_cache: Callable[..., Any]
    """``flash_mla_with_kvcache``."""
    new_schedule: Callable[[], Any]
    """An empty schedule, filled by the first call that is given it."""
    lse_units: dict[Hashable, torch.Tensor] = field(default_factory=dict, compare=False)
    """Filled by the first call of a function on a device: the fp32 scalar that makes its
    log-sum-exp a natural one.
    """

    def writes(self, function: Callable[..., Any]) -> bool:
        """A function takes the tensor to write; vLLM's do."""
        return _takes(function, "out")


@dataclass(frozen=True)
class FlashAttention3:
    """FlashAttention 3 over pages, with latent values."""

    function: Callable[..., Any]
    is_vllm: bool
    """vLLM's ``flash_attn_varlen_func``; else ``flash_attn_with_kvcache``."""


@cache
def _takes(function: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(function).parameters


def _first_module(kernel: SparseKernel, names: Sequence[str]) -> tuple[str, Any]:
    """The first module that can be imported."""
    reasons = []
    for name in names:
        try:
            return name, importlib.import_module(name)
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            reasons.append(f"{name}: {type(error).__name__}: {error}")
    raise SparseKernelUnavailableError(f"{kernel.value} cannot be imported: {'; '.join(reasons)}")


def load_flashmla() -> FlashMla:
    """FlashMLA, of its own package or the one inside vLLM.

    Raises:
        SparseKernelUnavailableError: none can be imported, or one before schedules were objects.
    """
    kernel = SparseKernel.FLASHMLA_KV
    name, module = _first_module(kernel, rule_of(kernel).modules)
    schedule = getattr(module, "get_mla_metadata", None)
    try:
        found = FlashMla(
            module.flash_mla_sparse_fwd,
            module.flash_mla_with_kvcache,
            lambda: module.get_mla_metadata()[0],
        )
        found.new_schedule()
    except (AttributeError, TypeError) as error:
        raise SparseKernelUnavailableError(
            f"{name} is of another version: {error}; get_mla_metadata is {schedule!r}"
        ) from error
    return found


def load_fa3() -> FlashAttention3:
    """FlashAttention 3, of its own package or the one inside vLLM.

    Raises:
        SparseKernelUnavailableError: none can be imported, or it has no ``qv``.
    """
    kernel = SparseKernel.FA3
    own = rule_of(kernel).modules[0]
    name, module = _first_module(kernel, (own, FA3_INSIDE_VLLM))
    is_vllm = name == FA3_INSIDE_VLLM
    wanted, latent = "flash_attn_with_kvcache", "qv"
    if is_vllm:
        wanted, latent = "flash_attn_varlen_func", "q_v"
        if not module.is_fa_version_supported(3):
            reason = module.fa_version_unsupported_reason(3)
            raise SparseKernelUnavailableError(f"{kernel.value} of {name}: {reason}")
    function = getattr(module, wanted, None)
    if function is None or not _takes(function, latent):
        raise SparseKernelUnavailableError(f"{name} has no {wanted} with {latent}")
    return FlashAttention3(function, is_vllm)


LOADERS: Final[dict[SparseKernel, Callable[[], Any]]] = {
    SparseKernel.FLASHMLA_SPARSE: load_flashmla,
    SparseKernel.FLASHMLA_KV: load_flashmla,
    SparseKernel.FA3: load_fa3,
    SparseKernel.FLASHINFER_MLA: lambda: flashinfer_mla_compat.load_latent(),
    SparseKernel.TRTLLM: lambda: trtllm_mla_calls.load_latent_calls(),
}
"""Of each kernel of others its functions."""


@dataclass
class PlannedCalls:
    """What the calls of a phase have in common, over all layers of a step."""

    plan: PhasePlan
    functions: Any
    """Of the kernel."""
    wrapper: Any = None
    """Of FlashInfer: planned for the phase's rows, each with a full list."""
    scale: float | None = None
    """That FlashInfer's wrapper is planned with."""
    workspace: torch.Tensor | None = None
    """uint8, zeroed when made, of trtllm-gen alone."""
    counters: torch.Tensor | None = None
    """uint8, likewise."""
    made: dict[Hashable, Any] = field(default_factory=dict)
    """By shape, what a first layer's call made for those that follow."""

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` gives, once for the step, and once for each graph: a graph must fill its
        own when it is replayed.
        """
        is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        whole = key, is_captured
        if whole not in self.made:
            self.made[whole] = make()
        return self.made[whole]


class CallPlanner:
    """Plans the calls of one builder's kernels."""

    def __init__(
        self,
        plans: Sequence[PhasePlan],
        most_rows: int,
        device: torch.device,
        dtype: torch.dtype,
        scale: float | None,
    ) -> None:
        """
        Args:
            plans: those that a step can come to.
            most_rows: query rows of a step, at most.
            device: of the records.
            dtype: of the model.
            scale: multiplies q.k; FlashInfer's plans hold it.

        Raises:
            SparseKernelUnavailableError: a kernel's package cannot be used.
            FlashInferUnavailableError: FlashInfer's cannot.
            ValueError: no scale, where a plan holds one.
        """
        self._scale = scale
        self._device, self._dtype, self._most_rows = device, dtype, most_rows
        self._functions: dict[SparseKernel, Any] = {}
        self._workspace: torch.Tensor | None = None
        self._counters: torch.Tensor | None = None
        self._captured: set[int] = set()
        self._wrappers: dict[Hashable, tuple[Any, Hashable]] = {}
        for plan in plans:
            self._load(plan)

    def _load(self, plan: PhasePlan) -> None:
        kernel, device = plan.kernel, self._device
        if kernel in self._functions or kernel not in LOADERS:
            return
        functions = self._functions[kernel] = LOADERS[kernel]()
        if isinstance(functions, FlashInferLatent) and self._scale is None:
            raise ValueError(f"vllm_config.softmax_scale is needed by {kernel.value}, got None")
        if isinstance(functions, FlashInferLatent | LatentCalls) and self._workspace is None:
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        if isinstance(functions, LatentCalls):
            entries = max(self._most_rows * plan.padded_heads, MOST_MULTIPROCESSORS)
            self._counters = torch.zeros(cdiv(entries, 8) * 32, dtype=torch.uint8, device=device)

    def capture(self, num_rows: int) -> None:
        """A graph of so many rows is to be captured: what is planned for them stays."""
        self._captured.add(num_rows)

    def plan(self, plan: PhasePlan, indices: torch.Tensor) -> PlannedCalls | None:
        """What the calls over a phase's rows share; None of the library's own kernel.

        Args:
            plan: of the phase.
            indices: ``[T, width]`` int32 room for its lists.
        """
        functions = self._functions.get(plan.kernel)
        if functions is None:
            return None
        planned = PlannedCalls(plan, functions, scale=self._scale)
        if isinstance(functions, FlashInferLatent) and len(indices):
            planned.wrapper = self._planned_wrapper(functions, plan, indices)
        elif isinstance(functions, LatentCalls):
            planned.workspace, planned.counters = self._workspace, self._counters
        return planned

    def _planned_wrapper(
        self, flashinfer: FlashInferLatent, plan: PhasePlan, indices: torch.Tensor
    ) -> Any:
        """A wrapper over pages of one token, as many for each row as a list has room for."""
        count, width = indices.shape
        is_decode = plan.phase is SparsePhase.DECODE
        is_kept = is_decode and count in self._captured
        key: Hashable = count if is_kept else plan.phase
        asked = count, indices.data_ptr()
        wrapper, planned = self._wrappers.get(key, (None, None))
        if planned == asked:
            return wrapper
        flat = indices.view(-1)
        if wrapper is None:
            assert self._workspace is not None
            buffers = self._reserved(flat, count) if is_kept else None
            wrapper = flashinfer.wrapper(self._workspace, "fa3", buffers)
        starts = torch.arange(count + 1, dtype=torch.int32)
        lens = torch.full((count,), width, dtype=torch.int32)
        assert self._scale is not None
        is_pinned = self._device.type == "cuda"
        csr = csr_on_host(starts.numpy(), lens.numpy(), 1, is_pinned)
        sizes = LatentSizes(
            num_heads=plan.padded_heads,
            rank=RANK,
            rope_size=ROPE,
            page_size=1,
            scale=self._scale,
            query_dtype=self._dtype,
            kv_dtype=torch.float8_e4m3fn,
        )
        flashinfer.plan(wrapper, csr, flat, sizes, causal=False)
        self._wrappers[key] = wrapper, asked
        return wrapper

    def _reserved(self, flat: torch.Tensor, count: int) -> LatentCsrBuffers:
        """A graph's tensors; its pages are the lists themselves."""
        qo_indptr, kv_indptr, kv_lens = (
            torch.zeros(extent, dtype=torch.int32, device=self._device)
            for extent in (count + 1, count + 1, count)
        )
        return LatentCsrBuffers(qo_indptr, kv_indptr, flat, kv_lens)
