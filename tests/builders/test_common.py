"""The batch of a step has vLLM's fields, its copies lose none, and its checks name the argument."""

import dataclasses
from dataclasses import MISSING, make_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from builders.batch import LEADING_AXIS, CommonAttentionMetadata, replace_known
from builders.checks.debug import debug_batch, debug_enabled, debug_read
from builders.checks.invariants import check_invariants
from specs.attention import AttentionType
from specs.kv_cache import CrossAttentionSpec, EncoderOnlyAttentionSpec, FullAttentionSpec

REQUIRED = [
    "query_start_loc",
    "query_start_loc_cpu",
    "seq_lens",
    "num_reqs",
    "num_actual_tokens",
    "max_query_len",
    "max_seq_len",
    "block_table_tensor",
    "slot_mapping",
]

# Public fields of vLLM's class. Its private ones are caches that our class does not keep.
VLLM_026_FIELDS = [
    *REQUIRED,
    "causal",
    "logits_indices_padded",
    "num_logits_indices",
    "encoder_seq_lens",
    "encoder_seq_lens_cpu",
    "dcp_local_seq_lens",
    "dcp_local_seq_lens_cpu",
    "positions",
    "is_prefilling",
    "seq_lens_cpu_upper_bound",
    "mm_req_doc_ranges",
    "rswa_prefix_lens",
]

VLLM_033_FIELDS = [
    *REQUIRED,
    "causal",
    "logits_indices_padded",
    "num_logits_indices",
    "max_logits_per_req",
    "encoder_seq_lens",
    "encoder_seq_lens_cpu",
    "dcp_local_seq_lens",
    "dcp_local_seq_lens_cpu_upper_bound",
    "positions",
    "is_prefilling",
    "seq_lens_cpu_upper_bound",
    "req_idx",
    "mm_req_doc_ranges",
    "rswa_prefix_lens",
    "replayssm_decode_base_cpu",
]

# 0.33 replaced the exact host copy, which costs a sync, by a bound.
RENAMED_IN_033 = {"dcp_local_seq_lens_cpu": "dcp_local_seq_lens_cpu_upper_bound"}

IN_BOTH_VERSIONS = [name for name in VLLM_026_FIELDS if name in VLLM_033_FIELDS]

FIELDS = {field.name: field for field in dataclasses.fields(CommonAttentionMetadata)}

# Leading axis of each field, and how many entries it has beyond one per request or token. Fields
# that are not listed keep their value.
LEADING = {
    "query_start_loc": ("reqs", 1),
    "query_start_loc_cpu": ("reqs", 1),
    "seq_lens": ("reqs", 0),
    "block_table_tensor": ("reqs", 0),
    "slot_mapping": ("tokens", 0),
    "causal": ("reqs", 0),
    "encoder_seq_lens": ("reqs", 0),
    "encoder_seq_lens_cpu": ("reqs", 0),
    "dcp_local_seq_lens": ("reqs", 0),
    "dcp_local_seq_lens_cpu_upper_bound": ("reqs", 0),
    "positions": ("tokens", 0),
    "is_prefilling": ("reqs", 0),
    "seq_lens_cpu_upper_bound": ("reqs", 0),
    "req_idx": ("reqs", 0),
    "rswa_prefix_lens": ("reqs", 0),
    "replayssm_decode_base_cpu": ("reqs", 0),
}
# Its entries are neither rows nor tokens: it has a length of its own, padded by its maker.
WITHOUT_LEADING_AXIS = {"logits_indices_padded"}

BLOCK_SIZE = 4
QUERY_LENS = (1, 3, 6, 0)
SEQ_LENS = (5, 3, 14, 0)
NUM_BLOCKS = 32


