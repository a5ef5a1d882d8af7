"""Lines of ``attn bench kernels --table sparse_mla``: bytes of the cache, and tiles of our kernel.

Attention over lists has rows of its own; see :mod:`attn.bench.measure.sparse`. The conversion of a
cache and the indexer's logits are rated by the bytes that they move per second, the logits beside
DeepGEMM's. Tiles are other forms of our portable kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch

from attn.bench.cases.case import MODEL_DTYPE, KernelCase
from attn.bench.cases.dense import TILES
from attn.bench.cases.inputs import Expected
from attn.bench.cases.latent import CONVERSION_CASE, INDEX_CASE
from attn.bench.cases.sparse import K_SCALE, SparseContent, filled_cache, sparse_content
from attn.bench.measure.judge import check_run
from attn.bench.measure.pairs import Log, Rounds, checked, lines_or_reason, timed
from attn.bench.peers.dense import TOLERANCE, KernelRun, Latest, Refusal
from attn.bench.results.lines import How, Line, Part
from attn.bench.results.reasons import describe
from attn.bench.results.results import Contender, Status
from attn.ops.indexer import paged_index_logits
from attn.ops.latent_convert import convert_blocks
from attn.ops.sparse_mla import launch_with, sparse_mla, tile_for
from attn.reference import indexer as index_reference
from attn.reference import sparse_mla as reference
from builders.device import device_facts, runs_gluon
from builders.sparse.arguments import ListedRows
from builders.sparse.hopper_tiles import hopper_sparse_tile, sparse_kernel_of
from builders.sparse.tiles import SparseShape, SparseTile
from specs.base import cdiv
from specs.dtypes import DType
from specs.engine import DecodeKernel
from specs.rows import INDEXER_PAGE, LatentFormat, RowFormat

ALONE: Final = "nothing"
DEEP_GEMM: Final = "deepgemm"
VLLM_DEEP_GEMM: Final = "vllm.utils.deep_gemm"
"""Module of vLLM's calls of DeepGEMM."""
RAW, BLOCK_SCALED = LatentFormat.FP8_NOPE_FP8_ROPE, LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE
TARGETS: Final[dict[tuple[str, How], dict[str, float]]] = {
    (CONVERSION_CASE, How.DEVICE): {"min_rate": 3.5},
    (INDEX_CASE, How.DEVICE): {"min_rate": 2.5, "max_ratio": 1.0},
}
HOWS: Final = (How.DEVICE, How.GRAPH)
WHOLE_LIST: Final = {"segment": 1 << 16, "span": 1}
"""Change of a tile that keeps one state for a whole list and needs half the registers. Its bits
differ from those of a list that is split because there are few rows."""
FEW: Final[dict[str, dict[str, Any]]] = {
    "32 keys": {"kv_tile": 32},
    "ids by the compiler": {"kv_tile": 64, "carries_ids": False, "holds_next": False},
    "2 stages": {"num_stages": 2},
    "split": {"span": 1},
    "segments of 512": {"segment": 512},
    "one state": WHOLE_LIST,
    # 128 registers let two programs share a multiprocessor.
    "one state, 128 registers": {**WHOLE_LIST, "num_stages": 2, "max_registers": 128},
    "one state, 32 keys": {**WHOLE_LIST, "kv_tile": 32},
    "one state, 32 keys, 4 warps": {**WHOLE_LIST, "kv_tile": 32, "num_warps": 4},
    "32 keys, 4 warps, 2 stages": {"kv_tile": 32, "num_warps": 4, "num_stages": 2},
}
"""Alternatives to a tile that folds heads into rows: changed fields, by name."""
MANY: Final[dict[str, dict[str, Any]]] = {
    "32 keys": {"kv_tile": 32},
    "32 keys, 3 stages": {"kv_tile": 32, "num_stages": 3},
}
"""Alternatives to a tile that does not fold heads into rows: changed fields, by name."""


