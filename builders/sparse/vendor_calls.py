"""Vendors' kernels for sparse latent attention: how they are imported, and what their calls share.

Plans of these calls depend on shapes alone, so the plan of a captured graph never changes. Nothing
here waits for the device.
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
"""Columns of the latent and of the rotary part, which these kernels require."""
WORKSPACE_BYTES = 128 << 20
"""Bytes of scratch of FlashInfer's kernels and trtllm-gen."""
FA3_INSIDE_VLLM: Final = "vllm.vllm_flash_attn"
"""vLLM's package of FlashAttention 3; the rule of the kernel names its extension module."""
MOST_MULTIPROCESSORS: Final = 256
"""No GPU has more multiprocessors; trtllm-gen counts its blocks with as many counters."""


class SparseKernelUnavailableError(RuntimeError):
    """A kernel's package cannot be imported, or is of a version that cannot be called."""


@dataclass(frozen=True)
class FlashMla:
    """FlashMLA's two functions for top-k lists, and its schedule."""

    prefill: Callable[..., Any]
    """``flash_mla_sparse_fwd``."""
    with_cache: Callable[..., Any]
    """``flash_mla_with_kvcache``."""
    new_schedule: Callable[[], Any]
    """Makes an empty schedule, which the first call with it fills."""
    lse_units: dict[Hashable, torch.Tensor] = field(default_factory=dict, compare=False)
    """fp32 scalars that make a function's log-sum-exp a natural one. The first call of a function
    on a device adds its scalar.
    """

    def writes(self, function: Callable[..., Any]) -> bool:
        """Whether a function takes the tensor that it should write, as vLLM's functions do."""
        return _takes(function, "out")


@dataclass(frozen=True)
class FlashAttention3:
    """FlashAttention 3's function over pages, with latent values."""

    function: Callable[..., Any]
    is_vllm: bool
    """Whether ``function`` is vLLM's ``flash_attn_varlen_func``. Otherwise it is
    ``flash_attn_with_kvcache``."""


@cache
def _takes(function: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(function).parameters


def _first_module(kernel: SparseKernel, names: Sequence[str]) -> tuple[str, Any]:
    """Name and module of the first of ``names`` that can be imported.

    Raises:
        SparseKernelUnavailableError: none can; the message has every reason.
    """
    reasons = []
    for name in names:
        try:
            return name, importlib.import_module(name)
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            reasons.append(f"{name}: {type(error).__name__}: {error}")
    raise SparseKernelUnavailableError(f"{kernel.value} cannot be imported: {'; '.join(reasons)}")


def load_flashmla() -> FlashMla:
    """Import FlashMLA from its own package or from vLLM's.

    Raises:
        SparseKernelUnavailableError: neither can be imported, or the version is older than schedule
            objects.
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
    """Import FlashAttention 3 from its own package or from vLLM's.

    Raises:
        SparseKernelUnavailableError: neither can be imported, or the function takes no latent
            query (``qv``).
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
"""For each vendor's kernel, a function that imports it."""


@dataclass
class PlannedCalls:
    """Objects that all layers' calls of a vendor's kernel share, for one phase of a step."""

    plan: PhasePlan
    """How the phase's rows are attended."""
    functions: Any
    """The kernel's functions, as :data:`LOADERS` gives them."""
    wrapper: Any = None
    """FlashInfer's wrapper, planned for the phase's rows, each with a full list; None for other
    kernels."""
    scale: float | None = None
    """Factor of the products of query and key with which FlashInfer's wrapper is planned."""
    workspace: torch.Tensor | None = None
    """uint8 scratch of trtllm-gen, zeroed when made; None for other kernels."""
    counters: torch.Tensor | None = None
    """uint8 counters of trtllm-gen, zeroed when made; None for other kernels."""
    made: dict[Hashable, Any] = field(default_factory=dict)
    """Objects that the first layer's call made for the layers after it, see :meth:`once`."""

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The result of ``make``, which is called once for the step, and once more under capture.

        A captured graph needs an object of its own, since it must fill that when it is replayed.

        Args:
            key: everything that the object depends on.
            make: makes the object.
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
            plans: all plans that a step may have.
            most_rows: most query rows of a step.
            device: where the records' tensors live.
            dtype: type of the model's elements.
            scale: factor of the products of query and key, which FlashInfer's plans hold.

        Raises:
            SparseKernelUnavailableError: a kernel's package cannot be used.
            FlashInferUnavailableError: FlashInfer cannot be used.
            ValueError: FlashInfer's kernel needs a scale, and there is none.
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
        """Announce that a graph of ``num_rows`` rows will be captured, so that its plan is kept."""
        self._captured.add(num_rows)

    def plan(self, plan: PhasePlan, indices: torch.Tensor) -> PlannedCalls | None:
        """Objects that the calls over a phase's rows share; None for the library's own kernel.

        Args:
            plan: plan of the phase.
            indices: ``[T, width]`` int32: room for the phase's lists.
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
        """FlashInfer's wrapper, planned for pages of one token.

        Each row has as many pages as its list has room for.
        """
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
        """The tensors that a captured graph reads; its page list is the lists themselves."""
        qo_indptr, kv_indptr, kv_lens = (
            torch.zeros(extent, dtype=torch.int32, device=self._device)
            for extent in (count + 1, count + 1, count)
        )
        return LatentCsrBuffers(qo_indptr, kv_indptr, flat, kv_lens)
