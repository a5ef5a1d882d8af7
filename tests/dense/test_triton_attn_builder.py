"""TRITON_ATTN's builder: persistent buffers, limits, wrong host lengths, records for graphs."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import builders.dense.triton_attn
import builders.device
from attn.backends.triton_attn import TritonAttentionBackend
from attn.testing import batches
from attn.testing.batches import WILD_BLOCK, BatchSpec, Heads
from attn.testing.cases import Case
from attn.testing.dense_trial import DenseTrial
from attn.testing.trial import CaseResult, Inputs, Results
from builders.batch import CommonAttentionMetadata
from builders.dense.record import TritonAttentionMetadata
from builders.dense.triton_attn import TritonAttentionMetadataBuilder
from builders.device import runs_gluon
from specs.dtypes import CacheDType, DType
from specs.engine import (
    DecodeKernel,
    EngineConfig,
    Kernels,
    ParallelConfig,
    PrefillKernel,
    SpeculativeConfig,
)
from specs.kv_cache import (
    AnyKVCacheSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from tests.builders.test_common import make_batch, same
from tests.tools.gpus import hopper

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = {"block_size": 16, "num_kv_heads": 1, "head_size": 64, "dtype": DType.FLOAT16}
CONFIG = EngineConfig(max_model_len=512, max_num_seqs=8, max_num_batched_tokens=96, num_heads=4)
SPECS: dict[str, AnyKVCacheSpec] = {
    "full": FullAttentionSpec(**SIZES),
    "window": SlidingWindowSpec(**SIZES, sliding_window=20),
    "chunk": ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=32),
    "cross": CrossAttentionSpec(**SIZES),
    "encoder": EncoderOnlyAttentionSpec(**SIZES),
}
DECODES = ((1, 1, 1, 1), (40, 17, 3, 200))
MIX = ((1, 3, 20, 33, 0), (40, 17, 25, 33, 0))
PREFILL = ((60, 36), (60, 36))


def builder_of(
    spec: AnyKVCacheSpec = SPECS["full"], **changes: Any
) -> TritonAttentionMetadataBuilder:
    return TritonAttentionMetadataBuilder(spec, ["layers.0"], CONFIG.replace(**changes), DEVICE)


def batch_of(lens: tuple[tuple[int, ...], tuple[int, ...]]) -> CommonAttentionMetadata:
    batch = make_batch(*lens, 16)
    moved = {
        item.name: value.to(DEVICE)
        for item in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, item.name), Tensor) and "cpu" not in item.name
    }
    return batch.replace(**moved)


def tensors(value: Any, path: str = "") -> dict[str, Tensor]:
    """Every tensor of a record, by the path of its field."""
    if isinstance(value, Tensor):
        return {path: value}
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return {}
    found = {}
    for item in dataclasses.fields(value):
        found |= tensors(getattr(value, item.name), f"{path}.{item.name}")
    return found


# -- Buffers.


@pytest.mark.parametrize("lens", [DECODES, MIX, PREFILL])
@pytest.mark.parametrize("name", ["full", "window", "encoder"])
def test_another_builders_record_gets_a_plan_in_own_buffers(name: str, lens: Any) -> None:
    # A graph captured with the second builder's records reads that builder's buffers only.
    first, second = builder_of(SPECS[name]), builder_of(SPECS[name])
    batch, other = batch_of(lens), batch_of(MIX if lens is DECODES else DECODES)
    second.build(0, other)  # what a plan leaves untouched is then the same both times
    expected = {key: tensor.clone() for key, tensor in tensors(second.build(0, batch)).items()}
    second.build(0, other)
    table, slots = batch.block_table_tensor + 1, batch.slot_mapping + 1
    updated = second.update_block_table(first.build(0, batch), table, slots)
    found = tensors(updated)
    own = {tensor.data_ptr() for tensor in tensors(second.build(0, batch)).values()}
    plan = [key for key in found if key.startswith((".split", ".prefill"))]
    assert plan
    for key in plan:
        assert found[key].data_ptr() in own
        if key not in (".split.states", ".split.sums"):
            assert torch.equal(found[key], expected[key]), key
    assert updated.block_table is table
    assert updated.slot_mapping is slots


def test_a_captured_prefill_of_more_requests_finds_no_tiles_of_an_earlier_step() -> None:
    builder = builder_of()
    captured = builder.build_for_cudagraph_capture(batch_of(((24, 24, 24, 24), (24, 24, 24, 24))))
    builder.build(0, batch_of(((60, 30, 1, 1), (60, 30, 1, 1))))
    assert int(captured.prefill.tile_starts[4]) > 0
    builder.build(0, batch_of(((1, 1), (40, 17))))
    assert captured.prefill.tile_starts.tolist() == [0] * 5


def test_a_length_beyond_the_limit_stays_within_the_rows_own_scratch() -> None:
    builder = builder_of()
    batch = batch_of(DECODES)
    batch.seq_lens[1] = 9000
    record = builder.build(0, batch)
    rows = record.split.rows[:4].tolist()
    assert rows[1][3] == 512
    assert max(row[9] for row in rows) <= record.split.slots


def test_lengths_beyond_the_requests_are_not_planned() -> None:
    builder = builder_of()
    batch = batch_of(DECODES)
    longer = batch.replace(seq_lens=torch.cat([batch.seq_lens, batch.seq_lens]))
    assert len(builder.build(0, longer).seq_lens) == 4
    assert int(builder.planner.buffers["total"][0]) == 4
    with pytest.raises(ValueError, match=r"num_reqs \(4\).*got 3 and 5"):
        builder.build(0, batch.replace(seq_lens=batch.seq_lens[:3]))


def test_an_encoder_needs_no_scratch() -> None:
    assert builder_of(SPECS["encoder"]).planner.scratch_bytes == 0


def test_a_draft_step_is_planned_anew_from_the_records_own_tensors() -> None:
    builder, batch = builder_of(), batch_of(DECODES)
    record = builder.build(0, batch)
    longer = batch.replace(seq_lens=batch.seq_lens + 100)
    batch.seq_lens.add_(100)
    assert record.seq_lens is batch.seq_lens
    builder.update_draft_decode_metadata(record)
    planned = record.split.rows[:4].clone()
    builder.build(0, batch_of(MIX))
    assert torch.equal(builder.build(0, longer).split.rows[:4], planned)


@pytest.mark.parametrize("name", SPECS)
def test_records_are_views_of_the_same_memory_build_after_build(name: str) -> None:
    builder = builder_of(SPECS[name])
    kept = {key: buffer.data_ptr() for key, buffer in builder.buffers._buffers.items()}
    of_the_batch = {".slot_mapping", ".query_start_loc", ".seq_lens", ".block_table"}
    places: dict[str, set[int]] = {}
    for lens in (MIX, DECODES, PREFILL, MIX):
        record = builder.build(0, batch_of(lens))
        for path, tensor in tensors(record).items():
            if path not in of_the_batch:
                places.setdefault(path, set()).add(tensor.data_ptr())
    assert places
    assert {len(found) for found in places.values()} == {1}
    assert set.union(*places.values()) <= set(kept.values())
    # Nothing was declared or moved after construction.
    assert {key: b.data_ptr() for key, b in builder.buffers._buffers.items()} == kept


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("lens", [DECODES, MIX, PREFILL], ids=["decodes", "mix", "prefill"])
def test_what_a_record_needs_of_the_batch_it_has_as_it_is(
    name: str, lens: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    batch = batch_of(lens)
    before = copy.deepcopy(batch)
    record = builder_of(SPECS[name]).build(0, batch)
    fields = [item.name for item in dataclasses.fields(batch)]
    assert [
        field for field in fields if not same(getattr(batch, field), getattr(before, field))
    ] == []
    assert record.slot_mapping is batch.slot_mapping
    assert record.block_table is batch.block_table_tensor
    assert record.seq_lens is batch.seq_lens
    assert (record.num_reqs, record.num_actual_tokens) == (batch.num_reqs, batch.num_actual_tokens)


def test_parts_that_the_host_knows_to_be_empty_are_left_out() -> None:
    builder = builder_of()
    assert builder.build(0, batch_of(DECODES)).prefill is None
    assert builder.build(0, batch_of(MIX)).prefill is not None
    assert builder_of(SPECS["encoder"]).build(0, batch_of(MIX)).split is None
    invariant = builder_of(batch_invariant=True)
    assert invariant.build(0, batch_of(PREFILL)).split is None
    int4 = FullAttentionSpec(**SIZES, cache_dtype=CacheDType.INT4_PER_TOKEN_HEAD)
    every_row = builder_of(int4, batch_invariant=True)
    assert every_row.build(0, batch_of(PREFILL)).prefill is None


# -- Limits.


@pytest.mark.parametrize(
    ("lens", "message"),
    [
        (((1,) * 9, (5,) * 9), r"num_reqs \(9\).*\(8\)"),
        (((60, 37), (60, 37)), r"num_actual_tokens \(97\).*\(96\)"),
    ],
)
def test_a_batch_beyond_the_limits_is_refused(
    lens: tuple[tuple[int, ...], tuple[int, ...]], message: str
) -> None:
    builder, batch = builder_of(), batch_of(lens)
    for build in (
        lambda: builder.build(0, batch),
        lambda: builder.build_for_cudagraph_capture(batch),
    ):
        with pytest.raises(ValueError, match=message):
            build()


@pytest.mark.parametrize(
    ("heads", "message"), [(None, "num_heads.*None"), (7, r"num_heads \(7\).*\(2\)")]
)
def test_the_number_of_heads_must_be_given_and_fit(heads: int | None, message: str) -> None:
    spec = FullAttentionSpec(**{**SIZES, "num_kv_heads": 2})
    with pytest.raises(ValueError, match=message):
        builder_of(spec, num_heads=heads)


@pytest.mark.parametrize("shape", [(3,), (5,), (4, 1), ()], ids=str)
def test_causal_flags_are_one_per_request(shape: tuple[int, ...]) -> None:
    batch = batch_of(DECODES).replace(causal=torch.ones(shape, dtype=torch.bool, device=DEVICE))
    with pytest.raises(ValueError, match=r"causal.*\[4\]"):
        builder_of().build(0, batch)


# -- Debugging.


def _wrong(name: str, index: Any, value: int) -> CommonAttentionMetadata:
    batch = batch_of(DECODES)
    tensor = getattr(batch, name).clone()
    tensor[index] = value
    return batch.replace(**{name: tensor})


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (_wrong("seq_lens", 2, 9999).replace(max_seq_len=9999), "request 2 of length 9999 needs"),
        (_wrong("seq_lens", 2, -4), "seq_lens.*got -4"),
        (_wrong("seq_lens", 2, 4000), "max_seq_len"),
        (_wrong("seq_lens", 3, 0).replace(max_query_len=0), "max_query_len"),
        (_wrong("query_start_loc", 2, 0), "query_start_loc must not decrease"),
        (_wrong("slot_mapping", 1, -3), "slot_mapping.*got -3"),
    ],
)
def test_debugging_refuses_a_bad_batch(
    monkeypatch: pytest.MonkeyPatch, batch: CommonAttentionMetadata, message: str
) -> None:
    builder = builder_of()
    monkeypatch.setenv("ATTN_DEBUG", "1")
    builder.build(0, batch_of(DECODES))
    with pytest.raises(ValueError, match=message):
        builder.build(0, batch)


def test_debugging_checks_block_ids_against_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DEBUG", "1")
    trial = trial_of(MIXED)
    table = trial.inputs.batch.block_table_tensor.clone()
    table[1, 0] = WILD_BLOCK
    batch = trial.inputs.batch.replace(block_table_tensor=table)
    record = trial.build(trial.builder(), batch)
    with pytest.raises(ValueError, match=rf"block_table.*\[1, 0\].*got {WILD_BLOCK}"):
        trial.attend(record, trial.inputs, trial.cache())


# -- Host lengths decide nothing.

MIXED = BatchSpec("mixed_lens", (1, 3, 20, 0, 33), (200, 17, 70, 0, 33))


def trial_of(batch: BatchSpec, **changes: Any) -> DenseTrial:
    case = Case(batch=batch, heads=Heads(4, 1, 64), dtype=DType.FLOAT16)
    trial = DenseTrial(TritonAttentionBackend, case, DEVICE)
    trial.config = trial.config.replace(**changes)
    trial.write()
    return trial


def problems(
    trial: DenseTrial, record: TritonAttentionMetadata, results: Results
) -> dict[str, Any]:
    result = CaseResult()
    trial.judge(results, record, result)
    trial.check_padding(results, result)
    return result.findings


LONG = BatchSpec("long", (20, 33, 0), (70, 33, 0))


def test_steps_of_prompts_alone_have_no_split_rows() -> None:
    trial = trial_of(LONG)
    builder = trial.builder()
    record = trial.build(builder)
    assert record.split is None
    assert problems(trial, record, trial.attend(record, trial.inputs, trial.cache())) == {}
    # A captured graph is replayed with other lengths, and the device may have dropped drafts that
    # the host counts: both need the plan of split KV.
    assert builder.build_for_cudagraph_capture(trial.inputs.batch).split is not None
    inexact = trial_of(LONG, exact_host_lengths=False)
    assert inexact.build(inexact.builder()).split is not None


LIES = {
    "longer_queries": {"max_query_len": 4096},
    "shorter_sequences": {"max_seq_len": 1},
    "longer_sequences": {"max_seq_len": 1 << 20},
    "stale_bound": {"seq_lens_cpu_upper_bound": torch.tensor([1, 0, 0, 7, 2], dtype=torch.int32)},
    "optimistic_bound": {"seq_lens_cpu_upper_bound": torch.full((5,), 900, dtype=torch.int32)},
    "no_bound": {"seq_lens_cpu_upper_bound": None},
    # The device has trimmed drafts that the host still counts per request; the total agrees.
    "other_queries": {
        "query_start_loc_cpu": torch.tensor([0, 10, 20, 30, 40, 57], dtype=torch.int32)
    },
    "one_long_query": {
        "query_start_loc_cpu": torch.tensor([0, 57, 57, 57, 57, 57], dtype=torch.int32)
    },
}


@pytest.mark.parametrize("lie", LIES)
def test_wrong_host_lengths_change_no_result(lie: str) -> None:
    trial = trial_of(MIXED, exact_host_lengths=False)
    builder = trial.builder()
    expected = trial.attend(trial.build(builder), trial.inputs, trial.cache())
    batch = trial.inputs.batch.replace(**LIES[lie])
    record = trial.build(trial.builder(), batch)
    results = trial.attend(record, trial.inputs, trial.cache())
    assert problems(trial, record, results) == {}
    for name, rows in expected.items():
        assert torch.equal(rows.view(torch.uint8), results[name].view(torch.uint8)), name


@pytest.mark.parametrize("lie", [lie for lie in LIES if "quer" not in lie])
def test_decodes_need_no_host_lengths_at_all(lie: str) -> None:
    trial = trial_of(BatchSpec("decodes", (1, 1, 1, 1, 1), (200, 1, 16, 17, 33)))
    batch = trial.inputs.batch.replace(**LIES[lie])
    record = trial.build(trial.builder(), batch)
    results = trial.attend(record, trial.inputs, trial.cache())
    assert problems(trial, record, results) == {}


# -- Records for graphs: captured with one step, replayed with others.

ROWS, TOKENS = 4, 48
REPLAYED = {
    "uniform_decode": ((1, 1, 1, 1), (200, 1, 64, 33)),
    "full_prefill": ((48, 0, 0, 0), (48, 0, 0, 0)),
    "chunked_prefill": ((20, 28, 0, 0), (90, 28, 0, 0)),
    "mix": ((1, 4, 20, 23), (77, 160, 45, 23)),
    "ragged_verify": ((1, 3, 2, 4), (130, 3, 20, 64)),
    "some_padding": ((1, 1, 0, 0), (150, 31, 0, 0)),
    "all_padding": ((0, 0, 0, 0), (0, 0, 0, 0)),
}


def padded(name: str) -> BatchSpec:
    counts, lens = REPLAYED[name]
    return BatchSpec(
        name, counts, lens, num_padding_tokens=TOKENS - sum(counts), pads_num_actual_tokens=True
    )


def capture_batch(batch: CommonAttentionMetadata, width: int) -> CommonAttentionMetadata:
    """A batch of the runner's own tensors, as at the capture of a uniform decode of all rows."""
    starts = torch.arange(ROWS + 1, dtype=torch.int32)
    table = torch.zeros((ROWS, width), dtype=torch.int32, device=DEVICE)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(DEVICE),
        query_start_loc_cpu=starts.clone(),
        seq_lens=torch.ones(ROWS, dtype=torch.int32, device=DEVICE),
        num_reqs=ROWS,
        num_actual_tokens=TOKENS,
        max_query_len=1,
        max_seq_len=1,
        block_table_tensor=table,
        slot_mapping=torch.full((TOKENS,), -1, device=DEVICE),
    )