def has_lines(case: KernelCase, peers: tuple[str, ...] = ()) -> bool:
    """Whether a case is measured as lines: bytes of the cache, or tiles where they are asked for.

    Args:
        case: a case of the table.
        peers: what the benchmark compares with.
    """
    return case.name in (CONVERSION_CASE, INDEX_CASE) or TILES in peers


def sparse_lines(
    case: KernelCase, backends: tuple[str, ...], rounds: Rounds, log: Log
) -> Iterator[Line]:
    """Measure the lines of a case; a line that fails holds its reason.

    Args:
        case: one of :data:`attn.bench.cases.latent.SPARSE_CASES`. One that attends lists is
            measured with every tile of our portable kernel and with the Hopper kernel's, by the
            operation alone and not by a layer.
        backends: names of our backends, for the lines.
        rounds: settings of the measurement.
        log: receives the place of an error.
    """
    (name,) = backends
    if case.name == CONVERSION_CASE:
        asked = _asked(case, name, ALONE)
        yield from lines_or_reason(asked, [], partial(_conversions, case, asked, rounds), log)
        return
    if case.name == INDEX_CASE:
        asked = _asked(case, name, DEEP_GEMM)
        yield from lines_or_reason(asked, [], partial(_logits, case, asked, rounds), log)
        return
    content = make_sparse_content(case, rounds)
    tiles: dict[str, SparseTile | None] = {"": None, **alternatives(content)}
    hopper, _ = _hopper_tile(content, DecodeKernel.AUTO)
    if hopper is not None:
        tiles[DecodeKernel.HOPPER.value] = hopper
    for label, tile in tiles.items():
        asked = _asked(case, ", ".join(filter(None, [name, label])), ALONE)
        given = partial(_attended, content, asked, rounds, tile)
        yield from lines_or_reason(asked, [], given, log)


def _asked(
    case: KernelCase,
    name: str,
    other: str,
) -> list[Line]:
    """The lines of a case, without numbers."""
    part, what, unit, amount = Part.LISTS, case.what, "TF", case.flops * 1e-6
    if case.name == CONVERSION_CASE:
        part, unit, amount = Part.STREAM, "TB/s", _converted_bytes(case) * 1e-6
        what = f"whole cache, 576 to 656 bytes, {case.num_reqs} x {case.seq_lens[0]} tokens"
    elif case.name == INDEX_CASE:
        part, unit, amount = Part.STREAM, "TB/s", _index_bytes(case) * 1e-6
        what = f"indexer's logits, {case.num_heads} heads, {case.num_reqs} x {case.seq_lens[0]}"
    return [
        Line(
            part=part,
            case=case.name,
            what=what,
            backend=name,
            how=how,
            other=other,
            unit=unit,
            amount=amount,
            **TARGETS.get((case.name, how), {}),
        )
        for how in HOWS
    ]


# -- Attention.


def make_sparse_content(case: KernelCase, rounds: Rounds) -> SparseContent:
    """Random tensors of a case."""
    return sparse_content(case, rounds.device, rounds.seed)


def _usual_tile(content: SparseContent) -> SparseTile:
    rank = content.case.head_size_v
    return tile_for(content.query[..., :rank], content.indices, content.case.latent_format)


def _hopper_tile(content: SparseContent, kernel: DecodeKernel) -> tuple[SparseTile | None, str]:
    """The Hopper kernel's tile; or None, and why that kernel does not take the rows."""
    case, device = content.case, content.query.device
    if not runs_gluon(device):
        return None, f"kernels in Gluon do not run on {device.type}"
    gpu = device_facts(device)
    shape = SparseShape(case.num_heads, case.topk, case.latent_format)
    try:
        given = shape, gpu.kind, MODEL_DTYPE, False, "kernels.sparse.own_decode", kernel
        options, why = sparse_kernel_of(*given)
    except ValueError as error:
        return None, str(error)
    if options is None:
        return None, why
    tile = hopper_sparse_tile(shape, gpu.num_multiprocessors, case.num_tokens, options)
    if tile.hopper is None:
        return None, "the portable kernel takes so few rows"
    return tile, why


