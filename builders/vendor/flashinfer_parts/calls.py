"""FlashInfer's functions that need no plan, called in one way whatever version is installed.

0.7 counts a row's finished parts outside the workspace and masks what 0.6 gets wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

RECENT = (0, 7, 0)
"""Versions from here on have the newer direct calls."""
KV_LAYOUT = "NHD"
"""Axes of a page as FlashInfer is told them; where heads lie first, strides say so."""


@cache
def numbers_of(version: str) -> tuple[int, ...]:
    """The three numbers of a version; none of one that has no such form."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(int(number) for number in numbers.groups()) if numbers else ()


@dataclass
class StepCall:
    """What a direct call over consecutive requests is given of the step, whatever the layer."""

    pages: torch.Tensor
    """``[R, width]`` int32, contiguous: the first page holds the first key of ``kv_lens``."""
    kv_lens: torch.Tensor
    """``[R]`` int32, of XQA uint32, which reads it so: keys that the table lists, the call's own
    tokens included."""
    max_kv_len: int
    """Bound of ``kv_lens`` that no step changes: kernels choose their tiles by it."""
    max_query_len: int
    """Tokens of every request, or the most of one; XQA has a kernel for each of its verifies."""
    workspace: torch.Tensor
    """uint8, zeroed when made, of this kernel and phase alone."""
    counters: torch.Tensor
    """uint8, zeroed when made, likewise."""
    mask: torch.Tensor | None
    """``[R, Tq, words]`` uint16, or ``[T, words]`` with ``query_starts``: bits of the call's own
    keys that a row sees, see :func:`builders.vendor.trtllm_parts.mha_split.causal_mask`; XQA's
    verify."""
    query_starts: torch.Tensor | None
    """``[R + 1]`` int32, from 0; None of decodes that have ``max_query_len`` tokens each."""
    kv_starts: torch.Tensor | None
    """``[R + 1]`` int32, from 0; of prefills alone."""


@dataclass(slots=True)
class LayerCall:
    """What it is given of the layer."""

    query: torch.Tensor
    """``[T, H, D]``."""
    key: torch.Tensor
    """``[N, P, Hk, D]``, any strides with dense rows."""
    value: torch.Tensor
    """Likewise, in the strides of ``key``."""
    output: torch.Tensor
    """``[T, H, D]``, written."""
    qk_scale: float
    """Multiplies the products of stored queries and keys."""
    v_scale: float
    """Multiplies the sums of stored values."""
    window_left: int
    """Visible keys before the token's own; -1 without a window."""
    sinks: torch.Tensor | None
    """``[H]`` fp32."""
    lse: torch.Tensor | None
    """``[T, H]`` fp32, written in log2, sinks aside."""


@dataclass(frozen=True)
class DirectCalls:
    """The functions of the installed version that need no plan, called in one way."""

    version: str
    decode_function: Any
    context_function: Any
    fmha_v2_function: Any
    ragged_xqa_function: Any = None
    """Decode by XQA that is told each request's number of tokens; None before 0.7.2."""

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
    def verifies_ragged(self) -> bool:
        """XQA takes requests of different numbers of tokens in one call."""
        return self.ragged_xqa_function is not None

    @property
    def prefills_fp8(self) -> bool:
        """fmha_v2 takes e4m3; before, it was known to hang on Hopper."""
        return self.is_recent

    def xqa(self, step: StepCall, call: LayerCall) -> None:
        """Decode or verify by XQA, which wants a dense query."""
        # In one piece: at batch 1 the host's time is all that a layer waits for.
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
        """Verify by XQA where requests have different numbers of tokens; a dense query too."""
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
        """Prefills by trtllm-gen."""
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
        """Prefills by fmha_v2.

        Raises:
            ValueError: K and V of a block do not lie side by side without gaps.
        """
        stacked, layout = stacked_pages(call.key, call.value)
        # By name: a window of the own key alone would be taken for none.
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
        """0.6 keeps them in the workspace's head; 0.7 would allocate them in each call."""
        return {"multi_ctas_kv_counter_buffer": step.counters} if self.is_recent else {}


def _cached(step: StepCall, call: LayerCall) -> tuple[Any, ...]:
    """What calls are given by position."""
    cache = call.key, call.value
    return call.query, cache, step.workspace, step.pages, step.kv_lens, step.max_kv_len


def _common(call: LayerCall) -> dict[str, Any]:
    """What decodes are given by name."""
    return {
        "bmm1_scale": call.qk_scale,
        "bmm2_scale": call.v_scale,
        "window_left": call.window_left,
        "out": call.output,
        "sinks": call.sinks,
        "kv_layout": KV_LAYOUT,
    }


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
