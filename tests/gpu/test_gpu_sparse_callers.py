"""Vendors' kernels of sparse latent attention, by the real packages, against float64.

Slots that must not be read hold poison. Lists have duplicates and gaps, and some are empty. Graphs
are tested too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from attn.bench.measure.timing import waits_are_errors
from attn.impls.sparse.call import SparseCall
from attn.impls.sparse.sparse_mla import ATTENDERS
from attn.testing.budget import budget, row_errors
from builders.batch import CommonAttentionMetadata
from builders.buffers import GraphBuffers
from builders.sparse.choice import PhasePlan, SparseSetup, check_setup, resolve
from builders.sparse.launches import SparseLaunch, SparseLaunches
from builders.sparse.sparse_mla import SparseMLAMetadataBuilder
from builders.sparse.tiles import SparseShape
from builders.sparse.vendor_calls import CallPlanner, PlannedCalls, SparseKernelUnavailableError
from builders.vendor.flashinfer_parts.install import FlashInferUnavailableError
from builders.vendor.trtllm_parts.mha_choice import capability_of
from specs.dtypes import DType
from specs.engine import Kernels, SparseKernels
from specs.rows import LatentFormat
from specs.sparse_mla import ForwardMode, SparseKernel, SparsePhase, rule_of
from tests.sparse.sparse_cases import K_SCALE, SparseCase, SparseTrial
from tests.sparse.test_sparse_mla import CONFIG, P, Step, impl_of, scales_of

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
K = SparseKernel
TOPK = 640
LENS = (640, 0, 129, 1, 512, 639, 640, 300)
HEADS = (8, 16, 64, 128)
DIRECT = [
    (rule.kernel, layout)
    for rule in map(rule_of, (one for one in K if one is not K.FLASHMLA_AUTO))
    if rule.kernel is not K.TRITON_SPARSE
    for layout in rule.reads
]
IDS = [f"{kernel.value}-{layout.value}" for kernel, layout in DIRECT]


RUNS_ON: dict[SparseKernel, tuple[int, ...]] = {
    K.FLASHMLA_SPARSE: (9, 10),
    K.FLASHMLA_KV: (9, 10),
    K.FLASHMLA_AUTO: (9, 10),
    K.FA3: (9,),
    K.FLASHINFER_MLA: (9,),
    K.TRTLLM: (10,),
    K.TRITON_SPARSE: (8, 9, 10, 12),
}
"""The major compute capabilities that each kernel has code for."""


def skip_or_fail(error: Exception, *kernels: SparseKernel) -> NoReturn:
    """Skip where a kernel has no code for this GPU or its package is not installed.

    Any other refusal fails the test: a package that is installed and cannot be called, or a row
    format that its own table of kernels says it reads.
    """
    major = torch.cuda.get_device_capability()[0]
    is_foreign = any(major not in RUNS_ON[kernel] for kernel in kernels)
    if is_foreign or re.search(r"no .* is installed|is not installed", str(error)):
        pytest.skip(str(error))
    raise error


@dataclass
class Calls:
    """The planned calls of a kernel, over rows that it reads without conversion."""

    plan: PhasePlan
    planned: PlannedCalls
    indices: Tensor
    """``[T, width]``: the buffer that holds the lists of each call."""
    launch: SparseLaunch
    """The launch of the library's own kernel, which runs rows that FlashInfer's kernel does not."""


def calls_of(kernel: SparseKernel, layout: LatentFormat, heads: int, phase: SparsePhase) -> Calls:
    """Plan a kernel's calls for rows of ``LENS``; skip, with the reason, if it is unavailable."""
    setup = SparseSetup(
        *(layout, kernel, kernel, heads, TOPK, 64, DType.BFLOAT16, capability_of(DEVICE))
    )
    mode = ForwardMode.DECODE if phase is SparsePhase.DECODE else ForwardMode.EXTEND
    try:
        check_setup(setup)
        whole = resolve(setup, mode)
        plan = whole.decode or whole.prefill
        assert plan is not None
        given = [plan], len(LENS), DEVICE, torch.bfloat16
        planner = CallPlanner(*given, case_of(layout, heads).scale)
    except (ValueError, SparseKernelUnavailableError, FlashInferUnavailableError) as error:
        skip_or_fail(error, kernel)
    indices = torch.full((len(LENS), plan.index_width), -1, dtype=torch.int32, device=DEVICE)
    planner.capture(len(LENS))
    planned = planner.plan(plan, indices)
    assert planned is not None
    shape = SparseShape(heads, plan.index_width, layout)
    launches = SparseLaunches(shape, len(LENS), False, {phase: None}, GraphBuffers(DEVICE))
    return Calls(plan, planned, indices, launches.of(len(LENS), phase))


