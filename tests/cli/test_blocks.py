"""The block allocator: ownership is exclusive, nothing is lost, windows give their past back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from attn.cli.blocks import BlockAllocator, OutOfBlocksError, first_visible_token
from specs.kv_cache import (
    AnyKVCacheSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    IndexerSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from specs.sentinels import NULL_BLOCK_ID

HEADS = {"num_kv_heads": 1, "head_size": 8}


def full(block_size: int = 4) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, **HEADS)


def window(size: int, block_size: int = 4) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block_size, sliding_window=size, **HEADS)


def chunked(size: int, lookback: int = 0, block_size: int = 4) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=block_size, attention_chunk_size=size, chunk_lookback=lookback, **HEADS
    )


ANY_SPEC = st.one_of(
    st.builds(full, st.integers(1, 6)),
    st.builds(window, st.integers(1, 20), st.integers(1, 6)),
    st.builds(chunked, st.integers(1, 20), st.integers(0, 2), st.integers(1, 6)),
)


def test_a_table_covers_exactly_the_tokens_it_was_grown_to() -> None:
    allocator = BlockAllocator(8, 4, full())
    for num_tokens, num_blocks in ((0, 0), (1, 1), (4, 1), (5, 2), (3, 2), (12, 3)):
        allocator.grow(7, num_tokens)
        assert len(allocator.tables[7]) == num_blocks
        assert (allocator.used_blocks, allocator.free_blocks) == (num_blocks, 7 - num_blocks)


def test_growing_keeps_the_blocks_that_a_request_has() -> None:
    allocator = BlockAllocator(8, 4, full())
    allocator.grow(0, 8)
    before = list(allocator.tables[0])
    allocator.grow(0, 20)
    assert allocator.tables[0][:2] == before


def test_the_null_block_is_never_handed_out() -> None:
    allocator = BlockAllocator(8, 4, full())
    allocator.grow(0, 28)
    assert sorted(allocator.tables[0]) == [1, 2, 3, 4, 5, 6, 7]
    assert allocator.capacity == 7


def test_blocks_of_static_sinks_are_never_handed_out() -> None:
    spec = SinkFullAttentionSpec(block_size=4, sink_len=8, **HEADS)
    allocator = BlockAllocator(8, 4, spec)
    allocator.grow(0, 20)
    assert sorted(allocator.tables[0]) == [3, 4, 5, 6, 7]


def test_tables_are_scattered_and_depend_on_the_seed_alone() -> None:
    def table(seed: int) -> list[int]:
        allocator = BlockAllocator(200, 4, full(), seed=seed)
        allocator.grow(0, 400)
        allocator.release(0)
        allocator.grow(1, 400)
        return allocator.tables[1]

    assert table(0) == table(0)
    assert table(0) != table(1)
    neighbours = sum(b - a == 1 for a, b in zip(table(0), table(0)[1:], strict=False))
    assert neighbours < 10


def test_too_few_free_blocks_is_an_error_that_changes_nothing() -> None:
    allocator = BlockAllocator(4, 4, full())
    allocator.grow(0, 5)
    assert allocator.can_grow(0, 12)
    assert not allocator.can_grow(0, 13)
    assert not allocator.can_grow(1, 5)
    message = "request 1 needs 2 more blocks of 4 to hold 5 tokens, got 1 free of 3"
    with pytest.raises(OutOfBlocksError, match=message):
        allocator.grow(1, 5)
    assert 1 not in allocator.tables
    assert allocator.free_blocks == 1


def test_trimming_frees_whole_blocks_once_and_nulls_their_entries() -> None:
    allocator = BlockAllocator(8, 4, window(4))
    allocator.grow(0, 16)
    last = allocator.tables[0][2:]
    for first_visible, num_null in ((3, 0), (4, 1), (9, 2), (4, 2), (11, 2)):
        allocator.trim(0, first_visible)
        assert allocator.tables[0][:num_null] == [NULL_BLOCK_ID] * num_null
        assert allocator.free_blocks == 3 + num_null
    assert allocator.tables[0][2:] == last


def test_trimmed_blocks_can_be_owned_by_another_request() -> None:
    allocator = BlockAllocator(3, 4, window(4))
    allocator.grow(0, 8)
    allocator.trim(0, 4)
    allocator.grow(1, 4)
    assert sorted(allocator.tables[0] + allocator.tables[1]) == [NULL_BLOCK_ID, 1, 2]
    allocator.release(0)
    assert allocator.free_blocks == 1


def test_a_request_that_comes_back_after_release_starts_with_an_empty_table() -> None:
    allocator = BlockAllocator(5, 4, window(4))
    allocator.grow(0, 16)
    allocator.trim(0, 12)
    allocator.release(0)
    allocator.grow(0, 8)
    assert len(allocator.tables[0]) == 2
    assert NULL_BLOCK_ID not in allocator.tables[0]


@pytest.mark.parametrize(
    ("spec", "position", "expected"),
    [
        (full(), 100, 0),
        (MLAAttentionSpec(block_size=64), 100, 0),
        (IndexerSpec(), 100, 0),
        (window(1), 100, 100),
        (window(10), 9, 0),
        (window(10), 10, 1),
        (SlidingWindowMLASpec(block_size=64, sliding_window=10), 10, 1),
        (chunked(8), 7, 0),
        (chunked(8), 8, 8),
        (chunked(8), 15, 8),
        (chunked(8, lookback=1), 15, 0),
        (chunked(8, lookback=1), 16, 8),
    ],
)
def test_the_first_visible_token_follows_the_mask(
    spec: AnyKVCacheSpec, position: int, expected: int
) -> None:
    assert first_visible_token(spec, position) == expected


@pytest.mark.parametrize("operation", ["trim", "release"])
def test_a_request_without_a_table_is_refused(operation: str) -> None:
    allocator = BlockAllocator(4, 4, full())
    with pytest.raises(ValueError, match="request_id must name a request with a table, got 5"):
        getattr(allocator, operation)(*((5, 0) if operation == "trim" else (5,)))


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match="num_tokens must not be negative, got -1"):
        BlockAllocator(4, 4, full()).grow(0, -1)


def test_a_cache_without_a_block_to_hand_out_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_blocks must exceed .* reserved blocks \(1\), got 1"):
        BlockAllocator(1, 4, full())
    spec = SinkFullAttentionSpec(block_size=4, sink_len=8, **HEADS)
    with pytest.raises(ValueError, match=r"reserved blocks \(3\), got 3"):
        BlockAllocator(3, 4, spec)


def test_a_block_size_other_than_the_specs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"block_size must be the spec's block_size \(4\), got 8"):
        BlockAllocator(4, 8, full())


@pytest.mark.parametrize("cls", [CrossAttentionSpec, EncoderOnlyAttentionSpec])
def test_specs_that_do_not_follow_decoder_tokens_are_refused(
    cls: type[CrossAttentionSpec] | type[EncoderOnlyAttentionSpec],
) -> None:
    with pytest.raises(TypeError, match="spec must describe decoder self-attention"):
        BlockAllocator(4, 4, cls(block_size=4, **HEADS))


@given(ANY_SPEC, st.integers(1, 30), st.lists(st.integers(1, 30), min_size=1, max_size=30))
@settings(deadline=None)
def test_the_minimum_is_enough_for_one_request_in_any_chunks(
    spec: AnyKVCacheSpec, max_chunk: int, chunks: list[int]
) -> None:
    chunks = [min(chunk, max_chunk) for chunk in chunks]
    probe = BlockAllocator(2, spec.block_size, spec)
    num_blocks = probe.min_blocks_for(sum(chunks), max_chunk) + NULL_BLOCK_ID + 1
    allocator = BlockAllocator(num_blocks, spec.block_size, spec)
    computed = 0
    for chunk in chunks:
        allocator.grow(0, computed + chunk)
        computed += chunk
        allocator.trim(0, first_visible_token(spec, computed))
        visible = range(first_visible_token(spec, computed), computed)
        for token in visible:
            assert allocator.tables[0][token // spec.block_size] != NULL_BLOCK_ID


class AllocatorMachine(RuleBasedStateMachine):
    """Random operations, compared with a model that counts tokens only."""

    num_blocks, block_size = 20, 3

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(self.num_blocks, self.block_size, full(self.block_size))
        self.lengths: dict[int, int] = {}
        self.trimmed: dict[int, int] = {}

    @rule(request_id=st.integers(0, 4), num_tokens=st.integers(0, 40))
    def grow(self, request_id: int, num_tokens: int) -> None:
        possible = self.allocator.can_grow(request_id, num_tokens)
        before = {key: list(table) for key, table in self.allocator.tables.items()}
        try:
            self.allocator.grow(request_id, num_tokens)
        except OutOfBlocksError:
            assert not possible
            assert self.allocator.tables == before
            return
        assert possible
        self.lengths[request_id] = max(num_tokens, self.lengths.get(request_id, 0))

    @precondition(lambda self: self.lengths)
    @rule(data=st.data(), token=st.integers(0, 60))
    def trim(self, data: st.DataObject, token: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.lengths)))
        self.allocator.trim(request_id, token)
        stop = min(token // self.block_size, -(-self.lengths[request_id] // self.block_size))
        self.trimmed[request_id] = max(stop, self.trimmed.get(request_id, 0))

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.lengths)))
        self.allocator.release(request_id)
        del self.lengths[request_id]
        self.trimmed.pop(request_id, None)

    @invariant()
    def tables_are_what_the_model_says(self) -> None:
        assert set(self.allocator.tables) == set(self.lengths)
        for request_id, table in self.allocator.tables.items():
            num_null = self.trimmed.get(request_id, 0)
            assert len(table) == -(-self.lengths[request_id] // self.block_size)
            assert [block == NULL_BLOCK_ID for block in table] == [
                index < num_null for index in range(len(table))
            ]

    @invariant()
    def every_block_has_one_owner_or_none(self) -> None:
        tables = self.allocator.tables.values()
        owned = [block for table in tables for block in table if block != NULL_BLOCK_ID]
        assert len(owned) == len(set(owned)) == self.allocator.used_blocks
        assert all(0 < block < self.num_blocks for block in owned)
        free = self.allocator.free_blocks
        assert free + len(owned) == self.allocator.capacity == self.num_blocks - 1
        # Whatever is counted as free can really be handed out.
        assert self.allocator.can_grow(99, free * self.block_size)
        assert not self.allocator.can_grow(99, free * self.block_size + 1)

    def teardown(self) -> None:
        for request_id in list(self.lengths):
            self.allocator.release(request_id)
        self.allocator.grow(99, (self.num_blocks - 1) * self.block_size)
        assert sorted(self.allocator.tables[99]) == list(range(1, self.num_blocks))


AllocatorMachine.TestCase.settings = settings(deadline=None, max_examples=60)
TestAllocatorMachine = AllocatorMachine.TestCase