@pytest.mark.parametrize("invariant", [False, True], ids=["plain", "invariant"])
def test_a_record_captured_with_decodes_serves_every_other_step(invariant: bool) -> None:
    trials = {name: trial_of(padded(name)) for name in REPLAYED}
    config = EngineConfig(
        max_model_len=256,
        max_num_seqs=ROWS,
        max_num_batched_tokens=TOKENS,
        num_heads=4,
        batch_invariant=invariant,
        speculative=SpeculativeConfig(num_speculative_tokens=3),
    )
    some = next(iter(trials.values()))
    builder = some.builder(config)
    static = capture_batch(some.inputs.batch, 20)
    record = builder.build_for_cudagraph_capture(static)
    queries = batches.poisoned(TOKENS, 4, 64, dtype=torch.float16, device=DEVICE)
    for name, trial in (*trials.items(), *trials.items()):
        batch = trial.inputs.batch
        for field in ("query_start_loc", "query_start_loc_cpu", "seq_lens", "slot_mapping"):
            getattr(static, field).copy_(getattr(batch, field))
        table = batch.block_table_tensor
        static.block_table_tensor.fill_(WILD_BLOCK)
        static.block_table_tensor[:, : table.shape[1]] = table
        queries.copy_(trial.inputs.query)
        builder.build(0, static.replace(max_query_len=max(1, *trial.batch_spec.query_lens)))
        inputs = Inputs(static, queries, None, None)
        results = trial.attend(record, inputs, trial.cache())
        assert problems(trial, record, results) == {}, name
        assert not bool(record.split.counters.any()), name


