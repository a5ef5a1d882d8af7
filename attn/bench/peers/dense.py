"""Other projects' kernels on a dense case: the same keys and values, in their own layouts.

A peer is imported only when it is asked for, and plans its step outside the timed call.
``python -m attn.bench.peers.dense [CASE PATTERN ...]`` compiles FlashInfer's kernels ahead.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import torch

from attn.bench.cases.case import CaseKind, KernelCase
from attn.bench.cases.dense import (
    FA3_ONE_SPLIT,
    FA4_CASE,
    VENDOR_CASES,
    BenchTable,
    select_cases,
)
from attn.bench.cases.inputs import Content
from attn.bench.command import USER_ERRORS, Parser, require_gpu, usage_error
from attn.bench.peers.flashinfer_jit import compile_flashinfer, wrapper_backend
from attn.bench.results.reasons import describe
from attn.bench.results.results import Status
from attn.errors import MissingDependencyError
from builders.pages.paging import block_table_to_csr
from specs.dtypes import CacheDType

TOLERANCE: Final = 1e-2
"""Most relative norm of a row's error; bf16 kernels have 2e-3 to 4e-3."""
FP8_QUERY_TOLERANCE: Final = 6e-2
"""Most relative norm of a row's error where the kernel has queries and weights in fp8."""

FLASHINFER_WORKSPACE_BYTES: Final = 512 << 20
VLLM_SEGMENTS: Final = 16
"""Segments of vLLM's split decode."""
VLLM_MIN_GRID: Final = 128
"""vLLM splits the keys while requests * KV heads stay at or below this."""


@dataclass(frozen=True)
class KernelRun:
    """A kernel that is ready to run; its plan is made."""

    call: Callable[[], object]
    """Runs one step and writes ``output``."""
    output: torch.Tensor
    """``[T, H, Dv]`` bf16 result of the latest step."""
    tolerance: float = TOLERANCE
    planned: Callable[[], object] | None = None
    """Makes the step's plan and runs the step; None for a kernel that needs no plan."""
    plan: Callable[[], object] | None = None
    """Makes the step's plan alone; None where there is none, or where it is a part of the first
    call."""
    refresh: Callable[[], object] | None = None
    """Takes the queries of the content anew; None for a kernel that reads them where they are."""
    collect: Callable[[], object] | None = None
    """Copies the last call's result to ``output``; None for a kernel that writes there itself."""


class Latest:
    """Holds the output of the latest call of a kernel that allocates it."""

    output: torch.Tensor


@dataclass(frozen=True)
class Refusal:
    """A kernel that cannot run, and the reason."""

    status: Status
    reason: str


def prepare_peer(
    name: str, content: Content, adapters: Mapping[str, tuple[str, Adapter]] | None = None
) -> KernelRun | Refusal:
    """Prepare a peer on a case and make its plan; returns a refusal where it cannot run.

    Args:
        name: one of ``ALL_PEERS``.
        content: the case's inputs.
        adapters: the adapters to look the name up in; None means those of dense cases.

    Raises:
        ValueError: no such peer.
    """
    known = _ADAPTERS if adapters is None else adapters
    if name not in known:
        raise ValueError(f"peer must be one of {', '.join(known)}, got {name!r}")
    if content.device.type != "cuda":
        return Refusal(Status.UNAVAILABLE, f"needs a CUDA device, not {content.device.type}")
    module_name, adapter = known[name]
    try:
        module = import_module(module_name)
    except Exception as error:
        return Refusal(Status.UNAVAILABLE, f"import {module_name}: {describe(error)}")
    try:
        return adapter(module, content)
    except Exception as error:
        # Only the place of the error: a compiler's message can have thousands of lines.
        traceback.print_tb(error.__traceback__, limit=-4)
        return Refusal(Status.FAILED, describe(error))


def _output(content: Content) -> torch.Tensor:
    return torch.empty_like(content.query)


