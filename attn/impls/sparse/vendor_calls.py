"""Calls of the kernels of sparse latent attention; each function writes its call's output and LSE.

Lists, lengths and rows are already in the form that the kernel takes, as its plan says. The
functions here pad heads, apply scales, make log-sum-exps natural, and make rows with an empty list
neutral (output 0, LSE -inf). The host reads nothing back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from attn.impls.sparse.call import SparseCall
from attn.ops.clear import clear_rows
from attn.ops.sparse_mla import sparse_mla
from attn.reference.quant import saturate
from builders.sparse.arguments import ListedRows
from builders.sparse.vendor_calls import RANK, ROPE, FlashMla, PlannedCalls
from builders.vendor.flashinfer_parts.install import LSE_UNIT
from builders.vendor.flashinfer_parts.mla_calls import LatentCall
from builders.vendor.trtllm_parts.mla_calls import LatentDecodeCall
from specs.dtypes import DType
from specs.layouts import latent_views
from specs.rows import INDEXER_PAGE, LatentFormat

MOST_SPLIT_ROWS = 512
"""Most rows that FlashMLA is given as requests of one row each.

FlashMLA may cut the list of a request between programs. More rows fill the GPU without cuts, and
its schedule has room for a limited number of requests: they are given as rows of one request."""


def attend_by_triton(call: SparseCall) -> None:
    """Call the library's own kernel, which reads rows of every layout."""
    launch = call.launch
    if launch is None:
        raise ValueError("launch of the library's own kernel must be the builder's, got None")
    layout = LatentFormat(call.row.name)
    listed = ListedRows(call.rows, layout, call.indices, call.lens, call.k_scale)
    given = call.query, call.rotary, listed, call.scale, call.out, call.lse
    sparse_mla(*given, launch=launch)


def attend_by_flashmla_sparse(call: SparseCall) -> None:
    """Call FlashMLA's prefill kernel, over bf16 rows of one array."""
    planned = _planned(call)
    functions, query = planned.functions, _whole_query(call, planned.plan.padded_heads)
    rows = call.rows.view(-1, 1, call.rows.shape[-1])
    given = _written(call, query, functions.writes(functions.prefill))
    listed = call.indices[:, None]
    out, _, lse = functions.prefill(query, rows, listed, call.scale, **given)
    _finish(call, out, lse * _lse_unit(planned, lse, _probe_prefill), lse[:, 0].isinf())


def attend_by_flashmla_kv(call: SparseCall) -> None:
    """Call FlashMLA's cache kernel, over block-scaled rows in pages of 64."""
    planned = _planned(call)
    functions, query = planned.functions, _whole_query(call, planned.plan.padded_heads)
    pages = call.rows.view(torch.uint8)
    if pages.shape[1] != INDEXER_PAGE:
        # Converted rows are one block, which is a whole number of pages.
        pages = pages.view(-1, INDEXER_PAGE, pages.shape[-1])
    # Axis 1 makes every row a request; axis 0 makes all rows one request.
    axis = 1 if len(query) <= MOST_SPLIT_ROWS else 0
    given = _written(call, query, functions.writes(functions.with_cache))
    if given:
        given["out"] = given["out"].unsqueeze(axis)
    shape = axis, *query.shape[:2], pages.shape[1], call.indices.shape[1]
    schedule = planned.once(shape, functions.new_schedule)
    out, lse = functions.with_cache(
        *(query.unsqueeze(axis), pages[:, :, None], None, None, call.query.shape[-1], schedule),
        softmax_scale=call.scale,
        is_fp8_kvcache=True,
        indices=call.indices.unsqueeze(axis),
        **given,
    )
    # [b, s, H, L] and [b, H, s].
    out, lse = out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
    _finish(call, out, lse * _lse_unit(planned, lse, _probe_cached), lse[:, 0].isinf())