def test_a_captured_record_does_not_depend_on_the_captured_lengths() -> None:
    builder = builder_of()
    static = [
        batch.replace(num_actual_tokens=60, max_query_len=1)
        for batch in (batch_of(((1,) * 4, (9, 9, 9, 9))), batch_of(((1,) * 4, (400, 1, 7, 300))))
    ]
    one, other = (builder.build_for_cudagraph_capture(batch) for batch in static)
    assert one.prefill is not None
    assert other.prefill is not None
    assert one.prefill.programs == other.prefill.programs
    assert one.split is not None
    assert one.split.groups == other.split.groups  # type: ignore[union-attr]


def test_a_graph_of_short_steps_needs_no_prefill() -> None:
    builder = builder_of()
    assert builder.build_for_cudagraph_capture(batch_of(DECODES)).prefill is None
    assert builder.build_for_cudagraph_capture(batch_of(((1,) * 8, (9,) * 8))).prefill is None


def test_a_copy_of_a_record_has_its_own_addresses() -> None:
    record = builder_of().build(0, batch_of(DECODES))
    assert record.split is not None
    assert record.split.pointers.tensors[0] is record.split.rows
    for copied in (copy.copy(record), copy.deepcopy(record)):
        assert copied.split is not None
        plan = copied.split
        assert plan.pointers.addresses == [tensor.data_ptr() for tensor in plan.pointers.tensors]
        assert plan.pointers.tensors[0] is plan.rows
    assert copied.split.pointers.addresses != record.split.pointers.addresses


