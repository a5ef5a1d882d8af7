"""Signatures of FlashInfer's wrappers and direct calls, of both versions and of the installed one.

``_`` stands for any default. The installed version is read without importing it: FlashInfer's
import asks for a GPU in some versions.
"""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
from collections.abc import Collection
from pathlib import Path

import pytest

PREFILL, DECODE = "BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"
MODULES = {PREFILL: "prefill.py", DECODE: "decode.py"}
METHODS = ("__init__", "plan", "run")
BEHIND = {"plan": "_plan_impl"}
"""The function to which a method hands its arguments, where a version puts one behind the other."""

_PREFILL_INIT = (
    "self, float_workspace_buffer, kv_layout=_, use_cuda_graph=_, qo_indptr_buf=_, "
    "paged_kv_indptr_buf=_, paged_kv_indices_buf=_, paged_kv_last_page_len_buf=_, "
    "custom_mask_buf=_, mask_indptr_buf=_, backend=_, jit_args=_, jit_kwargs=_"
)
_PREFILL_PLAN = (
    "self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, "
    "num_kv_heads, head_dim_qk, page_size, head_dim_vo=_, custom_mask=_, packed_custom_mask=_, "
    "causal=_, pos_encoding_mode=_, use_fp16_qk_reduction=_, sm_scale=_, window_left=_, "
    "logits_soft_cap=_, rope_scale=_, rope_theta=_, q_data_type=_, kv_data_type=_, o_data_type=_, "
    "non_blocking=_, prefix_len_ptr=_, token_pos_in_items_ptr=_, token_pos_in_items_len=_, "
    "max_item_len_ptr=_, seq_lens=_, seq_lens_q=_, block_tables=_, max_token_per_sequence=_, "
    "max_sequence_kv=_, fixed_split_size=_, disable_split_kv=_"
)
_DECODE_INIT = (
    "self, float_workspace_buffer, kv_layout=_, use_cuda_graph=_, use_tensor_cores=_, "
    "paged_kv_indptr_buffer=_, paged_kv_indices_buffer=_, paged_kv_last_page_len_buffer=_, "
    "backend=_, jit_args=_"
)
_DECODE_PAGES = (
    "self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size"
)
_DECODE_RUN = (
    "self, q, paged_kv_cache, *args, q_scale=_, k_scale=_, v_scale=_, out=_, lse=_, return_lse=_, "
    "enable_pdl=_, window_left=_, sinks=_, q_len_per_req=_, skip_softmax_threshold_scale_factor=_, "
    "kv_cache_sf=_"
)
SIGNATURES: dict[str, dict[tuple[str, str], str]] = {
    "0.6.14": {
        (PREFILL, "__init__"): _PREFILL_INIT,
        (PREFILL, "plan"): _PREFILL_PLAN,
        (PREFILL, "run"): (
            "self, q, paged_kv_cache, *args, q_scale=_, k_scale=_, v_scale=_, out=_, lse=_, "
            "return_lse=_, enable_pdl=_, window_left=_, sinks=_, kv_cache_sf=_, "
            "skip_softmax_threshold_scale_factor=_"
        ),
        (DECODE, "__init__"): _DECODE_INIT,
        (DECODE, "plan"): (
            f"{_DECODE_PAGES}, pos_encoding_mode=_, window_left=_, logits_soft_cap=_, "
            "q_data_type=_, kv_data_type=_, o_data_type=_, data_type=_, sm_scale=_, rope_scale=_, "
            "rope_theta=_, non_blocking=_, block_tables=_, seq_lens=_, fixed_split_size=_, "
            "disable_split_kv=_, q_len_per_req=_"
        ),
        (DECODE, "run"): _DECODE_RUN,
    },
    "0.7.2.post1": {
        (PREFILL, "__init__"): f"{_PREFILL_INIT}, variant_owns_mask=_",
        (PREFILL, "plan"): f"{_PREFILL_PLAN}, uniform_q_len=_",
        (PREFILL, "run"): (
            "self, q, paged_kv_cache, *args, q_scale=_, k_scale=_, v_scale=_, out=_, lse=_, "
            "return_lse=_, lse_base=_, lse_layout=_, enable_pdl=_, window_left=_, sinks=_, "
            "kv_cache_sf=_, skip_softmax_threshold_scale_factor=_, use_fp16_softmax=_, "
            "uses_spcompress=_"
        ),
        (DECODE, "__init__"): _DECODE_INIT,
        (DECODE, "plan"): (
            f"{_DECODE_PAGES}, *, pos_encoding_mode=_, window_left=_, window_right=_, "
            "logits_soft_cap=_, q_data_type=_, kv_data_type=_, o_data_type=_, data_type=_, "
            "sm_scale=_, rope_scale=_, rope_theta=_, non_blocking=_, block_tables=_, seq_lens=_, "
            "fixed_split_size=_, disable_split_kv=_, q_len_per_req=_, is_causal=_"
        ),
        (DECODE, "run"): _DECODE_RUN,
    },
}