def attend_by_fa3(call: SparseCall) -> None:
    """Call FlashAttention 3; each query row is a request, and each token is a page."""
    functions, lens = _planned(call).functions, _lens(call)
    rank, width = call.query.shape[-1], call.indices.shape[1]
    pages = call.rows.view(-1, 1, 1, call.rows.shape[-1])
    latent, rope = pages[..., :rank], pages[..., rank:]
    common: dict[str, Any] = {"softmax_scale": call.scale, "causal": False}
    if functions.is_vllm:
        count, device = len(call.query), call.query.device

        def counted() -> torch.Tensor:
            return torch.arange(count + 1, dtype=torch.int32, device=device)

        starts = _planned(call).once(count, counted)
        out, lse = functions.function(
            q=call.rotary,
            k=rope,
            v=latent,
            max_seqlen_q=1,
            cu_seqlens_q=starts,
            max_seqlen_k=width,
            seqused_k=lens,
            q_v=call.query,
            block_table=call.indices,
            return_softmax_lse=True,
            out=call.out,
            fa_version=3,
            **common,
        )
        _finish(call, out, lse.T, lens == 0)
        return
    out, lse, *_ = functions.function(
        call.rotary[:, None],
        rope,
        latent,
        qv=call.query[:, None],
        cache_seqlens=lens,
        page_table=call.indices,
        return_softmax_lse=True,
        **common,
    )
    _finish(call, out[:, 0], lse[..., 0], lens == 0)


def attend_by_flashinfer_mla(call: SparseCall) -> None:
    """Call FlashInfer's wrapper, over pages of one token.

    A plan of the wrapper holds lengths known to the host, so each row is planned with as many pages
    as its list has room for. Rows whose list is shorter run on the library's own kernel instead.

    Raises:
        ValueError: the step was planned with another scale than the layer's.
    """
    planned, lens = _planned(call), _lens(call)
    rank, heads = call.query.shape[-1], planned.plan.padded_heads
    is_full = lens >= call.indices.shape[1]
    attend_by_triton(replace(call, lens=torch.where(is_full, 0, lens)))
    # The wrapper computes the rows with shorter lists too, and needs pages to read: -1 becomes 0.
    call.indices.clamp_(min=0)
    if planned.scale != call.scale:
        raise ValueError(
            f"scale of the layer must be what the step was planned with ({planned.scale}), got "
            f"{call.scale}"
        )
    # The wrapper takes no scale from the device, and reads rows as they are stored. The query and
    # the output are scaled in its place; a power of two scales exactly.
    query = _whole_query(call, heads)
    query = (query.float() * call.k_scale).to(query.dtype)
    fields = latent_views(call.rows.view(-1, 1, call.rows.shape[-1]), call.row)
    out = call.out.new_empty((len(query), heads, rank))
    lse = torch.empty((len(query), heads), dtype=torch.float32, device=out.device)
    planned.functions.run(
        planned.wrapper,
        LatentCall(
            q_nope=query[..., :rank],
            q_pe=query[..., rank:],
            latent=fields["nope"],
            rope=fields["rope"],
            output=out,
            lse=lse,
            scale=1.0,
        ),
    )
    own = slice(0, call.query.shape[1])
    real = (out[:, own].float() * call.k_scale).to(out.dtype)
    call.out.copy_(torch.where(is_full[:, None, None], real, call.out))
    call.lse.copy_(torch.where(is_full[:, None], lse[:, own], call.lse))


def attend_by_trtllm(call: SparseCall) -> None:
    """Call trtllm-gen; each query row is a request, and its list stands in for a block table."""
    planned, lens = _planned(call), _lens(call)
    assert planned.workspace is not None
    assert planned.counters is not None
    rank, heads = call.query.shape[-1], planned.plan.padded_heads
    query = _whole_query(call, heads)
    qk_scale: float | torch.Tensor = call.scale
    v_scale: float | torch.Tensor = 1.0
    rows = call.rows
    if planned.plan.query_dtype is DType.FLOAT8_E4M3FN:
        e4m3 = planned.plan.query_dtype.torch
        q_scale = torch.ones_like(call.k_scale) if call.q_scale is None else call.q_scale
        query = saturate(query.float() / q_scale, e4m3)
        qk_scale, v_scale = call.scale * q_scale * call.k_scale, call.k_scale
        rows = rows.view(e4m3)
    out = torch.empty((len(query), 1, heads, rank), dtype=torch.bfloat16, device=query.device)
    lse = torch.empty((len(query), heads), dtype=torch.float32, device=query.device)
    # A row without keys is computed with one key, and cleared below.
    call.indices.clamp_(min=0)
    width = call.indices.shape[1]
    planned.functions.decode(
        LatentDecodeCall(
            query=query[:, None],
            cache=rows,
            output=out,
            lse=lse,
            pages=call.indices[:, None],
            kv_lens=lens.clamp(min=1),
            max_kv_len=width,
            workspace=planned.workspace,
            counters=planned.counters,
            nope_size=NOPE_SIZE,
            rank=rank,
            qk_scale=qk_scale,
            v_scale=v_scale,
            topk=width,
        )
    )
    _finish(call, out[:, 0], lse * LSE_UNIT, lens == 0)