# -- Which prefill kernel.

DCP = {"parallel": ParallelConfig(decode_context_parallel_size=2)}


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make builders take their device for a Hopper GPU that runs Gluon."""
    monkeypatch.setattr(builders.dense.triton_attn, "runs_gluon", lambda device: True)
    monkeypatch.setattr(builders.dense.triton_attn, "device_facts", lambda device: hopper(3))


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("name", ["full", "window", "chunk", "cross"])
def test_the_hopper_kernel_is_planned_beside_the_plain_one(name: str) -> None:
    left = PrefillKernel.AUTO
    record = builder_of(SPECS[name], kernels=Kernels.own(prefill=left)).build(0, batch_of(MIX))
    assert record.prefill is not None
    assert record.prefill.hopper is not None
    assert not record.prefill.hopper.is_required
    assert record.prefill.programs > 0
    plain = builder_of(SPECS[name], kernels=Kernels.own(prefill=PrefillKernel.TRITON)).build(
        0, batch_of(MIX)
    )
    assert plain.prefill is not None
    assert plain.prefill.hopper is None
    # The portable kernel's plan is the same beside it.
    assert torch.equal(record.prefill.tile_starts, plain.prefill.tile_starts)
    named = builder_of(SPECS[name], kernels=Kernels.own(prefill=PrefillKernel.HOPPER)).build(
        0, batch_of(MIX)
    )
    assert named.prefill is not None
    assert named.prefill.hopper is not None
    assert named.prefill.hopper.is_required


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("full", DCP, "decode context parallelism"),
        ("encoder", {"batch_invariant": True}, "batch invariance"),
    ],
)
def test_where_the_hopper_kernel_does_not_serve_the_plain_one_is_planned(
    name: str, changes: dict[str, Any], said: str
) -> None:
    left = builder_of(SPECS[name], **changes, kernels=Kernels.own(prefill=PrefillKernel.AUTO))
    assert left.planner.hopper is None
    with pytest.raises(ValueError, match=f"'hopper' does not serve this layer: {said}"):
        builder_of(SPECS[name], **changes, kernels=Kernels.own(prefill=PrefillKernel.HOPPER))


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("encoder", {}, "there are no pages"),
        ("full", DCP, "decode context parallelism"),
        ("full", {"rswa_window": 64}, "R-SWA"),
    ],
)
def test_a_plan_for_few_tokens_is_the_plain_kernels_where_the_other_does_not_serve(
    name: str, changes: dict[str, Any], said: str
) -> None:
    left = builder_of(SPECS[name], **changes, kernels=Kernels.own(decode=DecodeKernel.AUTO))
    assert left.planner.hopper_decode is None
    with pytest.raises(ValueError, match=f"kernels.dense.decode 'hopper' does not serve.*: {said}"):
        builder_of(SPECS[name], **changes, kernels=Kernels.own(decode=DecodeKernel.HOPPER))


def test_gluon_runs_on_a_gpu_that_nothing_interprets(monkeypatch: pytest.MonkeyPatch) -> None:
    for interpreted in (False, True):
        monkeypatch.setattr(builders.device, "interprets", lambda value=interpreted: value)
        assert runs_gluon(torch.device("cuda")) is not interpreted
        assert not runs_gluon(torch.device("cpu"))
