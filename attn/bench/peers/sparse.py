"""Other projects' kernels for latent attention over lists, as vLLM's backends call them.

In every layer vLLM turns the positions that the indexer listed into slots, so every call here does.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

import torch

from attn.bench.cases.sparse import SparseContent
from attn.bench.peers.dense import KernelRun, Latest, Refusal
from attn.bench.results.reasons import describe
from attn.bench.results.results import Status
from builders.sparse.vendor_calls import load_fa3, load_flashmla
from specs.rows import LatentFormat
from specs.sparse_mla import SparseKernel, rule_of

VLLM_LISTS: Final = "vllm.v1.attention.backends.mla.sparse_utils"
"""Module of vLLM's function that turns positions into slots."""
HEADS: Final = (64, 128)
"""Numbers of query heads that FlashMLA's kernels take; fewer are padded in every call."""


def _slots_of(content: SparseContent, counts: bool) -> Callable[[], Any]:
    """A call that gives the slots of all lists, with the number of their entries if asked for."""
    convert = import_module(VLLM_LISTS).triton_convert_req_index_to_global_index
    given: dict[str, Any] = {"return_valid_counts": True} if counts else {}

    def call() -> Any:
        return convert(
            content.requests,
            content.block_table,
            content.positions,
            BLOCK_SIZE=content.cache.shape[1],
            NUM_TOPK_TOKENS=content.case.topk,
            **given,
        )

    return call


def _output(content: SparseContent) -> torch.Tensor:
    query = content.query
    return query.new_empty((*query.shape[:2], content.case.head_size_v))


def _fa3(content: SparseContent) -> KernelRun | Refusal:
    """FlashAttention-3 as vLLM's FLASH_ATTN_MLA_SPARSE calls it: each token is a page."""
    case, latest, rank = content.case, Latest(), content.case.head_size_v
    if case.latent_format is not LatentFormat.BF16:
        return Refusal(Status.UNSUPPORTED, f"reads no {case.latent_format.value} rows")
    attend, slots_of = load_fa3(), _slots_of(content, counts=True)
    if not attend.is_vllm:
        return Refusal(Status.UNAVAILABLE, "FlashAttention-3 is not vLLM's")
    rows = content.cache.view(content.query.dtype).view(-1, 1, 1, case.head_size)
    latent, rope = rows[..., :rank], rows[..., rank:]
    (query, rotary), output = content.parts, _output(content)

    def call() -> None:
        slots, counts = slots_of()
        starts = torch.arange(0, len(query) + 1, dtype=torch.int32, device=query.device)
        latest.output = attend.function(
            q=rotary,
            k=rope,
            v=latent,
            q_v=query,
            max_seqlen_q=1,
            cu_seqlens_q=starts,
            max_seqlen_k=case.topk,
            seqused_k=counts,
            block_table=slots,
            softmax_scale=case.scale,
            causal=True,
            fa_version=3,
        )

    return KernelRun(call, output, collect=lambda: output.copy_(latest.output))


def _flashmla(content: SparseContent) -> KernelRun | Refusal:
    """FlashMLA as vLLM's FLASHMLA_SPARSE calls it: queries joined and padded in every call."""
    case, latest = content.case, Latest()
    layout = case.latent_format
    kernel = SparseKernel.FLASHMLA_KV
    if layout is LatentFormat.BF16:
        kernel = SparseKernel.FLASHMLA_SPARSE
    if layout not in rule_of(kernel).reads:
        return Refusal(Status.UNSUPPORTED, f"reads no {layout.value} rows")
    heads = next((some for some in HEADS if case.num_heads <= some), None)
    if heads is None:
        return Refusal(Status.UNSUPPORTED, f"takes at most {HEADS[-1]} heads")
    functions, slots_of = load_flashmla(), _slots_of(content, counts=False)
    joined, output = torch.empty_like(content.query), _output(content)

    def padded() -> torch.Tensor:
        torch.cat(content.parts, -1, out=joined)
        if heads == case.num_heads:
            return joined
        wide = joined.new_zeros((len(joined), heads, case.head_size))
        wide[:, : case.num_heads] = joined
        return wide

    def collect() -> None:
        output.copy_(latest.output[:, : case.num_heads])

    if kernel is SparseKernel.FLASHMLA_SPARSE:
        rows = content.cache.view(content.query.dtype).view(-1, 1, case.head_size)

        def prefill() -> None:
            latest.output = functions.prefill(padded(), rows, slots_of()[:, None], case.scale)[0]

        return KernelRun(prefill, output, collect=collect)
    # Decodes are passed as requests of one token, a prefill as one request with many tokens.
    axis = 0 if case.num_reqs == 1 and case.num_tokens > 1 else 1

    def with_cache(schedule: Any) -> None:
        found = functions.with_cache(
            *(padded().unsqueeze(axis), content.cache[:, :, None], None, None),
            *(case.head_size_v, schedule),
            softmax_scale=case.scale,
            is_fp8_kvcache=True,
            indices=slots_of().unsqueeze(axis),
        )
        latest.output = found[0].flatten(0, 1)

    schedule = functions.new_schedule()
    return KernelRun(
        lambda: with_cache(schedule),
        output,
        # The first call with a schedule fills it in.
        planned=lambda: with_cache(functions.new_schedule()),
        collect=collect,
    )


SPARSE_ADAPTERS: Final[dict[str, Callable[[SparseContent], KernelRun | Refusal]]] = {
    "fa3": _fa3,
    "flashmla": _flashmla,
}
"""For each peer, the function that prepares a run."""


def prepare_sparse_peer(name: str, content: SparseContent) -> KernelRun | Refusal:
    """Prepare a peer on a case; returns a refusal where it cannot run.

    Args:
        name: a key of ``SPARSE_ADAPTERS``.
        content: the case's inputs.
    """
    if name not in SPARSE_ADAPTERS:
        known = ", ".join(SPARSE_ADAPTERS)
        raise ValueError(f"peer must be one of {known}, got {name!r}")
    device = content.query.device
    if device.type != "cuda":
        return Refusal(Status.UNAVAILABLE, f"needs a CUDA device, not {device.type}")
    try:
        return SPARSE_ADAPTERS[name](content)
    except (ImportError, RuntimeError) as error:
        return Refusal(Status.UNAVAILABLE, describe(error))
    except Exception as error:
        traceback.print_tb(error.__traceback__, limit=-4)
        return Refusal(Status.FAILED, describe(error))
