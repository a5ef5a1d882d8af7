"""Continuous batching, checked step by step against a model that only counts tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attn.cli.blocks import BlockAllocator, first_visible_token
from attn.cli.scheduler import KVBudgetError, ScheduledRow, Scheduler, StepPlan
from attn.cli.trace import TraceRequest, synthetic_trace
from builders.batch import decode_first_order
from specs.kv_cache import (
    AnyKVCacheSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from specs.sentinels import NULL_BLOCK_ID

HEADS = {"num_kv_heads": 1, "head_size": 8}


def full(block_size: int = 4) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, **HEADS)


def window(size: int, block_size: int = 4) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block_size, sliding_window=size, **HEADS)


def chunked(size: int, block_size: int = 4) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(block_size=block_size, attention_chunk_size=size, **HEADS)


def trace(*lengths: tuple[int, int]) -> list[TraceRequest]:
    return [TraceRequest(float(index), *pair) for index, pair in enumerate(lengths)]


def allocators(num_blocks: int, *specs: AnyKVCacheSpec) -> list[BlockAllocator]:
    return [
        BlockAllocator(num_blocks, spec.block_size, spec, seed=seed)
        for seed, spec in enumerate(specs or (full(),))
    ]


@dataclass
class Replay:
    """Runs a scheduler to its end and checks every plan on the way."""

    scheduler: Scheduler
    plans: list[StepPlan] = field(default_factory=list)
    cached: dict[int, int] = field(default_factory=dict)
    """Request -> tokens in the cache, as the plans say."""
    targets: dict[int, int] = field(default_factory=dict)
    """Request -> tokens that it computes as a prefill."""
    computed: dict[int, int] = field(default_factory=dict)
    """Request -> tokens computed, recomputed ones included."""
    discarded: int = 0
    num_preemptions: int = 0
    first_seen: list[int] = field(default_factory=list)

    def run(self) -> "Replay":
        total = sum(request.num_cached_tokens for request in self.scheduler.requests)
        while (plan := self.scheduler.schedule()) is not None:
            self.check(plan)
            self.plans.append(plan)
            self.scheduler.commit(plan)
            assert len(self.plans) <= total + self.discarded, "a step computed nothing"
        self.check_end()
        return self

    def check(self, plan: StepPlan) -> None:
        rows = plan.rows
        assert rows
        assert len({row.request_id for row in rows}) == len(rows) <= self.scheduler.max_num_seqs
        assert 0 < plan.num_tokens <= self.scheduler.max_num_batched_tokens
        assert plan.num_decodes + plan.num_prefills == len(rows)
        assert plan.num_decode_tokens + plan.num_prefill_tokens == plan.num_tokens
        assert all(not row.is_prefilling for row in rows[: plan.num_decodes])
        assert all(row.is_prefilling for row in rows[plan.num_decodes :])
        before = self.num_preemptions
        self.forget_preempted()
        self.num_preemptions += plan.num_preemptions
        assert self.num_preemptions == self.scheduler.num_preemptions
        assert self.scheduler.num_discarded_tokens == self.discarded
        for row in rows:
            self.check_row(row)
        self.check_blocks(rows)
        if self.num_preemptions > before:
            assert all(row.request_id in self.cached for row in rows), "admitted while preempting"
        for row in rows:
            self.cached[row.request_id] = row.seq_len
            if row.request_id not in self.first_seen:
                self.first_seen.append(row.request_id)

    def forget_preempted(self) -> None:
        """A request with cached tokens but without a table has been preempted."""
        tables = self.scheduler.allocators[0].tables
        for request_id in [r for r in self.cached if r not in tables]:
            length = self.cached.pop(request_id)
            if length < self.scheduler.requests[request_id].num_cached_tokens:
                self.discarded += length
                prompt = self.scheduler.requests[request_id].context_tokens
                # The token after the last one computed was generated already, if any was.
                done = length if length < prompt else length + 1
                self.targets[request_id] = max(prompt, done, self.targets.get(request_id, 0))

    def check_row(self, row: ScheduledRow) -> None:
        request = self.scheduler.requests[row.request_id]
        target = self.targets.get(row.request_id, request.context_tokens)
        assert row.context_len == self.cached.get(row.request_id, 0)
        assert row.is_prefilling == (row.context_len < target)
        assert row.num_new_tokens >= 1
        if row.is_prefilling:
            assert row.seq_len <= target
        else:
            assert row.num_new_tokens == 1
        assert row.seq_len <= request.num_cached_tokens
        computed = self.computed.get(row.request_id, 0)
        self.computed[row.request_id] = computed + row.num_new_tokens

    def check_blocks(self, rows: Sequence[ScheduledRow]) -> None:
        for allocator in self.scheduler.allocators:
            tables = allocator.tables
            owned = [b for table in tables.values() for b in table if b != NULL_BLOCK_ID]
            assert len(owned) == len(set(owned)) == allocator.used_blocks
            assert set(owned) <= set(range(1, allocator.num_blocks))
            for row in rows:
                table, size = tables[row.request_id], allocator.block_size
                assert len(table) == -(-row.seq_len // size)
                first = first_visible_token(allocator.spec, row.context_len)
                assert NULL_BLOCK_ID not in table[first // size :]

    def check_end(self) -> None:
        scheduler = self.scheduler
        assert (scheduler.running, scheduler.waiting) == (0, 0)
        assert scheduler.finished == len(scheduler.requests)
        assert all(a.free_blocks == a.capacity and not a.tables for a in scheduler.allocators)
        assert scheduler.blocks_in_use == (0,) * len(scheduler.allocators)
        assert self.first_seen == list(range(len(scheduler.requests)))
        needed = sum(request.num_cached_tokens for request in scheduler.requests)
        assert sum(self.computed.values()) == needed + self.discarded
        if not self.num_preemptions:
            for request_id, count in self.computed.items():
                assert count == scheduler.requests[request_id].num_cached_tokens


SPECS = st.lists(
    st.one_of(
        st.builds(full, st.integers(1, 5)),
        st.builds(window, st.integers(1, 12), st.integers(1, 5)),
        st.builds(chunked, st.integers(1, 12), st.integers(1, 5)),
    ),
    min_size=1,
    max_size=3,
)
LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 12)), max_size=12)


@given(
    lengths=LENGTHS,
    specs=SPECS,
    spare=st.integers(0, 8),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 24),
)
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
def test_any_trace_runs_to_its_end_within_every_budget(
    lengths: list[tuple[int, int]],
    specs: list[AnyKVCacheSpec],
    spare: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> None:
    requests = trace(*lengths)
    groups = []
    for spec in specs:
        probe = BlockAllocator(2, spec.block_size, spec)
        longest = max((request.num_cached_tokens for request in requests), default=1)
        # The smallest cache that is accepted, and a little more: preemption is then common.
        fewest = max(probe.min_blocks_for(longest, max_num_batched_tokens), 1)
        groups.append(BlockAllocator(fewest + spare + 1, spec.block_size, spec))
    Replay(Scheduler(requests, groups, max_num_seqs, max_num_batched_tokens)).run()


def test_a_full_cache_preempts_the_most_recently_admitted_and_still_finishes() -> None:
    # Both prompts fit into 6 blocks of 4; both generations do not.
    scheduler = Scheduler(trace((8, 9), (8, 9)), allocators(7), 4, 64)
    replay = Replay(scheduler).run()
    assert replay.num_preemptions == 1
    # Request 1 loses 12 tokens when request 0 needs its fourth block, and recomputes 13: the
    # 13th was generated already.
    assert replay.discarded == 12
    again = [row for plan in replay.plans for row in plan.rows if row.request_id == 1]
    restart = [row for row in again if row.context_len == 0]
    assert [row.num_new_tokens for row in restart] == [8, 13]
    assert all(row.is_prefilling for row in restart)


def test_a_preempted_request_comes_back_before_those_that_never_ran() -> None:
    scheduler = Scheduler(trace((8, 9), (8, 9), (1, 0)), allocators(7), 4, 16)
    replay = Replay(scheduler).run()
    preempted_at = next(i for i, plan in enumerate(replay.plans) if plan.num_preemptions)
    later = [row.request_id for plan in replay.plans[preempted_at:] for row in plan.rows]
    assert later.index(1) < later.index(2)


def test_a_running_request_that_is_last_preempts_itself() -> None:
    # In the second step both want a second block of three; the older one takes it.
    scheduler = Scheduler(trace((4, 5), (4, 5)), allocators(4), 4, 64)
    replay = Replay(scheduler).run()
    second = replay.plans[1]
    assert second.num_preemptions == 1
    assert [row.request_id for row in second.rows] == [0]


@pytest.mark.parametrize(
    ("generated", "steps"),
    [(0, [(5, True)]), (1, [(5, True)]), (2, [(5, True), (1, False)]), (3, None)],
)
def test_g_generated_tokens_take_one_prefill_and_g_minus_one_decodes(
    generated: int, steps: list[tuple[int, bool]] | None
) -> None:
    replay = Replay(Scheduler(trace((5, generated)), allocators(9), 1, 64)).run()
    seen = [(row.num_new_tokens, row.is_prefilling) for plan in replay.plans for row in plan.rows]
    assert seen == (steps or [(5, True), (1, False), (1, False)])


def test_a_prompt_of_one_token_is_a_prefill() -> None:
    replay = Replay(Scheduler(trace((1, 2)), allocators(9), 1, 64)).run()
    assert [plan.num_prefills for plan in replay.plans] == [1, 0]


def test_a_long_prompt_is_cut_into_chunks_of_the_token_budget() -> None:
    replay = Replay(Scheduler(trace((10, 1), (3, 1)), allocators(9), 4, 4)).run()
    rows = [[(r.request_id, r.context_len, r.num_new_tokens) for r in p.rows] for p in replay.plans]
    assert rows == [[(0, 0, 4)], [(0, 4, 4)], [(0, 8, 2), (1, 0, 2)], [(1, 2, 1)]]


def test_decodes_take_their_tokens_before_a_prompt_does() -> None:
    replay = Replay(Scheduler(trace((2, 5), (2, 5), (9, 1)), allocators(20), 4, 4)).run()
    counts = [(plan.num_decode_tokens, plan.num_prefill_tokens) for plan in replay.plans]
    assert counts == [(0, 4), (2, 2), (2, 2), (2, 2), (2, 2), (0, 1)]


def test_no_more_requests_run_than_allowed() -> None:
    replay = Replay(Scheduler(trace(*[(2, 3)] * 5), allocators(20), 2, 64)).run()
    assert [len(plan.rows) for plan in replay.plans] == [2, 2, 2, 2, 2, 2, 1, 1, 1]


def test_a_request_that_does_not_fit_holds_back_those_behind_it() -> None:
    # Request 1 needs 4 blocks, of which 3 are free; request 2 would fit.
    scheduler = Scheduler(trace((12, 3), (16, 0), (1, 0)), allocators(7), 4, 64)
    plan = scheduler.schedule()
    assert plan is not None
    assert [row.request_id for row in plan.rows] == [0]
    assert (scheduler.running, scheduler.waiting) == (1, 2)
    assert scheduler.blocks_in_use == (3,)


def test_a_prompt_is_admitted_only_when_the_whole_of_it_fits() -> None:
    # After request 0 has grown, 2 of 5 blocks are free: enough for a chunk, not for the prompt.
    scheduler = Scheduler(trace((8, 5), (12, 1)), allocators(6), 4, 8)
    replay = Replay(scheduler).run()
    assert replay.num_preemptions == 0
    assert [row.request_id for row in replay.plans[1].rows] == [0]


def test_one_full_group_is_enough_to_preempt_in_all_groups() -> None:
    groups = [*allocators(100, full()), *allocators(7, full())]
    replay = Replay(Scheduler(trace((8, 9), (8, 9)), groups, 4, 64)).run()
    assert replay.num_preemptions == 1


def test_a_sliding_window_lets_a_long_request_run_in_few_blocks() -> None:
    groups = allocators(8, window(8))
    replay = Replay(Scheduler(trace((100, 50)), groups, 1, 8)).run()
    assert replay.num_preemptions == 0
    with pytest.raises(KVBudgetError):
        Scheduler(trace((100, 50)), allocators(8, full()), 1, 8)


@pytest.mark.parametrize("threshold", [1, 3])
def test_rows_are_in_the_order_that_the_builders_expect(threshold: int) -> None:
    requests = [TraceRequest(0.0, 1 + 7 * index % 23, index % 12) for index in range(40)]
    scheduler = Scheduler(requests, allocators(13), 8, 12)
    replay = Replay(scheduler).run()
    assert replay.num_preemptions
    mixed = 0
    for plan in replay.plans:
        query_lens = torch.tensor([row.num_new_tokens for row in plan.rows])
        context_lens = torch.tensor([row.context_len for row in plan.rows])
        order = decode_first_order(query_lens, context_lens, threshold).tolist()
        # A last chunk of one token is a decode to the builders: it follows the real ones.
        assert order == list(range(len(plan.rows)))
        mixed += 0 < plan.num_decodes < len(plan.rows)
    assert mixed


def test_rows_of_one_kind_are_in_arrival_order() -> None:
    replay = Replay(Scheduler(synthetic_trace(30, 1, 64), allocators(90), 16, 48)).run()
    for plan in replay.plans:
        decodes = [row.request_id for row in plan.rows if not row.is_prefilling]
        fresh = [row.request_id for row in plan.rows if row.context_len == 0]
        assert decodes == sorted(decodes)
        assert fresh == sorted(fresh)


def test_the_same_trace_gives_the_same_plans() -> None:
    runs = [
        Replay(Scheduler(synthetic_trace(20, 2, 128), allocators(40), 8, 64)).run().plans
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_no_requests_are_no_steps() -> None:
    assert Scheduler([], allocators(4), 1, 1).schedule() is None


def test_a_cache_smaller_than_one_request_is_refused_at_once() -> None:
    message = (
        r"request 1 of 19 tokens needs 5 blocks of 4 in KV cache group 1 "
        r"\(max_num_batched_tokens 64\), got 4"
    )
    groups = [*allocators(6, full()), *allocators(5, full())]
    with pytest.raises(KVBudgetError, match=message):
        Scheduler(trace((1, 1), (18, 2)), groups, 4, 64)
    Scheduler(trace((1, 1), (16, 1)), groups, 4, 64)


def test_a_request_that_fits_exactly_runs() -> None:
    replay = Replay(Scheduler(trace((16, 5), (20, 0)), allocators(6), 4, 64))
    replay.run()
    assert replay.computed == {0: 20, 1: 20}
    assert replay.num_preemptions == 0


class _Promising(BlockAllocator):
    """Claims that any request fits."""

    def min_blocks_for(self, num_tokens: int, num_inflight: int) -> int:
        return 0


@pytest.mark.parametrize(("lengths", "steps"), [((9, 1), 0), ((8, 2), 1)])
def test_a_spec_that_counts_too_few_blocks_ends_in_an_error_not_in_a_loop(
    lengths: tuple[int, int], steps: int
) -> None:
    scheduler = Scheduler(trace(lengths), [_Promising(3, 4, full())], 4, 64)
    for _ in range(steps):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan)
    with pytest.raises(KVBudgetError, match=r"request 0 alone cannot grow to 9 tokens"):
        scheduler.schedule()


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens"])
def test_a_limit_below_one_is_refused(name: str) -> None:
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be positive, got 0"):
        Scheduler(trace((1, 1)), allocators(4), **limits)


def test_allocators_must_be_there_and_unused() -> None:
    with pytest.raises(ValueError, match="allocators must hold one allocator per KV cache group"):
        Scheduler(trace((1, 1)), [], 1, 1)
    groups = allocators(4, full(), full())
    groups[1].grow(0, 1)
    with pytest.raises(ValueError, match=r"allocators\[1\] must not be in use, got 1 tables"):
        Scheduler(trace((1, 1)), groups, 1, 1)


def test_plans_are_committed_once_and_in_turn() -> None:
    scheduler = Scheduler(trace((1, 3)), allocators(4), 1, 1)
    plan = scheduler.schedule()
    assert plan is not None
    with pytest.raises(RuntimeError, match=r"commit\(\) the last plan"):
        scheduler.schedule()
    with pytest.raises(ValueError, match="plan must be the last one"):
        scheduler.commit(StepPlan(plan.rows))
    scheduler.commit(plan)
    with pytest.raises(ValueError, match="plan must be the last one"):
        scheduler.commit(plan)