def _window(content: Content) -> tuple[int, int]:
    """Keys visible to the left of a token and to the right of it; -1 means all."""
    window = content.case.sliding_window
    return (-1, -1) if window is None else (window - 1, 0)


def _bf16_sinks(content: Content) -> torch.Tensor | None:
    return None if content.sinks is None else content.sinks.to(content.query.dtype)


def _descale(content: Content) -> torch.Tensor:
    """``[R, Hk]`` fp32 ones, a view of a single element."""
    one = torch.ones(1, dtype=torch.float32, device=content.device)
    return one.expand(content.case.num_reqs, content.case.num_kv_heads)


def _fa3(module: Any, content: Content, splits: int = 0) -> KernelRun | Refusal:
    """FlashAttention-3 as vLLM ships it; over an fp8 cache its query is fp8 too.

    Args:
        module: vLLM's package of it.
        content: the case's inputs.
        splits: splits of the keys; 0 leaves the number to it.
    """
    if not module.FA3_AVAILABLE:
        return Refusal(Status.UNAVAILABLE, "this vLLM has no FlashAttention-3 library")
    case, output = content.case, _output(content)
    quantized = case.kv_cache_dtype.is_quantized
    query = content.query.to(content.key.dtype)
    window = _window(content)
    max_query_len, max_seq_len = max(case.query_lens), max(case.seq_lens)

    def plan() -> object:
        return module.get_scheduler_metadata(
            batch_size=case.num_reqs,
            max_seqlen_q=max_query_len,
            max_seqlen_k=max_seq_len,
            num_heads_q=case.num_heads,
            num_heads_kv=case.num_kv_heads,
            headdim=case.head_size,
            cache_seqlens=content.seq_lens,
            qkv_dtype=content.key.dtype,
            cu_seqlens_q=content.query_start_loc,
            page_size=case.block_size,
            causal=True,
            window_size=window,
            num_splits=splits,
        )

    made = plan()
    descale = _descale(content) if quantized else None
    sinks = _bf16_sinks(content)

    def attend(schedule: object) -> None:
        module.flash_attn_varlen_func(
            q=query,
            k=content.key,
            v=content.value,
            out=output,
            cu_seqlens_q=content.query_start_loc,
            max_seqlen_q=max_query_len,
            seqused_k=content.seq_lens,
            max_seqlen_k=max_seq_len,
            softmax_scale=case.scale,
            causal=True,
            window_size=list(window),
            block_table=content.block_table,
            scheduler_metadata=schedule,
            q_descale=descale,
            k_descale=descale,
            v_descale=descale,
            num_splits=splits,
            fa_version=3,
            s_aux=sinks,
        )

    return KernelRun(
        lambda: attend(made),
        output,
        FP8_QUERY_TOLERANCE if quantized else TOLERANCE,
        planned=lambda: attend(plan()),
        plan=plan,
        refresh=partial(query.copy_, content.query) if quantized else None,
    )


def _vllm_triton(module: Any, content: Content) -> KernelRun | Refusal:
    """VLLM's unified Triton kernel, with the split buffers that vLLM's builder makes."""
    case, device, output = content.case, content.device, _output(content)
    quantized = case.kv_cache_dtype.is_quantized
    query = content.query.to(content.key.dtype)
    split_below = VLLM_MIN_GRID // case.num_kv_heads
    segments = (split_below, case.num_heads, VLLM_SEGMENTS)
    padded_size = 1 << (case.head_size - 1).bit_length()
    segment_outputs = torch.empty((*segments, padded_size), dtype=torch.float32, device=device)
    partial_max, partial_sum = (
        torch.empty(segments, dtype=torch.float32, device=device) for _ in range(2)
    )
    descale = _descale(content)
    query_descale = torch.ones(1, dtype=torch.float32, device=device) if quantized else None
    modes = module.KVQuantMode
    mode = modes.FP8_PER_TENSOR if quantized else modes.NONE
    max_query_len, max_seq_len = max(case.query_lens), max(case.seq_lens)
    sinks, window = _bf16_sinks(content), _window(content)

    def call() -> None:
        module.unified_attention(
            q=query,
            k=content.key,
            v=content.value,
            out=output,
            cu_seqlens_q=content.query_start_loc,
            max_seqlen_q=max_query_len,
            seqused_k=content.seq_lens,
            max_seqlen_k=max_seq_len,
            softmax_scale=case.scale,
            causal=True,
            window_size=window,
            block_table=content.block_table,
            softcap=0,
            q_descale=query_descale,
            k_descale=descale,
            v_descale=descale,
            seq_threshold_3D=split_below,
            num_par_softmax_segments=VLLM_SEGMENTS,
            softmax_segm_output=segment_outputs,
            softmax_segm_max=partial_max,
            softmax_segm_expsum=partial_sum,
            sinks=sinks,
            kv_quant_mode=mode,
        )

    return KernelRun(
        call,
        output,
        FP8_QUERY_TOLERANCE if quantized else TOLERANCE,
        refresh=partial(query.copy_, content.query) if quantized else None,
    )


