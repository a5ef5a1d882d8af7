"""TRITON_ATTN's behaviour that only a GPU shows: races, graphs, large offsets, allocations."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from attn.backends.triton_attn import TritonAttentionBackend
from attn.testing.batches import Layer
from builders.batch import CommonAttentionMetadata
from builders.drafts.advance import advance
from specs.dtypes import CacheDType, DType
from specs.engine import DecodeKernel, EngineConfig, Kernels, PrefillKernel, SpeculativeConfig
from specs.kv_cache import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK = 16


@dataclass(frozen=True)
class Setup:
    """A layer, and an engine that serves it."""

    cache_dtype: CacheDType = CacheDType.AUTO
    dtype: DType = DType.BFLOAT16
    heads: int = 8
    kv_heads: int = 2
    head_size: int = 128
    num_blocks: int = 4096
    max_seqs: int = 256
    max_tokens: int = 1024
    max_len: int = 32768
    speculative: int | None = 3
    invariant: bool = False
    fp8_mla_queries: bool = False
    """Read for latent layers."""
    prefill_kernel: PrefillKernel = PrefillKernel.TRITON
    decode_kernel: DecodeKernel = DecodeKernel.TRITON
    """The tests here run the portable kernels on every GPU; Hopper kernels have their own files."""
    window: int | None = None
    chunk: int | None = None
    fill_byte: int | None = None
    """The byte that fills the whole cache; None fills it with normally distributed rows."""


class Serving:
    """A backend's builder and impl over a cache with a row in every slot."""

    def __init__(self, setup: Setup, seed: int = 0) -> None:
        self.setup = setup
        self.generator = torch.Generator(DEVICE).manual_seed(seed)
        fields: dict[str, Any] = {
            "block_size": BLOCK,
            "num_kv_heads": setup.kv_heads,
            "head_size": setup.head_size,
            "dtype": setup.dtype,
            "cache_dtype": setup.cache_dtype,
        }
        self.spec: Any = FullAttentionSpec(**fields)
        if setup.window is not None:
            self.spec = SlidingWindowSpec(**fields, sliding_window=setup.window)
        if setup.chunk is not None:
            self.spec = ChunkedLocalAttentionSpec(**fields, attention_chunk_size=setup.chunk)
        speculative = setup.speculative and SpeculativeConfig(
            num_speculative_tokens=setup.speculative
        )
        self.config = EngineConfig(
            max_model_len=setup.max_len,
            max_num_seqs=setup.max_seqs,
            max_num_batched_tokens=setup.max_tokens,
            num_heads=setup.heads,
            speculative=speculative or None,
            batch_invariant=setup.invariant,
            kernels=Kernels.own(setup.prefill_kernel, setup.decode_kernel),
        )
        scale = torch.tensor(0.03, device=DEVICE)
        is_scaled = setup.cache_dtype in (CacheDType.FP8, CacheDType.FP8_E5M2)
        one = torch.ones((), device=DEVICE)
        self.layer = Layer(one, scale if is_scaled else one, scale if is_scaled else one)
        self.impl: Any = TritonAttentionBackend.get_impl_cls()(
            setup.heads,
            setup.head_size,
            setup.head_size**-0.5,
            setup.kv_heads,
            None,
            setup.window,
            setup.cache_dtype.value,
            attention_chunk_size=setup.chunk,
        )
        layout = self.spec.layout()
        fill = 0 if setup.fill_byte is None else setup.fill_byte
        self.cache = layout.allocate(setup.num_blocks, DEVICE, fill_byte=fill)
        if setup.fill_byte is None:
            self.write(torch.arange(setup.num_blocks * BLOCK, device=DEVICE))

    def normal(self, *shape: int) -> Tensor:
        rows = torch.randn(*shape, generator=self.generator, device=DEVICE)
        return rows.to(self.setup.dtype.torch)

    def rows(self, count: int) -> tuple[Tensor, Tensor]:
        """Random keys and values of ``count`` tokens."""
        shape = (count, self.setup.kv_heads, self.setup.head_size)
        return self.normal(*shape), self.normal(*shape)

    def queries(self, count: int) -> Tensor:
        # The softmax is far from flat, so that a lost or doubled key shows.
        return self.normal(count, self.setup.heads, self.setup.head_size) * 3

    def write(self, slots: Tensor, rows: tuple[Tensor, Tensor] | None = None) -> None:
        key, value = rows or self.rows(len(slots))
        self.impl.do_kv_cache_update(self.layer, key, value, self.cache, slots)

    def builder(self) -> Any:
        builder_cls: Any = TritonAttentionBackend.get_builder_cls()
        return builder_cls(self.spec, ["layers.0"], self.config, DEVICE)

    def tables(self, seq_lens: Sequence[int], seed: int = 0) -> Tensor:
        """A table of blocks for each length; blocks may be shared, since nothing is written."""
        width = max(-(-length // BLOCK) for length in [*seq_lens, 1])
        ids = torch.randint(
            1,
            self.setup.num_blocks,
            (len(seq_lens), width),
            generator=torch.Generator().manual_seed(seed),
        )
        return ids.int().to(DEVICE)

    def forward(self, record: Any, query: Tensor, output: Tensor | None = None) -> Results:
        shape = (len(query), self.setup.heads, self.setup.head_size)
        if output is None:
            output = torch.full(shape, -7.0, dtype=query.dtype, device=DEVICE)
        lse = torch.full(shape[:2], -7.0, device=DEVICE)
        self.impl.forward(self.layer, query, None, None, self.cache, record, output, output_lse=lse)
        return output, lse

    def step(self, query_lens: Sequence[int], seq_lens: Sequence[int], table: Tensor) -> Any:
        return CommonAttentionMetadata.from_lengths(query_lens, seq_lens, table, BLOCK)


Results = tuple[Tensor, Tensor]


def same(one: Results, other: Results) -> bool:
    """Whether two results are equal; a NaN in one would make them differ."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def part(results: Results, start: int, stop: int) -> Results:
    return results[0][start:stop], results[1][start:stop]


def disturb(turn: int) -> None:
    """Change what the GPU's caches hold, and put a launch of another length in between."""
    size = (turn % 7) * (1 << 22) + 1
    torch.empty(size, device=DEVICE).fill_(turn)


# -- Same row, same bits.

KINDS = {
    "decode": (Setup(), 1),
    "verify": (Setup(), 4),
    "fp8": (Setup(cache_dtype=CacheDType.FP8), 1),
    "fp8_verify": (Setup(cache_dtype=CacheDType.FP8), 4),
    "int4": (Setup(cache_dtype=CacheDType.INT4_PER_TOKEN_HEAD), 1),
    "one_kv_head": (Setup(heads=16, kv_heads=1), 2),
    # This layer has a tile of its own: two warps, four programs per multiprocessor.
    "narrow_window": (Setup(heads=16, head_size=64, speculative=None, window=128), 1),
    # This tile has 64 rows, and half the keys of other tiles at this head size.
    "tall_d64": (Setup(heads=16, head_size=64, speculative=7), 8),
    "tall_window": (Setup(heads=16, head_size=64, speculative=7, window=128), 8),
    "fp32": (Setup(dtype=DType.FLOAT32, head_size=64), 1),
}


def ragged(rows: int, most: int, seed: int, least: int = 4) -> list[int]:
    """Random lengths, some at the borders of segments."""
    dice = random.Random(seed)
    sizes = [dice.choice((dice.randint(least, most), 1024, 1025, 2048, least)) for _ in range(rows)]
    return [min(size, most) for size in [most, *sizes[1:]]]


def check_launches(setup: Setup, query_len: int, launches: int, rows: int) -> None:
    """Check that a request has one result, though launches take random requests in any order."""
    serving = Serving(setup)
    builder = serving.builder()
    lens = ragged(rows, setup.max_len, 1, max(query_len, 4))
    table, dice = serving.tables(lens), random.Random(2)
    queries = serving.queries(rows * query_len).view(rows, query_len, setup.heads, -1)
    known: dict[int, Results] = {}
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for turn in range(launches):
        disturb(turn)
        chosen = dice.sample(range(rows), dice.randint(1, rows))
        batch = serving.step(
            [query_len] * len(chosen), [lens[row] for row in chosen], table[chosen]
        )
        record = builder.build(0, batch)
        results = serving.forward(record, queries[chosen].flatten(0, 1))
        for place, row in enumerate(chosen):
            own = part(results, place * query_len, (place + 1) * query_len)
            for actual, expected in zip(own, known.setdefault(row, own), strict=True):
                wrong += (actual != expected).any() | actual.isnan().any()
        assert not bool(record.split.counters.any())
    assert int(wrong) == 0
    assert len(known) == rows


SHAPES = ("128 x 8k", "one", "ragged")
"""Batches that are launched again and again; a prototype's race showed most in the first."""


def check_repeats(serving: Serving, query_len: int, shape: str) -> None:
    """Check that 120 launches of a batch, each with a new plan, give the same bits."""
    setup = serving.setup
    lens = {
        "128 x 8k": [8192] * 128,
        "one": [setup.max_len],
        "ragged": ragged(48, setup.max_len, 1, max(query_len, 4)),
    }[shape]
    batch = serving.step([query_len] * len(lens), lens, serving.tables(lens))
    queries, builder = serving.queries(query_len * len(lens)), serving.builder()
    first = serving.forward(builder.build(0, batch), queries)
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for turn in range(119):
        disturb(turn)
        again = serving.forward(builder.build(0, batch), queries)
        for actual, expected in zip(again, first, strict=True):
            wrong += (actual != expected).any() | actual.isnan().any()
    assert int(wrong) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_120_launches_among_other_neighbours_give_the_same_bits(kind: str) -> None:
    check_launches(*KINDS[kind], launches=120, rows=48)


def check_alone(setup: Setup, rows: int, verify: int = 4) -> None:
    """Check that a row has the same bits alone, amid others, and as the last of a verify."""
    serving = Serving(setup)
    builder = serving.builder()
    lens = ragged(rows, setup.max_len, 3)
    middle = rows // 2
    lens[middle] = setup.max_len - 5
    table, queries = serving.tables(lens), serving.queries(rows)
    amid = serving.forward(builder.build(0, serving.step([1] * rows, lens, table)), queries)
    one = slice(middle, middle + 1)
    alone = serving.forward(
        builder.build(0, serving.step([1], [lens[middle]], table[one])), queries[one]
    )
    assert same(part(amid, middle, middle + 1), alone)
    # The last token of a verify sees what a decode at its position sees.
    several = torch.cat([serving.queries(verify - 1), queries[one]])
    verified = serving.forward(
        builder.build(0, serving.step([verify], [lens[middle]], table[one])), several
    )
    assert same(part(verified, verify - 1, verify), alone)
    everywhere = [verify if row == middle else 1 for row in range(rows)]
    mixed = torch.cat([queries[:middle], several, queries[middle + 1 :]])
    verified = serving.forward(builder.build(0, serving.step(everywhere, lens, table)), mixed)
    assert same(part(verified, middle + verify - 1, middle + verify), alone)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_one_result_alone_amid_255_others_and_in_a_verify(kind: str) -> None:
    check_alone(KINDS[kind][0], rows=256)


def test_a_row_of_an_invariant_engine_has_one_result_in_any_chunk() -> None:
    serving = Serving(Setup(invariant=True))
    builder = serving.builder()
    table, queries = serving.tables([9000]), serving.queries(600)
    whole = serving.forward(builder.build(0, serving.step([600], [9000], table)), queries)
    for start, stop in ((0, 16), (0, 17), (100, 356), (599, 600), (583, 600)):
        batch = serving.step([stop - start], [9000 - 600 + stop], table)
        assert same(
            serving.forward(builder.build(0, batch), queries[start:stop]), part(whole, start, stop)
        )


# -- Graphs.

STEPS = {
    "uniform_decode": lambda rows, tokens: [1] * rows,
    "full_prefill": lambda rows, tokens: [tokens] + [0] * (rows - 1),
    "mix": lambda rows, tokens: [1] * (rows - 2) + [tokens // 3, tokens // 2],
    "all_padding": lambda rows, tokens: [0] * rows,
    "ragged_verify": lambda rows, tokens: (
        [1 + row % 4 for row in range(rows // 2)] + [0] * (rows - rows // 2)
    ),
}


class StaticBatch:
    """A batch of the runner's own tensors, with which graphs are captured."""

    def __init__(self, rows: int, tokens: int, width: int) -> None:
        self.rows, self.tokens = rows, tokens
        starts = torch.arange(rows + 1, dtype=torch.int32)
        self.batch = CommonAttentionMetadata(
            query_start_loc=starts.to(DEVICE),
            query_start_loc_cpu=starts,
            seq_lens=torch.ones(rows, dtype=torch.int32, device=DEVICE),
            num_reqs=rows,
            num_actual_tokens=tokens,
            max_query_len=1,
            max_seq_len=1,
            block_table_tensor=torch.zeros((rows, width), dtype=torch.int32, device=DEVICE),
            slot_mapping=torch.full((tokens,), -1, device=DEVICE),
        )

    def put(self, batch: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Copy a step into the tensors; unused table entries point outside the cache."""
        static = self.batch
        static.query_start_loc.copy_(batch.query_start_loc)
        static.query_start_loc_cpu.copy_(batch.query_start_loc_cpu)
        static.seq_lens.copy_(batch.seq_lens)
        static.block_table_tensor.fill_(1 << 30)
        table = batch.block_table_tensor
        static.block_table_tensor[:, : table.shape[1]] = table
        return static.replace(max_query_len=max(1, batch.max_query_len))


def captured(run: Any) -> Any:
    """Capture ``run`` in a graph.

    Returns:
        The tensors that ``run`` returned, and a function that replays the graph. On a CPU that
        function calls ``run`` again and copies its results into the tensors.
    """
    if DEVICE.type != "cuda":
        held = run()

        def again() -> None:
            for tensor, new in zip(held, run(), strict=True):
                tensor.copy_(new)

        return held, again
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = run()
    return held, graph.replay


def check_replays(setup: Setup, rows: int, tokens: int, replays: int) -> None:
    serving, dice = Serving(setup), random.Random(4)
    eager_builder, builder = serving.builder(), serving.builder()
    steps = {}
    for name, lens_of in STEPS.items():
        counts = lens_of(rows, tokens)
        lens = [count and dice.randint(count, setup.max_len) for count in counts]
        steps[name] = serving.step(counts, lens, serving.tables(lens, seed=len(steps)))
    queries = serving.queries(tokens)
    expected = {
        name: serving.forward(eager_builder.build(0, batch), queries)
        for name, batch in steps.items()
    }
    static = StaticBatch(rows, tokens, setup.max_len // BLOCK)
    record = builder.build_for_cudagraph_capture(static.batch)
    held, replay = captured(lambda: serving.forward(record, queries))
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for turn in range(replays):
        name = dice.choice(list(STEPS))
        builder.build(0, static.put(steps[name]))
        disturb(turn)
        replay()
        for actual, want in zip(held, expected[name], strict=True):
            wrong += (actual != want).any()
    assert int(wrong) == 0
    assert not bool(record.split.counters.any())
    assert builder.planner.buffers["taken"].item() == 0


@pytest.mark.parametrize("kind", ["decode", "fp8"])
def test_a_graph_of_decodes_replays_every_kind_of_step(kind: str) -> None:
    check_replays(KINDS[kind][0], rows=64, tokens=512, replays=1000)


# -- Another process on the GPU.

_COMES_AND_GOES = """
import ctypes
cuda, context, memory = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
cuda.cuInit(0)
while True:
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    cuda.cuCtxSetCurrent(context)
    cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 28))
    cuda.cuMemFree_v2(memory)
    cuda.cuDevicePrimaryCtxRelease_v2(0)
"""


@contextmanager
def another_process() -> Iterator[None]:
    """Another process that makes and destroys CUDA contexts.

    Each time, running kernels of this process are stopped midway. They go on with the registers and
    shared memory that were saved.
    """
    with subprocess.Popen([sys.executable, "-c", _COMES_AND_GOES]) as process:
        try:
            yield
            assert process.poll() is None
        finally:
            process.kill()


def check_interrupted(
    setup: Setup, query_len: int, rows: int = 64, seconds: float = 5.0, processes: int = 2
) -> None:
    """Check that interrupted launches give the same bits as undisturbed launches."""
    serving = Serving(setup)
    builder = serving.builder()
    lens = ragged(rows, setup.max_len, 6, max(query_len, 4))
    batch = serving.step([query_len] * rows, lens, serving.tables(lens))
    queries = serving.queries(rows * query_len)
    first = serving.forward(builder.build(0, batch), queries)
    torch.cuda.synchronize()
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    with ExitStack() as others:
        for _ in range(processes):
            others.enter_context(another_process())
        stop = time.monotonic() + seconds
        while time.monotonic() < stop:
            for _ in range(20):
                record = builder.build(0, batch)
                again = serving.forward(record, queries)
                for actual, expected in zip(again, first, strict=True):
                    wrong += (actual != expected).any() | actual.isnan().any()
            torch.cuda.synchronize()
    assert int(wrong) == 0
    # A step of prefills only has no split-KV plan.
    assert record.split is None or not bool(record.split.counters.any())
    assert builder.planner.buffers["taken"].item() == 0


@pytest.mark.parametrize("kind", ["decode", "verify", "fp8", "int4"])
def test_launches_that_are_interrupted_give_the_same_bits(kind: str) -> None:
    check_interrupted(*KINDS[kind])


# -- Offsets beyond 32 bits.


def check_far_blocks(
    num_blocks: int,
    query_lens: tuple[int, ...] = (1, 4, 40),
    prefill_kernel: PrefillKernel = PrefillKernel.TRITON,
) -> None:
    """Check that rows give the same bits in the first and in the last blocks of a cache."""
    setup = Setup(
        heads=4,
        kv_heads=1,
        num_blocks=num_blocks,
        max_seqs=4,
        max_len=512,
        fill_byte=0xFF,
        prefill_kernel=prefill_kernel,
    )
    serving = Serving(setup)
    builder, length = serving.builder(), 300
    width = -(-length // BLOCK)
    rows, queries = serving.rows(length), serving.queries(max(query_lens))
    places = {
        "near": torch.arange(1, 1 + width),
        "far": torch.arange(num_blocks - width, num_blocks),
    }
    position = torch.arange(length)
    found: dict[str, list[Results]] = {}
    for name, blocks in places.items():
        before = serving.cache[: 2 * width].clone()
        slots = blocks[position // BLOCK] * BLOCK + position % BLOCK
        serving.write(slots.to(DEVICE), rows)
        after = serving.cache[: 2 * width]
        if name == "far":
            assert torch.equal(before.view(torch.int16), after.view(torch.int16))
        table = blocks[None].int().to(DEVICE)
        found[name] = [
            serving.forward(
                builder.build(0, serving.step([count], [length], table)), queries[:count]
            )
            for count in query_lens
        ]
    for near, far in zip(found["near"], found["far"], strict=True):
        assert bool(near[0].isfinite().all())
        assert same(near, far)


def many_blocks() -> int:
    """A number of blocks that 32-bit offsets do not reach; skip if memory is too small."""
    per_block = 2 * BLOCK * 128
    num_blocks = (1 << 31) // per_block + 4096
    free, _ = torch.cuda.mem_get_info()
    if free < num_blocks * per_block * 2 + (1 << 30):
        pytest.skip("needs 6 GB of free memory")
    return num_blocks


def test_a_cache_beyond_32_bit_offsets_is_written_and_read_right() -> None:
    check_far_blocks(many_blocks())


# -- Nothing is allocated.


def allocations() -> int:
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


@pytest.mark.parametrize("kind", ["decode", "fp8", "int4"])
def test_forward_and_a_rebuild_allocate_nothing_after_a_warm_up(kind: str) -> None:
    setup = KINDS[kind][0]
    serving = Serving(setup)
    builder = serving.builder()
    steps = [
        serving.step(counts, lens, serving.tables(lens))
        for counts, lens in (
            ([1] * 8, [900] * 8),
            ([1, 4, 300], [5000, 40, 300]),
            ([4] * 8, [3000] * 8),
        )
    ]
    for batch in steps:
        serving.forward(builder.build(0, batch), serving.queries(batch.num_actual_tokens))
    for batch in steps:
        query = serving.queries(batch.num_actual_tokens)
        output = torch.empty_like(query)
        lse = torch.empty(query.shape[:2], device=DEVICE)
        key, value = serving.rows(batch.num_actual_tokens)
        torch.cuda.synchronize()
        before = allocations()
        record = builder.build(0, batch)
        serving.impl.do_kv_cache_update(
            serving.layer, key, value, serving.cache, batch.slot_mapping
        )
        serving.impl.forward(
            serving.layer, query, key, value, serving.cache, record, output, output_lse=lse
        )
        assert allocations() == before


# -- Draft steps in one graph.


def draft(
    serving: Serving, builder: Any, batch: Any, queries: Tensor, rows: tuple[Tensor, Tensor]
) -> list[Tensor]:
    """Run one draft step for each of ``queries``; a step first writes its token's row."""
    found: list[Tensor] = []
    for turn, query in enumerate(queries):
        if turn:
            batch = advance(batch, BLOCK, serving.setup.max_len)
        record = builder.build_for_drafting(batch, turn)
        serving.write(record.slot_mapping, (rows[0][turn], rows[1][turn]))
        found += serving.forward(record, query)
    return found


def check_drafting(setup: Setup, rows: int, steps: int, replays: int) -> None:
    serving = Serving(setup)
    shape = (steps, rows, setup.kv_heads, setup.head_size)
    new = serving.normal(*shape), serving.normal(*shape)
    queries = serving.queries(steps * rows).view(steps, rows, setup.heads, -1)
    # Every request has blocks of its own, since drafts are written to them.
    width = setup.num_blocks // (rows + 1)
    table = torch.arange(rows * width, dtype=torch.int32, device=DEVICE).view(rows, width) + width
    most = min(width * BLOCK, setup.max_len)
    static = StaticBatch(rows, rows, width)
    builder, eager_builder, dice = serving.builder(), serving.builder(), random.Random(5)
    batch = static.put(serving.step([1] * rows, [most // 2] * rows, table))
    held, replay = captured(lambda: draft(serving, builder, batch, queries, new))
    for _ in range(replays):
        # Some requests reach the length limit while drafting, and become padding.
        lens = [dice.choice((1, dice.randint(1, most - 1), most - 1, most)) for _ in range(rows)]
        step = serving.step([1] * rows, lens, table)
        static.put(step)
        static.batch.slot_mapping.copy_(step.slot_mapping)
        kept = serving.cache.clone()
        replay()
        replayed = [tensor.clone() for tensor in held]
        serving.cache.copy_(kept)
        eager = draft(serving, eager_builder, step, queries, new)
        for actual, want in zip(replayed, eager, strict=True):
            assert torch.equal(actual, want)


def test_draft_steps_of_one_graph_are_those_of_eager_steps() -> None:
    check_drafting(KINDS["decode"][0], rows=16, steps=4, replays=20)
