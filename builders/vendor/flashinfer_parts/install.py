"""The installed FlashInfer: whether it can be used, and its wrappers with one interface.

No other module of the library imports FlashInfer's attention. Versions 0.6.14 to 0.7 are known. 0.7
takes the options of a decode plan by keyword alone. In both, the two wrappers have different names
for graph buffers. The direct calls are in :mod:`builders.vendor.flashinfer_parts.calls`; this
module exports them too. A test binds every call to both versions.
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
"""Folder of the CUDA toolkit where no environment variable names one."""
LSE_UNIT = math.log(2)
"""Factor from the wrappers' log-sum-exp, which is in base 2, to the natural logarithm."""


class FlashInferUnavailableError(ImportError):
    """FlashInfer is missing or cannot be used; the message says what to install or choose."""


@dataclass(frozen=True)
class FlashInfer:
    """The wrappers of the installed version, with one interface for all versions.

    Plans have a softmax scale of 1, because layers of a group may differ in it. ``run`` gets the
    scale as ``q_scale``.
    """

    version: str
    prefill_cls: Any
    decode_cls: Any

    def prefill(
        self, workspace: torch.Tensor, kernel: str, buffers: CsrOnDevice | None = None
    ) -> Any:
        """Make a wrapper for requests of any length.

        Args:
            workspace: uint8, zeroed, device.
            kernel: ``fa2`` or ``fa3``.
            buffers: for a CUDA graph, buffers for its number of requests; None outside graphs.
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
        """Make a wrapper for requests of one token.

        Args:
            workspace: uint8, zeroed, device.
            kernel: ``fa2``.
            use_tensor_cores: decode with the prefill kernel, which packs query heads into a tile.
            buffers: for a CUDA graph, buffers for its number of requests; None outside graphs.
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
        """True where a wrapper's next plan can bypass FlashInfer's Python, given device arrays."""
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
        """Plan requests of any length, without waiting for the device.

        A wrapper serves one layer's sizes. ``uniform_q_len`` of 0.7.2 is not used: FlashInfer drops
        it for a batch with padding requests, and with it the tile of a captured kernel.

        Args:
            wrapper: a wrapper made by :meth:`prefill`.
            csr: lengths of the requests.
            indices: ``[>= csr.num_pages]`` int32 pages, device.
            sizes: the layer's sizes.
            causal: causal mask, aligned at the bottom right; else every key is seen.
            on_device: ``csr`` and ``indices`` on the device, used where :meth:`replans` is True;
                for a graph, the tensors that its wrapper was made with.
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
            # Spares FlashInfer a loop over the elements of a tensor.
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
        """Plan requests of one token, without waiting for the device.

        Args:
            wrapper: a wrapper made by :meth:`decode`.
            csr: lengths of the requests.
            indices: ``[>= csr.num_pages]`` int32 pages, device.
            sizes: the layer's sizes.
            on_device: ``csr`` and ``indices`` on the device, used where :meth:`replans` is True;
                for a graph, the tensors that its wrapper was made with.
        """
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
        """Plan without FlashInfer's own Python; returns False where that is impossible."""
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
        # FlashInfer counts the keys before the token's own.
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
        FlashInferUnavailableError: FlashInfer is missing, of another version, or fails to import.
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
    """The direct calls of the installed FlashInfer.

    Raises:
        FlashInferUnavailableError: FlashInfer is missing, of another version, or fails to import.
    """
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
        names: names of modules inside FlashInfer.

    Raises:
        FlashInferUnavailableError: FlashInfer is missing, of another version, or fails to import.
    """
    try:
        with warnings.catch_warnings():
            # On import FlashInfer warns of missing packages that this library does not need.
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
        # A broken installation may raise anything; some versions ask for a GPU's properties.
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
    """Turn an ``AttributeError`` for a missing function into ``FlashInferUnavailableError``."""
    try:
        yield
    except AttributeError as error:
        raise FlashInferUnavailableError(f"flashinfer {version} is incomplete: {error}") from error


def version_reason(version: str) -> str | None:
    """Why a version of FlashInfer is not used; None for a version that is used.

    Args:
        version: FlashInfer's version, for example ``0.7.2.post1``.
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