def _flashinfer(module: Any, content: Content) -> KernelRun | Refusal:
    """FlashInfer's wrappers: fa2 (tensor cores) for decode and verify, fa3 for other steps."""
    case, device, output = content.case, content.device, _output(content)
    if case.sinks:
        return Refusal(Status.UNSUPPORTED, "these wrappers take no sinks")
    pages = block_table_to_csr(content.block_table, content.seq_lens, case.block_size)
    indptr = _pinned(pages.indptr)
    last_page_len = _pinned(pages.last_page_len)
    indices = pages.indices[: int(indptr[-1])].contiguous()
    workspace = torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    lengths: tuple[torch.Tensor, ...] = (indptr, indices, last_page_len)
    sizes = (case.num_heads, case.num_kv_heads, case.head_size, case.block_size)
    common = {
        "sm_scale": case.scale,
        "window_left": _window(content)[0],
        "q_data_type": content.query.dtype,
        "kv_data_type": content.key.dtype,
    }
    if case.kind is CaseKind.DECODE:
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True, backend=wrapper_backend(case)
        )
    else:
        backend = wrapper_backend(case)
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        lengths = (_pinned(content.query_start_loc), *lengths)
        common["causal"] = True
    cache = (content.key, content.value)

    def plan() -> None:
        wrapper.plan(*lengths, *sizes, **common)

    def call() -> None:
        wrapper.run(content.query, cache, out=output)

    def plan_and_call() -> None:
        plan()
        call()

    plan()
    return KernelRun(call, output, planned=plan_and_call, plan=plan)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned host memory, from which a copy to the device does not block the host."""
    return tensor.cpu().pin_memory() if tensor.is_cuda else tensor


def _xqa(module: Any, content: Content) -> KernelRun | Refusal:
    """XQA of FlashInfer, for decode and verify; over an fp8 cache it computes in fp8."""
    case, device, output = content.case, content.device, _output(content)
    if not case.is_bandwidth_bound:
        return Refusal(Status.UNSUPPORTED, "decodes and verifies only")
    query_len = case.query_lens[0]
    # Zeroed because the first bytes are semaphores; the kernel resets them to zero.
    workspace = torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    seq_lens = content.seq_lens.view(torch.uint32)
    mask, out = None, output
    max_seq_len, window_left = max(case.seq_lens), _window(content)[0]
    if query_len > 1:
        mask = _causal_bits(case.num_reqs, query_len).to(device)
        out = output.view(case.num_reqs, query_len, case.num_heads, case.head_size)

    def call() -> None:
        module.xqa_batch_decode_with_kv_cache(
            query=content.query,
            kv_cache=(content.key, content.value),
            workspace_buffer=workspace,
            block_tables=content.block_table,
            seq_lens=seq_lens,
            max_seq_len=max_seq_len,
            bmm1_scale=case.scale,
            bmm2_scale=1.0,
            window_left=window_left,
            out=out,
            sinks=content.sinks,
            kv_layout="NHD",
            q_len_per_req=query_len,
            mask=mask,
        )

    quantized = case.kv_cache_dtype.is_quantized
    return KernelRun(call, output, FP8_QUERY_TOLERANCE if quantized else TOLERANCE)


def _causal_bits(num_reqs: int, query_len: int) -> torch.Tensor:
    """``[R, query_len, 2 * ceil(query_len / 32)]`` uint16: bit j of row i is set for j <= i."""
    words = 2 * -(-query_len // 32)
    rows = [
        [(((1 << (row + 1)) - 1) >> (16 * word)) & 0xFFFF for word in range(words)]
        for row in range(query_len)
    ]
    signed = torch.tensor(rows, dtype=torch.int32).to(torch.int16)
    return signed.expand(num_reqs, -1, -1).contiguous().view(torch.uint16)


def _cudnn(module: Any, content: Content) -> KernelRun | Refusal:
    """CuDNN's attention: through torch where torch has the mask, else FlashInfer's paged call.

    Torch aligns the causal mask with the first key and takes one length for all requests, so it
    serves prefills of equal lengths without context.
    """
    case = content.case
    for what, is_asked in (
        ("sinks", case.sinks),
        ("a window", case.sliding_window is not None),
        ("a quantised cache", case.kv_cache_dtype.is_quantized),
    ):
        if is_asked:
            return Refusal(Status.UNSUPPORTED, f"not called with {what}")
    if case.query_lens == case.seq_lens and len(set(case.query_lens)) == 1:
        return _cudnn_of_torch(module, content)
    try:
        import_module("cudnn")
        paged = import_module("flashinfer.cudnn")
    except Exception as error:
        # Not known is not the same as not served: the target stays open.
        reason = "torch's has neither lengths nor a context, and the paged one cannot be imported"
        return Refusal(Status.UNAVAILABLE, f"{reason}: {describe(error)}")
    is_decode = case.kind is CaseKind.DECODE
    run = (_cudnn_decode if is_decode else _cudnn_paged)(paged, content)
    try:
        run.call()
        # Waits, so that an error inside the kernel is raised here and not in another peer's call.
        torch.cuda.synchronize(content.device)
    except Exception as error:
        return Refusal(Status.FAILED, f"the paged one: {describe(error)}")
    return run


def _cudnn_decode(module: Any, content: Content) -> KernelRun:
    """CuDNN's paged decode, called by FlashInfer."""
    case, device, output = content.case, content.device, _output(content)
    workspace = torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    # cuDNN names a page's axes [N, Hk, P, D]; the transposed views copy nothing.
    key, value = content.key.transpose(1, 2), content.value.transpose(1, 2)
    lens, longest = content.seq_lens.view(-1, 1, 1, 1), max(case.seq_lens)

    def call() -> None:
        module.cudnn_batch_decode_with_kv_cache(
            content.query,
            key,
            value,
            case.scale,
            workspace,
            max_sequence_kv=longest,
            actual_seq_lens_kv=lens,
            block_tables=content.block_table,
            out=output,
        )

    return KernelRun(call, output)