BATCH_DECODE, BATCH_CONTEXT, FMHA_V2, XQA_DECODE = (
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_fmha_v2_prefill",
    "xqa_batch_decode_with_kv_cache",
)
FUNCTION_MODULES = {
    BATCH_DECODE: "decode.py",
    BATCH_CONTEXT: "prefill.py",
    FMHA_V2: "prefill.py",
    XQA_DECODE: "decode.py",
}
_BATCH_DECODE = (
    "query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=_, "
    "bmm2_scale=_, window_left=_, out=_, out_dtype=_, o_sf_scale=_, o_sf_vec_size=_, sinks=_, "
    "kv_layout=_, enable_pdl=_, backend=_, q_len_per_req=_, o_scale=_, mask=_, max_q_len=_, "
    "cum_seq_lens_q=_, skip_softmax_threshold_scale_factor=_, kv_cache_sf=_, "
    "uses_shared_paged_kv_idx=_, lse=_, return_lse=_"
)
_BATCH_CONTEXT = (
    "query, kv_cache, workspace_buffer, block_tables, seq_lens, max_q_len, max_kv_len, "
    "bmm1_scale, bmm2_scale, batch_size, cum_seq_lens_q, cum_seq_lens_kv, window_left=_, out=_, "
    "out_dtype=_, o_sf_scale=_, o_sf_vec_size=_, kv_layout=_, enable_pdl=_, sinks=_, "
    "kv_cache_sf=_, skip_softmax_threshold_scale_factor=_, uses_shared_paged_kv_idx=_, causal=_, "
    "lse=_, return_lse=_"
)
_FMHA_V2 = (
    "qkv, input_layout, workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, "
    "bmm2_scale, batch_size, cum_seq_lens_q, cum_seq_lens_kv, block_tables=_, out=_, out_dtype=_, "
    "sinks=_, pos_encoding_mode=_, logits_soft_cap_scale=_, mask_mode=_, window_left=_, "
    "chunked_attention_size=_, save_softmax_stats=_, skip_softmax_threshold_scale_factor=_"
)
_XQA_DECODE = (
    "query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=_, "
    "bmm2_scale=_, window_left=_, out=_, sinks=_, kv_layout=_, enable_pdl=_, q_len_per_req=_, "
    "o_scale=_, mask=_, kv_cache_sf=_"
)
FUNCTIONS: dict[str, dict[str, str]] = {
    "0.6.14": {
        BATCH_DECODE: _BATCH_DECODE,
        BATCH_CONTEXT: _BATCH_CONTEXT,
        FMHA_V2: _FMHA_V2,
        XQA_DECODE: _XQA_DECODE,
    },
    "0.7.2.post1": {
        BATCH_DECODE: (
            f"{_BATCH_DECODE}, bmm1_scale_log2=_, multi_ctas_kv_counter_buffer=_, "
            "enable_block_sparse_attention=_, cp_world=_, cp_rank=_, causal_seqlens_kv_global=_, "
            "bf16q_fp8kv_transform_mode=_, request_order=_, request_order_plan=_"
        ),
        BATCH_CONTEXT: (
            f"{_BATCH_CONTEXT}, multi_ctas_kv_counter_buffer=_, use_fp16_softmax=_, "
            "uses_spcompress=_, backend=_"
        ),
        FMHA_V2: _FMHA_V2,
        XQA_DECODE: f"{_XQA_DECODE}, q_cu_seq_lens=_",
    },
}


def signature(version: str, cls: str, method: str) -> inspect.Signature:
    """The recorded signature of a method, to bind calls to."""
    text = SIGNATURES[version][cls, method].replace("=_", "=None")
    return inspect.signature(eval(f"lambda {text}: None"))


def function_signature(version: str, name: str) -> inspect.Signature:
    """The recorded signature of a function, to bind calls to."""
    text = FUNCTIONS[version][name].replace("=_", "=None")
    return inspect.signature(eval(f"lambda {text}: None"))


def installed_version() -> str | None:
    """The installed FlashInfer's version; None if it is not installed."""
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return None


def known_version(known: Collection[str]) -> str:
    """The installed FlashInfer's version, for a test of what it was recorded to have.

    The test is skipped where no FlashInfer is installed; it fails where nobody recorded the
    installed one, whose signatures may be others.

    Args:
        known: versions that are recorded.
    """
    version = installed_version()
    if version is None:
        pytest.skip("FlashInfer is not installed")
    assert version in known, (
        f"FlashInfer {version} is installed, and recorded are {', '.join(known)}: record it too"
    )
    return version


def installed_signatures() -> dict[tuple[str, str], str]:
    """The installed FlashInfer's signatures, read from its files, in this module's notation."""
    found = {}
    for cls, module in MODULES.items():
        (body,) = (
            node.body
            for node in parsed(module).body
            if isinstance(node, ast.ClassDef) and node.name == cls
        )
        # Where a function has overloads, the last definition counts.
        methods = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
        for name in METHODS:
            found[cls, name] = written(methods.get(BEHIND.get(name, name), methods[name]).args)
    return found


def installed_functions() -> dict[str, str]:
    """The installed FlashInfer's functions, read from its files, in this module's notation."""
    found = {}
    for name, module in FUNCTION_MODULES.items():
        body = parsed(module).body
        # Where a function has overloads, the last definition counts.
        (*_, node) = (
            node for node in body if isinstance(node, ast.FunctionDef) and node.name == name
        )
        found[name] = written(node.args)
    return found


def parsed(module: str) -> ast.Module:
    # Not by its spec: other tests put modules in its place.
    installed = importlib.metadata.distribution("flashinfer-python")
    return ast.parse(Path(str(installed.locate_file(f"flashinfer/{module}"))).read_text("utf-8"))


def written(arguments: ast.arguments) -> str:
    plain = len(arguments.args) - len(arguments.defaults)
    parts = [one.arg + "=_" * (place >= plain) for place, one in enumerate(arguments.args)]
    if arguments.vararg is not None:
        parts.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        parts.append("*")
    parts += [f"{one.arg}=_" for one in arguments.kwonlyargs]
    if arguments.kwarg is not None:
        parts.append(f"**{arguments.kwarg.arg}")
    return ", ".join(parts)
