"""Other projects' kernels on a latent case, over the same rows."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch

from attn.bench.cases.inputs import Content
from attn.bench.peers.dense import (
    FLASHINFER_WORKSPACE_BYTES,
    Adapter,
    KernelRun,
    Refusal,
)
from attn.bench.results.results import Status
from builders.pages.paging import block_table_to_csr
from specs.base import cdiv

FLASHMLA_BLOCK: Final = 64
"""Tokens of a page: the only size that FlashMLA's dense kernel takes."""
EXPANDED: Final = Refusal(Status.UNSUPPORTED, "latent rows only, not expanded ones")
VLLM_MOST_SPLITS: Final = 32
"""Most splits of a request's keys in vLLM's Triton kernel, which takes 16 heads per program."""


def _output(content: Content) -> torch.Tensor:
    """An uninitialised output ``[T, H, L]``."""
    rows = content.query[..., : content.case.head_size_v]
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


def _flashmla(module: Any, content: Content) -> KernelRun | Refusal:
    """FlashMLA's dense decode as vLLM ships it; the first call with a schedule fills it in."""
    case = content.case
    if case.is_expanded:
        return EXPANDED
    if torch.cuda.get_device_capability(content.device)[0] != 9:
        return Refusal(Status.UNSUPPORTED, "its dense kernel is for Hopper")
    if case.kv_cache_dtype.is_quantized:
        return Refusal(Status.UNSUPPORTED, "its dense kernel takes no fp8 cache with a bf16 query")
    if case.block_size != FLASHMLA_BLOCK or len(set(case.query_lens)) > 1:
        return Refusal(
            Status.UNSUPPORTED, f"pages of {FLASHMLA_BLOCK} tokens and queries of one length only"
        )
    output, query_len = _output(content), case.query_lens[0]
    query = content.query.view(case.num_reqs, query_len, case.num_heads, case.head_size)
    results: list[torch.Tensor] = []

    def attend(schedule: tuple[Any, Any]) -> None:
        out, _ = module.flash_mla_with_kvcache(
            query,
            content.key,
            content.block_table,
            content.seq_lens,
            case.head_size_v,
            schedule[0],
            schedule[1],
            softmax_scale=case.scale,
            causal=True,
        )
        results[:] = [out]

    def plan() -> tuple[Any, Any]:
        made: tuple[Any, Any] = module.get_mla_metadata(
            content.seq_lens, query_len * case.num_heads, 1
        )
        return made

    made = plan()
    return KernelRun(
        lambda: attend(made),
        output,
        planned=lambda: attend(plan()),
        collect=lambda: output.copy_(results[0].view_as(output)),
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
    query, rotary = content.query[..., :rank], content.query[..., rank:]
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
    return KernelRun(call, output, planned=plan_and_call)


def _vllm_triton_mla(module: Any, content: Content) -> KernelRun | Refusal:
    """The split decode of vLLM's TRITON_MLA, with enough splits to fill the device."""
    case, device, output = content.case, content.device, _output(content)
    if case.is_expanded or max(case.query_lens) > 1:
        return Refusal(Status.UNSUPPORTED, "one new token per request only")
    programs = case.num_reqs * cdiv(case.num_heads, 16)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    splits = max(1, min(cdiv(2 * processors, programs), VLLM_MOST_SPLITS))
    shape = (case.num_reqs, case.num_heads)
    lse = torch.zeros(shape, dtype=content.query.dtype, device=device)
    partial = torch.empty((*shape, splits, case.head_size_v + 1), device=device)
    one = torch.ones((), device=device)
    fwd = module.decode_attention_fwd
    known = inspect.signature(fwd).parameters
    # Arguments that not every version of vLLM has.
    given: dict[str, Any] = {"k_scale": one, "v_scale": one, "is_mla": True}

    def call() -> None:
        fwd(
            *(content.query, content.key, content.value, output, lse, content.block_table),
            *(content.seq_lens, partial, splits, case.scale, case.block_size),
            **{name: value for name, value in given.items() if name in known},
        )

    return KernelRun(call, output)


def _fa3_expanded(module: Any, content: Content) -> KernelRun | Refusal:
    """FlashAttention-3 as vLLM ships it, over expanded keys and values, which are not paged."""
    case = content.case
    if not module.FA3_AVAILABLE:
        return Refusal(Status.UNAVAILABLE, "this vLLM has no FlashAttention-3 library")
    if not case.is_expanded:
        return Refusal(Status.UNSUPPORTED, "latent rows only where they are expanded")
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
    # Imported directly: vLLM's own operators would also need FlashMLA's library of fp8 kernels.
    "flashmla": ("vllm.third_party.flashmla.flash_mla_interface", _flashmla),
    "flashinfer_mla": ("flashinfer.mla", _flashinfer_mla),
    "fa3": ("vllm.vllm_flash_attn", _fa3_expanded),
    "vllm_triton_mla": ("vllm.v1.attention.ops.triton_decode_attention", _vllm_triton_mla),
}
"""Module to import for each peer, and the function that prepares a run."""