def _cudnn_of_torch(module: Any, content: Content) -> KernelRun:
    case, output = content.case, _output(content)

    def by_request(rows: torch.Tensor) -> torch.Tensor:
        return rows.view(case.num_reqs, case.query_lens[0], *rows.shape[1:]).transpose(1, 2)

    query = by_request(content.query)
    key, value = (
        by_request(content.rows(side, content.slots)) for side in (content.key, content.value)
    )
    attend = torch.nn.functional.scaled_dot_product_attention
    results: list[torch.Tensor] = []

    def call() -> None:
        results.clear()
        with module.sdpa_kernel(module.SDPBackend.CUDNN_ATTENTION):
            results.append(
                attend(query, key, value, is_causal=True, scale=case.scale, enable_gqa=True)
            )

    def collect() -> None:
        output.copy_(results[0].transpose(1, 2).flatten(0, 1))

    return KernelRun(call, output, collect=collect)


def _cudnn_paged(module: Any, content: Content) -> KernelRun:
    case, device, output = content.case, content.device, _output(content)
    workspace = torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    # cuDNN names a page's axes [N, Hk, P, D]; the transposed views copy nothing.
    key, value = content.key.transpose(1, 2), content.value.transpose(1, 2)
    query_lens = torch.tensor(case.query_lens, dtype=torch.int32, device=device)
    offsets = content.query_start_loc * (case.num_heads * case.head_size)
    lens = {
        "actual_seq_lens_q": query_lens.view(-1, 1, 1, 1),
        "actual_seq_lens_kv": content.seq_lens.view(-1, 1, 1, 1),
        "max_token_per_sequence": max(case.query_lens),
        "max_sequence_kv": max(case.seq_lens),
        "batch_offsets_q": offsets,
        "batch_offsets_o": offsets,
    }

    def call() -> None:
        module.cudnn_batch_prefill_with_kv_cache(
            content.query,
            key,
            value,
            case.scale,
            workspace,
            block_tables=content.block_table,
            causal=True,
            return_lse=False,
            out=output,
            **lens,
        )

    return KernelRun(call, output)


