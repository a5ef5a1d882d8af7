"""SPARSE_MLA's builder: it says in place, without reading the device, what every token reads in
every mode.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn.ops.topk_transform import transform_topk
from attn.testing.batches import WILD_BLOCK
from builders.batch import CommonAttentionMetadata
from builders.sparse import choice as sparse_choice
from builders.sparse import choice as sparse_mla_choice
from builders.sparse import vendor_calls as sparse_calls
from builders.sparse.arguments import TopkLists
from builders.sparse.record import SparseMLAMetadata, SparseRows
from builders.sparse.sparse_mla import SparseMLAMetadataBuilder
from specs.devices import KNOWN_DEVICES
from specs.dtypes import CacheDType, DType
from specs.engine import EngineConfig, Kernels, ParallelConfig, SparseKernels, SpeculativeConfig
from specs.kv_cache import FullAttentionSpec, MLAAttentionSpec, latent_spec
from specs.rows import LatentFormat
from specs.sparse_mla import STORED_FORMATS, ForwardMode, IndexKind, SparseKernel
from tests.emulators.flashinfer_emulator import MadeOnDevice, OnDevice, on_device

BF16, RAW, SCALED = STORED_FORMATS
K, MODES = SparseKernel, ForwardMode
P, TOPK = 64, 24
CONFIG = EngineConfig(
    max_model_len=512,
    max_num_seqs=6,
    max_num_batched_tokens=200,
    num_heads=16,
    index_topk=TOPK,
    speculative=SpeculativeConfig(num_speculative_tokens=3),
)


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 with every kernel."""
    capability = KNOWN_DEVICES["h200"].compute_capability
    monkeypatch.setattr(sparse_choice, "capability_of", lambda device: capability)
    monkeypatch.setattr(sparse_mla_choice, "unavailable_kernels", dict)
    monkeypatch.setattr(sparse_calls, "LOADERS", {})


def spec_of(layout: LatentFormat = BF16, **fields: Any) -> MLAAttentionSpec:
    spec = latent_spec(layout, P)
    assert isinstance(spec, MLAAttentionSpec)
    return spec.replace(**fields) if fields else spec


def sparse_kernels(**kernels: SparseKernel) -> Kernels:
    return Kernels(sparse=SparseKernels(**kernels))


def builder_of(
    layout: LatentFormat = BF16,
    prefill: SparseKernel = K.TRITON_SPARSE,
    decode: SparseKernel = K.TRITON_SPARSE,
    **settings: Any,
) -> SparseMLAMetadataBuilder:
    settings = {"kernels": sparse_kernels(prefill=prefill, decode=decode)} | settings
    return SparseMLAMetadataBuilder(
        spec_of(layout), ["layers.0"], CONFIG.replace(**settings), "cpu"
    )