def make_batch(
    query_lens: tuple[int, ...] = QUERY_LENS,
    seq_lens: tuple[int, ...] = SEQ_LENS,
    block_size: int = BLOCK_SIZE,
) -> CommonAttentionMetadata:
    """A decoder batch whose used blocks are 1, 2, ...; unused table entries are out of range."""
    blocks = [-(-seq_len // block_size) for seq_len in seq_lens]
    table = torch.full((len(seq_lens), max(blocks, default=0) + 1), 999_999, dtype=torch.int32)
    used = 1
    for row, count in enumerate(blocks):
        table[row, :count] = torch.arange(used, used + count, dtype=torch.int32)
        used += count
    return CommonAttentionMetadata.from_lengths(query_lens, seq_lens, table, block_size)


def filled_batch() -> CommonAttentionMetadata:
    """A batch of four requests with a value in every optional field."""
    rows = torch.arange(4, dtype=torch.int32)
    return make_batch().replace(
        causal=torch.tensor([True, False, True, True]),
        logits_indices_padded=torch.tensor([0, 3, 9, 9]),
        num_logits_indices=3,
        max_logits_per_req=1,
        encoder_seq_lens=rows + 1,
        encoder_seq_lens_cpu=np.arange(4) + 1,
        dcp_local_seq_lens=rows + 2,
        dcp_local_seq_lens_cpu_upper_bound=rows + 3,
        is_prefilling=torch.tensor([False, True, True, False]),
        req_idx=np.arange(4) + 7,
        mm_req_doc_ranges={1: [(0, 2)], 2: [(3, 5), (7, 9)]},
        rswa_prefix_lens=rows + 4,
        replayssm_decode_base_cpu=rows + 5,
    )


def stand_in_for_vllm(
    batch: CommonAttentionMetadata, names: list[str], **private: Any
) -> CommonAttentionMetadata:
    """An object of another class with only these fields, which a builder may be given."""
    cls = make_dataclass("VllmStandIn", [*names, *private])
    made: Any = cls(*(getattr(batch, name) for name in names), **private)
    return made


def same(ours: Any, theirs: Any) -> bool:
    """Whether two field values are equal; they may be tensors or arrays."""
    if isinstance(ours, torch.Tensor):
        return isinstance(theirs, torch.Tensor) and torch.equal(ours, theirs)
    if isinstance(ours, np.ndarray):
        return bool(np.array_equal(ours, theirs))
    return bool(ours == theirs)


# -- Fields.


@pytest.mark.parametrize("name", VLLM_026_FIELDS)
def test_every_public_field_of_vllm_026_is_here(name: str) -> None:
    assert RENAMED_IN_033.get(name, name) in FIELDS


@pytest.mark.parametrize("name", VLLM_033_FIELDS)
def test_every_public_field_of_vllm_033_is_here(name: str) -> None:
    assert name in FIELDS


def test_there_is_one_other_field_behind_vllms_in_their_order() -> None:
    assert list(FIELDS) == [*VLLM_033_FIELDS, "block_size"]
    assert FIELDS["block_size"].default is None


@pytest.mark.parametrize("name", VLLM_033_FIELDS)
def test_defaults_are_vllms(name: str) -> None:
    default = MISSING if name in REQUIRED else True if name == "causal" else None
    assert FIELDS[name].default is default


@pytest.mark.parametrize("name", FIELDS)
def test_every_tensor_field_has_a_leading_axis_or_a_documented_exemption(name: str) -> None:
    annotation = str(FIELDS[name].type)
    is_tensor = "Tensor" in annotation or "ndarray" in annotation
    assert is_tensor == (name in LEADING_AXIS or name in WITHOUT_LEADING_AXIS)
    assert LEADING_AXIS.get(name) == LEADING.get(name)


# -- Copies.


def test_the_filled_batch_leaves_no_field_at_its_default() -> None:
    batch = filled_batch()
    assert [name for name, field in FIELDS.items() if getattr(batch, name) is field.default] == []


@pytest.mark.parametrize("changed", FIELDS)
def test_replace_changes_one_field_and_keeps_every_other(changed: str) -> None:
    batch = filled_batch()
    before = {name: getattr(batch, name) for name in FIELDS}
    value = object()
    copied = batch.replace(**{changed: value})
    assert getattr(copied, changed) is value
    assert all(getattr(copied, name) is before[name] for name in FIELDS if name != changed)
    assert all(getattr(batch, name) is before[name] for name in FIELDS)


@pytest.mark.parametrize(("num_reqs", "num_tokens"), [(3, 10), (2, 4), (0, 0), (4, 10)])
@pytest.mark.parametrize("name", FIELDS)
def test_unpadded_cuts_each_field_along_its_own_axis_and_loses_none(
    name: str, num_reqs: int, num_tokens: int
) -> None:
    batch = filled_batch()
    before = getattr(batch, name)
    after = getattr(batch.unpadded(num_tokens, num_reqs), name)
    if name in LEADING:
        extent, extra = LEADING[name]
        stop = num_reqs + extra if extent == "reqs" else num_tokens
        assert same(after, before[:stop])
        assert len(after) == stop
    elif name == "num_reqs":
        assert after == num_reqs
    elif name == "num_actual_tokens":
        assert after == num_tokens
    elif name == "mm_req_doc_ranges":
        assert after == {req: spans for req, spans in before.items() if req < num_reqs}
    else:
        assert after is before
    assert getattr(batch, name) is before


def test_unpadded_keeps_fields_that_are_none_or_a_flag() -> None:
    cut = make_batch().unpadded(10, 3)
    assert cut.causal is True
    assert cut.encoder_seq_lens is None
    assert cut.mm_req_doc_ranges is None


@pytest.mark.parametrize(
    ("tokens", "reqs", "message"),
    [
        (10, 5, r"num_actual_reqs must be in \[0, 4\], got 5"),
        (10, -1, r"num_actual_reqs must be in \[0, 4\], got -1"),
        (11, 4, r"num_actual_tokens must be in \[0, 10\], got 11"),
        (-1, 4, r"num_actual_tokens must be in \[0, 10\], got -1"),
    ],
)
def test_unpadded_cannot_grow_a_batch(tokens: int, reqs: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_batch().unpadded(tokens, reqs)


def test_replace_known_leaves_out_what_the_other_class_lacks() -> None:
    other = stand_in_for_vllm(make_batch(), IN_BOTH_VERSIONS)
    copied = replace_known(other, num_reqs=7, req_idx=np.arange(4))
    assert type(copied) is type(other)
    assert copied.num_reqs == 7
    assert not hasattr(copied, "req_idx")
    ours = replace_known(make_batch(), num_reqs=7, req_idx=np.arange(4))
    assert same(ours.req_idx, np.arange(4))


# -- Derived values.

lengths = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 9)).map(lambda pair: (pair[0], sum(pair))),
    max_size=6,
)


