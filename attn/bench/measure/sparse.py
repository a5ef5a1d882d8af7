"""Measurement of one case of latent attention over lists: our layer and its peers."""

from __future__ import annotations

import traceback
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from attn.bench.cases.case import MODEL_DTYPE, KernelCase
from attn.bench.cases.sparse import SparseContent, sparse_content
from attn.bench.measure.measure import OURS, PLAIN, Log, judged_and_timed
from attn.bench.measure.ours import (
    PLAIN_KERNELS,
    backend_refusals,
    engine_config,
    kv_cache_spec,
    latent_impl,
)
from attn.bench.peers.dense import KernelRun, Latest, Refusal
from attn.bench.peers.sparse import prepare_sparse_peer
from attn.bench.results.reasons import describe
from attn.bench.results.results import CaseResult, Contender, Status
from attn.bench.settings import KernelBench
from attn.impls.base import LayerScales
from attn.registry import RegisteredBackend
from builders.batch import CommonAttentionMetadata
from specs.engine import Kernels
from specs.rows import LatentFormat


def our_sparse_run(
    member: RegisteredBackend, content: SparseContent, kernels: Kernels
) -> KernelRun:
    """One ``forward_mqa`` of our layer, called as vLLM's layer calls it.

    Args:
        member: the backend.
        content: the case's inputs.
        kernels: the engine setting of that name.
    """
    case, query = content.case, content.parts
    config = engine_config(case, kernels=kernels).replace(index_topk=case.topk)
    lists = content.positions.new_full((config.max_num_batched_tokens, case.topk), -1)
    lists[: case.num_tokens] = content.positions
    impl = latent_impl(member, case, indexer=SimpleNamespace(topk_indices_buffer=lists))
    make: Any = member.get_class().get_builder_cls()
    builder = make(kv_cache_spec(case), ["layers.0"], config, query[0].device)
    batch = CommonAttentionMetadata.from_lengths(
        case.query_lens, case.seq_lens, content.block_table, content.cache.shape[1]
    )
    scales = LayerScales.of(k=float(content.k_scale), device=query[0].device)
    forward, latest = impl.forward_mqa, Latest()
    cache, output = _typed(content), query[0].new_empty(query[0].shape)

    def attend(record: Any) -> None:
        latest.output = forward(query, cache, record, scales)[0]

    return KernelRun(
        partial(attend, builder.build(0, batch)),
        output,
        planned=lambda: attend(builder.build(0, batch)),
        plan=partial(builder.build, 0, batch),
        collect=lambda: output.copy_(latest.output),
    )


def _typed(content: SparseContent) -> torch.Tensor:
    """The cache with the elements that an engine's cache has."""
    layout = content.case.latent_format
    if layout is LatentFormat.BF16:
        return content.cache.view(MODEL_DTYPE.torch)
    return content.cache


def bench_sparse_case(
    bench: KernelBench, case: KernelCase, device: torch.device, log: Log
) -> CaseResult:
    """Check every kernel on a case, then time those that are right, in turn."""
    reasons = backend_refusals(case, bench.member)
    if reasons:
        refused = Contender(name=OURS, status=Status.UNSUPPORTED, reason="; ".join(reasons))
        return CaseResult(case=case, ours=refused)
    content = sparse_content(case, device, bench.seed)
    runs: dict[str, KernelRun | Refusal] = {}
    variants = {OURS: bench.kernels}
    if case.target.min_plain_rate is not None:
        variants[PLAIN] = PLAIN_KERNELS
    for name, kernels in variants.items():
        try:
            runs[name] = our_sparse_run(bench.member, content, kernels)
        except Exception as error:
            log(traceback.format_exc())
            runs[name] = Refusal(Status.FAILED, describe(error))
    peers = [name for name in bench.peers if name in bench.table.peers]
    runs.update({name: prepare_sparse_peer(name, content) for name in peers})
    made = judged_and_timed(bench, case, (runs, content.expected, content), device, log)
    return CaseResult(
        case=case,
        ours=made[OURS],
        peers=tuple(made[name] for name in peers),
        plain=made.get(PLAIN),
    )