def batch_of(
    query_lens: list[int], seq_lens: list[int], padding: int = 0
) -> CommonAttentionMetadata:
    """Blocks are in no order; past a request's last block the table holds wild ids."""
    columns = max(-(-length // P) for length in [*seq_lens, 1]) + 1
    table = torch.full((len(seq_lens), columns), WILD_BLOCK // P, dtype=torch.int32)
    free = 1 + torch.randperm(99, generator=torch.Generator().manual_seed(0)).int()
    for req, length in enumerate(seq_lens):
        used = -(-length // P)
        table[req, :used], free = free[:used], free[used:]
    batch = CommonAttentionMetadata.from_lengths(query_lens, seq_lens, table, P)
    if padding:
        slots = torch.cat([batch.slot_mapping, torch.full((padding,), -1)])
        tokens = batch.num_actual_tokens + padding
        batch = batch.replace(slot_mapping=slots, num_actual_tokens=tokens)
    return batch


def lists_of(batch: CommonAttentionMetadata, seed: int = 1) -> torch.Tensor:
    """Lists ``[T, TOPK]``: keys that each token sees, some twice, some entries empty; padding has
    stale lists.
    """
    random = torch.Generator().manual_seed(seed)
    lists = torch.randint(0, 10_000, (batch.num_actual_tokens, TOPK), generator=random).int()
    starts = batch.query_start_loc_cpu.tolist()
    for req, length in enumerate(batch.seq_lens.tolist()):
        new = starts[req + 1] - starts[req]
        for token in range(new):
            visible = length - new + token + 1
            row = starts[req] + token
            lists[row] = torch.randint(0, visible, (TOPK,), generator=random).int()
            lists[row, visible:] = -1
            lists[row, 3] = -1
    return lists


def wanted_slots(batch: CommonAttentionMetadata, lists: torch.Tensor) -> list[list[int]]:
    """Slots that each token reads, in order, found by loops."""
    starts, found = batch.query_start_loc_cpu.tolist(), []
    for row in range(batch.num_actual_tokens):
        reqs = [req for req in range(batch.num_reqs) if starts[req] <= row < starts[req + 1]]
        slots = []
        for token in lists[row].tolist() if reqs else []:
            if token >= 0:
                block = int(batch.block_table_tensor[reqs[0], token // P])
                slots.append(block * P + token % P)
        found.append(slots)
    return found


def read_slots(rows: SparseRows, lists: torch.Tensor) -> list[list[int]]:
    """Slots that a kernel would read if it follows the record."""
    plan, found = rows.plan, []
    own = lists[rows.first_token : rows.first_token + rows.num_rows]

    def transformed(first: int, count: int, **given: Any) -> torch.Tensor:
        part = slice(first, first + count)
        out = rows.indices[part]
        counts = None if rows.counts is None else rows.counts[part]
        transform_topk(
            TopkLists(own[part], rows.lengths.visible_lens[part], rows.lengths.reqs[part]),
            *(plan.index_kind, out),
            block_table=rows.block_table,
            block_size=rows.block_size,
            offsets=rows.offsets,
            counts=counts,
            **given,
        )
        assert bool((out[:, TOPK:] == -1).all())
        if counts is not None:
            for row, length in zip(out.tolist(), counts.tolist(), strict=True):
                assert all(entry >= 0 for entry in row[:length])
                assert all(entry < 0 for entry in row[length:])
        return out

    if plan.index_kind is IndexKind.PAGED:
        assert rows.chunks == ()
        assert rows.converted is None
        return [[x for x in row if x >= 0] for row in transformed(0, rows.num_rows).tolist()]
    assert rows.converted is not None
    assert rows.converted_row is not None
    assert rows.converted_row.name == plan.reads.value
    assert len(rows.converted) % 64 == 0
    assert rows.converted.shape[1] * rows.converted.element_size() == rows.converted_row.nbytes
    expected_first = 0
    for chunk in rows.chunks:
        assert chunk.first_row == expected_first
        expected_first += chunk.num_rows
        assert len(chunk.slots) <= len(rows.converted)
        gathers = plan.index_kind is IndexKind.GATHERED
        shape = (chunk.num_rows, plan.index_width)
        given = {"slots": chunk.slots.view(shape)} if gathers else {}
        out = transformed(chunk.first_row, chunk.num_rows, **given)
        sources = chunk.slots.tolist()
        found += [[sources[x] for x in row if x >= 0] for row in out.tolist()]
    assert expected_first == rows.num_rows
    return found


def check_reads(record: SparseMLAMetadata, batch: CommonAttentionMetadata) -> None:
    lists = lists_of(batch)
    found = []
    for rows in (record.decode, record.prefill_rows):
        if rows is not None:
            found += read_slots(rows, lists)
    assert found == wanted_slots(batch, lists)


STEPS: dict[str, tuple[CommonAttentionMetadata, ForwardMode]] = {
    "decode": (batch_of([1, 1, 1], [40, 1, 130]), MODES.DECODE),
    "decode padding": (batch_of([1, 1, 0], [40, 65, 0], padding=2), MODES.DECODE),
    "verify": (batch_of([4, 4], [70, 4]), MODES.TARGET_VERIFY),
    "ragged verify": (batch_of([1, 4, 2], [70, 64, 3]), MODES.TARGET_VERIFY),
    "extend": (batch_of([9, 30], [90, 30]), MODES.EXTEND),
    "long context": (batch_of([5, 6], [500, 400]), MODES.EXTEND),
    "extend padding": (batch_of([9, 30], [90, 30], padding=3), MODES.EXTEND),
    "mixed": (batch_of([1, 4, 70, 9], [65, 200, 70, 100]), MODES.MIXED),
    "idle": (batch_of([0, 0], [0, 0]), MODES.IDLE),
}
PAIRS = [
    (BF16, K.TRITON_SPARSE, K.TRITON_SPARSE),
    (RAW, K.TRITON_SPARSE, K.TRITON_SPARSE),
    (BF16, K.FLASHMLA_SPARSE, K.FA3),
    (BF16, K.FLASHMLA_KV, K.FLASHMLA_KV),
    (RAW, K.FLASHMLA_SPARSE, K.FLASHINFER_MLA),
    (RAW, K.FLASHMLA_KV, K.FLASHMLA_KV),
    (SCALED, K.FLASHMLA_SPARSE, K.FLASHMLA_KV),
    (SCALED, K.FLASHMLA_AUTO, K.FLASHMLA_AUTO),
]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("layout", "prefill", "decode"), PAIRS)
def test_every_row_reads_what_its_list_says(
    layout: LatentFormat, prefill: SparseKernel, decode: SparseKernel, name: str
) -> None:
    batch, mode = STEPS[name]
    record = builder_of(layout, prefill, decode).build(0, batch)
    assert record.plan.mode is mode
    check_reads(record, batch)
    # All rows go to one method of the impl.
    assert (record.num_decodes, record.num_prefills) == (batch.num_reqs, 0)
    assert record.num_decode_tokens == record.num_actual_tokens == batch.num_actual_tokens
    assert record.num_prefill_tokens == 0
    for rows in (record.decode, record.prefill_rows):
        if rows is not None:
            lens = rows.lengths
            assert torch.equal(lens.topk_lens, lens.visible_lens.clamp(max=TOPK))


@pytest.mark.parametrize("name", ["extend", "mixed", "long context", "extend padding"])
@pytest.mark.parametrize("bounds", [True, False])
def test_converted_rows_are_held_a_few_at_a_time(name: str, bounds: bool) -> None:
    batch, _ = STEPS[name]
    if not bounds:
        batch = batch.replace(seq_lens_cpu_upper_bound=None)
    # The longest request needs 512 rows of 1152 bytes.
    builder = builder_of(RAW, K.FLASHMLA_SPARSE, mla_workspace_bytes=512 * 1152)
    record = builder.build(0, batch)
    check_reads(record, batch)
    assert record.prefill_rows is not None
    assert record.prefill_rows.converted is not None
    assert len(record.prefill_rows.converted) == 512
    with pytest.raises(ValueError, match=r"must be at least 589824 for .*got 589823"):
        builder_of(RAW, K.FLASHMLA_SPARSE, mla_workspace_bytes=512 * 1152 - 1)


def test_contexts_that_do_not_fit_together_are_converted_in_turn() -> None:
    builder = builder_of(RAW, K.FLASHMLA_SPARSE, mla_workspace_bytes=512 * 1152)
    batch = batch_of([60, 70, 30, 5], [400, 100, 300, 5])
    record = builder.build(0, batch)
    assert record.prefill_rows is not None
    assert record.prefill_rows.plan.index_kind is IndexKind.RAGGED
    assert [(one.first_row, one.num_rows) for one in record.prefill_rows.chunks] == [
        (0, 130),
        (130, 35),
    ]
    assert record.prefill_rows.offsets is not None
    assert record.prefill_rows.offsets.tolist() == [0, 400, 0, 300]
    check_reads(record, batch)


def test_optimistic_host_bounds_only_leave_rows_empty() -> None:
    builder = builder_of(RAW, K.FLASHMLA_SPARSE, exact_host_lengths=False)
    batch = batch_of([60, 70], [100, 110])
    loose = batch.replace(seq_lens_cpu_upper_bound=torch.tensor([130, 2000], dtype=torch.int32))
    loose = loose.replace(max_seq_len=2000)
    record = builder.build(0, loose)
    check_reads(record, batch)
    assert record.prefill_rows is not None
    (chunk,) = record.prefill_rows.chunks
    assert len(chunk.slots) == 130 + 512
    assert bool((chunk.slots[210:] == -1).all())


def test_few_tokens_of_long_contexts_convert_what_they_list() -> None:
    builder, batch = builder_of(RAW, K.FLASHMLA_SPARSE), STEPS["long context"][0]
    rows = builder.build(0, batch).prefill_rows
    assert rows is not None
    assert rows.plan.index_kind is IndexKind.GATHERED
    assert sum(len(chunk.slots) for chunk in rows.chunks) == 11 * 128
    assert rows.offsets is None


@pytest.mark.parametrize(("layout", "prefill", "decode"), PAIRS)
def test_a_build_reads_nothing_back(
    layout: LatentFormat, prefill: SparseKernel, decode: SparseKernel
) -> None:
    names = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
    steps = [STEPS[name][0] for name in ("decode", "ragged verify", "mixed", "long context")]
    given = [
        one.replace(**{name: on_device(getattr(one, name)) for name in names}) for one in steps
    ]
    with MadeOnDevice():
        builder = builder_of(layout, prefill, decode)
        for batch in given:
            record = builder.build(0, batch)
            builder.update_block_table(record, batch.block_table_tensor, batch.slot_mapping)
        builder.build_for_cudagraph_capture(given[0])
        builder.update_draft_decode_metadata(builder.build_for_drafting(given[0], 1))
    assert record.prefill_rows is not None
    assert isinstance(record.prefill_rows.lengths.reqs, OnDevice)


@pytest.mark.parametrize(
    ("layout", "decode"), [(BF16, K.TRITON_SPARSE), (RAW, K.FLASHMLA_KV), (BF16, K.FA3)]
)
def test_a_captured_step_is_rebuilt_in_place(layout: LatentFormat, decode: SparseKernel) -> None:
    builder = builder_of(layout, decode=decode)
    captured = builder.build_for_cudagraph_capture(batch_of([2, 2, 2], [5, 5, 5])).decode
    # A replay has other lengths, and padding.
    batch = batch_of([2, 1, 0], [70, 33, 0], padding=3)
    record = builder.build(0, batch)
    rows = record.decode
    assert captured is not None
    assert rows is not None
    assert captured.plan == rows.plan
    for one, other in (
        *zip(vars(captured.lengths).values(), vars(rows.lengths).values(), strict=True),
        (captured.indices, rows.indices),
        *((a.slots, b.slots) for a, b in zip(captured.chunks, rows.chunks, strict=True)),
    ):
        assert one.data_ptr() == other.data_ptr()
        assert one.shape == other.shape
    assert captured.lengths.visible_lens.tolist() == [69, 70, 33, 0, 0, 0]
    check_reads(record, batch)


def test_prompts_are_captured_where_their_rows_are_read_as_they_are() -> None:
    captured = builder_of(RAW).build_for_cudagraph_capture(batch_of([5, 5], [5, 5]))
    assert captured.decode is None
    assert captured.prefill_rows is not None
    assert captured.prefill_rows.num_rows == 10
    said = "at most 4 for SPARSE_MLA with flashmla_sparse over fp8_nope_fp8_rope rows, got 5"
    with pytest.raises(ValueError, match=said):
        builder_of(RAW, K.FLASHMLA_SPARSE).build_for_cudagraph_capture(batch_of([5], [5]))


def test_draft_steps_have_their_modes_and_are_written_anew() -> None:
    builder = builder_of()
    first = builder.build_for_drafting(batch_of([3, 1], [40, 33]), 0)
    assert first.plan.mode is MODES.DRAFT_EXTEND
    record = builder.build_for_drafting(batch_of([1, 1], [41, 34]), 1)
    assert record.plan.mode is MODES.DECODE
    assert record.decode is not None
    record.decode.seq_lens.add_(1)
    builder.update_draft_decode_metadata(record)
    assert record.decode.lengths.visible_lens.tolist() == [42, 35]
    prompts = builder.build_for_drafting(batch_of([30, 9], [40, 33]), 0)
    assert prompts.plan.mode is MODES.EXTEND
    idle = builder.build(0, batch_of([0], [0]))
    builder.update_draft_decode_metadata(idle)
    assert (idle.decode, idle.prefill_rows) == (None, None)


@pytest.mark.parametrize(("layout", "prefill", "decode"), PAIRS)
def test_another_group_s_table_changes_what_is_read_and_nothing_else(
    layout: LatentFormat, prefill: SparseKernel, decode: SparseKernel
) -> None:
    builder, batch = builder_of(layout, prefill, decode), STEPS["mixed"][0]
    record = builder.build(0, batch)
    moved = batch.replace(block_table_tensor=batch.block_table_tensor + 100)
    updated = builder.update_block_table(record, moved.block_table_tensor, moved.slot_mapping)
    check_reads(updated, moved)
    check_reads(record, batch)
    assert updated.plan is record.plan


def test_rooms_of_the_two_phases_do_not_overlap() -> None:
    builder = builder_of(RAW, K.FLASHMLA_SPARSE, K.FLASHMLA_KV)
    record = builder.build(0, STEPS["mixed"][0])
    places: list[int] = []
    for rows in (record.decode, record.prefill_rows):
        assert rows is not None
        first = rows.indices.data_ptr()
        places += [first, first + rows.indices.numel() * 4]
    assert places == sorted(places)


def test_the_sequence_that_failed_elsewhere() -> None:
    """Prefill by the bf16 kernel over quantised rows, a decode, another prefill, and a batch of
    both.

    Elsewhere this sequence failed: prefill rows were handed to the kernel unconverted.
    """
    for layout in (RAW, SCALED):
        builder = builder_of(layout, K.FLASHMLA_SPARSE, K.FLASHMLA_KV)
        for name in ("extend", "decode", "extend", "mixed", "verify", "extend"):
            batch, mode = STEPS[name]
            record = builder.build(0, batch)
            assert record.plan.mode is mode
            check_reads(record, batch)
            if record.prefill_rows is not None:
                assert record.prefill_rows.plan.kernel is K.FLASHMLA_SPARSE
                assert record.prefill_rows.plan.index_kind is IndexKind.RAGGED
                assert record.prefill_rows.offsets is not None
            if record.decode is not None:
                assert record.decode.plan.kernel is K.FLASHMLA_KV
                assert record.decode.offsets is None


def test_no_room_is_kept_for_what_is_read_as_it_is() -> None:
    builder = builder_of(SCALED)
    assert "converted" not in builder.buffers
    assert "counts" not in builder.buffers
    assert "counts" in builder_of(BF16, decode=K.FA3).buffers
    # Decodes convert at most what they can list: 6 requests of 4 tokens with 64 entries.
    small = builder_of(RAW, decode=K.FLASHMLA_KV).buffers["converted"]
    assert len(small) == 6 * 4 * 64 * 656


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        (spec_of(), {"num_heads": None}, "num_heads is needed by SPARSE_MLA"),
        (spec_of(), {"index_topk": None}, "index_topk, is needed by SPARSE_MLA"),
        (spec_of(topk=8), {}, r"index_topk must be the spec's topk \(8\), got 24"),
        (spec_of(), {"num_heads": 200}, "num_heads must be 1 to 128, got 200"),
        (
            spec_of(),
            {"parallel": ParallelConfig(decode_context_parallel_size=3)},
            r"num_heads \(\d+\) counts the heads of all ranks and must be a multiple of .* \(3\)",
        ),
        (
            spec_of(cache_dtype=CacheDType.FLOAT16),
            {},
            "kv_cache_dtype must be quantised or the model's bfloat16, got 'float16'",
        ),
        (
            spec_of(kv_lora_rank=256),
            {"kernels": sparse_kernels(decode=K.FA3)},
            r"rows must be 512 \+ 64 wide for fa3, got 256 \+ 64: use triton_sparse",
        ),
        (
            spec_of(),
            {"kernels": sparse_kernels(prefill=K.FLASHMLA_SPARSE), "batch_invariant": True},
            "batch_invariant must be False for flashmla_sparse, got True: use triton_sparse",
        ),
        (
            spec_of(SCALED),
            {"kernels": sparse_kernels(decode=K.TRTLLM)},
            "decode by trtllm reads bf16 and fp8_nope_fp8_rope rows alone.*: use flashmla_kv",
        ),
        (
            spec_of(page_size_padded=64 * 1152 + 64),
            {"kernels": sparse_kernels(prefill=K.FLASHMLA_SPARSE)},
            "flashmla_sparse reads a cache as one array of rows, got pages with padding",
        ),
        (
            FullAttentionSpec(block_size=P, dtype=DType.BFLOAT16, num_kv_heads=1, head_size=64),
            {},
            "must be MLAAttentionSpec for SPARSE_MLA, got FullAttentionSpec",
        ),
    ],
)
def test_what_is_not_served_is_refused_at_construction(
    spec: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SparseMLAMetadataBuilder(spec, ["layers.0"], CONFIG.replace(**settings), "cpu")


def test_batches_that_cannot_be_taken_are_refused() -> None:
    builder, batch = builder_of(), batch_of([1, 1], [40, 33])
    with pytest.raises(NotImplementedError, match="causal=False"):
        builder.build(0, batch.replace(causal=False))
    with pytest.raises(NotImplementedError, match="rswa_prefix_lens"):
        builder.build(0, batch.replace(rswa_prefix_lens=batch.seq_lens))
    with pytest.raises(ValueError, match=r"num_reqs \(7\) exceeds max_num_seqs \(6\)"):
        builder.build(0, batch_of([1] * 7, [5] * 7))
    with pytest.raises(ValueError, match=r"num_actual_tokens \(201\) exceeds .* \(200\)"):
        builder.build(0, batch_of([201], [201]))