def _fa4(module: Any, content: Content) -> KernelRun | Refusal:
    """FlashAttention-4 as vLLM ships it, over contiguous keys and values, in one case."""
    case = content.case
    if case.name != FA4_CASE:
        return Refusal(Status.UNSUPPORTED, f"measured on {FA4_CASE} alone")
    if not module.FA4_AVAILABLE:
        return Refusal(Status.UNAVAILABLE, "this vLLM has no FlashAttention-4")
    key, value = content.own_rows()
    output, longest = _output(content), max(case.query_lens)

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
            num_splits=1,
            fa_version=4,
        )

    return KernelRun(call, output)


Adapter = Callable[[Any, Content], KernelRun | Refusal]

_ADAPTERS: Final[dict[str, tuple[str, Adapter]]] = {
    "fa3": ("vllm.vllm_flash_attn", _fa3),
    FA3_ONE_SPLIT: ("vllm.vllm_flash_attn", partial(_fa3, splits=1)),
    "flashinfer": ("flashinfer", _flashinfer),
    "xqa": ("flashinfer.decode", _xqa),
    "cudnn": ("torch.nn.attention", _cudnn),
    "fa4": ("vllm.vllm_flash_attn.flash_attn_interface", _fa4),
    "vllm_triton": ("vllm.v1.attention.ops.triton_unified_attention", _vllm_triton),
}
"""Module to import for each peer, and the function that prepares a run."""


def compiled_cases() -> tuple[KernelCase, ...]:
    """Cases of all tables, including the fp8 variants that a table makes itself."""
    tables = (table.cases for table in BenchTable)
    cases = {case.name: case for table in tables for case in table}
    for case in VENDOR_CASES:
        name = case.name.replace("dec_", "dec_fp8_")
        cases.setdefault(name, case.replace(name=name, kv_cache_dtype=CacheDType.FP8_E4M3))
    return tuple(cases.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m attn.bench.peers.dense``; returns 1 when a kernel does not compile."""
    parser = Parser(
        "python -m attn.bench.peers.dense", description="Compile FlashInfer's kernels ahead."
    )
    parser.add_argument("case", nargs="*", help="Shell pattern of names; default: all.")
    patterns = parser.parse_args(arguments).case
    try:
        chosen = select_cases(patterns, compiled_cases())
        if find_spec("flashinfer") is None:
            raise MissingDependencyError("flashinfer", "compiling the peers' kernels")
        # FlashInfer asks the GPU which architecture to compile for.
        require_gpu("compiling the peers' kernels")
    except USER_ERRORS as error:
        return usage_error(error)
    return 0 if compile_flashinfer(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
