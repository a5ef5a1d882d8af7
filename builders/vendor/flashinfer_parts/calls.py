"""FlashInfer's functions that need no plan, with one interface for every installed version.

0.7 differs from 0.6 in two ways: its counters lie outside of the workspace, and its masks are right
in shapes where those of 0.6 are wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

RECENT = (0, 7, 0)
"""First version with the newer direct calls."""
KV_LAYOUT = "NHD"
"""Order of a page's axes that FlashInfer is given; strides tell it where heads come first."""


@cache
def numbers_of(version: str) -> tuple[int, ...]:
    """The three numbers of a version; empty for a version of another form."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(int(number) for number in numbers.groups()) if numbers else ()


@dataclass
class StepCall:
    """The step's arguments of a direct call over consecutive requests, equal for all layers."""

    pages: torch.Tensor
    """``[R, width]`` int32, contiguous; a request's first page holds its first listed key."""
    kv_lens: torch.Tensor
    """``[R]`` int32, or uint32 for XQA: listed keys of each request, the call's own tokens
    included."""
    max_kv_len: int
    """Bound of ``kv_lens``, equal in all steps, because kernels choose their tiles by it."""
    max_query_len: int
    """Tokens of every request, or of the longest one; XQA compiles a kernel for each number."""
    workspace: torch.Tensor
    """uint8 scratch of this kernel and phase alone, zeroed when made."""
    counters: torch.Tensor
    """uint8 counters of this kernel and phase alone, zeroed when made."""
    mask: torch.Tensor | None
    """``[R, Tq, words]`` uint16, or ``[T, words]`` with ``query_starts``, for XQA's verify: bits of
    the call's own tokens that a row sees
    (:func:`builders.vendor.trtllm_parts.mha_split.causal_mask`)."""
    query_starts: torch.Tensor | None
    """``[R + 1]`` int32, from 0; None for decodes with ``max_query_len`` tokens each."""
    kv_starts: torch.Tensor | None
    """``[R + 1]`` int32, from 0; None for decodes."""


@dataclass(slots=True)
class LayerCall:
    """The layer's arguments of a direct call."""

    query: torch.Tensor
    """``[T, H, D]`` queries of the requests' new tokens."""
    key: torch.Tensor
    """``[N, P, Hk, D]``, any strides with dense rows."""
    value: torch.Tensor
    """``[N, P, Hk, D]``, in the strides of ``key``."""
    output: torch.Tensor
    """``[T, H, D]``, written."""
    qk_scale: float
    """Multiplies the products of stored queries and keys."""
    v_scale: float
    """Multiplies the sums of stored values."""
    window_left: int
    """Visible keys before the token's own; -1 without a window."""
    sinks: torch.Tensor | None
    """``[H]`` fp32 sink logits; None without sinks."""
    lse: torch.Tensor | None
    """``[T, H]`` fp32, written in base 2, without the sinks."""


