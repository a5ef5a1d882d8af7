"""Vendors' kernels of sparse latent attention without a GPU.

Every call is bound to its signature, checked against the kernel's documentation, and computed in
float64 from exactly the tensors passed. What a kernel leaves undefined is NaN here, for example the
outputs of rows that list nothing.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from builders.sparse import vendor_calls as sparse_calls
from builders.sparse.vendor_calls import FlashAttention3, FlashMla
from builders.vendor.flashinfer_parts.mla_calls import FlashInferLatent
from builders.vendor.trtllm_parts.mla_calls import LatentCalls
from specs.devices import KNOWN_DEVICES, Device
from specs.sparse_mla import SparseKernel
from tests.emulators import flashinfer_mla_emulator, trtllm_mla_emulator
from tests.emulators.flashinfer_emulator import ContractError, need
from tests.emulators.flashinfer_signatures import written

PREFILL, CACHED, VARLEN, KVCACHE = (
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
)
SIGNATURES = {
    PREFILL: "q, kv, indices, sm_scale, d_v=_, attn_sink=_, topk_length=_, out=_",
    CACHED: (
        "q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, "
        "num_splits=_, softmax_scale=_, causal=_, is_fp8_kvcache=_, indices=_, attn_sink=_, "
        "extra_k_cache=_, extra_indices_in_kvcache=_, topk_length=_, extra_topk_length=_, out=_"
    ),
    VARLEN: (
        "q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=_, seqused_k=_, q_v=_, "
        "dropout_p=_, softmax_scale=_, causal=_, window_size=_, softcap=_, alibi_slopes=_, "
        "deterministic=_, return_attn_probs=_, block_table=_, return_softmax_lse=_, out=_, "
        "scheduler_metadata=_, q_descale=_, k_descale=_, v_descale=_, num_splits=_, "
        "output_scale=_, fa_version=_, s_aux=_, cp_world_size=_, cp_rank=_, cp_tot_seqused_k=_, "
        "mask_mod=_, aux_tensors=_, dynamic_causal=_"
    ),
    KVCACHE: (
        "q, k_cache, v_cache, k=_, v=_, qv=_, rotary_cos=_, rotary_sin=_, cache_seqlens=_, "
        "cache_batch_idx=_, cache_leftpad=_, page_table=_, cu_seqlens_q=_, cu_seqlens_k_new=_, "
        "max_seqlen_q=_, rotary_seqlens=_, q_descale=_, k_descale=_, v_descale=_, "
        "softmax_scale=_, causal=_, window_size=_, attention_chunk=_, softcap=_, "
        "rotary_interleaved=_, scheduler_metadata=_, num_splits=_, pack_gqa=_, sm_margin=_, "
        "return_softmax_lse=_"
    ),
}
"""Signatures in vLLM 0.26.0, and in FlashAttention's own package."""
VLLM_FILES = {
    PREFILL: "third_party/flashmla/flash_mla_interface.py",
    CACHED: "third_party/flashmla/flash_mla_interface.py",
    VARLEN: "vllm_flash_attn/flash_attn_interface.py",
}
NO_OUT = ", out=_"
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
RANK, WIDTH, SCALED_BYTES = 512, 576, 656

Mutation = Callable[[str, dict[str, Any]], None]
"""Changes what a call was given, by argument; the first argument is the function's name."""


