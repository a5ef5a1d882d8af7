"""FlashInfer's direct calls of latent attention without a GPU.

Every call is bound to a version's signature, checked against what its kernel needs, and computed in
torch from exactly the tensors passed. What a kernel leaves undefined is NaN here. Where FlashInfer
is installed, its own check of shapes runs on the arguments.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from builders.vendor import trtllm_mla
from builders.vendor.trtllm_parts import mha_choice as trtllm_mha_choice
from builders.vendor.trtllm_parts import mla_calls as trtllm_mla_calls
from builders.vendor.trtllm_parts.mla_calls import LatentCalls
from specs.devices import KNOWN_DEVICES, Device
from tests.emulators.flashinfer_emulator import ContractError, need
from tests.emulators.flashinfer_signatures import installed_version, parsed, written

DECODE, RAGGED = "trtllm_batch_decode_with_kv_cache_mla", "trtllm_ragged_attention_deepseek"
MODULES = {DECODE: "mla/_core.py", RAGGED: "prefill.py"}
OLD, NEW = VERSIONS = ("0.6.14", "0.7.2.post1")
_DECODE = (
    "query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, "
    "block_tables, seq_lens, max_seq_len, sparse_mla_top_k=_, out=_, bmm1_scale=_, bmm2_scale=_, "
    "sinks=_, skip_softmax_threshold_scale_factor=_, enable_pdl=_, backend=_, is_var_seq=_, "
    "uses_shared_paged_kv_idx=_, lse=_, return_lse=_, cute_dsl_impl=_, kv_scale_format=_, "
    "cum_seq_lens_q=_, max_q_len=_"
)
_RAGGED = (
    "query, key, value, workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, "
    "bmm2_scale, o_sf_scale, batch_size, window_left, cum_seq_lens_q, cum_seq_lens_kv, "
    "enable_pdl, is_causal, return_lse, attention_sinks=_, "
    "skip_softmax_threshold_scale_factor=_, out=_, lse=_, sage_attn_sfs=_, "
    "num_elts_per_sage_attn_blk=_, backend=_"
)
FUNCTIONS = {
    OLD: {DECODE: _DECODE, RAGGED: _RAGGED},
    NEW: {
        DECODE: (
            f"{_DECODE}, multi_ctas_kv_counter_buffer=_, sparse_mla_top_k_lens=_, enable_dcp=_, "
            "cp_world=_, cp_rank=_, causal_seqlens_kv_global=_, use_fp16_softmax=_, "
            "return_lse_base=_"
        ),
        RAGGED: (
            f"{_RAGGED}, q_seq_lens_cpu=_, kv_seq_lens_cpu=_, use_fp16_softmax=_, "
            "uses_spcompress=_, skip_all_rows_active_check=_"
        ),
    },
}
WORKSPACE_BYTES = 1 << 14
HEAD_BYTES = 1 << 12
"""Stands for the part of a workspace where 0.6 keeps counters."""
E4M3 = torch.float8_e4m3fn
BYTE = 0xAB
B200 = KNOWN_DEVICES["b200"]

Mutation = Callable[[str, dict[str, Any]], None]
"""Changes what a call was given, by argument; the first argument is ``decode`` or ``ragged``."""


def installed_functions() -> dict[str, str]:
    """The installed FlashInfer's functions, read from its files, in this module's notation."""
    found = {}
    for name, module in MODULES.items():
        nodes = [node for node in parsed(module).body if isinstance(node, ast.FunctionDef)]
        # Where a function has overloads, the last definition counts.
        (*_, node) = (node for node in nodes if node.name == name)
        found[name] = written(node.args)
    return found


@cache
def installed_shape_check() -> Callable[..., Any] | None:
    """FlashInfer's ``_check_trtllm_gen_mla_shape``, read from its files; None if it is not
    installed.
    """
    if installed_version() is None:
        return None
    check = "_check_trtllm_gen_mla_shape"
    wanted: list[ast.stmt] = [
        node
        for node in parsed("utils.py").body
        if isinstance(node, ast.FunctionDef) and node.name == "_check_block_tables_shape"
    ]
    for node in parsed(MODULES[DECODE]).body:
        is_check = isinstance(node, ast.FunctionDef) and node.name == check
        is_sizes = isinstance(node, ast.ClassDef) and node.name == "MLAHeadDimensions"
        names = [getattr(one, "id", "") for one in getattr(node, "targets", [])]
        if is_check or is_sizes or any("dimensions" in name for name in names):
            wanted.append(node)
    kept = {"layer", "supported_mla_layer_dimensions"}
    wanted = [
        node
        for node in wanted
        if not (isinstance(node, ast.Assign) and "Layer" in ast.unparse(node)) and node not in kept
    ]
    names: dict[str, Any] = {"torch": torch, "dataclass": dataclass, "dataclasses": dataclasses}
    exec("from typing import *", names)
    module = ast.Module([*wanted], [])
    exec(compile(ast.fix_missing_locations(module), "<flashinfer>", "exec"), names)
    found: Callable[..., Any] = names[check]
    return found


@dataclass
class Emulator:
    """Emulates the two functions of one version on one GPU."""

    version: str
    device: Device = B200
    mutation: Mutation | None = None
    owners: dict[int, tuple[str, Tensor]] = field(default_factory=dict)
    """The kernel that first used each piece of scratch, with the piece, so that it stays alive."""
    called: list[str] = field(default_factory=list)
    shapes_checked: int = 0

    def _given(self, name: str, function: str, args: Any, kwargs: Any) -> dict[str, Any]:
        text = FUNCTIONS[self.version][function].replace("=_", "=None")
        signature = inspect.signature(eval(f"lambda {text}: None"))
        given = dict(signature.bind(*args, **kwargs).arguments)
        if self.mutation is not None:
            self.mutation(name, given)
        self.called.append(name)
        capability = self.device.compute_capability
        need(capability is not None and capability.major == 10, f"{name} on {self.device.name}")
        return given

    def decode(self, *args: Any, **kwargs: Any) -> Tensor:
        """Emulates ``trtllm_batch_decode_with_kv_cache_mla``."""
        given = self._given("decode", DECODE, args, kwargs)
        need(given.get("backend") == "trtllm-gen", f"backend {given.get('backend')}")
        query, cache, tables = given["query"], given["kv_cache"], given["block_tables"]
        lens, out, lse = given["seq_lens"], given["out"], given["lse"]
        rank, rope = given["kv_lora_rank"], given["qk_rope_head_dim"]
        self._check_shapes(query, cache, tables, rank, rope)
        page = cache.shape[-2]
        reqs, length, heads, _ = query.shape
        need(query.is_contiguous(), "query is strided")
        need(query.dtype == cache.dtype, f"cache of {cache.dtype} for {query.dtype}")
        need(query.dtype in (torch.bfloat16, E4M3), f"query of {query.dtype}")
        need(heads <= 64 or heads == 128, f"{heads} heads")
        for stride in (*cache.stride()[:-1], cache.storage_offset()):
            need(stride * cache.element_size() % 16 == 0, "cache is not aligned")
        need(cache.stride(-1) == 1, "cache rows are strided")
        need(page in (32, 64), f"pages of {page}")
        need(tables.dtype == torch.int32 and tables.is_contiguous(), f"tables of {tables.dtype}")
        need(lens.dtype == torch.int32 and lens.is_contiguous(), f"lengths of {lens.dtype}")
        need(len(lens) == reqs and bool((lens > 0).all()), f"lengths {lens.tolist()}")
        need(given["max_seq_len"] >= int(lens.max()), "max_seq_len below a length")
        need(int(lens.max()) <= tables.shape[1] * page, "lengths beyond the tables")
        need(out.shape == (reqs, length, heads, rank) and out.is_contiguous(), "output")
        need(out.dtype == torch.bfloat16, f"output of {out.dtype}")
        need(bool(given.get("return_lse")), "lse is given and not asked for")
        need(lse.shape == (reqs * length, heads) and lse.dtype == torch.float32, "lse")
        need(lse.is_contiguous(), "lse is strided")
        for name in ("bmm1_scale", "bmm2_scale"):
            need(isinstance(given[name], float), f"{name} is {type(given[name]).__name__}")
        self._scratch("decode", given["workspace_buffer"], keeps_head=self.version == OLD)
        self._counters(given, reqs * length * heads)
        rows = cache.flatten(0, -3).double()
        for req in range(reqs):
            count = int(lens[req])
            used = tables[req, : -(-count // page)].long()
            need(bool(((used >= 0) & (used < len(rows))).all()), f"blocks {used.tolist()}")
            keys = rows[used].flatten(0, 1)[:count]
            back = torch.arange(length)[:, None] + count - length - torch.arange(count)
            state = _state(query[req], keys, keys[:, :rank], back >= 0, given)
            out[req], lse[req * length : (req + 1) * length] = state
        return out

    def _check_shapes(
        self, query: Tensor, cache: Tensor, tables: Tensor, rank: int, rope: int
    ) -> None:
        need((rank, rope) in ((512, 64), (256, 64)), f"rows of {rank} + {rope}")
        need(query.dim() == 4 and cache.dim() in (3, 4), "axes")
        need(query.shape[-1] == cache.shape[-1] == rank + rope, "width of a row")
        need(tables.dim() == 2 and len(tables) == len(query), "tables of other requests")
        page = cache.shape[-2]
        need(tables.shape[1] % max(1, 128 // page) == 0, f"{tables.shape[1]} blocks of {page}")
        own = installed_shape_check()
        if own is not None:
            try:
                own(query, cache, rank, rope, 0, tables, page)
            except ValueError as error:
                raise ContractError(str(error)) from error
            self.shapes_checked += 1

    def ragged(self, *args: Any, **kwargs: Any) -> Tensor:
        """Emulates ``trtllm_ragged_attention_deepseek``."""
        given = self._given("ragged", RAGGED, args, kwargs)
        query, key, value = given["query"], given["key"], given["value"]
        out, lse, lens = given["out"], given.get("lse"), given["seq_lens"]
        sizes = query.shape[2], key.shape[2], value.shape[2]
        known = ((192, 192, 128), (128, 128, 128), (256, 256, 256))
        need(sizes in known, f"heads of {sizes}")
        need(query.dtype == key.dtype == value.dtype, "types")
        need(query.dtype in (torch.bfloat16, torch.float16, E4M3), f"query of {query.dtype}")
        made = torch.bfloat16 if query.dtype == E4M3 else query.dtype
        need(out.shape == (*query.shape[:2], sizes[2]) and out.dtype == made, "output")
        for tensor in (query, key, value, out):
            need(tensor.stride(-1) == 1, "rows are strided")
            need(tensor.data_ptr() % 16 == 0, "rows are not aligned")
        need(given["window_left"] == -1 and given["o_sf_scale"] == -1, "window or block scale")
        need(given["batch_size"] == len(lens), f"batch_size {given['batch_size']}")
        need(bool(given["return_lse"]) == (lse is not None), "lse as asked for")
        if lse is not None:
            need(lse.shape == query.shape[:2] and lse.dtype == torch.float32, "lse")
        starts = _starts("cum_seq_lens_q", given["cum_seq_lens_q"], len(lens), len(query))
        need(starts[-1] == len(query), f"rows {starts} of {len(query)}")
        kv = _starts("cum_seq_lens_kv", given["cum_seq_lens_kv"], len(lens), len(key))
        need(lens.dtype == torch.int32, f"lengths of {lens.dtype}")
        for name in ("bmm1_scale", "bmm2_scale"):
            need(isinstance(given[name], float), f"{name} is {type(given[name]).__name__}")
        self._scratch("ragged", given["workspace_buffer"], keeps_head=False)
        out.fill_(math.nan)
        if lse is not None:
            lse.fill_(math.nan)
        for req, ((start, stop), (low, high)) in enumerate(
            zip(pairwise(starts), pairwise(kv), strict=True)
        ):
            count, length = high - low, stop - start
            need(int(lens[req]) == count, f"cum_seq_lens_kv {kv} for {lens.tolist()}")
            need(length <= given["max_q_len"], "max_q_len below a request's rows")
            need(count <= given["max_kv_len"], "max_kv_len below a request's keys")
            need(length <= count or not given["is_causal"], "rows past keys")
            if not count or not length:
                continue
            visible = torch.ones(length, count, dtype=torch.bool)
            if given["is_causal"]:
                visible = visible.tril(count - length)
            keys, values = key[low:high].double(), value[low:high].double()
            state = _state(query[start:stop], keys, values, visible, given)
            out[start:stop] = state[0].to(out.dtype)
            if lse is not None:
                lse[start:stop] = state[1]
        return out

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

    def _counters(self, given: dict[str, Any], entries: int) -> None:
        if self.version == OLD:
            return
        counters = given.get("multi_ctas_kv_counter_buffer")
        need(counters is not None, "counters would be allocated in every call")
        assert counters is not None
        owner, _ = self.owners.setdefault(counters.data_ptr(), ("counters", counters))
        need(owner == "counters", f"counters of {owner}")
        need(not counters.any(), "counters are not zero")
        entries = max(entries, self.device.num_multiprocessors or 0)
        need(counters.numel() >= -(-entries // 8) * 32, "too few counters")


def _state(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, given: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Output and log2 of the softmax sums of one request, over keys of one head or of each head."""
    group = "kd" if keys.dim() == 2 else "khd"
    scores = torch.einsum(f"qhd,{group}->hqk", query.double(), keys) * given["bmm1_scale"]
    scores = scores.masked_fill(~visible, -math.inf)
    sums = scores.logsumexp(-1)
    weights = scores.softmax(-1)
    out = torch.einsum(f"hqk,{group}->qhd", weights, values) * given["bmm2_scale"]
    return out, (sums.T / math.log(2)).float()


def _starts(name: str, starts: Tensor, num_reqs: int, end: int) -> list[int]:
    need(starts.dtype == torch.int32 and starts.is_contiguous(), f"{name} of {starts.dtype}")
    values: list[int] = starts.tolist()
    need(len(values) == num_reqs + 1, f"{name} of {len(values) - 1} requests, not {num_reqs}")
    need(values[0] == 0 and values[-1] <= end, f"{name} {values} to {end}")
    need(values == sorted(values), f"{name} decreases")
    return values


@contextmanager
def emulated(
    version: str = OLD, mutation: Mutation | None = None, device: Device = B200
) -> Iterator[Emulator]:
    """Put this module's calls on ``device`` in FlashInfer's place; every call goes through
    ``mutation``.
    """
    emulator = Emulator(version, device, mutation)
    calls = LatentCalls(version, emulator.decode, emulator.ragged)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trtllm_mla_calls, "load_latent_calls", lambda: calls)
        patch.setattr(trtllm_mla, "WORKSPACE_BYTES", WORKSPACE_BYTES)
        patch.setattr(trtllm_mha_choice, "capability_of", lambda _: device.compute_capability)
        yield emulator
