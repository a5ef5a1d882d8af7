"""FlashInfer as it is installed: whether it can be used, and what its versions call differently.

Nothing else in the library imports FlashInfer's attention. 0.6.14 to 0.7 are known. Of wrappers,
0.7 takes the options of a decode plan by keyword alone, and a trap of both is that the two wrappers
name graph buffers differently. Of the direct calls, 0.7 counts a row's finished parts outside the
workspace and masks what 0.6 gets wrong. A test binds every call to both.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

OLDEST = (0, 6, 14)
BEFORE = (0, 8, 0)
RECENT = (0, 7, 0)
"""Versions from here on have the newer direct calls."""
DEFAULT_CUDA = Path("/usr/local/cuda")
"""Where a CUDA toolkit is looked for that no variable names."""
LSE_UNIT = math.log(2)
"""The wrappers return log2 of the sum; times this it is the natural logarithm."""
KV_LAYOUT = "NHD"
"""Axes of a page as the wrappers are told them; where heads lie first, strides say so."""


class FlashInferUnavailableError(ImportError):
    """FlashInfer is not there or cannot be used; the message says what to install or choose."""


@dataclass(frozen=True)
class CsrOnHost:
    """Lengths of consecutive requests as ``plan`` reads them: all int32, on the host."""

    qo_indptr: torch.Tensor
    """``[R + 1]``: rows of the query."""
    kv_indptr: torch.Tensor
    """``[R + 1]``: pages."""
    last_page_len: torch.Tensor
    """``[R]``: tokens in the last page; 0 without pages."""
    kv_lens: torch.Tensor
    """``[R]``: tokens in all pages."""
    num_tokens: int
    """Rows of the query."""
    num_pages: int
    max_query_len: int


@dataclass(frozen=True)
class LayerSizes:
    """What ``plan`` asks about a layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    page_size: int
    query_dtype: torch.dtype
    kv_dtype: torch.dtype
    sliding_window: int | None
    """Visible keys, the token's own included."""
    logits_soft_cap: float | None


@dataclass(frozen=True)
class CsrBuffers:
    """Reserved device tensors, int32, whose addresses a CUDA graph keeps."""

    qo_indptr: torch.Tensor
    """``[R + 1]``."""
    kv_indptr: torch.Tensor
    """``[R + 1]``."""
    kv_indices: torch.Tensor
    """``[most pages]``."""
    last_page_len: torch.Tensor
    """``[R]``."""


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
        self, workspace: torch.Tensor, kernel: str, buffers: CsrBuffers | None = None
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
        buffers: CsrBuffers | None = None,
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

    def plan_prefill(
        self,
        wrapper: Any,
        csr: CsrOnHost,
        indices: torch.Tensor,
        sizes: LayerSizes,
        *,
        causal: bool = True,
    ) -> None:
        """Plan rows of any length; the device is not waited for.

        ``uniform_q_len`` of 0.7.2 is left alone: it is dropped for a batch with padding requests,
        and the tile of a captured kernel with it.

        Args:
            wrapper: of :meth:`prefill`.
            csr: lengths.
            indices: ``[csr.num_pages]`` int32 pages, device.
            sizes: the layer.
            causal: bottom-right aligned; else every key is seen.
        """
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

    def plan_decode(
        self, wrapper: Any, csr: CsrOnHost, indices: torch.Tensor, sizes: LayerSizes
    ) -> None:
        """Plan rows of one token; arguments as of :meth:`plan_prefill`."""
        wrapper.plan(
            csr.kv_indptr,
            indices,
            csr.last_page_len,
            *_counts(sizes),
            seq_lens=csr.kv_lens,
            **_options(sizes),
        )


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