def alternatives(content: SparseContent) -> Mapping[str, SparseTile]:
    """Other tiles of the portable kernel for a case, by name."""
    usual, found = _usual_tile(content), {}
    for name, changes in (FEW if usual.folds else MANY).items():
        changed = replace(usual, **changes)
        if changed != usual:
            found[name] = changed
    return found


def ours(content: SparseContent, tile: SparseTile | None = None) -> KernelRun:
    """A run of our kernel with a tile, which is the portable kernel's unless one is given."""
    case, query, rank = content.case, content.query, content.case.head_size_v
    chosen = tile or _usual_tile(content)
    out = query.new_empty((*query.shape[:2], rank))
    lse = torch.empty(query.shape[:2], device=query.device)
    launch = launch_with(chosen, query[..., :rank], content.indices)
    listed = ListedRows(content.cache, case.latent_format, content.indices, k_scale=content.k_scale)

    def call() -> None:
        parts = query[..., :rank], query[..., rank:]
        sparse_mla(*parts, listed, case.scale, out, lse, launch=launch)

    return KernelRun(call, out)


def _attended(
    content: SparseContent, asked: list[Line], rounds: Rounds, tile: SparseTile | None
) -> Iterator[Line]:
    """Time our kernel with a tile."""
    yield from _streamed(ours(content, tile), content.expected, asked, rounds)


# -- Bytes.


def _tokens(case: KernelCase) -> int:
    return sum(cdiv(length, INDEXER_PAGE) * INDEXER_PAGE for length in case.seq_lens)


def _rows_of(layout: LatentFormat, case: KernelCase) -> RowFormat:
    return layout.row(case.head_size_v, case.rope_size, MODEL_DTYPE)


def _converted_bytes(case: KernelCase) -> float:
    sizes = (_rows_of(layout, case).nbytes for layout in (RAW, BLOCK_SCALED))
    return float(_tokens(case) * sum(sizes))


def _conversions(case: KernelCase, asked: list[Line], rounds: Rounds) -> Iterator[Line]:
    """Time the conversion of a whole cache of 576-byte rows to 656-byte rows."""
    source, target = (_rows_of(layout, case) for layout in (RAW, BLOCK_SCALED))
    blocks = _tokens(case) // INDEXER_PAGE
    cache = filled_cache(source, blocks, rounds.device, rounds.seed, scales=False)
    out = cache.new_full((blocks, INDEXER_PAGE, target.nbytes), 0xFF)
    scale = torch.tensor(K_SCALE, device=rounds.device)
    some = torch.linspace(0, blocks - 1, 9, device=rounds.device).long()
    read = partial(
        reference.read_listed,
        rank=case.head_size_v,
        rope_size=case.rope_size,
        k_scale=scale,
        model_dtype=MODEL_DTYPE.torch,
        dtype=torch.float64,
    )
    slots = (
        some[:, None] * INDEXER_PAGE + torch.arange(INDEXER_PAGE, device=some.device)
    ).flatten()
    real = read(cache, slots, layout=RAW)[:, None]
    result = torch.empty_like(real)

    def call() -> None:
        convert_blocks(cache, source, out, target, scale)

    def collect() -> None:
        result.copy_(read(out, slots, layout=BLOCK_SCALED)[:, None])

    places = torch.arange(len(slots), device=some.device), torch.zeros_like(some[:1])
    # The conversion is exact, as the scale is a power of two.
    run = KernelRun(call, result, tolerance=1e-30, collect=collect)
    yield from _streamed(run, Expected(*places, real), asked, rounds)


def _index_bytes(case: KernelCase) -> float:
    return float(_tokens(case) * LatentFormat.INDEXER_FP8.row(INDEX_SIZE).nbytes)


INDEX_SIZE: Final = 128