def case_of(layout: LatentFormat, heads: int, lens: tuple[int, ...] = LENS) -> SparseCase:
    return SparseCase(
        layout,
        heads,
        lens,
        topk=TOPK,
        rank=512,
        rope_size=64,
        block_size=64,
        num_blocks=40,
        dtype=torch.bfloat16,
        device=str(DEVICE),
    )


def rounded(trial: SparseTrial, plan: PhasePlan) -> SparseTrial:
    """Round the queries of a trial as a kernel that takes them in e4m3 does."""
    if plan.query_dtype is DType.FLOAT8_E4M3FN:
        codes = (trial.query.float() / 0.5).clamp(-448, 448).to(torch.float8_e4m3fn)
        trial.query = (codes.float() * 0.5).bfloat16()
    return trial


def listed(trial: SparseTrial, plan: PhasePlan) -> tuple[Tensor, Tensor | None]:
    """The lists as ``transform_topk`` leaves them for a kernel, and lengths if it takes them."""
    ids = trial.indices.clone()
    ids[torch.arange(TOPK) >= trial.lens[:, None]] = -1
    if plan.skips_minus_one:
        return ids, None
    counts = (ids >= 0).sum(1).int()
    for row, kept in enumerate(ids.clone()):
        ids[row] = -1
        ids[row, : counts[row]] = kept[kept >= 0]
    return ids, counts


def call_of(trial: SparseTrial, calls: Calls) -> SparseCall:
    """A call with output and LSE full of NaN."""
    case, plan = trial.case, calls.plan
    ids, counts = listed(trial, plan)
    calls.indices.fill_(-1)
    calls.indices[:, :TOPK] = ids.to(DEVICE)
    row = case.layout.row(case.rank, case.rope_size, DType.BFLOAT16)
    typed = {LatentFormat.BF16: torch.bfloat16, LatentFormat.FP8_NOPE_FP8_ROPE: row["nope"].dtype}
    dtype = typed.get(case.layout, torch.uint8)
    rows = trial.cache.view(dtype if isinstance(dtype, torch.dtype) else dtype.torch)
    query, (out, lse) = trial.query.to(DEVICE), trial.results()
    scales = [torch.tensor(one, device=DEVICE) for one in (K_SCALE, 0.5)]
    lens = None if counts is None else counts.to(DEVICE)
    given = query[..., :512], query[..., 512:], rows, row, calls.indices, lens, case.scale
    return SparseCall(*given, scales[0], out, lse, calls.planned, scales[1], calls.launch)