@dataclass(frozen=True)
class DirectCalls:
    """The functions of the installed version that need no plan, with one interface."""

    version: str
    decode_function: Any
    context_function: Any
    fmha_v2_function: Any
    ragged_xqa_function: Any = None
    """XQA's decode function for requests with different numbers of tokens; None before 0.7.2."""

    @property
    def is_recent(self) -> bool:
        """True for version 0.7 or later."""
        return numbers_of(self.version) >= RECENT

    @property
    def verifies_windows(self) -> bool:
        """True where XQA masks every row's window in a verify; 0.6 masks the last row's alone."""
        return self.is_recent

    @property
    def verifies_fp8(self) -> bool:
        """True where XQA over fp8 masks verifies right on Hopper; 0.6 does not in some shapes."""
        return self.is_recent

    @property
    def verifies_ragged(self) -> bool:
        """True where XQA takes requests with different numbers of tokens in one call."""
        return self.ragged_xqa_function is not None

    @property
    def prefills_fp8(self) -> bool:
        """True where fmha_v2 takes e4m3; that of 0.6 is known to hang on Hopper."""
        return self.is_recent

    def xqa(self, step: StepCall, call: LayerCall) -> None:
        """Decode or verify by XQA; the query must be dense."""
        # Arguments are written out: at batch 1 a layer waits for the host, and helpers cost time.
        self.decode_function(
            call.query,
            (call.key, call.value),
            step.workspace,
            step.pages,
            step.kv_lens,
            step.max_kv_len,
            bmm1_scale=call.qk_scale,
            bmm2_scale=call.v_scale,
            window_left=call.window_left,
            out=call.output,
            sinks=call.sinks,
            kv_layout=KV_LAYOUT,
            backend="xqa",
            q_len_per_req=step.max_query_len,
            mask=step.mask,
        )

    def ragged_xqa(self, step: StepCall, call: LayerCall) -> None:
        """Verify by XQA with different numbers of tokens per request; the query must be dense."""
        self.ragged_xqa_function(
            *_cached(step, call),
            **_common(call),
            q_len_per_req=step.max_query_len,
            mask=step.mask,
            q_cu_seq_lens=step.query_starts,
        )

    def gen_decode(self, step: StepCall, call: LayerCall) -> None:
        """Decode, verify or draft-extend by trtllm-gen."""
        length, starts = step.max_query_len, step.query_starts
        given: dict[str, Any] = {"q_len_per_req": length}
        if starts is not None:
            given = {"q_len_per_req": None, "max_q_len": length, "cum_seq_lens_q": starts}
        self.decode_function(
            *_cached(step, call),
            **_common(call),
            backend="trtllm-gen",
            lse=call.lse,
            **given,
            **self._counters(step),
        )

    def gen_prefill(self, step: StepCall, call: LayerCall) -> None:
        """Prefill by trtllm-gen."""
        self.context_function(
            *_cached(step, call)[:-1],
            step.max_query_len,
            step.max_kv_len,
            call.qk_scale,
            call.v_scale,
            len(step.kv_lens),
            step.query_starts,
            step.kv_starts,
            window_left=call.window_left,
            out=call.output,
            kv_layout=KV_LAYOUT,
            sinks=call.sinks,
            lse=call.lse,
            **self._counters(step),
        )

    def fmha_v2(self, step: StepCall, call: LayerCall) -> None:
        """Prefill by fmha_v2.

        Raises:
            ValueError: K and V of a block do not lie side by side without gaps.
        """
        stacked, layout = stacked_pages(call.key, call.value)
        # The mask is named, because fmha_v2 would take a window of a single key for no window.
        mask = "causal" if call.window_left < 0 else "sliding_window"
        self.fmha_v2_function(
            (call.query, stacked),
            f"Q_PAGED_KV_{layout}",
            step.workspace,
            step.kv_lens,
            step.max_query_len,
            step.max_kv_len,
            call.qk_scale,
            call.v_scale,
            len(step.kv_lens),
            step.query_starts,
            step.kv_starts,
            block_tables=step.pages,
            out=call.output,
            sinks=call.sinks,
            mask_mode=mask,
            window_left=call.window_left,
        )

    def _counters(self, step: StepCall) -> dict[str, torch.Tensor]:
        """The counter argument of 0.7, which else allocates counters in every call; none for 0.6,
        which has counters at the start of the workspace.
        """
        return {"multi_ctas_kv_counter_buffer": step.counters} if self.is_recent else {}


def _cached(step: StepCall, call: LayerCall) -> tuple[Any, ...]:
    """Positional arguments of the direct calls."""
    cache = call.key, call.value
    return call.query, cache, step.workspace, step.pages, step.kv_lens, step.max_kv_len


def _common(call: LayerCall) -> dict[str, Any]:
    """Keyword arguments of the decode calls."""
    return {
        "bmm1_scale": call.qk_scale,
        "bmm2_scale": call.v_scale,
        "window_left": call.window_left,
        "out": call.output,
        "sinks": call.sinks,
        "kv_layout": KV_LAYOUT,
    }


def canonical_strides(pages: torch.Tensor) -> torch.Tensor:
    """View pages with the strides of a dense tensor on axes that have one entry.

    torch may keep any stride on such an axis, as it never uses it, but hardware tensor descriptors
    refuse some.

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
        value: ``[N, P, Hk, D]``.

    Returns:
        ``[N, 2, P, Hk, D]`` or ``[N, 2, Hk, P, D]``, contiguous.

    Raises:
        ValueError: a block is not ``2 * P * Hk * D`` dense elements, first all of K, then all of V.
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
    """Strides of a dense tensor ``[N, *inner]``."""
    strides = [1]
    for extent in reversed(inner):
        strides.append(strides[-1] * extent)
    return tuple(reversed(strides))