def installed_signatures() -> dict[str, str] | None:
    """Signatures in the installed vLLM, read from its files; None if vLLM is not installed."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return None
    root, signatures = Path(found.submodule_search_locations[0]), {}
    for name, file in VLLM_FILES.items():
        if not (root / file).is_file():
            return None
        nodes = ast.parse((root / file).read_text("utf-8")).body
        (node,) = (one for one in nodes if isinstance(one, ast.FunctionDef) and one.name == name)
        signatures[name] = written(node.args)
    return signatures


@dataclass
class Schedule:
    """Emulates ``FlashMLASchedMeta``."""

    shape: tuple[int, ...] | None = None


@dataclass
class Emulator:
    """Emulates every package, on one GPU."""

    device: Device
    mutation: Mutation | None = None
    writes: bool = True
    """FlashMLA's functions take ``out``: those in vLLM do, those of its own package do not."""
    base_of_lse: float = math.e
    """Base of FlashMLA's log-sum-exp."""
    is_vllm: bool = True
    """FlashAttention 3 is the build in vLLM, and not its own package."""
    called: list[str] = field(default_factory=list)
    schedules: list[Schedule] = field(default_factory=list)

    @property
    def _is_sm100(self) -> bool:
        capability = self.device.compute_capability
        return capability is not None and capability.major == 10

    def _given(self, name: str, args: Any, kwargs: Any) -> dict[str, Any]:
        text = SIGNATURES[name]
        if not self.writes:
            text = text.removesuffix(NO_OUT)
        signature = inspect.signature(eval(f"lambda {text.replace('=_', '=None')}: None"))
        given = dict(signature.bind(*args, **kwargs).arguments)
        if self.mutation is not None:
            self.mutation(name, given)
        self.called.append(name)
        return given

    # -- FlashMLA.

    def new_schedule(self) -> Schedule:
        """Emulates ``get_mla_metadata``."""
        self.schedules.append(Schedule())
        return self.schedules[-1]

    def prefill(self, q: Tensor, kv: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Emulates ``flash_mla_sparse_fwd``."""
        given = self._given(PREFILL, (q, kv, indices, *args), kwargs)
        query, rows, listed = given["q"], given["kv"], given["indices"]
        heads = query.shape[1]
        need(query.dtype == rows.dtype == BF16, f"{query.dtype} and {rows.dtype}")
        need(heads in ((128,) if self._is_sm100 else (64, 128)), f"{heads} heads")
        need(query.is_contiguous() and query.shape[2] == WIDTH, "query")
        need(rows.shape[1:] == (1, WIDTH) and rows.stride(-1) == 1, f"rows {[*rows.shape]}")
        need(listed.shape[:2] == (len(query), 1), f"lists {[*listed.shape]}")
        need(listed.dtype == torch.int32 and listed.stride(-1) == 1, "lists' type")
        need(listed.shape[2] % 128 == 0, f"lists of {listed.shape[2]}")
        need(given.get("topk_length") is None and given.get("attn_sink") is None, "no such")
        lists = torch.where(listed[:, 0] < len(rows), listed[:, 0], -1)
        out, lse = self._flashmla_state(query, rows[:, 0].double(), lists, given["sm_scale"])
        return self._into(given, out), lse, lse

    def with_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Emulates ``flash_mla_with_kvcache`` over 656-byte rows."""
        given = self._given(CACHED, args, kwargs)
        query, cache, listed = given["q"], given["k_cache"], given["indices"]
        schedule = given["tile_scheduler_metadata"]
        requests, rows, heads, width = query.shape
        need(query.dtype == BF16 and width == WIDTH and query.is_contiguous(), "query")
        need(heads in (64, 128), f"{heads} heads")
        need(cache.dtype in (torch.uint8, torch.int8, E4M3), f"cache of {cache.dtype}")
        need(cache.shape[1:] == (64, 1, SCALED_BYTES), f"cache {[*cache.shape]}")
        need(cache.stride(1) == SCALED_BYTES and cache.stride(-1) == 1, "strides of rows")
        need(listed.shape[:2] == (requests, rows) and listed.is_contiguous(), "lists")
        need(listed.dtype == torch.int32 and listed.shape[2] % 64 == 0, "width of lists")
        need(bool(((listed >= -1) & (listed < 64 * len(cache))).all()), "an illegal access")
        need(bool(given.get("is_fp8_kvcache")) and not given.get("causal"), "sparse is fp8")
        need(given["head_dim_v"] == RANK and given.get("topk_length") is None, "arguments")
        need(isinstance(schedule, Schedule), "schedule")
        need(requests * 20 < 48 << 10, f"a schedule of {requests} requests")
        shape = (requests, rows, heads, cache.shape[1], listed.shape[2])
        need(schedule.shape in (None, shape), f"a schedule of {schedule.shape} for {shape}")
        schedule.shape = shape
        data = cache.view(torch.uint8)[:, :, 0].flatten(0, 1)
        scales = data[:, RANK : RANK + 16].contiguous().view(torch.float32).double()
        if self._is_sm100:
            scales = torch.exp2(scales.log2().round())
        latent = data[:, :RANK].contiguous().view(E4M3).double()
        rope = data[:, RANK + 16 :].contiguous().view(BF16).double()
        real = torch.cat([latent * scales.repeat_interleave(128, 1), rope], 1)
        flat = query.flatten(0, 1), real, listed.flatten(0, 1), given["softmax_scale"]
        out, lse = self._flashmla_state(*flat)
        out = out.view(requests, rows, heads, RANK)
        return self._into(given, out), lse.view(requests, rows, heads).transpose(1, 2)

    def _flashmla_state(
        self, query: Tensor, real: Tensor, lists: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = _state(query, real, lists, scale)
        lse = (lse / math.log(self.base_of_lse)).float()
        return out, lse.masked_fill(lse.isinf(), math.inf)

    def _into(self, given: dict[str, Any], out: Tensor) -> Tensor:
        target = given.get("out")
        if target is None:
            return out.bfloat16()
        need(target.shape == out.shape and target.dtype == BF16, f"output {[*target.shape]}")
        need(target.is_contiguous(), "output is strided")
        return target.copy_(out)  # type: ignore[no-any-return]

    # -- FlashAttention 3.

    def varlen(self, *args: Any, **kwargs: Any) -> Any:
        """Emulates vLLM's ``flash_attn_varlen_func``."""
        given = self._given(VARLEN, args, kwargs)
        count = len(given["q"])
        need(given.get("fa_version") == 3, "another version")
        need(bool(given.get("return_softmax_lse")), "no lse asked for")
        starts = given["cu_seqlens_q"]
        need(starts.dtype == torch.int32, "cu_seqlens_q")
        need(starts.tolist() == [*range(count + 1)], f"starts {starts.tolist()}")
        need(given["max_seqlen_q"] == 1, "max_seqlen_q")
        parts = given["q"], given["q_v"], given["k"], given["v"]
        pages, lens = given["block_table"], given["seqused_k"]
        need(given["max_seqlen_k"] >= int(lens.max()), "max_seqlen_k")
        out, lse = self._fa3(parts, pages, lens, given["softmax_scale"])
        return self._into(given, out), lse.T.contiguous()

    def kvcache(self, *args: Any, **kwargs: Any) -> Any:
        """Emulates FlashAttention's own ``flash_attn_with_kvcache``."""
        given = self._given(KVCACHE, args, kwargs)
        query, latent = given["q"], given["qv"]
        need(query.shape[1] == latent.shape[1] == 1, "one token each")
        need(bool(given.get("return_softmax_lse")), "no lse asked for")
        parts = query[:, 0], latent[:, 0], given["k_cache"], given["v_cache"]
        scale, pages = given["softmax_scale"], given["page_table"]
        out, lse = self._fa3(parts, pages, given["cache_seqlens"], scale)
        return out[:, None].bfloat16(), lse[..., None], None, None

    def _fa3(
        self, parts: tuple[Tensor, ...], pages: Tensor, lens: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        need(not self._is_sm100, "FlashAttention 3 is for Hopper")
        rotary, query, rope, latent = parts
        need(all(part.dtype == BF16 for part in parts), "types")
        need(all(part.stride(-1) == 1 for part in parts), "strides")
        need(rotary.shape[-1] == rope.shape[-1] == WIDTH - RANK, "rotary part")
        need(query.shape[-1] == latent.shape[-1] == RANK, "latent part")
        need(rope.shape[1:3] == latent.shape[1:3] == (1, 1), "pages of one token and head")
        need(pages.dtype == lens.dtype == torch.int32, "tables")
        need(pages.stride(-1) == 1 and len(pages) == len(lens) == len(query), "tables' rows")
        need(bool((lens <= pages.shape[1]).all()), "lengths beyond the table")
        columns = torch.arange(pages.shape[1])
        lists = torch.where(columns < lens[:, None], pages, -1)
        counted = (lists >= 0) & (lists < len(rope))
        need(torch.equal(counted, columns < lens[:, None]), "an illegal access")
        whole, real = torch.cat([query, rotary], -1), torch.cat([latent, rope], -1)[:, 0, 0]
        return _state(whole, real.double(), lists, scale)


def _state(query: Tensor, real: Tensor, lists: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output and natural log-sum-exp; a row that lists nothing is left undefined."""
    out = torch.full((*query.shape[:2], RANK), math.nan, dtype=torch.float64)
    lse = torch.full(query.shape[:2], -math.inf, dtype=torch.float64)
    for row, listed in enumerate(lists.long()):
        keys = real[listed[listed >= 0]]
        if len(keys):
            scores = scale * query[row].double() @ keys.T
            out[row], lse[row] = scores.softmax(-1) @ keys[:, :RANK], scores.logsumexp(-1)
    return out, lse.float()


class Wrapper(flashinfer_mla_emulator.Wrapper):
    """Emulates FlashInfer's wrapper, which keeps an array of pages that is on its device."""

    def plan(self, *args: Any, **kwargs: Any) -> None:
        super().plan(*args, **kwargs)
        assert self.planned is not None
        metadata = kwargs.get("metadata")
        own = kwargs["kv_indices"] if metadata is None else metadata.kv_indices
        self.planned["kv_indices"] = own


class SparseTrtllm(trtllm_mla_emulator.Emulator):
    """Emulates ``trtllm_batch_decode_with_kv_cache_mla`` with lists."""

    def decode(self, *args: Any, **kwargs: Any) -> Tensor:
        name = trtllm_mla_emulator.DECODE
        given = self._given("decode", name, args, kwargs)
        query, cache, lists = given["query"], given["kv_cache"], given["block_tables"]
        lens, out, lse = given["seq_lens"], given["out"], given["lse"]
        topk, (rows, one, heads, width) = given["sparse_mla_top_k"], query.shape
        need(given.get("backend") == "trtllm-gen", "backend")
        need(cache.shape[1:] == (1, 64, WIDTH) and width == WIDTH, f"cache {[*cache.shape]}")
        need(query.dtype == cache.dtype and query.dtype in (BF16, E4M3), f"{query.dtype}")
        need(query.is_contiguous() and one == 1, "query")
        need(heads <= 64 or heads == 128, f"{heads} heads")
        need(cache.stride(0) == 64 * WIDTH and cache.stride(-1) == 1, "one array of rows")
        need(lists.shape == (rows, 1, topk) and lists.dtype == torch.int32, "lists")
        need(topk % 4 == 0 and lists.is_contiguous(), f"lists of {topk}")
        own = trtllm_mla_emulator.installed_shape_check()
        if own is not None:
            try:
                own(query, cache, RANK, WIDTH - RANK, topk, lists, 64)
            except ValueError as error:
                raise ContractError(str(error)) from error
        need(len(lens) == rows and lens.dtype == torch.int32, "lengths")
        need(bool(((lens > 0) & (lens <= topk)).all()), f"lengths {lens.tolist()}")
        need(given["max_seq_len"] >= int(lens.max()), "max_seq_len")
        need(out.shape == (rows, 1, heads, RANK) and out.dtype == BF16, "output")
        need(lse.shape == (rows, heads) and bool(given.get("return_lse")), "lse")
        scales = []
        for name in ("bmm1_scale", "bmm2_scale"):
            scale = given[name]
            is_scalar = isinstance(scale, Tensor) and scale.dtype == torch.float32
            need(isinstance(scale, float) or (is_scalar and scale.numel() == 1), name)
            scales.append(float(scale))
        self._scratch("decode", given["workspace_buffer"], keeps_head=self.version == "0.6.14")
        self._counters(given, rows * heads)
        columns = torch.arange(topk)
        listed = torch.where(columns < lens[:, None], lists[:, 0], -1)
        good = (listed >= 0) & (listed < 64 * len(cache))
        need(torch.equal(good, columns < lens[:, None]), "an illegal access")
        real = cache[:, 0].flatten(0, 1).double()
        state = _state(query[:, 0], real, listed, scales[0])
        out[:, 0], lse[:] = state[0] * scales[1], state[1] / math.log(2)
        return out


@contextmanager
def emulated(
    device: Device = KNOWN_DEVICES["h200"],
    mutation: Mutation | None = None,
    version: str = flashinfer_mla_emulator.NEW,
    **fields: Any,
) -> Iterator[Emulator]:
    """Put this module in the place of all packages; every call goes through ``mutation``."""
    emulator = Emulator(device, mutation, **fields)
    flashmla = FlashMla(emulator.prefill, emulator.with_cache, emulator.new_schedule)
    if not emulator.writes:

        def prefill(q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float) -> Any:
            return emulator.prefill(q, kv, indices, sm_scale)

        flashmla = FlashMla(prefill, emulator.with_cache, emulator.new_schedule)
    fa3 = FlashAttention3(emulator.varlen if emulator.is_vllm else emulator.kvcache, True)
    fa3 = FlashAttention3(fa3.function, emulator.is_vllm)
    shared = {"version": version, "mutation": None if mutation is None else staticmethod(mutation)}
    wrapper = type("Wrapper", (Wrapper,), shared)
    metadata = flashinfer_mla_emulator.Metadata
    is_new = version == flashinfer_mla_emulator.NEW
    latent = FlashInferLatent(version, wrapper, metadata if is_new else None)
    trtllm = SparseTrtllm(version, device, mutation)
    loaders = {
        SparseKernel.FLASHMLA_SPARSE: lambda: flashmla,
        SparseKernel.FLASHMLA_KV: lambda: flashmla,
        SparseKernel.FA3: lambda: fa3,
        SparseKernel.FLASHINFER_MLA: lambda: latent,
        SparseKernel.TRTLLM: lambda: LatentCalls(version, trtllm.decode, None),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_calls, "LOADERS", loaders)
        patch.setattr(sparse_calls, "WORKSPACE_BYTES", flashinfer_mla_emulator.WORKSPACE_BYTES)
        yield emulator


__all__ = ["ContractError", "Mutation", "emulated"]