@pytest.mark.parametrize("phase", SparsePhase)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("kernel", "layout"), DIRECT, ids=IDS)
def test_states(kernel: SparseKernel, layout: LatentFormat, heads: int, phase: SparsePhase) -> None:
    calls = calls_of(kernel, layout, heads, phase)
    for seed in range(3):
        trial = rounded(SparseTrial(case_of(layout, heads), seed), calls.plan)
        call = call_of(trial, calls)
        ATTENDERS[kernel](call)
        assert trial.misses(call.out, call.lse) == {}
        empty = torch.tensor([length == 0 for length in LENS])
        assert not call.out.cpu()[empty].any()
        assert bool((call.lse.cpu()[empty] == -torch.inf).all())


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(("kernel", "layout"), DIRECT, ids=IDS)
def test_full_lists(kernel: SparseKernel, layout: LatentFormat, heads: int) -> None:
    """Full lists without gaps run on a plan for full lists."""
    calls = calls_of(kernel, layout, heads, SparsePhase.DECODE)
    trial = rounded(SparseTrial(case_of(layout, heads, (TOPK,) * len(LENS))), calls.plan)
    first = trial.indices.max(1, keepdim=True).values
    assert bool((first < 40 * 64).all())
    trial.indices = torch.where(trial.indices < 0, first, trial.indices)
    call = call_of(trial, calls)
    ATTENDERS[kernel](call)
    assert trial.misses(call.out, call.lse) == {}


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(("kernel", "layout"), DIRECT, ids=IDS)
def test_a_graph_replays_other_lists(
    kernel: SparseKernel, layout: LatentFormat, heads: int
) -> None:
    calls = calls_of(kernel, layout, heads, SparsePhase.DECODE)
    others = [LENS, LENS[::-1], (TOPK,) * len(LENS), (0,) * len(LENS), LENS]
    trials = [
        rounded(SparseTrial(case_of(layout, heads, lens), seed), calls.plan)
        for seed, lens in enumerate(others)
    ]
    # The graph reads the cache of the first trial, so the other caches are copied over it.
    caches = [trial.cache.clone() for trial in trials]
    call = call_of(trials[0], calls)
    attend = ATTENDERS[kernel]
    attend(call)
    with waits_are_errors():
        attend(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(call)
    for seed in (*range(1, len(trials)), 0):
        trial = trials[seed]
        ids, counts = listed(trial, calls.plan)
        calls.indices[:, :TOPK] = ids.to(DEVICE)
        if call.lens is not None:
            assert counts is not None
            call.lens.copy_(counts)
        query = trial.query.to(DEVICE)
        call.query.copy_(query[..., :512])
        call.rotary.copy_(query[..., 512:])
        call.rows.view(torch.uint8).copy_(caches[seed])
        call.out.fill_(float("nan"))
        call.lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        if any(trial.case.lens):
            assert trial.misses(call.out, call.lse) == {}
        else:
            assert not call.out.any()
            assert bool((call.lse == float("-inf")).all())


SEQUENCES = [
    (layout, prefill, decode)
    for layout in (LatentFormat.FP8_NOPE_FP8_ROPE, LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE)
    for prefill, decode in (
        (K.FLASHMLA_SPARSE, K.FLASHMLA_KV),
        (K.FLASHMLA_SPARSE, K.TRITON_SPARSE),
        (K.FLASHMLA_AUTO, K.FLASHMLA_AUTO),
    )
]


@pytest.mark.parametrize(("layout", "prefill", "decode"), SEQUENCES)
def test_prefill_decode_and_prefill_again(
    layout: LatentFormat, prefill: SparseKernel, decode: SparseKernel
) -> None:
    """Builder and impl alternate prefills and decodes over an fp8 cache.

    This crashed when decodes decided how later prefills run.
    """
    config: Any = CONFIG.replace(
        kernels=Kernels(sparse=SparseKernels(prefill=prefill, decode=decode))
    )
    builder = None
    for seed, name in enumerate(("extend", "decode", "mixed", "extend", "verify")):
        step = Step(name, layout, seed)
        impl = impl_of(layout, step.lists)
        step.write_context(impl, scales_of())
        if builder is None:
            try:
                builder = SparseMLAMetadataBuilder(step.spec, ["layers.0"], config, DEVICE)
            except (ValueError, SparseKernelUnavailableError) as error:
                skip_or_fail(error, prefill, decode)
        table = step.batch.block_table_tensor.to(DEVICE)
        batch = CommonAttentionMetadata.from_lengths(step.query_lens, step.seq_lens, table, P)
        impl.indexer.topk_indices_buffer = step.lists.to(DEVICE)
        scales = scales_of()
        scales._k_scale, scales._q_scale = scales._k_scale.to(DEVICE), scales._q_scale.to(DEVICE)
        record = builder.build(0, batch)
        query, cache = step.query.to(DEVICE), step.cache.to(DEVICE)
        out, lse = impl.forward_mqa(query, cache, record, scales)
        assert lse is not None
        wanted, wanted_lse, low, _ = step.expected({False: False, True: False})
        assert float(row_errors(out.cpu(), wanted).max()) <= budget(wanted, low, torch.bfloat16)
        empty = wanted_lse.isinf()
        assert bool((lse.cpu()[empty] == -torch.inf).all())
        assert not out.cpu()[empty].any()