@dataclass(frozen=True)
class PagedCall:
    """One direct call: consecutive requests over a paged cache."""

    query: torch.Tensor
    """``[T, H, D]``."""
    key: torch.Tensor
    """``[N, P, Hk, D]``, any strides with dense rows."""
    value: torch.Tensor
    """Likewise, in the strides of ``key``."""
    output: torch.Tensor
    """``[T, H, D]``, written."""
    pages: torch.Tensor
    """``[R, width]`` int32, contiguous."""
    kv_lens: torch.Tensor
    """``[R]`` int32, the call's own tokens included."""
    max_kv_len: int
    """Bound of ``kv_lens`` that no step changes: kernels choose their tiles by it."""
    workspace: torch.Tensor
    """uint8, zeroed when made, of this kernel alone."""
    counters: torch.Tensor
    """uint8, zeroed when made, likewise."""
    qk_scale: float
    """Multiplies the products of stored queries and keys."""
    v_scale: float
    """Multiplies the sums of stored values."""
    sliding_window: int | None
    """Visible keys, the token's own included."""
    sinks: torch.Tensor | None
    """``[H]`` fp32."""
    lse: torch.Tensor | None = None
    """``[T, H]`` fp32, written in log2, sinks aside."""

    @property
    def window_left(self) -> int:
        """Keys before the token's own; -1 without a window."""
        return -1 if self.sliding_window is None else self.sliding_window - 1


@dataclass(frozen=True)
class DirectCalls:
    """The functions of the installed version that need no plan, called in one way."""

    version: str
    decode_function: Any
    context_function: Any
    fmha_v2_function: Any

    @property
    def is_recent(self) -> bool:
        """0.7 or later."""
        return numbers_of(self.version) >= RECENT

    @property
    def verifies_windows(self) -> bool:
        """XQA places the window of each row of a verify; before, of the last one alone."""
        return self.is_recent

    @property
    def verifies_fp8(self) -> bool:
        """XQA over fp8 masks the rows of a verify right on Hopper; before, not in every shape."""
        return self.is_recent

    @property
    def prefills_fp8(self) -> bool:
        """fmha_v2 takes e4m3; before, it was known to hang on Hopper."""
        return self.is_recent

    def xqa(self, call: PagedCall, query_len: int, mask: torch.Tensor | None) -> None:
        """Decode or verify by XQA.

        Args:
            call: query, cache and output as XQA takes them: a dense query.
            query_len: tokens of every request.
            mask: ``[R, query_len, words]`` uint16 with more than one; see
                :func:`builders.trtllm_mha.causal_mask`.
        """
        self.decode_function(
            call.query,
            (call.key, call.value),
            call.workspace,
            call.pages,
            call.kv_lens.view(torch.uint32),
            call.max_kv_len,
            bmm1_scale=call.qk_scale,
            bmm2_scale=call.v_scale,
            window_left=call.window_left,
            out=call.output,
            sinks=call.sinks,
            kv_layout=KV_LAYOUT,
            backend="xqa",
            q_len_per_req=query_len,
            mask=mask,
        )

    def gen_decode(
        self, call: PagedCall, query_len: int, query_starts: torch.Tensor | None
    ) -> None:
        """Decode, verify or draft-extend by trtllm-gen.

        Args:
            call: everything else.
            query_len: tokens of every request, or the most of one.
            query_starts: ``[R + 1]`` int32 where requests differ; else None.
        """
        given: dict[str, Any] = {"q_len_per_req": query_len}
        if query_starts is not None:
            given = {"q_len_per_req": None, "max_q_len": query_len, "cum_seq_lens_q": query_starts}
        self.decode_function(
            call.query,
            (call.key, call.value),
            call.workspace,
            call.pages,
            call.kv_lens,
            call.max_kv_len,
            bmm1_scale=call.qk_scale,
            bmm2_scale=call.v_scale,
            window_left=call.window_left,
            out=call.output,
            sinks=call.sinks,
            kv_layout=KV_LAYOUT,
            backend="trtllm-gen",
            lse=call.lse,
            **given,
            **self._counters(call),
        )

    def gen_prefill(
        self,
        call: PagedCall,
        query_starts: torch.Tensor,
        kv_starts: torch.Tensor,
        max_query_len: int,
    ) -> None:
        """Prefills by trtllm-gen.

        Args:
            call: everything else.
            query_starts: ``[R + 1]`` int32.
            kv_starts: ``[R + 1]`` int32.
            max_query_len: bound of the requests' tokens.
        """
        self.context_function(
            call.query,
            (call.key, call.value),
            call.workspace,
            call.pages,
            call.kv_lens,
            max_query_len,
            call.max_kv_len,
            call.qk_scale,
            call.v_scale,
            len(call.kv_lens),
            query_starts,
            kv_starts,
            window_left=call.window_left,
            out=call.output,
            kv_layout=KV_LAYOUT,
            sinks=call.sinks,
            lse=call.lse,
            **self._counters(call),
        )

    def fmha_v2(
        self,
        call: PagedCall,
        query_starts: torch.Tensor,
        kv_starts: torch.Tensor,
        max_query_len: int,
    ) -> None:
        """Prefills by fmha_v2; arguments as of :meth:`gen_prefill`.

        Raises:
            ValueError: K and V of a block do not lie side by side without gaps.
        """
        stacked, layout = stacked_pages(call.key, call.value)
        # By name: a window of the own key alone would be taken for none.
        mask = "causal" if call.sliding_window is None else "sliding_window"
        self.fmha_v2_function(
            (call.query, stacked),
            f"Q_PAGED_KV_{layout}",
            call.workspace,
            call.kv_lens,
            max_query_len,
            call.max_kv_len,
            call.qk_scale,
            call.v_scale,
            len(call.kv_lens),
            query_starts,
            kv_starts,
            block_tables=call.pages,
            out=call.output,
            sinks=call.sinks,
            mask_mode=mask,
            window_left=call.window_left,
        )

    def _counters(self, call: PagedCall) -> dict[str, torch.Tensor]:
        """0.6 keeps them in the workspace's head; 0.7 would allocate them in each call."""
        return {"multi_ctas_kv_counter_buffer": call.counters} if self.is_recent else {}