def _logits(case: KernelCase, asked: list[Line], rounds: Rounds) -> Iterator[Line]:
    """Time the logits of one row per request over the indexer's whole cache."""
    device, rows, length = rounds.device, case.num_reqs, case.seq_lens[0]
    generator = torch.Generator(device).manual_seed(rounds.seed)
    blocks = _tokens(case) // INDEXER_PAGE
    row = LatentFormat.INDEXER_FP8.row(INDEX_SIZE)
    cache = filled_cache(row, blocks, device, rounds.seed, scales=True)
    table = torch.randperm(blocks, device=device, generator=generator).view(rows, -1).int()
    query = torch.randn(rows, case.num_heads, INDEX_SIZE, device=device, generator=generator)
    query = query.to(DType.FLOAT8_E4M3FN.torch)
    weights = torch.randn(rows, case.num_heads, device=device, generator=generator).abs()
    lens = torch.full((rows,), length, dtype=torch.int32, device=device)
    logits = torch.empty(rows, length, device=device)

    def call() -> None:
        paged_index_logits(query, weights, cache, table, None, lens, logits)

    some = torch.tensor(sorted({0, rows // 2, rows - 1}), device=device)
    wanted = []
    for row in some.tolist():
        keys = index_reference.read_index_keys(cache, table[row], length, torch.float64)
        scores = (query[row].double() @ keys.T).relu()
        wanted.append((weights[row].double()[:, None] * scores).sum(0)[None])
    places = some, torch.zeros_like(some[:1])
    run = KernelRun(call, logits[:, None], tolerance=TOLERANCE)
    expected = Expected(*places, torch.stack(wanted))
    error, calls = checked(run, expected), {"ours": run.call}
    other = prepare_deep_gemm(query, weights, cache, table, lens)
    if isinstance(other, KernelRun):
        found = check_run(DEEP_GEMM, other, expected)
        if isinstance(found, Contender):
            other = Refusal(found.status, found.reason)
        else:
            calls[DEEP_GEMM] = other.call
    if isinstance(other, Refusal):
        asked = [line.replace(reason=f"{DEEP_GEMM}: {other.reason}") for line in asked]
    yield from timed(asked, calls, rounds, error)
    checked(run, expected)


def prepare_deep_gemm(
    query: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    lens: torch.Tensor,
) -> KernelRun | Refusal:
    """DeepGEMM's paged logits as vLLM's indexer calls them, with the schedule made before.

    Args:
        query: ``[R, H, 128]`` e4m3.
        weights: ``[R, H]`` fp32.
        cache: ``[N, 64, 132]`` bytes of the indexer's pages.
        table: ``[R, pages]`` int32.
        lens: ``[R]`` int32 lengths, all equal.
    """
    device = query.device
    if device.type != "cuda":
        return Refusal(Status.UNAVAILABLE, f"needs a CUDA device, not {device.type}")
    latest, longest = Latest(), table.shape[1] * INDEXER_PAGE
    try:
        module = import_module(VLLM_DEEP_GEMM)
        count = torch.cuda.get_device_properties(device).multi_processor_count
        by_row = lens[:, None]
        schedule = module.get_paged_mqa_logits_metadata(by_row, INDEXER_PAGE, count)
        known = inspect.signature(module.fp8_fp4_paged_mqa_logits).parameters
    except Exception as error:
        return Refusal(Status.UNAVAILABLE, describe(error))

    # An argument that newer versions of vLLM lack.
    given = {"clean_logits": False} if "clean_logits" in known else {}

    def call() -> None:
        latest.output = module.fp8_fp4_paged_mqa_logits(
            (query[:, None], None),
            cache[:, :, None],
            weights,
            by_row,
            table,
            schedule,
            max_model_len=longest,
            **given,
        )

    output = torch.empty(len(query), 1, longest, device=device)
    return KernelRun(call, output, collect=lambda: output.copy_(latest.output[:, None]))


def _streamed(
    run: KernelRun, expected: Expected, asked: list[Line], rounds: Rounds
) -> Iterator[Line]:
    error = checked(run, expected)
    yield from timed(asked, {"ours": run.call}, rounds, error)
    checked(run, expected)
