"""FlashInfer as it is installed: whether it can be used, and what its versions call differently.

Nothing else in the library imports FlashInfer's attention. 0.6.14 to 0.7 are known. Of wrappers,
0.7 takes the options of a decode plan by keyword alone, and a trap of both is that the two wrappers
name graph buffers differently. The direct calls are in
:mod:`builders.vendor.flashinfer_parts.calls`, whose names are this module's too. A test binds every
call to both versions.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from builders.vendor.flashinfer_parts.calls import KV_LAYOUT as KV_LAYOUT
from builders.vendor.flashinfer_parts.calls import DirectCalls as DirectCalls
from builders.vendor.flashinfer_parts.calls import LayerCall as LayerCall
from builders.vendor.flashinfer_parts.calls import StepCall as StepCall
from builders.vendor.flashinfer_parts.calls import canonical_strides as canonical_strides
from builders.vendor.flashinfer_parts.calls import numbers_of as numbers_of
from builders.vendor.flashinfer_parts.calls import stacked_pages as stacked_pages
from builders.vendor.flashinfer_parts.csr import CsrOnDevice, CsrOnHost, LayerSizes
from builders.vendor.flashinfer_parts.pinned import PLAN_MEMORY
from builders.vendor.flashinfer_parts.replan import can_replan, replan

OLDEST = (0, 6, 14)
BEFORE = (0, 8, 0)
DEFAULT_CUDA = Path("/usr/local/cuda")
"""Where a CUDA toolkit is looked for that no variable names."""
LSE_UNIT = math.log(2)
"""The wrappers return log2 of the sum; times this it is the natural logarithm."""


class FlashInferUnavailableError(ImportError):
    """FlashInfer is not there or cannot be used; the message says what to install or choose."""


@dataclass(frozen=True)
class FlashInfer:
    """The wrappers of the installed version, called in one way.

    Plans leave the softmax scale at 1: layers of a group may differ in it, so that ``run`` gets it,
    as ``q_scale``.
    """

    version: str
    prefill_cls: Any
    decode_cls: Any

    def prefill(
        self, workspace: torch.Tensor, kernel: str, buffers: CsrOnDevice | None = None
    ) -> Any:
        """A wrapper for rows of any length; with ``buffers`` for one CUDA graph.

        Args:
            workspace: uint8, zeroed, device.
            kernel: ``fa2`` or ``fa3``.
            buffers: of the graph's number of requests; None outside graphs.
        """
        given: dict[str, Any] = {}
        if buffers is not None:
            given = {
                "use_cuda_graph": True,
                "qo_indptr_buf": buffers.qo_indptr,
                "paged_kv_indptr_buf": buffers.kv_indptr,
                "paged_kv_indices_buf": buffers.kv_indices,
                "paged_kv_last_page_len_buf": buffers.last_page_len,
            }
        return self.prefill_cls(workspace, KV_LAYOUT, backend=kernel, **given)

    def decode(
        self,
        workspace: torch.Tensor,
        kernel: str,
        use_tensor_cores: bool,
        buffers: CsrOnDevice | None = None,
    ) -> Any:
        """A wrapper for rows of one token; arguments as of :meth:`prefill`.

        Args:
            workspace: uint8, zeroed, device.
            kernel: ``fa2``.
            use_tensor_cores: by the kernel of prefills, which packs query heads into a tile.
            buffers: of the graph's number of requests; None outside graphs.
        """
        given: dict[str, Any] = {}
        if buffers is not None:
            given = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": buffers.kv_indptr,
                "paged_kv_indices_buffer": buffers.kv_indices,
                "paged_kv_last_page_len_buffer": buffers.last_page_len,
            }
        return self.decode_cls(
            workspace, KV_LAYOUT, use_tensor_cores=use_tensor_cores, backend=kernel, **given
        )

    def replans(self, wrapper: Any) -> bool:
        """A wrapper's next plan goes past FlashInfer's own Python, if it is said where on the
        device its arrays are.
        """
        return can_replan(numbers_of(self.version), wrapper)

    def plan_prefill(
        self,
        wrapper: Any,
        csr: CsrOnHost,
        indices: torch.Tensor,
        sizes: LayerSizes,
        *,
        causal: bool = True,
        on_device: CsrOnDevice | None = None,
    ) -> None:
        """Plan rows of any length; the device is not waited for.

        A wrapper serves one layer's sizes.

        ``uniform_q_len`` of 0.7.2 is left alone: it is dropped for a batch with padding requests,
        and the tile of a captured kernel with it.

        Args:
            wrapper: of :meth:`prefill`.
            csr: lengths.
            indices: ``[>= csr.num_pages]`` int32 pages, device.
            sizes: the layer.
            causal: bottom-right aligned; else every key is seen.
            on_device: what ``csr`` and ``indices`` say, where :meth:`replans`; of a graph, the
                tensors that it was made with.
        """
        if on_device is not None and self._replan(wrapper, csr, on_device, sizes, causal):
            return
        PLAN_MEMORY.provide(wrapper)
        wrapper.plan(
            csr.qo_indptr,
            csr.kv_indptr,
            indices,
            csr.last_page_len,
            *_counts(sizes),
            causal=causal,
            seq_lens=csr.kv_lens,
            # A loop over tensor elements is spared.
            max_token_per_sequence=csr.max_query_len,
            **_options(sizes),
        )
        PLAN_MEMORY.hold(wrapper)

    def plan_decode(
        self,
        wrapper: Any,
        csr: CsrOnHost,
        indices: torch.Tensor,
        sizes: LayerSizes,
        *,
        on_device: CsrOnDevice | None = None,
    ) -> None:
        """Plan rows of one token; arguments as of :meth:`plan_prefill`."""
        if on_device is not None and self._replan(wrapper, csr, on_device, sizes, causal=False):
            return
        PLAN_MEMORY.provide(wrapper)
        wrapper.plan(
            csr.kv_indptr,
            indices,
            csr.last_page_len,
            *_counts(sizes),
            seq_lens=csr.kv_lens,
            **_options(sizes),
        )
        PLAN_MEMORY.hold(wrapper)

    def _replan(
        self, wrapper: Any, csr: CsrOnHost, on_device: CsrOnDevice, sizes: LayerSizes, causal: bool
    ) -> bool:
        """False where nothing is done."""
        version = numbers_of(self.version)
        if not can_replan(version, wrapper):
            return False
        PLAN_MEMORY.provide(wrapper)
        replan(version, wrapper, csr, on_device, sizes, causal=causal)
        PLAN_MEMORY.hold(wrapper)
        return True


def _counts(sizes: LayerSizes) -> tuple[int, int, int, int]:
    return sizes.num_heads, sizes.num_kv_heads, sizes.head_size, sizes.page_size


def _options(sizes: LayerSizes) -> dict[str, Any]:
    window = sizes.sliding_window
    return {
        "sm_scale": 1.0,
        # Keys before the token's own.
        "window_left": -1 if window is None else window - 1,
        "logits_soft_cap": sizes.logits_soft_cap,
        "q_data_type": sizes.query_dtype,
        "kv_data_type": sizes.kv_dtype,
        "o_data_type": sizes.query_dtype,
    }


@cache
def load() -> FlashInfer:
    """The wrappers of the installed FlashInfer.

    Raises:
        FlashInferUnavailableError: it is missing, of another version, or fails to import.
    """
    version, (prefill, decode) = checked_modules("prefill", "decode")
    with complete(version):
        return FlashInfer(
            version,
            prefill.BatchPrefillWithPagedKVCacheWrapper,
            decode.BatchDecodeWithPagedKVCacheWrapper,
        )


@cache
def load_calls() -> DirectCalls:
    """The direct calls of the installed FlashInfer; errors as of :func:`load`."""
    version, (prefill, decode) = checked_modules("prefill", "decode")
    with complete(version):
        xqa = decode.xqa_batch_decode_with_kv_cache
        takes_ragged = "q_cu_seq_lens" in inspect.signature(xqa).parameters
        return DirectCalls(
            version,
            decode.trtllm_batch_decode_with_kv_cache,
            prefill.trtllm_batch_context_with_kv_cache,
            prefill.trtllm_fmha_v2_prefill,
            xqa if takes_ragged else None,
        )


def checked_modules(*names: str) -> tuple[str, list[Any]]:
    """Version and modules of the installed FlashInfer.

    Args:
        names: of modules inside it.

    Raises:
        FlashInferUnavailableError: it is missing, of another version, or fails to import.
    """
    try:
        with warnings.catch_warnings():
            # Importing it warns of packages that nothing here needs.
            warnings.simplefilter("ignore")
            version = str(importlib.import_module("flashinfer").__version__)
            modules = [importlib.import_module(f"flashinfer.{name}") for name in names]
    except ModuleNotFoundError as error:
        if error.name == "flashinfer":
            raise FlashInferUnavailableError(
                "flashinfer is not installed: pip install flashinfer-python"
            ) from error
        raise FlashInferUnavailableError(f"flashinfer cannot be imported: {error}") from error
    except Exception as error:
        # Whatever a broken installation raises: some versions ask for a GPU's properties.
        kind = type(error).__name__
        raise FlashInferUnavailableError(
            f"flashinfer cannot be imported: {kind}: {error}"
        ) from error
    reason = version_reason(version)
    if reason is not None:
        raise FlashInferUnavailableError(reason)
    return version, modules


@contextmanager
def complete(version: str) -> Iterator[None]:
    """What a module lacks makes FlashInfer unavailable."""
    try:
        yield
    except AttributeError as error:
        raise FlashInferUnavailableError(f"flashinfer {version} is incomplete: {error}") from error


def version_reason(version: str) -> str | None:
    """Why a version is not used; None for one that is.

    Args:
        version: as FlashInfer says it, ``0.7.2.post1`` say.
    """
    if OLDEST <= numbers_of(version) < BEFORE:
        return None
    oldest, before = (".".join(map(str, one)) for one in (OLDEST, BEFORE))
    return (
        f"flashinfer {version} is installed; at least {oldest} and below {before} is needed: "
        f"pip install 'flashinfer-python>={oldest},<{before}'"
    )


def compiler_reason() -> str | None:
    """Why FlashInfer's kernels cannot be compiled here; None where they can, or need not be."""
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return None
    named = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    known = [DEFAULT_CUDA, *(Path(home) for home in named if home)]
    if shutil.which("nvcc") or any((home / "bin" / "nvcc").exists() for home in known):
        return None
    return (
        "flashinfer compiles its kernels with nvcc, which is not on PATH nor under CUDA_HOME: "
        "install the CUDA toolkit, or pip install flashinfer-jit-cache"
    )


def unavailable_reason(loader: Callable[[], object] = load) -> str | None:
    """Why FlashInfer cannot be used on this machine's GPU; None where it can, or without a GPU.

    Args:
        loader: :func:`load`, or :func:`load_calls`.
    """
    if not torch.cuda.is_available():
        return None
    try:
        loader()
    except FlashInferUnavailableError as error:
        return str(error)
    return compiler_reason()
