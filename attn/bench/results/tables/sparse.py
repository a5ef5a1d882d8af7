"""``attn bench kernels --table sparse_mla``: latent attention over lists, compared with FlashMLA.

Our kernel takes any number of heads. FlashMLA's kernels take at least 64; fewer heads are padded
outside the timed call. The conversion of a cache and the indexer's logits are rated by the bytes
that they move per second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final

import torch

from attn.bench.cases.case import MODEL_DTYPE, KernelCase
from attn.bench.cases.dense import TILES
from attn.bench.cases.inputs import Expected
from attn.bench.cases.latent import CONVERSION_CASE, INDEX_CASE
from attn.bench.measure.judge import check_run
from attn.bench.measure.pairs import Log, Rounds, checked, lines_or_reason, timed
from attn.bench.measure.timing import Call
from attn.bench.peers.dense import TOLERANCE, KernelRun
from attn.bench.results.lines import How, Line, Part
from attn.bench.results.results import Contender
from attn.ops.indexer import paged_index_logits
from attn.ops.latent_convert import convert_blocks
from attn.ops.sparse_mla import launch_with, sparse_mla, tile_for
from attn.reference import indexer as index_reference
from attn.reference import sparse_mla as reference
from builders.device import device_facts, runs_gluon
from builders.sparse.arguments import ListedRows
from builders.sparse.hopper_tiles import hopper_sparse_tile, sparse_kernel_of
from builders.sparse.tiles import SparseShape, SparseTile
from builders.sparse.vendor_calls import load_flashmla
from specs.base import cdiv
from specs.dtypes import DType
from specs.engine import DecodeKernel
from specs.layouts import latent_views
from specs.rows import INDEXER_PAGE, LatentFormat, RowFormat
from specs.sparse_mla import SparseKernel, rule_of

OURS: Final = "SPARSE_MLA"
FLASHMLA: Final = "flashmla"
ALONE: Final = "nothing"
RAW, BLOCK_SCALED = LatentFormat.FP8_NOPE_FP8_ROPE, LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE
JUDGED: Final = 3
"""Number of rows that are compared with float64."""
K_SCALE: Final = 0.5
MIN_PADDED_SPEEDUP: Final = {"max_ratio": 0.5}
"""Target against FlashMLA where FlashMLA has to pad heads."""
TARGETS: Final[dict[tuple[str, How], dict[str, float]]] = {
    ("dec_656_h128_b128", How.DEVICE): {"min_rate": 250.0},
    ("dec_656_h16_b1", How.GRAPH): {"max_us": 12.0},
    ("pre_bf16_h128_4k", How.DEVICE): {"min_rate": 350.0},
    (CONVERSION_CASE, How.DEVICE): {"min_rate": 3.5},
    (INDEX_CASE, How.DEVICE): {"min_rate": 2.5},
}
HOPPER_TARGETS: Final[dict[tuple[str, How], dict[str, float]]] = {
    ("dec_656_h128_b128", How.DEVICE): {"max_ratio": 1.0},
    ("dec_656_h16_b128", How.DEVICE): MIN_PADDED_SPEEDUP,
    ("dec_656_h8_b128", How.DEVICE): MIN_PADDED_SPEEDUP,
    ("pre_bf16_h128_4k", How.DEVICE): {"max_ratio": 1.0},
    ("pre_bf16_h16_4k", How.DEVICE): MIN_PADDED_SPEEDUP,
}
"""Targets of the Hopper kernel."""
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


def sparse_lines(
    case: KernelCase,
    backends: tuple[str, ...],
    rounds: Rounds,
    log: Log,
    *,
    kernel: DecodeKernel = DecodeKernel.AUTO,
    peers: tuple[str, ...] = (FLASHMLA,),
) -> Iterator[Line]:
    """Measure the lines of a case; a line that fails holds its reason.

    Args:
        case: one of :data:`attn.bench.cases.latent.SPARSE_CASES`.
        backends: names of our backends, for the lines.
        rounds: settings of the measurement.
        log: receives the place of an error.
        kernel: our kernel; ``auto`` measures both the portable and the Hopper kernel where they
            serve.
        peers: ``flashmla``, and ``tiles`` for other tiles of our portable kernel.
    """
    (name,) = backends
    measure = {CONVERSION_CASE: _conversions, INDEX_CASE: _logits}.get(case.name)
    if measure is not None:
        asked = _asked(case, name, ALONE)
        yield from lines_or_reason(asked, [], partial(measure, case, asked, rounds), log)
        return
    content = make_sparse_content(case, rounds)
    other = FLASHMLA if FLASHMLA in peers else ALONE
    if kernel is not DecodeKernel.HOPPER:
        asked = _asked(case, name, other)
        given = partial(_attended, content, asked, rounds, ours)
        yield from lines_or_reason(asked, [], given, log)
    if kernel is not DecodeKernel.TRITON:
        tile, why = _hopper_tile(content, kernel)
        asked = _asked(case, f"{name}, {DecodeKernel.HOPPER.value}", other, HOPPER_TARGETS)
        if tile is not None or kernel is DecodeKernel.HOPPER:
            given = partial(_attended, content, asked, rounds, partial(ours, tile=tile))
            yield from lines_or_reason(asked, [] if tile else [why], given, log)
    if TILES in peers:
        for label, tile in alternatives(content).items():
            asked = _asked(case, f"{name}, {label}", ALONE, {})
            given = partial(_attended, content, asked, rounds, partial(ours, tile=tile))
            yield from lines_or_reason(asked, [], given, log)


def _asked(
    case: KernelCase,
    name: str,
    other: str,
    targets: Mapping[tuple[str, How], dict[str, float]] = TARGETS,
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
            **targets.get((case.name, how), {}),
        )
        for how in HOWS
    ]


# -- Attention.


@dataclass(frozen=True)
class SparseContent:
    """Tensors of a case."""

    case: KernelCase
    cache: torch.Tensor
    """``[N, P, row]`` bytes of cached rows."""
    query: torch.Tensor
    """``[T, H, L + r]`` absorbed queries."""
    indices: torch.Tensor
    """``[T, topk]`` int32 slots without duplicates in a row."""
    k_scale: torch.Tensor

    @cached_property
    def expected(self) -> Expected:
        """Sampled rows in float64."""
        case, device = self.case, self.query.device
        rank, rows = case.head_size_v, range(min(JUDGED, len(self.query)))
        heads = sorted({0, case.num_heads // 2, case.num_heads - 1})
        # The arithmetic is float64, but BF16 rows of the cache must be read in the model's dtype.
        read = partial(
            reference.read_listed,
            layout=case.latent_format,
            rank=rank,
            rope_size=case.rope_size,
            k_scale=self.k_scale,
            model_dtype=self.query.dtype,
            dtype=torch.float64,
        )
        wanted = []
        for row in rows:
            keys = read(self.cache, self.indices[row].long())
            scores = self.query[row, heads].double() @ keys.T * case.scale
            wanted.append(scores.softmax(-1) @ keys[:, :rank])
        places = torch.tensor([*rows], device=device), torch.tensor(heads, device=device)
        return Expected(*places, torch.stack(wanted))


def filled_cache(row: RowFormat, blocks: int, rounds: Rounds, scales: bool) -> torch.Tensor:
    """``[N, 64, row]`` bytes of normally distributed rows; scales are powers of two, or all 1."""
    generator = torch.Generator(rounds.device).manual_seed(rounds.seed)
    cache = torch.empty(blocks, INDEXER_PAGE, row.nbytes, dtype=torch.uint8, device=rounds.device)
    for name, view in latent_views(cache, row).items():
        # Filled in parts, because the random values are drawn in fp32.
        for start in range(0, len(view), 4096):
            part = view[start : start + 4096]
            values = torch.randn(*part.shape, device=rounds.device, generator=generator)
            if name == "scale":
                values = torch.exp2(values.round()) if scales else torch.ones_like(values)
            part.copy_(values)
    return cache


def make_sparse_content(case: KernelCase, rounds: Rounds) -> SparseContent:
    """Random tensors of a case; requests share no cached rows."""
    device, pages = rounds.device, cdiv(case.seq_lens[0], INDEXER_PAGE)
    generator = torch.Generator(device).manual_seed(rounds.seed + 1)
    cache = filled_cache(case.latent_row, case.num_reqs * pages, rounds, scales=True)
    shape = case.num_tokens, case.num_heads, case.head_size
    query = 3 * torch.randn(*shape, device=device, generator=generator)
    lists = []
    for req, new in enumerate(case.query_lens):
        first = req * pages * INDEXER_PAGE
        for _ in range(new):
            at = torch.randperm(case.seq_lens[req], device=device, generator=generator)
            lists.append((at[: case.topk] + first).int())
    k_scale = torch.tensor(K_SCALE, device=device)
    return SparseContent(case, cache, query.to(MODEL_DTYPE.torch), torch.stack(lists), k_scale)


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


def flashmla(content: SparseContent) -> KernelRun | str:
    """A run of FlashMLA on padded queries, or why FlashMLA cannot be called."""
    case, query = content.case, content.query
    layout, heads = case.latent_format, 64 if case.num_heads <= 64 else 128
    kernel = SparseKernel.FLASHMLA_KV
    if layout is LatentFormat.BF16:
        kernel = SparseKernel.FLASHMLA_SPARSE
    if layout not in rule_of(kernel).reads:
        return f"FlashMLA reads no {layout.value} rows"
    try:
        functions = load_flashmla()
    except RuntimeError as error:
        return str(error)
    padded = query.new_zeros(len(query), heads, case.head_size)
    padded[:, : case.num_heads] = query
    out = query.new_empty((*query.shape[:2], case.head_size_v))
    found: list[torch.Tensor] = []

    def prefill() -> None:
        rows = content.cache.view(query.dtype).view(-1, 1, case.head_size)
        found[:] = functions.prefill(padded, rows, content.indices[:, None], case.scale)[:1]

    # Decodes are passed as requests of one token, a prefill as one request with many tokens.
    axis = 0 if case.num_reqs == 1 and case.num_tokens > 1 else 1
    schedule = functions.new_schedule()

    def with_cache() -> None:
        result = functions.with_cache(
            *(padded.unsqueeze(axis), content.cache[:, :, None], None, None),
            *(case.head_size_v, schedule),
            softmax_scale=case.scale,
            is_fp8_kvcache=True,
            indices=content.indices.unsqueeze(axis),
        )
        found[:] = [result[0].flatten(0, 1)]

    def collect() -> None:
        out.copy_(found[0][:, : case.num_heads])

    call = prefill if kernel is SparseKernel.FLASHMLA_SPARSE else with_cache
    return KernelRun(call, out, collect=collect)


def _attended(
    content: SparseContent,
    asked: list[Line],
    rounds: Rounds,
    own: Callable[[SparseContent], KernelRun],
) -> Iterator[Line]:
    """Time our kernel, and FlashMLA where it is asked for and can be called."""
    runs = {"ours": own(content)}
    if asked[0].other == FLASHMLA:
        peer = flashmla(content)
        if isinstance(peer, str):
            asked = [line.replace(reason=peer) for line in asked]
        else:
            runs[FLASHMLA] = peer
    error = checked(runs["ours"], content.expected)
    if FLASHMLA in runs:
        found = check_run(FLASHMLA, runs[FLASHMLA], content.expected)
        if isinstance(found, Contender):
            # Our kernel is timed even without FlashMLA.
            asked = [line.replace(reason=f"{FLASHMLA}: {found.reason}") for line in asked]
            del runs[FLASHMLA]
    calls: dict[str, Call] = {name: run.call for name, run in runs.items()}
    yield from timed(asked, calls, rounds, error)
    # Checked again after many launches, which may show an error that is not in every launch.
    for run in runs.values():
        checked(run, content.expected)


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
    cache = filled_cache(source, blocks, rounds, scales=False)
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
    cache = filled_cache(LatentFormat.INDEXER_FP8.row(INDEX_SIZE), blocks, rounds, scales=True)
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
    yield from _streamed(run, Expected(*places, torch.stack(wanted)), asked, rounds)


def _streamed(
    run: KernelRun, expected: Expected, asked: list[Line], rounds: Rounds
) -> Iterator[Line]:
    error = checked(run, expected)
    yield from timed(asked, {"ours": run.call}, rounds, error)
    checked(run, expected)
