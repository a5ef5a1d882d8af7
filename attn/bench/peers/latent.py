"""Other projects' kernels on a latent case, over the same rows."""

from __future__ import annotations

import inspect
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch

from attn.bench.cases.inputs import Content
from attn.bench.peers.dense import (
    FLASHINFER_WORKSPACE_BYTES,
    FP8_QUERY_TOLERANCE,
    Adapter,
    KernelRun,
    Latest,
    Refusal,
)
from attn.bench.results.results import Status
from builders.pages.paging import block_table_to_csr
from specs.base import cdiv

FLASHMLA_BLOCK: Final = 64
"""Tokens of a page: the only size that FlashMLA's dense kernel takes."""
FLASHMLA_FP8: Final = "vllm.v1.attention.ops.flashmla"
"""Module of FlashMLA's calls over an fp8 cache, which need FlashMLA's second library."""
EXPANDED: Final = Refusal(Status.UNSUPPORTED, "latent rows only, not expanded ones")
VLLM_MOST_SPLITS: Final = 32
"""Most splits of a request's keys in vLLM's Triton kernel, which takes 16 heads per program."""


def _output(content: Content) -> torch.Tensor:
    """An uninitialised output ``[T, H, L]``."""
    rows = content.query[..., : content.case.head_size_v]
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


def _parts(content: Content) -> tuple[torch.Tensor, torch.Tensor]:
    """The two parts of the queries, as an engine passes them."""
    assert content.parts is not None
    return content.parts


def _flashmla(module: Any, content: Content) -> KernelRun | Refusal:
    """FlashMLA's dense decode as vLLM's FLASHMLA calls it.

    The parts of the queries are joined in every call. The first call with a schedule fills it in.
    Over an fp8 cache the query is fp8 too, which an engine's layer makes before the call.
    """
    case = content.case
    if case.is_expanded:
        return EXPANDED
    if torch.cuda.get_device_capability(content.device)[0] != 9:
        return Refusal(Status.UNSUPPORTED, "its dense kernel is for Hopper")
    if case.block_size != FLASHMLA_BLOCK or len(set(case.query_lens)) > 1:
        return Refusal(
            Status.UNSUPPORTED, f"pages of {FLASHMLA_BLOCK} tokens and queries of one length only"
        )
    if case.kv_cache_dtype.is_quantized:
        return _flashmla_fp8(import_module(FLASHMLA_FP8), content)
    output, query_len, parts, latest = (
        _output(content),
        case.query_lens[0],
        _parts(content),
        Latest(),
    )
    shape = (case.num_reqs, query_len, case.num_heads, case.head_size)

    def attend(schedule: Any) -> None:
        latest.output, _ = module.flash_mla_with_kvcache(
            q=torch.cat(parts, dim=-1).view(shape),
            k_cache=content.key,
            block_table=content.block_table,
            cache_seqlens=content.seq_lens,
            head_dim_v=case.head_size_v,
            tile_scheduler_metadata=schedule,
            softmax_scale=case.scale,
            causal=True,
            is_fp8_kvcache=False,
        )

    def schedule() -> Any:
        return module.get_mla_metadata(content.seq_lens, query_len * case.num_heads, 1)[0]

    return KernelRun(
        partial(attend, schedule()),
        output,
        planned=lambda: attend(schedule()),
        collect=lambda: output.copy_(latest.output.view_as(output)),
    )


def _flashmla_fp8(module: Any, content: Content) -> KernelRun:
    case, output, latest = content.case, _output(content), Latest()
    query, query_len = content.query.to(content.key.dtype), case.query_lens[0]
    shape = (case.num_reqs, query_len, case.num_heads, case.head_size)
    one = torch.ones(1, device=content.device)

    def plan() -> tuple[Any, Any]:
        found: tuple[Any, Any] = module.get_mla_metadata_dense_fp8(
            content.seq_lens, query_len * case.num_heads, 1
        )
        return found

    def attend(schedule: tuple[Any, Any]) -> None:
        latest.output, _ = module.flash_mla_with_kvcache_fp8(
            q=query.view(shape),
            k_cache=content.key,
            block_table=content.block_table,
            cache_seqlens=content.seq_lens,
            head_dim_v=case.head_size_v,
            tile_scheduler_metadata=schedule[0],
            num_splits=schedule[1],
            softmax_scale=case.scale,
            causal=True,
            descale_q=one,
            descale_k=one,
        )

    return KernelRun(
        partial(attend, plan()),
        output,
        FP8_QUERY_TOLERANCE,
        planned=lambda: attend(plan()),
        plan=plan,
        refresh=partial(query.copy_, content.query),
        collect=lambda: output.copy_(latest.output.view_as(output)),
    )


def _flashinfer_mla(module: Any, content: Content) -> KernelRun | Refusal:
    """FlashInfer's paged MLA wrapper with its fa3 kernel."""
    if content.case.is_expanded:
        return EXPANDED
    case, device, output = content.case, content.device, _output(content)
    rows = 64 if case.num_heads * max(case.query_lens) <= 64 else 128
    if max(case.query_lens) > 1 and rows % case.num_heads:
        reason = f"drops visible keys with {case.num_heads} heads, no divisor of its tile"
        return Refusal(Status.UNSUPPORTED, reason)
    pages = block_table_to_csr(content.block_table, content.seq_lens, case.block_size)
    indptr = pages.indptr.cpu().pin_memory()
    indices = pages.indices[: int(indptr[-1])].contiguous()
    starts = content.query_start_loc.cpu().pin_memory()
    lens = content.seq_lens.cpu().pin_memory()
    workspace = torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = module.BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
    rank, latent, rope = case.head_size_v, content.value[:, :, 0], content.key[:, :, 0]
    rope = rope[..., rank:]
    query, rotary = _parts(content)
    given: dict[str, Any] = {}
    if case.kv_cache_dtype.is_quantized:
        given = {"ckv_scale": 1.0, "kpe_scale": 1.0}

    def plan() -> None:
        wrapper.plan(
            *(starts, indptr, indices, lens, case.num_heads, rank, case.rope_size),
            *(case.block_size, True, case.scale, content.query.dtype, content.key.dtype),
        )

    def call() -> None:
        wrapper.run(query, rotary, latent, rope, out=output, **given)

    def plan_and_call() -> None:
        plan()
        call()

    plan()
    return KernelRun(call, output, planned=plan_and_call, plan=plan)


