"""FlashInfer's direct calls (TRT-LLM) without a GPU.

Every call is bound to a version's signature, checked against what its kernel needs, and computed in
torch from exactly the tensors that were passed. Rows that a kernel leaves undefined are NaN here,
and keys that a mask hides are multiplied by zero, as kernels do with the tiles they load.
Workspaces are left as kernels leave them: counters are zero, the rest is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from builders.vendor.flashinfer_parts import install as flashinfer_compat
from builders.vendor.flashinfer_parts.calls import DirectCalls
from builders.vendor.trtllm_parts import mha_buffers
from builders.vendor.trtllm_parts import mha_choice as trtllm_mha_choice
from specs.devices import Device
from tests.emulators.flashinfer_emulator import ALIGNMENT, ContractError, need
from tests.emulators.flashinfer_signatures import (
    BATCH_CONTEXT,
    BATCH_DECODE,
    FMHA_V2,
    FUNCTIONS,
    XQA_DECODE,
    function_signature,
)

VERSIONS = tuple(FUNCTIONS)
OLD, NEW = VERSIONS
WORKSPACE_BYTES = 1 << 14
HEAD_BYTES = 1 << 12
"""Stands for the 8 MiB of counters or semaphores that workspaces begin with."""
PAGES = (16, 32, 64, 128)
GEN_HEADS = (64, 128, 256)
FMHA_HEADS = {9: (32, 40, 48, 64, 80, 96, 104, 128, 160, 192, 256), 12: (64, 128, 256)}
E4M3 = torch.float8_e4m3fn
BYTE = 0xAB

Mutation = Callable[[str, dict[str, Any]], None]
"""Changes what a call was given, by argument; the first argument is the kernel called."""


@dataclass(frozen=True)
class Scored:
    """The inputs from which every kernel computes, once it has read its arguments."""

    query: Tensor
    key: Tensor
    """Keys ``[N, P, Hk, D]``."""
    value: Tensor
    pages: Tensor
    kv_lens: list[int]
    starts: list[int]
    scale: float
    v_scale: float
    window_left: int
    sinks: Tensor | None
    draft_mask: Tensor | None = None
    """Bool ``[T, Tq]``: which of its request's own tokens a row sees."""

    def attend(self, output: Tensor) -> Tensor:
        """Write ``output``, and return log2 of the softmax sums."""
        log2 = torch.full(self.query.shape[:2], math.nan)
        for row, (start, stop) in enumerate(pairwise(self.starts)):
            count, page = self.kv_lens[row], self.key.shape[1]
            used = self.pages[row, : -(-count // page)].long()
            inside = (used >= 0) & (used < len(self.key))
            need(bool(inside.all()), f"pages {used.tolist()} of {len(self.key)}")
            if stop == start or count == 0:
                continue
            output[start:stop], log2[start:stop] = self._request(row, start, stop, used, count)
        return log2

    def _request(
        self, row: int, start: int, stop: int, used: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        group = self.query.shape[1] // self.key.shape[2]
        k, v = (
            cache[used].flatten(0, 1)[:count].double().repeat_interleave(group, 1)
            for cache in (self.key, self.value)
        )
        length = stop - start
        scores = torch.einsum("qhd,khd->hqk", self.query[start:stop].double(), k) * self.scale
        back = torch.arange(length)[:, None] + count - length - torch.arange(count)
        visible = back >= 0
        if self.draft_mask is not None:
            visible[:, : count - length] = True
            visible[:, count - length :] = self.draft_mask[start:stop, :length]
        if self.window_left >= 0:
            visible &= back <= self.window_left
        scores = scores.masked_fill(~visible, -math.inf)
        sums = scores.logsumexp(-1)
        if self.sinks is not None:
            sums = torch.logaddexp(sums, self.sinks.double()[:, None])
        weights = (scores - sums[..., None]).exp()
        out = torch.einsum("hqk,khd->qhd", weights, v) * self.v_scale
        return out, (sums.T / math.log(2)).float()


@dataclass
class Emulator:
    """Emulates the three functions of one version on one GPU."""

    version: str
    device: Device
    mutation: Mutation | None = None
    owners: dict[int, tuple[str, Tensor]] = field(default_factory=dict)
    """The kernel that first used each piece of scratch, with the piece, so that it stays alive."""
    called: list[str] = field(default_factory=list)

    @property
    def major(self) -> int:
        assert self.device.compute_capability is not None
        return self.device.compute_capability.major

    @property
    def is_old(self) -> bool:
        return self.version == OLD

    def _given(self, function: str, args: Any, kwargs: Any, kernel: str = "") -> dict[str, Any]:
        given = dict(function_signature(self.version, function).bind(*args, **kwargs).arguments)
        name = kernel or {"xqa": "xqa", "trtllm-gen": "gen_decode"}.get(
            given.get("backend", ""), "auto"
        )
        if self.mutation is not None:
            self.mutation(name, given)
        self.called.append(name)
        return given

    def decode(self, *args: Any, **kwargs: Any) -> Tensor:
        """Emulates ``trtllm_batch_decode_with_kv_cache``."""
        given = self._given(BATCH_DECODE, args, kwargs)
        backend = given.get("backend")
        need(backend in ("xqa", "trtllm-gen"), f"backend {backend}")
        return self._xqa(given) if backend == "xqa" else self._gen_decode(given)

    def ragged_xqa(self, *args: Any, **kwargs: Any) -> Tensor:
        """Emulates ``xqa_batch_decode_with_kv_cache``, called for requests of different lengths."""
        given = self._given(XQA_DECODE, args, kwargs, "ragged_xqa")
        query, lens = given["query"], given["seq_lens"]
        need(given.get("q_cu_seq_lens") is not None, "requests of one length have the other call")
        bounds = _starts("q_cu_seq_lens", given["q_cu_seq_lens"], len(lens), len(query))
        longest = max(stop - start for start, stop in pairwise(bounds))
        need(given["q_len_per_req"] > 1, "no drafts")
        need(longest <= given["q_len_per_req"], f"q_len_per_req below {longest}")
        return self._xqa(given, bounds)

    def _xqa(self, given: dict[str, Any], bounds: list[int] | None = None) -> Tensor:
        need(self.major in (9, 10, 12), f"XQA on {self.device.name}")
        for name in ("max_q_len", "cum_seq_lens_q", "lse"):
            need(given.get(name) is None, f"XQA takes no {name}")
        need(not given.get("return_lse"), "XQA takes no return_lse")
        query, length = given["query"], given["q_len_per_req"]
        key, value = _nhd(given)
        need(query.dtype in (torch.float16, torch.bfloat16), f"query of {query.dtype}")
        need(key.dtype in (query.dtype, E4M3), f"cache of {key.dtype} for {query.dtype}")
        need(query.is_contiguous(), "XQA ignores the query's strides")
        need(16 <= key.shape[-1] <= 256 and key.shape[-1] % 16 == 0, "head size")
        whole = all(stride % key.shape[-1] == 0 for stride in key.stride()[:-1])
        need(whole, f"strides {key.stride()}: XQA counts them in rows")
        self._check_cache(key, value, query)
        _check_output(given["out"], query, query.dtype)
        lens = given["seq_lens"]
        need(lens.dtype == torch.uint32, f"seq_lens of {lens.dtype}")
        lens = lens.view(torch.int32)
        self._check_tables(given["block_tables"], lens, key, given["max_seq_len"])
        starts = bounds or [row * length for row in range(len(lens) + 1)]
        need(len(query) == starts[-1], f"{len(query)} rows of {len(lens)} x {length}")
        short = [n for n, (a, b) in zip(lens.tolist(), pairwise(starts), strict=True) if n < b - a]
        need(not short, f"lengths {short} below their rows")
        window = given.get("window_left", -1)
        mask = given.get("mask")
        if length > 1:
            need(mask is not None, "no mask")
            need(window < 0 or not self.is_old, "0.6 puts one window over all rows")
            is_fp8 = key.dtype == E4M3
            need(not (is_fp8 and self.is_old and self.major == 9), "0.6 verifies fp8 wrong")
            shape = (len(lens), length) if bounds is None else (len(query),)
            mask = _unpacked(mask, shape, length).view(len(query), length)
        else:
            need(mask is None, "a mask without drafts")
        self._scratch("xqa", given["workspace_buffer"], keeps_head=True)
        self._attend(given, key, value, lens.tolist(), starts, window, mask)
        return given["out"]

    def _gen_decode(self, given: dict[str, Any]) -> Tensor:
        need(self.major == 10, f"trtllm-gen on {self.device.name}")
        need(given.get("mask") is None, "trtllm-gen takes no mask")
        query, lens = given["query"], given["seq_lens"]
        key, value = self._check_gen(given)
        starts = given.get("cum_seq_lens_q")
        if starts is None:
            length = given["q_len_per_req"]
            need(len(query) == length * len(lens), f"{len(query)} rows of {len(lens)} x {length}")
            bounds = [row * length for row in range(len(lens) + 1)]
        else:
            need(given.get("q_len_per_req", 1) is None, "q_len_per_req beside cum_seq_lens_q")
            bounds = _starts("cum_seq_lens_q", starts, len(lens), len(query))
            longest = max(stop - start for start, stop in pairwise(bounds))
            need(longest <= given["max_q_len"], f"max_q_len below {longest}")
        need(given["max_seq_len"] >= int(lens.max()), "max_seq_len below a length")
        short = [n for n, (a, b) in zip(lens.tolist(), pairwise(bounds), strict=True) if n < b - a]
        need(not short, f"lengths {short} below their rows")
        self._scratch("gen_decode", given["workspace_buffer"], keeps_head=self.is_old)
        self._counters("gen_decode", given, len(lens))
        window = given.get("window_left", -1)
        log2 = self._attend(given, key, value, lens.tolist(), bounds, window)
        if given.get("lse") is not None:
            given["lse"][:] = log2
        return given["out"]

    def context(self, *args: Any, **kwargs: Any) -> Tensor:
        """Emulates ``trtllm_batch_context_with_kv_cache``."""
        given = self._given(BATCH_CONTEXT, args, kwargs, "gen_prefill")
        need(self.major == 10, f"trtllm-gen on {self.device.name}")
        query, lens = given["query"], given["seq_lens"]
        key, value = self._check_gen(given)
        bounds = self._check_ragged(given, lens, len(query))
        need(given.get("causal", True), "not causal")
        self._scratch("gen_prefill", given["workspace_buffer"], keeps_head=False)
        self._counters("gen_prefill", given, len(lens))
        window = given.get("window_left", -1)
        log2 = self._attend(given, key, value, lens.tolist(), bounds, window)
        if given.get("lse") is not None:
            given["lse"][:] = log2
        return given["out"]

    def fmha_v2(self, *args: Any, **kwargs: Any) -> Tensor:
        """Emulates ``trtllm_fmha_v2_prefill``."""
        given = self._given(FMHA_V2, args, kwargs, "fmha_v2")
        need(self.major in FMHA_HEADS, f"fmha_v2 on {self.device.name}")
        (query, stacked), layout = given["qkv"], given["input_layout"]
        need(layout in ("Q_PAGED_KV_NHD", "Q_PAGED_KV_HND"), f"layout {layout}")
        need(stacked.dim() == 5 and stacked.shape[1] == 2, f"pages {[*stacked.shape]}")
        # The kernel computes addresses from the shape.
        need(stacked.is_contiguous(), "pages are strided")
        key, value = stacked.unbind(1)
        if layout.endswith("HND"):
            key, value = key.transpose(1, 2), value.transpose(1, 2)
        need(query.is_contiguous(), "fmha_v2 ignores the query's strides")
        need(query.dtype in (torch.bfloat16, E4M3), f"query of {query.dtype}")
        need(key.dtype == query.dtype, f"cache of {key.dtype} for {query.dtype}")
        need(query.dtype != E4M3 or self.major == 9, "e4m3 off Hopper")
        need(query.dtype != E4M3 or not self.is_old, "e4m3 may hang")
        need(query.shape[-1] in FMHA_HEADS[self.major], f"head size {query.shape[-1]}")
        self._check_cache(key, value, query)
        _check_output(given["out"], query, torch.bfloat16)
        lens = given["seq_lens"]
        need(lens.dtype == torch.int32, f"seq_lens of {lens.dtype}")
        self._check_tables(given["block_tables"], lens, key, given["max_kv_len"])
        _check_tails(key, value, given["block_tables"], lens)
        bounds = self._check_ragged(given, lens, len(query))
        need(given["max_kv_len"] >= given["max_q_len"], "max_kv_len below max_q_len")
        self._scratch("fmha_v2", given["workspace_buffer"], keeps_head=False)
        window, mode = given.get("window_left", -1), given.get("mask_mode", "causal")
        need(mode in ("causal", "sliding_window"), f"mask {mode}")
        if mode == "causal" and not 0 < window < given["max_kv_len"]:
            window = -1
        self._attend(given, key, value, lens.tolist(), bounds, window, query=query)
        return given["out"]

    # -- what calls have in common

    def _check_gen(self, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        query, lens = given["query"], given["seq_lens"]
        key, value = _nhd(given)
        is_fp8 = key.dtype == E4M3
        need(query.dtype == key.dtype, f"cache of {key.dtype} for {query.dtype}")
        need(query.dtype in (torch.float16, torch.bfloat16, E4M3), f"query of {query.dtype}")
        need(query.stride(-1) == 1, "query rows are strided")
        need(key.shape[-1] in GEN_HEADS, f"head size {key.shape[-1]}")
        group = query.shape[1] // key.shape[2]
        need(group > 1 or key.shape[1] < 128, "missing kernel: pages of 128 without a group")
        self._check_cache(key, value, query)
        out = given["out"]
        _check_output(out, query, out.dtype if is_fp8 else query.dtype)
        need(out.dtype in (torch.float16, torch.bfloat16), f"output of {out.dtype}")
        need(lens.dtype == torch.int32, f"seq_lens of {lens.dtype}")
        most = given["max_kv_len"] if "max_kv_len" in given else given["max_seq_len"]
        self._check_tables(given["block_tables"], lens, key, most)
        lse = given.get("lse")
        if lse is not None:
            need(lse.shape == query.shape[:2] and lse.dtype == torch.float32, "lse")
        need(not given.get("return_lse"), "the log-sum-exp would be returned")
        return key, value

    def _check_cache(self, key: Tensor, value: Tensor, query: Tensor) -> None:
        need(key.shape == value.shape and key.dtype == value.dtype, "keys unlike values")
        need(key.stride() == value.stride(), "keys and values of other strides")
        need(key.stride(-1) == 1, "rows are strided")
        size = key.element_size()
        for stride in key.stride()[:-1]:
            need(stride * size % ALIGNMENT == 0, f"stride of {stride * size} bytes")
        for rows in (key, value):
            need(rows.data_ptr() % ALIGNMENT == 0, "cache is not aligned")
        need(key.shape[1] in PAGES, f"pages of {key.shape[1]}")
        need(query.shape[2] == key.shape[3], "head sizes differ")
        need(query.shape[1] % key.shape[2] == 0, f"{query.shape[1]} heads over {key.shape[2]}")

    @staticmethod
    def _check_tables(tables: Tensor, lens: Tensor, key: Tensor, most: int) -> None:
        need(tables.dtype == torch.int32, f"block_tables of {tables.dtype}")
        need(tables.dim() == 2 and tables.is_contiguous(), "block_tables are strided")
        need(lens.dim() == 1 and lens.is_contiguous(), "lengths are strided")
        need(len(tables) == len(lens) > 0, f"{len(tables)} tables for {len(lens)} lengths")
        room = tables.shape[1] * key.shape[1]
        need(int(lens.max()) <= room, f"lengths {lens.tolist()} beyond tables for {room}")
        need(int(lens.max()) <= most, f"lengths {lens.tolist()} beyond the bound {most}")

    @staticmethod
    def _check_ragged(given: dict[str, Any], lens: Tensor, num_rows: int) -> list[int]:
        """Check the rows of each request; kernels count its keys by the difference of starts."""
        need(given["batch_size"] == len(lens), f"batch_size {given['batch_size']}")
        bounds = _starts("cum_seq_lens_q", given["cum_seq_lens_q"], len(lens), num_rows)
        kv = _starts("cum_seq_lens_kv", given["cum_seq_lens_kv"], len(lens), int(lens.sum()))
        for length, (start, stop), (low, high) in zip(
            lens.tolist(), pairwise(bounds), pairwise(kv), strict=True
        ):
            need(high - low == length, f"cum_seq_lens_kv {kv} for {lens.tolist()}")
            need(stop - start <= max(length, given["max_q_len"] * (length == 0)), "rows past keys")
            need(stop - start <= given["max_q_len"], "max_q_len below a request's rows")
        return bounds

    def _scratch(self, kernel: str, scratch: Tensor, keeps_head: bool) -> None:
        """Scratch must be zero at first use; afterwards the kernel's counters are zero again."""
        need(scratch.dtype == torch.uint8 and scratch.is_contiguous(), "workspace's type")
        need(scratch.numel() >= WORKSPACE_BYTES, "workspace is too small")
        owner, _ = self.owners.setdefault(scratch.data_ptr(), (kernel, scratch))
        need(owner == kernel, f"workspace of {owner} given to {kernel}")
        marked = scratch[-1] == BYTE
        head = scratch[:HEAD_BYTES] if marked else scratch
        if keeps_head or not marked:
            need(not head.any(), "workspace is not zero")
        scratch[HEAD_BYTES if keeps_head else 0 :] = BYTE

    def _counters(self, kernel: str, given: dict[str, Any], num_reqs: int) -> None:
        if self.is_old:
            return
        counters = given.get("multi_ctas_kv_counter_buffer")
        need(counters is not None, "counters would be allocated in every call")
        assert counters is not None
        owner, _ = self.owners.setdefault(counters.data_ptr(), (kernel, counters))
        need(owner == kernel, f"counters of {owner} given to {kernel}")
        need(not counters.any(), "counters are not zero")
        entries = max(num_reqs * given["query"].shape[1], self.device.num_multiprocessors or 0)
        need(counters.numel() >= -(-entries // 8) * 32, "too few counters")

    def _attend(
        self,
        given: dict[str, Any],
        key: Tensor,
        value: Tensor,
        lens: list[int],
        starts: list[int],
        window: int,
        mask: Tensor | None = None,
        query: Tensor | None = None,
    ) -> Tensor:
        query = given["query"] if query is None else query
        for name in ("bmm1_scale", "bmm2_scale"):
            need(isinstance(given[name], float), f"{name} is {type(given[name]).__name__}")
        need(window >= -1, f"window_left {window}")
        sinks = given.get("sinks")
        if sinks is not None:
            need(sinks.dtype == torch.float32, f"sinks of {sinks.dtype}")
            need(sinks.shape == (query.shape[1],) and sinks.is_contiguous(), "sinks' shape")
        given["out"].fill_(math.nan)
        tables = given["block_tables"]
        scored = Scored(
            *(query, key, value, tables, lens, starts),
            *(given["bmm1_scale"], given["bmm2_scale"], window, sinks, mask),
        )
        return scored.attend(given["out"])


def _check_tails(key: Tensor, value: Tensor, tables: Tensor, lens: Tensor) -> None:
    """After a request's last key, fmha_v2 multiplies the page's contents by a weight of zero."""
    page_size = key.shape[1]
    for row, kv_len in zip(tables.tolist(), lens.tolist(), strict=True):
        if kv_len % page_size:
            page = row[kv_len // page_size]
            need(0 <= page < len(key), f"page {page} of {len(key)}")
            for rows in (key, value):
                tail = rows[page, kv_len % page_size :].float()
                need(bool(tail.isfinite().all()), "NaN behind the last key")


def _nhd(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    key, value = given["kv_cache"]
    need(given.get("kv_layout") == "NHD", "layouts are said by strides here")
    return key, value


def _check_output(out: Tensor, query: Tensor, dtype: torch.dtype) -> None:
    need(out is not None, "output would be allocated")
    need(out.shape == query.shape and out.dtype == dtype, f"output {[*out.shape]} of {out.dtype}")
    need(out.is_contiguous(), "output is strided")


def _starts(name: str, starts: Tensor, num_reqs: int, end: int) -> list[int]:
    need(starts.dtype == torch.int32 and starts.is_contiguous(), f"{name} of {starts.dtype}")
    values: list[int] = starts.tolist()
    need(len(values) == num_reqs + 1, f"{name} of {len(values) - 1} requests, not {num_reqs}")
    need(values[0] == 0 and values[-1] == end, f"{name} {values} to {end}")
    need(values == sorted(values), f"{name} decreases")
    return values


def _unpacked(mask: Tensor, shape: tuple[int, ...], length: int) -> Tensor:
    words = -(-length // 32) * 2
    need(mask.dtype == torch.uint16 and mask.is_contiguous(), f"mask of {mask.dtype}")
    need(mask.shape == (*shape, words), f"mask {[*mask.shape]}")
    bits = mask.to(torch.int32)[..., None] >> torch.arange(16) & 1
    flat = bits.flatten(-2).bool()
    need(not flat[..., length:].any(), "mask has bits past the drafts")
    return flat[..., :length]


@contextmanager
def emulated(
    device: Device, version: str = VERSIONS[0], mutation: Mutation | None = None
) -> Iterator[Emulator]:
    """Put this module's calls on ``device`` in FlashInfer's place; every call goes through
    ``mutation``.
    """
    emulator = Emulator(version, device, mutation)
    ragged = "q_cu_seq_lens" in function_signature(version, XQA_DECODE).parameters
    calls = DirectCalls(
        *(version, emulator.decode, emulator.context, emulator.fmha_v2),
        emulator.ragged_xqa if ragged else None,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashinfer_compat, "load_calls", lambda: calls)
        patch.setattr(mha_buffers, "WORKSPACE_BYTES", WORKSPACE_BYTES)
        patch.setattr(trtllm_mha_choice, "capability_of", lambda _: device.compute_capability)
        yield emulator


__all__ = ["ContractError", "Emulator", "Mutation", "emulated"]