@given(rows=lengths, block_size=st.integers(1, 5))
def test_a_batch_from_lengths_is_what_a_loop_over_requests_makes(
    rows: list[tuple[int, int]], block_size: int
) -> None:
    query_lens, seq_lens = tuple(row[0] for row in rows), tuple(row[1] for row in rows)
    batch = make_batch(query_lens, seq_lens, block_size)
    starts, slots, positions, owners = [0], [], [], []
    for row, (query_len, seq_len) in enumerate(rows):
        starts.append(starts[-1] + query_len)
        for position in range(seq_len - query_len, seq_len):
            block = int(batch.block_table_tensor[row, position // block_size])
            slots.append(block * block_size + position % block_size)
            positions.append(position)
            owners.append(row)
    assert batch.query_start_loc.tolist() == batch.query_start_loc_cpu.tolist() == starts
    assert batch.seq_lens.tolist() == list(seq_lens)
    assert same(batch.seq_lens_cpu_upper_bound, batch.seq_lens)
    assert batch.slot_mapping.tolist() == slots
    assert batch.positions is not None
    assert batch.positions.tolist() == positions
    assert (batch.num_reqs, batch.num_actual_tokens) == (len(rows), len(owners))
    assert batch.max_query_len == max(query_lens, default=0)
    assert batch.max_seq_len == max(seq_lens, default=0)
    assert batch.batch_size() == len(rows)
    assert batch.naive_query_lens().tolist() == list(query_lens)
    assert batch.compute_num_computed_tokens().tolist() == [kv - new for new, kv in rows]
    assert batch.token_to_req_indices().tolist() == owners
    assert batch.token_to_req_indices().dtype == torch.int32
    check_invariants(batch, block_size=block_size, num_blocks=NUM_BLOCKS * 3)


# -- Invariants.


def int32(*values: int) -> torch.Tensor:
    """A small int32 tensor."""
    return torch.tensor(values, dtype=torch.int32)


BROKEN: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query_start_loc": int32(0, 1, 4, 10, 10).long()}, TypeError, "query_start_loc must be"),
    (
        {"query_start_loc_cpu": int32(0, 1, 4, 10, 10).long()},
        TypeError,
        "query_start_loc_cpu must be torch.int32, got torch.int64",
    ),
    ({"seq_lens": int32(*SEQ_LENS).float()}, TypeError, "seq_lens must be torch.int32"),
    (
        {"block_table_tensor": torch.ones(4, 8, dtype=torch.int64)},
        TypeError,
        "block_table_tensor must be torch.int32",
    ),
    ({"slot_mapping": torch.ones(10, dtype=torch.int32)}, TypeError, "slot_mapping must be"),
    (
        {"query_start_loc": int32(0, 1, 4, 10)},
        ValueError,
        r"query_start_loc must have length 5, got \(4,\)",
    ),
    (
        {"query_start_loc_cpu": int32(0, 1, 4, 10, 10, 10)},
        ValueError,
        "query_start_loc_cpu must have length 5",
    ),
    ({"seq_lens": int32(5, 3, 14)}, ValueError, "seq_lens must have length 4"),
    (
        {"block_table_tensor": torch.ones(3, 8, dtype=torch.int32)},
        ValueError,
        "block_table_tensor must have length 4",
    ),
    (
        {"slot_mapping": torch.ones(9, dtype=torch.int64)},
        ValueError,
        "slot_mapping must have length 10",
    ),
    (
        {"block_table_tensor": torch.ones(4, dtype=torch.int32)},
        ValueError,
        r"block_table_tensor must be \[R, max_blocks\], got \(4,\)",
    ),
    (
        {"query_start_loc_cpu": torch.empty(5, dtype=torch.int32, device="meta")},
        ValueError,
        "query_start_loc_cpu must be on the host, got meta",
    ),
    (
        {"query_start_loc": int32(1, 1, 4, 10, 10)},
        ValueError,
        "query_start_loc must start at 0, got 1",
    ),
    (
        {"query_start_loc": int32(0, 4, 1, 10, 10)},
        ValueError,
        r"query_start_loc must not decrease, got \[4, 1\] at 1",
    ),
    (
        {"query_start_loc": int32(0, 1, 4, 10, 11)},
        ValueError,
        r"query_start_loc must end at or below num_actual_tokens \(10\), got 11",
    ),
    (
        {"query_start_loc_cpu": int32(0, 1, 4, 9, 9)},
        ValueError,
        r"query_start_loc_cpu must end where query_start_loc does \(10\), got 9",
    ),
    ({"max_query_len": 5}, ValueError, r"max_query_len must bound the query lengths \(6\), got 5"),
    ({"seq_lens": int32(5, 3, 14, -1)}, ValueError, "seq_lens must not be negative, got -1"),
    (
        {"seq_lens": int32(5, 2, 14, 0)},
        ValueError,
        r"seq_lens\[1\] must be at least the query length 3, got 2",
    ),
    ({"max_seq_len": 13}, ValueError, r"max_seq_len must bound seq_lens \(14\), got 13"),
    (
        {"block_table_tensor": torch.ones(4, 3, dtype=torch.int32)},
        ValueError,
        "block_table_tensor has 3 columns; request 2 of length 14 needs 4 blocks of 4",
    ),
    (
        {"block_table_tensor": torch.full((4, 4), NUM_BLOCKS, dtype=torch.int32)},
        ValueError,
        r"block_table_tensor\[0, 0\] must be in \[0, 32\), got 32",
    ),
    (
        {"slot_mapping": torch.full((10,), -2)},
        ValueError,
        "slot_mapping must hold -1 or a slot, got -2 at token 0",
    ),
    (
        {"slot_mapping": torch.full((10,), NUM_BLOCKS * BLOCK_SIZE)},
        ValueError,
        "slot_mapping must be below 128",
    ),
]


def test_a_batch_with_padding_rows_and_wild_unused_entries_is_valid() -> None:
    check_invariants(make_batch(), block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    check_invariants(filled_batch(), block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    check_invariants(make_batch((), ()), block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)


@pytest.mark.parametrize(
    ("changes", "error", "message"), BROKEN, ids=[message[:40] for _, _, message in BROKEN]
)
def test_a_broken_rule_is_reported_with_the_field(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_invariants(
            make_batch().replace(**changes), block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"slot_mapping": torch.full((16,), -1)},
        {"num_actual_tokens": 16, "slot_mapping": torch.full((16,), -1)},
        {"max_query_len": 99, "max_seq_len": 4096},
        # Graph padding: a row with tokens but no KV length computes nothing.
        {"seq_lens": int32(5, 0, 14, 0)},
        # Drafts trimmed on the device: the host disagrees per request, not in total.
        {"query_start_loc_cpu": int32(0, 2, 4, 10, 10)},
    ],
)
def test_padded_and_trimmed_batches_are_valid(changes: dict[str, Any]) -> None:
    check_invariants(make_batch().replace(**changes), block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)


def test_cross_attention_rows_may_have_fewer_keys_than_queries() -> None:
    table = torch.ones(4, 9, dtype=torch.int32)
    batch = make_batch().replace(seq_lens=int32(2, 9, 3, 0), block_table_tensor=table)
    with pytest.raises(ValueError, match=r"seq_lens\[2\]"):
        check_invariants(batch)
    check_invariants(
        batch, attn_type=AttentionType.ENCODER_DECODER, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS
    )


def test_cross_attention_is_checked_by_the_encoder_lengths() -> None:
    batch = make_batch().replace(
        seq_lens=int32(500, 600, 700, 0),
        max_seq_len=700,
        encoder_seq_lens=int32(2, 9, 3, 0),
        block_table_tensor=torch.ones(4, 9, dtype=torch.int32),
    )
    cross = AttentionType.ENCODER_DECODER
    check_invariants(batch, attn_type=cross, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "rows", "block_size", "message"),
    [
        ([1], [4, 4], 2, 16, "one entry per request, got 1, 2 and 2"),
        ([1, 1], [4, 4], 1, 16, "one entry per request, got 2, 2 and 1"),
        ([-1], [4], 1, 16, r"query_lens\[0\] must be in \[0, seq_lens\[0\]\] = \[0, 4\], got -1"),
        ([5], [4], 1, 16, r"query_lens\[0\] must be in .*, got 5"),
        ([1], [4], 1, 0, "block_size must be positive, got 0"),
        ([0], [-5], 1, 16, r"seq_lens\[0\] must not be negative, got -5"),
        ([1, 3], [4, 17], 2, 16, r"block_table must .* of 16 .*seq_lens\[1\] = 17, got 1 columns"),
    ],
)
def test_lengths_that_cannot_be_are_named(
    query_lens: list[int], seq_lens: list[int], rows: int, block_size: int, message: str
) -> None:
    table = torch.ones(rows, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        CommonAttentionMetadata.from_lengths(query_lens, seq_lens, table, block_size)


@pytest.mark.parametrize("columns", [0, 1])
def test_a_table_may_be_too_short_for_padding_and_missing_for_encoders(columns: int) -> None:
    table = torch.ones(2, columns, dtype=torch.int32)
    batch = CommonAttentionMetadata.from_lengths([3, 0], [16, 40], table, 16)
    assert batch.block_size == 16
    slots = [16 + 13, 16 + 14, 16 + 15] if columns else [-1, -1, -1]
    assert batch.slot_mapping.tolist() == slots


def test_copies_keep_the_block_size() -> None:
    batch = CommonAttentionMetadata.from_lengths([2, 1], [2, 1], torch.ones(2, 1).int(), 32)
    for copied in (batch.replace(causal=False), batch.unpadded(2, 1)):
        assert copied.block_size == 32


def test_padding_tokens_belong_to_the_last_request() -> None:
    batch = make_batch((1, 3), (4, 5)).replace(num_actual_tokens=6)
    buffer = torch.zeros(8, dtype=torch.int32)
    rows = batch.token_to_req_indices(buffer)
    assert rows.tolist() == [0, 1, 1, 1, 1, 1]
    assert rows.data_ptr() == buffer.data_ptr()


def test_cross_attention_still_checks_the_table() -> None:
    batch = make_batch().replace(block_table_tensor=torch.ones(4, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match="block_table_tensor has 1 columns"):
        check_invariants(batch, attn_type=AttentionType.ENCODER_DECODER, block_size=BLOCK_SIZE)


@pytest.mark.parametrize("attn_type", [AttentionType.ENCODER, AttentionType.ENCODER_ONLY])
def test_encoders_need_neither_table_nor_slots(attn_type: AttentionType) -> None:
    batch = make_batch().replace(
        block_table_tensor=torch.zeros(4, 0, dtype=torch.int32),
        slot_mapping=torch.full((10,), -7),
    )
    check_invariants(batch, attn_type=attn_type, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)


# -- The debug switch.


@pytest.mark.parametrize(
    ("value", "enabled"), [(None, False), ("", False), ("0", False), ("1", True), ("yes", True)]
)
def test_the_debug_switch_is_an_environment_variable(
    monkeypatch: pytest.MonkeyPatch, value: str | None, enabled: bool
) -> None:
    monkeypatch.delenv("ATTN_DEBUG", raising=False)
    if value is not None:
        monkeypatch.setenv("ATTN_DEBUG", value)
    assert debug_enabled() is enabled


DENSE = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 8}


@pytest.mark.parametrize("debugging", [False, True])
def test_debugging_checks_batches_and_reads_and_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch, debugging: bool
) -> None:
    monkeypatch.setenv("ATTN_DEBUG", str(int(debugging)))
    wild = int32(99).view(1, 1)
    calls = {
        "max_seq_len": lambda: debug_batch(
            make_batch().replace(max_seq_len=1), FullAttentionSpec(**DENSE)
        ),
        "block_table": lambda: debug_read(wild, int32(1), NUM_BLOCKS, BLOCK_SIZE),
    }
    for name, call in calls.items():
        if debugging:
            with pytest.raises(ValueError, match=name):
                call()
        else:
            call()


def test_debugging_knows_cross_attention_and_encoders_by_their_spec(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ATTN_DEBUG", "1")
    cross = make_batch().replace(seq_lens=int32(2, 9, 3, 0))
    debug_batch(cross, CrossAttentionSpec(**DENSE))
    with pytest.raises(ValueError, match=r"seq_lens\[2\]"):
        debug_batch(cross, FullAttentionSpec(**DENSE))
    encoder = cross.replace(slot_mapping=torch.full((10,), -7))
    debug_batch(encoder, EncoderOnlyAttentionSpec(**DENSE))