NOPE_SIZE = 128
"""Elements of a head's query before absorption; no kernel of absorbed queries reads the number."""


def _planned(call: SparseCall) -> PlannedCalls:
    assert call.planned is not None, "of a kernel of others the step's builder plans the calls"
    return call.planned


def _lens(call: SparseCall) -> torch.Tensor:
    assert call.lens is not None, "the kernel needs the number of entries at a list's front"
    return call.lens


def _whole_query(call: SparseCall, heads: int) -> torch.Tensor:
    """The query with its rotary part, ``[T, heads, L + r]`` contiguous; padding heads are zeros."""
    query, rotary = call.query, call.rotary
    count, own, rank = query.shape
    size = count, heads, rank + rotary.shape[-1]
    whole = query.new_empty(size)
    whole[:, :own, :rank] = query
    whole[:, :own, rank:] = rotary
    if heads > own:
        whole[:, own:] = 0
    return whole


def _written(call: SparseCall, query: torch.Tensor, takes_out: bool) -> dict[str, Any]:
    """The ``out`` argument of a function that takes one: the call's output, if it has all heads."""
    fits = takes_out and call.out.shape[:2] == query.shape[:2] and call.out.is_contiguous()
    return {"out": call.out} if fits else {}


def _lse_unit(
    planned: PlannedCalls,
    lse: torch.Tensor,
    probe: Callable[[FlashMla, int, torch.device], torch.Tensor],
) -> torch.Tensor:
    """The factor that makes FlashMLA's log-sum-exp natural: an fp32 scalar on the device.

    Versions of FlashMLA differ in the base of the logarithm. The first call of a function on a
    device therefore runs ``probe``: rows whose sum is known. The host does not wait for the device.

    Raises:
        RuntimeError: the first call is being captured: a graph would probe at every replay.
    """
    functions, kernel, device = planned.functions, planned.plan.kernel, lse.device
    unit: torch.Tensor | None = functions.lse_units.get((kernel, device))
    if unit is None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the first call of {kernel.value} on {device} must come before a graph is "
                "captured, as a warm-up does, got a capture"
            )
        unit = probe(functions, planned.plan.padded_heads, device)
        functions.lse_units[kernel, device] = unit
    return unit


def _probe_prefill(functions: FlashMla, heads: int, device: torch.device) -> torch.Tensor:
    """Find the factor of FlashMLA's prefill, by a list of 128 entries with weights of one."""
    width, count = RANK + ROPE, 128
    query = torch.zeros((1, heads, width), dtype=torch.bfloat16, device=device)
    rows = torch.zeros((1, 1, width), dtype=torch.bfloat16, device=device)
    indices = torch.zeros((1, 1, count), dtype=torch.int32, device=device)
    lse = functions.prefill(query, rows, indices, 1.0)[2]
    return _unit(lse, count)


def _probe_cached(functions: FlashMla, heads: int, device: torch.device) -> torch.Tensor:
    """Find the factor of FlashMLA's cache kernel, by a list of one page with weights of one."""
    row = LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE.row(RANK, ROPE).nbytes
    query = torch.zeros((1, 1, heads, RANK + ROPE), dtype=torch.bfloat16, device=device)
    cache = torch.zeros((1, INDEXER_PAGE, 1, row), dtype=torch.uint8, device=device)
    indices = torch.zeros((1, 1, INDEXER_PAGE), dtype=torch.int32, device=device)
    _, lse = functions.with_cache(
        *(query, cache, None, None, RANK, functions.new_schedule()),
        softmax_scale=1.0,
        is_fp8_kvcache=True,
        indices=indices,
    )
    return _unit(lse, INDEXER_PAGE)


def _unit(lse: torch.Tensor, count: int) -> torch.Tensor:
    """The factor that makes ``lse``, the logarithm of the sum of ``count`` ones, natural.

    It is ln 2 where ``lse`` is nearer to the binary logarithm, else 1.
    """
    middle = (math.log(count) + math.log2(count)) / 2
    found = lse.flatten()[0].float()
    one = torch.ones_like(found)
    return torch.where(found > middle, one * math.log(2), one)


def _finish(call: SparseCall, out: torch.Tensor, lse: torch.Tensor, is_empty: torch.Tensor) -> None:
    """Copy the results of the layer's own heads, and make rows with an empty list neutral."""
    heads = call.query.shape[1]
    if out.data_ptr() != call.out.data_ptr():
        call.out.copy_(out[:, :heads])
    call.lse.copy_(lse[:, :heads])
    clear_rows(call.out, call.lse, is_empty)
