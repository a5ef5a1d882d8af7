"""FlashInfer's wrapper of latent attention without a GPU.

Every call is bound to a version's signature, checked against what the kernels need, and computed in
torch from exactly the tensors passed. Keys that the kernels of 0.6 drop are dropped here too. What
the kernels leave undefined is NaN.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from builders.vendor import flashinfer_mla
from builders.vendor.flashinfer_parts import mla_calls as flashinfer_mla_compat
from builders.vendor.flashinfer_parts.mla_calls import FlashInferLatent
from tests.emulators.flashinfer_emulator import ContractError, OnDevice, need
from tests.emulators.flashinfer_signatures import installed_version, parsed, written

WRAPPER = "BatchMLAPagedAttentionWrapper"
OLD, NEW = VERSIONS = ("0.6.14", "0.7.2.post1")
MODULES = {OLD: "mla/_core.py", NEW: "mla/_batch_mla/_wrapper.py"}
_INIT = (
    "self, float_workspace_buffer, use_cuda_graph=_, qo_indptr=_, kv_indptr=_, kv_indices=_, "
    "kv_len_arr=_, backend=_"
)
_PLANNED = (
    "num_heads{0}, head_dim_ckv{0}, head_dim_kpe{0}, page_size{0}, causal{0}, sm_scale{0}, "
    "q_data_type{0}, kv_data_type{0}, use_profiler=_"
)
SIGNATURES: dict[str, dict[str, str]] = {
    OLD: {
        "__init__": _INIT,
        "plan": "self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, " + _PLANNED.format(""),
        "run": (
            "self, q_nope, q_pe, ckv_cache, kpe_cache, out=_, lse=_, return_lse=_, "
            "profiler_buffer=_, kv_len=_, page_table=_, return_lse_base_on_e=_, o_scale=_, *, "
            "ckv_scale=_, kpe_scale=_"
        ),
    },
    NEW: {
        "__init__": _INIT,
        "plan": (
            "self, qo_indptr=_, kv_indptr=_, kv_indices=_, kv_len_arr=_, "
            + _PLANNED.format("=_")
            + ", *, metadata=_, cum_seq_lens_q=_, block_tables=_, seq_lens=_, max_q_len=_, "
            "query_layout=_, kv_cache_layout=_, lse_mode=_, output_dtype=_, output_scale=_, "
            "scale_mode=_, skip_softmax=_, enable_pdl=_, use_sinks=_"
        ),
        "run": (
            "self, q_nope=_, q_pe=_, ckv_cache=_, kpe_cache=_, out=_, lse=_, return_lse=_, "
            "profiler_buffer=_, kv_len=_, page_table=_, return_lse_base_on_e=_, o_scale=_, *, "
            "query=_, kv_cache=_, ckv_scale=_, ckv_scale_arr=_, kpe_scale=_, sinks=_, "
            "skip_softmax_threshold_scale_factor=_, bmm1_scale=_, bmm2_scale=_"
        ),
    },
}
WORKSPACE_BYTES = 1 << 16
E4M3 = torch.float8_e4m3fn
KEY_TILE = 64
FIELDS = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")

Mutation = Callable[[str, dict[str, Any]], None]
"""Changes the arguments of a call to ``__init__``, ``plan`` or ``run``, by name."""


def installed_methods() -> dict[str, str]:
    """The installed wrapper's signatures, read from its files, in this module's notation."""
    import ast

    version = installed_version()
    assert version is not None
    (body,) = (
        node.body
        for node in parsed(MODULES[version]).body
        if isinstance(node, ast.ClassDef) and node.name == WRAPPER
    )
    # Where a function has overloads, the last definition counts.
    methods = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    return {name: written(methods[name].args) for name in SIGNATURES[version]}


@dataclass(frozen=True)
class Metadata:
    """Emulates ``MLAPlanMetadata`` of 0.7, in CSR form."""

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_len_arr: Tensor

    @classmethod
    def csr(cls, **given: Tensor) -> Metadata:
        return cls(**given)


def query_tile(query_lens: list[int], num_heads: int) -> int:
    """Rows (tokens x heads) of a tile."""
    return 128 if sum(query_lens) * num_heads // len(query_lens) > 64 else 64


def dropped_keys(query_lens: list[int], kv_lens: list[int], num_heads: int) -> list[Any]:
    """Request, token and key of the keys that a causal kernel drops.

    It drops the last key of a token whose heads end in another tile, where that key begins a tile
    of keys.
    """
    tile, found = query_tile(query_lens, num_heads), []
    for request, (rows, keys) in enumerate(zip(query_lens, kv_lens, strict=True)):
        for end in range(tile, rows * num_heads, tile):
            token, head = divmod(end, num_heads)
            key = keys - rows + token
            if head and token < rows and 0 <= key < keys and key % KEY_TILE == 0:
                found.append((request, token, key, head))
    return found


class Wrapper:
    """Emulates ``BatchMLAPagedAttentionWrapper`` of one version."""

    version = OLD
    mutation: Mutation | None = None

    def _given(self, method: str, args: Any, kwargs: Any) -> dict[str, Any]:
        text = SIGNATURES[self.version][method].replace("=_", "=None")
        bound = inspect.signature(eval(f"lambda {text}: None")).bind(self, *args, **kwargs)
        given = dict(bound.arguments)
        del given["self"]
        if self.mutation is not None:
            metadata = given.pop("metadata", None)
            if metadata is not None:
                given |= vars(metadata)
            type(self).mutation(method.strip("_"), given)  # type: ignore[misc]
            if metadata is not None:
                given["metadata"] = Metadata(**{name: given.pop(name) for name in FIELDS})
        return given

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = self._given("__init__", args, kwargs)
        workspace = given["float_workspace_buffer"]
        need(workspace.dtype == torch.uint8, f"workspace of {workspace.dtype}")
        need(workspace.numel() >= WORKSPACE_BYTES, "workspace is too small")
        self.backend = given.get("backend")
        need(self.backend in ("fa2", "fa3"), "backend is left to FlashInfer")
        self.is_graph = bool(given.get("use_cuda_graph"))
        self.buffers = {name: given[name] for name in FIELDS if given.get(name) is not None}
        need(set(self.buffers) == (set(FIELDS) if self.is_graph else set()), "reserved buffers")
        self.planned: dict[str, Any] | None = None
        self.grid: int | None = None

    def plan(self, *args: Any, **kwargs: Any) -> None:
        given = self._given("plan", args, kwargs)
        if self.version == NEW:
            need(given.get("metadata") is not None, "flat metadata is deprecated")
            given |= vars(given.pop("metadata"))
            need(given.get("query_layout") == "split", "layout of the query")
            need(given.get("kv_cache_layout") == "split", "layout of the cache")
        csr = {name: given.pop(name) for name in FIELDS}
        self._check_csr(csr, given["page_size"])
        self._check_types(given)
        query_lens, kv_lens = csr["qo_indptr"].diff().tolist(), csr["kv_len_arr"].tolist()
        heads = given["num_heads"]
        given["dropped"] = dropped_keys(query_lens, kv_lens, heads) if given["causal"] else []
        need(not given["dropped"] or self.version == OLD, f"drops keys {given['dropped']}")
        tile = query_tile(query_lens, heads)
        tiles = sum(-(-rows * heads // tile) for rows in query_lens)
        need(tiles <= 16384, f"{tiles} tiles")
        if self.is_graph:
            self.grid = self.grid or tile
            need(tile == self.grid, "another grid than was captured")
            for name, buffer in self.buffers.items():
                source = csr[name]
                target = buffer[: len(source)] if name == "kv_indices" else buffer
                need(target.shape == source.shape, f"{name} of {[*source.shape]} in a graph")
                target.copy_(source)
            csr = dict(self.buffers)
        else:
            csr = {name: tensor.clone() for name, tensor in csr.items()}
        self.planned = {**given, **csr}

    @staticmethod
    def _check_csr(csr: dict[str, Tensor], page: int) -> None:
        for name, tensor in csr.items():
            need(tensor.dtype == torch.int32, f"{name} of {tensor.dtype}")
            need(tensor.dim() == 1 and tensor.is_contiguous(), f"{name} is no contiguous row")
            if name != "kv_indices":
                need(not isinstance(tensor, OnDevice), f"{name} would be copied back")
        qo, kv, indices, lens = csr.values()
        need(len(qo) == len(kv) == len(lens) + 1 > 1, "another number of requests")
        for name, starts in (("qo_indptr", qo), ("kv_indptr", kv)):
            need(int(starts[0]) == 0 and bool((starts.diff() > 0).all()), f"{name} {starts}")
        need(torch.equal(kv.diff(), (lens + page - 1) // page), "pages of another number of keys")
        need(bool((lens >= qo.diff()).all()), "fewer keys than rows")
        need(len(indices) >= int(kv[-1]), "fewer pages than listed")

    def _check_types(self, given: dict[str, Any]) -> None:
        q_dtype, kv_dtype = given["q_data_type"], given["kv_data_type"]
        widths = given["head_dim_ckv"], given["head_dim_kpe"]
        need(q_dtype in (torch.float16, torch.bfloat16), f"query of {q_dtype}")
        need(widths[0] in (128, 256, 512) and widths[1] == 64, f"rows of {widths}")
        need(isinstance(given["sm_scale"], float), "sm_scale")
        if kv_dtype == E4M3:
            need(self.backend == "fa3", "e4m3 needs fa3")
            need(q_dtype == torch.bfloat16, f"query of {q_dtype} beside e4m3")
            need(widths == (512, 64), f"rows of {widths} in e4m3")
        else:
            need(kv_dtype == q_dtype, f"cache of {kv_dtype} for {q_dtype}")

    def run(self, *args: Any, **kwargs: Any) -> Any:
        given, plan = self._given("run", args, kwargs), self.planned
        need(plan is not None, "run before plan")
        assert plan is not None
        if self.version == NEW:
            query, cache = given["query"], given["kv_cache"]
            mode = "basee" if given.get("return_lse_base_on_e") else "base2"
            need(given.get("return_lse") and plan.get("lse_mode") == mode, "lse as planned")
        else:
            query = given["q_nope"], given["q_pe"]
            cache = given["ckv_cache"], given["kpe_cache"]
        out, lse = given["out"], given["lse"]
        self._check_run(plan, query, cache, out, lse)
        scales = given.get("ckv_scale"), given.get("kpe_scale")
        is_fp8 = plan["kv_data_type"] == E4M3
        for scale in scales:
            need(isinstance(scale, float) if is_fp8 else scale is None, f"scale {scale}")
        out[:], natural = self._attend(plan, query, cache, [scale or 1.0 for scale in scales])
        need(given.get("return_lse"), "lse is given and not asked for")
        lse[:] = natural if given.get("return_lse_base_on_e") else natural / math.log(2)
        return out, lse

    def _check_run(self, plan: Any, query: Any, cache: Any, out: Tensor, lse: Tensor) -> None:
        tokens, heads = int(plan["qo_indptr"][-1]), plan["num_heads"]
        widths = plan["head_dim_ckv"], plan["head_dim_kpe"]
        for part, width in zip(query, widths, strict=True):
            need(part.shape == (tokens, heads, width), f"query {[*part.shape]}, {tokens} rows")
            need(part.dtype == plan["q_data_type"], f"query of {part.dtype}")
            need(part.stride(-1) == 1, "query rows are strided")
        for part, width in zip(cache, widths, strict=True):
            need(part.shape[1:] == (plan["page_size"], width), f"cache {[*part.shape]}")
            need(part.dtype == plan["kv_data_type"], f"cache of {part.dtype}")
            need(part.stride(-1) == 1, "cache rows are strided")
            for stride in (*part.stride()[:2], part.storage_offset()):
                need(stride * part.element_size() % 16 == 0, "cache rows are not aligned")
        need(out.shape == (tokens, heads, widths[0]), f"output {[*out.shape]}")
        need(out.dtype == plan["q_data_type"] and out.is_contiguous(), "output")
        need(lse.shape == (tokens, heads) and lse.dtype == torch.float32, "lse")
        need(lse.is_contiguous(), "lse is strided")

    def _attend(
        self, plan: Any, query: Any, cache: Any, scales: list[float]
    ) -> tuple[Tensor, Tensor]:
        outs = torch.full(query[0].shape, math.nan, dtype=torch.float64)
        lses = torch.full(query[0].shape[:2], math.nan)
        for row, (start, stop) in enumerate(pairwise(plan["qo_indptr"].tolist())):
            first, end = plan["kv_indptr"][row : row + 2].tolist()
            count, pages = int(plan["kv_len_arr"][row]), plan["kv_indices"][first:end].long()
            need(bool(((pages >= 0) & (pages < len(cache[0]))).all()), f"pages {pages.tolist()}")
            # Scale and rows are the query's type before they are multiplied, and after.
            model = query[0].dtype
            latent, rope = (
                (part[pages].flatten(0, 1)[:count].to(model) * torch.tensor(scale, dtype=model))
                for part, scale in zip(cache, scales, strict=True)
            )
            latent, rope = latent.double(), rope.double()
            q_nope, q_pe = (part[start:stop].double() for part in query)
            scores = torch.einsum("qhl,kl->hqk", q_nope, latent)
            scores = (scores + torch.einsum("qhr,kr->hqk", q_pe, rope)) * plan["sm_scale"]
            if plan["causal"]:
                length = stop - start
                back = torch.arange(length)[:, None] + count - length - torch.arange(count)
                scores = scores.masked_fill(back < 0, -math.inf)
            for request, token, key, head in plan["dropped"]:
                if request == row:
                    scores[:head, token, key] = -math.inf
            outs[start:stop] = torch.einsum("hqk,kl->qhl", scores.softmax(-1), latent)
            lses[start:stop] = scores.logsumexp(-1).T.float()
        return outs, lses


@contextmanager
def emulated(version: str = OLD, mutation: Mutation | None = None) -> Iterator[FlashInferLatent]:
    """Put this module in FlashInfer's place; every call goes through ``mutation``."""
    shared = {"version": version, "mutation": None if mutation is None else staticmethod(mutation)}
    wrapper = type("Wrapper", (Wrapper,), shared)
    found = FlashInferLatent(version, wrapper, Metadata if version == NEW else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashinfer_mla_compat, "load_latent", lambda: found)
        patch.setattr(flashinfer_mla, "WORKSPACE_BYTES", WORKSPACE_BYTES)
        yield found


__all__ = ["ContractError", "Mutation", "emulated"]