def canonical_strides(pages: torch.Tensor) -> torch.Tensor:
    """The same pages, with the strides that a dense tensor has where an axis has one entry.

    Descriptors of the hardware refuse what torch may keep there, since it never uses it.

    Args:
        pages: ``[N, P, Hk, D]``.
    """
    blocks, size, heads, _ = pages.shape
    if blocks > 1 and heads > 1:
        return pages
    strides = list(pages.stride())
    if heads == 1:
        strides[2] = strides[1]
    if blocks == 1:
        strides[0] = max(size * strides[1], heads * strides[2])
    return pages.as_strided(pages.shape, strides)


def stacked_pages(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, str]:
    """K and V as one tensor of dense blocks, and the order of its axes: ``NHD`` or ``HND``.

    Args:
        key: ``[N, P, Hk, D]``.
        value: likewise.

    Returns:
        ``[N, 2, P, Hk, D]`` or ``[N, 2, Hk, P, D]``, contiguous.

    Raises:
        ValueError: blocks that are not ``2 * P * Hk * D`` elements, first all of K, then all of V.
    """
    blocks, size, heads, width = key.shape
    plane = size * heads * width
    apart = value.data_ptr() - key.data_ptr()
    dense = {"NHD": (heads * width, width), "HND": (width, size * width)}
    for layout, inner in dense.items():
        strides = (2 * plane, *inner, 1)
        fits = canonical_strides(key).stride() == canonical_strides(value).stride()
        own = _used_strides(key)
        fits &= own == tuple(s for s, n in zip(strides, key.shape, strict=True) if n > 1)
        if fits and apart == plane * key.element_size():
            order = (size, heads) if layout == "NHD" else (heads, size)
            return key.as_strided((blocks, 2, *order, width), _dense((2, *order, width))), layout
    raise ValueError(
        "kv_cache must be split and without padding for fmha_v2, [num_blocks, 2, block_size, "
        "num_kv_heads, head_size] dense in NHD or HND order, since it addresses pages by their "
        f"shape; got K and V {apart} bytes apart in strides {key.stride()}: choose another prefill "
        "backend for this layout"
    )


def _used_strides(pages: torch.Tensor) -> tuple[int, ...]:
    return tuple(
        stride for stride, extent in zip(pages.stride(), pages.shape, strict=True) if extent > 1
    )


def _dense(inner: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of ``[N, *inner]``."""
    strides = [1]
    for extent in reversed(inner):
        strides.append(strides[-1] * extent)
    return tuple(reversed(strides))


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
        return DirectCalls(
            version,
            decode.trtllm_batch_decode_with_kv_cache,
            prefill.trtllm_batch_context_with_kv_cache,
            prefill.trtllm_fmha_v2_prefill,
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


def numbers_of(version: str) -> tuple[int, ...]:
    """The three numbers of a version; none of one that has no such form."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(int(number) for number in numbers.groups()) if numbers else ()


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