def _vllm_triton_mla(module: Any, content: Content) -> KernelRun | Refusal:
    """The split decode of vLLM's TRITON_MLA, with enough splits to fill the device."""
    case, device, output = content.case, content.device, _output(content)
    if case.is_expanded or max(case.query_lens) > 1:
        return Refusal(Status.UNSUPPORTED, "one new token per request only")
    programs = case.num_reqs * cdiv(case.num_heads, 16)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    splits = max(1, min(cdiv(2 * processors, programs), VLLM_MOST_SPLITS))
    shape, parts, latest = (case.num_reqs, case.num_heads), _parts(content), Latest()
    partial_outputs = torch.empty((*shape, splits, case.head_size_v + 1), device=device)
    one = torch.ones((), device=device)
    fwd = module.decode_attention_fwd
    known = inspect.signature(fwd).parameters
    # Arguments that not every version of vLLM has.
    wanted: dict[str, Any] = {"k_scale": one, "v_scale": one, "is_mla": True}
    given = {name: value for name, value in wanted.items() if name in known}

    def call() -> None:
        query = torch.cat(parts, dim=-1)
        latest.output = query.new_zeros((*shape, case.head_size_v))
        lse = query.new_zeros(shape)
        fwd(
            *(query, content.key, content.value, latest.output, lse, content.block_table),
            *(content.seq_lens, partial_outputs, splits, case.scale, case.block_size),
            **given,
        )

    return KernelRun(call, output, collect=lambda: output.copy_(latest.output))


def _fa3(module: Any, content: Content) -> KernelRun | Refusal:
    """FlashAttention-3 as vLLM ships it: over latent rows as its FLASH_ATTN_MLA calls it."""
    case = content.case
    if not module.FA3_AVAILABLE:
        return Refusal(Status.UNAVAILABLE, "this vLLM has no FlashAttention-3 library")
    if case.is_expanded:
        return _fa3_expanded(module, content)
    if case.kv_cache_dtype.is_quantized:
        return Refusal(Status.UNSUPPORTED, "FLASH_ATTN_MLA takes no fp8 cache")
    output, latest, rank = _output(content), Latest(), case.head_size_v
    query, rotary = _parts(content)
    latent, rope = content.value, content.key[..., rank:]
    max_query_len, max_seq_len = max(case.query_lens), max(case.seq_lens)

    def plan() -> object:
        return module.get_scheduler_metadata(
            batch_size=case.num_reqs,
            max_seqlen_q=max_query_len,
            max_seqlen_k=max_seq_len,
            num_heads_q=case.num_heads,
            num_heads_kv=1,
            headdim=case.rope_size,
            cache_seqlens=content.seq_lens,
            qkv_dtype=content.key.dtype,
            headdim_v=rank,
            page_size=case.block_size,
            cu_seqlens_q=content.query_start_loc,
            causal=True,
            num_splits=0,
        )

    def attend(schedule: object) -> None:
        latest.output = module.flash_attn_varlen_func(
            q=rotary,
            k=rope,
            v=latent,
            q_v=query,
            max_seqlen_q=max_query_len,
            cu_seqlens_q=content.query_start_loc,
            max_seqlen_k=max_seq_len,
            seqused_k=content.seq_lens,
            block_table=content.block_table,
            softmax_scale=case.scale,
            causal=True,
            fa_version=3,
            scheduler_metadata=schedule,
            num_splits=0,
        )

    return KernelRun(
        partial(attend, plan()),
        output,
        planned=lambda: attend(plan()),
        plan=plan,
        collect=lambda: output.copy_(latest.output),
    )


def _fa3_expanded(module: Any, content: Content) -> KernelRun:
    """FlashAttention-3 over expanded keys and values, which are not paged."""
    case = content.case
    key, value = content.own_rows()
    output, longest = torch.empty_like(value), max(case.query_lens)

    def call() -> None:
        module.flash_attn_varlen_func(
            q=content.query,
            k=key,
            v=value,
            out=output,
            cu_seqlens_q=content.query_start_loc,
            cu_seqlens_k=content.query_start_loc,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=case.scale,
            causal=True,
            fa_version=3,
        )

    return KernelRun(call, output)


LATENT_ADAPTERS: Final[dict[str, tuple[str, Adapter]]] = {
    # Imported directly: vLLM's own operators would also need FlashMLA's second library.
    "flashmla": ("vllm.third_party.flashmla.flash_mla_interface", _flashmla),
    "flashinfer_mla": ("flashinfer.mla", _flashinfer_mla),
    "fa3": ("vllm.vllm_flash_attn", _fa3),
    "vllm_triton_mla": ("vllm.v1.attention.ops.triton_decode_attention", _vllm_triton_mla),
}
"""Module to import for each peer, and the function that prepares a run."""
