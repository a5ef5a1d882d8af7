"""Continuous batching for the replay: the choice of requests and tokens for each step.

The oldest requests come first: running requests get their tokens before new requests are admitted,
and new requests are admitted in arrival order. Arrival times only give that order; the scheduler
never waits for one. When the KV cache is full, the most recently admitted request loses its blocks
and computes all its tokens again later. The oldest running request never loses its blocks, so every
step makes progress.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from attn.cli.blocks import BlockAllocator, first_visible_token
from attn.cli.trace import TraceRequest


class KVBudgetError(ValueError):
    """The KV cache cannot hold a request, even when no other request has blocks."""


@dataclass(frozen=True)
class ScheduledRow:
    """One request's share of a step."""

    request_id: int
    """Index of the request in the trace; also its key in the allocators' tables."""
    num_new_tokens: int
    """Query length, at least 1."""
    context_len: int
    """Tokens cached before this step."""
    is_prefilling: bool
    """True for a request that computes known tokens: its prompt, or tokens lost by a preemption."""

    @property
    def seq_len(self) -> int:
        """KV length after this step."""
        return self.context_len + self.num_new_tokens


@dataclass(frozen=True)
class StepPlan:
    """One step's batch: decode rows, then at most one extend, then prefills without context."""

    rows: tuple[ScheduledRow, ...]
    """The batch's rows, in arrival order within each kind; never empty."""
    num_preemptions: int = 0
    """Requests that lost their blocks to make room for this step."""

    @cached_property
    def num_decodes(self) -> int:
        """Rows that feed back one generated token; they come first."""
        return sum(not row.is_prefilling for row in self.rows)

    @property
    def num_prefills(self) -> int:
        """Rows that compute a prompt or recompute a preempted request."""
        return len(self.rows) - self.num_decodes

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of the decode rows, drafts included."""
        return sum(row.num_new_tokens for row in self.rows if not row.is_prefilling)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of the rows of :attr:`num_prefills`."""
        return self.num_tokens - self.num_decode_tokens

    @cached_property
    def num_tokens(self) -> int:
        """All tokens of the step."""
        return sum(row.num_new_tokens for row in self.rows)


@dataclass
class _Request:
    """Progress of one request."""

    request_id: int
    total_tokens: int
    """Tokens whose KV is written by the time the request is done."""
    known_tokens: int
    """Prompt and generated tokens so far; the last one generated is not in the cache yet."""
    prefill_tokens: int
    """``known_tokens`` at admission; with fewer computed tokens the request is prefilling."""
    num_computed: int = 0

    def row(self, budget: int, num_drafts: int = 0) -> ScheduledRow:
        """The request's next tokens, at most ``budget``; drafts follow a generated token."""
        is_prefilling = self.num_computed < self.prefill_tokens
        wanted = self.known_tokens - self.num_computed
        if not is_prefilling:
            wanted = min(wanted + num_drafts, self.total_tokens - self.num_computed)
        return ScheduledRow(
            request_id=self.request_id,
            num_new_tokens=min(wanted, budget),
            context_len=self.num_computed,
            is_prefilling=is_prefilling,
        )

    def accept(self, num_new_tokens: int) -> int:
        """Number of tokens of a verify that stay: the first one and some of its drafts.

        The number depends only on the request and its progress, so that runs can be repeated.
        """
        mixed = zlib.crc32(f"{self.request_id} {self.num_computed}".encode())
        return 1 + mixed % num_new_tokens


class Scheduler:
    """Scheduler that turns requests into steps.

    Call :meth:`schedule` and :meth:`commit` in turn until :meth:`schedule` returns None.
    """

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        allocators: Sequence[BlockAllocator],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_speculative_tokens: int = 0,
    ) -> None:
        """
        Args:
            requests: requests in arrival order; a request's id is its index.
            allocators: an unused allocator for each KV cache group; a request owns blocks in each.
            max_num_seqs: most requests in a step.
            max_num_batched_tokens: most tokens in a step.
            num_speculative_tokens: drafts that a decode verifies; some are refused and computed
                again.

        Raises:
            KVBudgetError: a request does not fit into the cache, even alone.
            ValueError: a limit is below 1, or there is no allocator, or one in use.
        """
        for name, limit in (
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
        ):
            if limit < 1:
                raise ValueError(f"{name} must be positive, got {limit}")
        if not allocators:
            raise ValueError("allocators must hold one allocator per KV cache group, got none")
        for group, allocator in enumerate(allocators):
            if allocator.tables:
                raise ValueError(
                    f"allocators[{group}] must not be in use, got {len(allocator.tables)} tables"
                )
        self.requests = tuple(requests)
        self.allocators = tuple(allocators)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_speculative_tokens = num_speculative_tokens
        self.finished = 0
        """Requests that are done."""
        self.num_preemptions = 0
        """Preemptions so far."""
        self.num_discarded_tokens = 0
        """Tokens computed and then thrown away: by preemptions, or drafts that were refused."""
        self._waiting = deque(
            _Request(index, request.num_cached_tokens, request.context_tokens, 0)
            for index, request in enumerate(self.requests)
        )
        self._running: list[_Request] = []
        self._pending: StepPlan | None = None
        for waiting in self._waiting:
            self._check_fits_alone(waiting)

    @property
    def running(self) -> int:
        """Number of requests that hold blocks."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of requests that are not admitted yet, or were preempted."""
        return len(self._waiting)

    @property
    def blocks_in_use(self) -> tuple[int, ...]:
        """Blocks owned by requests in each KV cache group."""
        return tuple(allocator.used_blocks for allocator in self.allocators)

    def schedule(self) -> StepPlan | None:
        """Plan the next step and allocate its blocks; None when every request is done.

        Raises:
            KVBudgetError: the only running request cannot grow. The constructor checks for this, so
                the error means that the KV cache spec counted too few blocks.
            RuntimeError: the previous step was not committed.
        """
        if self._pending is not None:
            raise RuntimeError("commit() the last plan before the next schedule()")
        if not self._running and not self._waiting:
            return None
        before = self.num_preemptions
        rows = self._schedule_running()
        rows += self._admit(self.max_num_batched_tokens - sum(r.num_new_tokens for r in rows))
        if not rows:
            raise self._cannot_fit(self._waiting[0].row(self.max_num_batched_tokens))
        # The rows are decode-first without sorting: only the last running request can be inside
        # its prompt, since a prompt that is cut takes the rest of the token budget.
        self._pending = StepPlan(tuple(rows), self.num_preemptions - before)
        return self._pending

    def commit(self, plan: StepPlan) -> None:
        """Record the planned tokens as computed: finish requests, free blocks out of sight.

        Args:
            plan: the plan that :meth:`schedule` returned last. This frees blocks that the step saw
                and no later step can see, so check the step's results before.

        Raises:
            ValueError: ``plan`` is another plan.
        """
        if self._pending is None or plan is not self._pending:
            raise ValueError(
                f"plan must be the last one that schedule() returned, and uncommitted, got a plan "
                f"of {len(plan.rows)} rows"
            )
        self._pending = None
        rows = {row.request_id: row for row in plan.rows}
        for request in self._running:
            request.num_computed += self._kept_tokens(request, rows.get(request.request_id))
            request.known_tokens = max(request.known_tokens, request.num_computed)
            if request.num_computed == request.total_tokens:
                self._release(request)
                self.finished += 1
                continue
            if request.num_computed == request.known_tokens:
                request.known_tokens += 1
            for allocator in self.allocators:
                visible = first_visible_token(allocator.spec, request.num_computed)
                allocator.trim(request.request_id, visible)
        self._running = [r for r in self._running if r.num_computed < r.total_tokens]

    def _kept_tokens(self, request: _Request, row: ScheduledRow | None) -> int:
        """Number of a row's tokens that need not be computed again."""
        if row is None:
            return 0
        if row.is_prefilling or row.num_new_tokens == 1:
            return row.num_new_tokens
        kept = request.accept(row.num_new_tokens)
        self.num_discarded_tokens += row.num_new_tokens - kept
        return kept

    def _schedule_running(self) -> list[ScheduledRow]:
        """Rows of the running requests; where blocks run out, the latest ones are preempted."""
        rows: list[ScheduledRow] = []
        budget = self.max_num_batched_tokens
        # Preemption shortens the list from its end, never below the requests that have a row.
        while budget and len(rows) < len(self._running):
            request = self._running[len(rows)]
            row = request.row(budget, self.num_speculative_tokens)
            while not self._grow(row):
                if len(self._running) == 1:
                    raise self._cannot_fit(row)
                if self._preempt_last() is request:
                    return rows
            rows.append(row)
            budget -= row.num_new_tokens
        return rows

    def _admit(self, budget: int) -> list[ScheduledRow]:
        """Rows of waiting requests, in order, until one of them does not fit."""
        rows: list[ScheduledRow] = []
        while budget and self._waiting and len(self._running) < self.max_num_seqs:
            request = self._waiting[0]
            if not self._has_room_for(request):
                break
            request.prefill_tokens = request.known_tokens
            row = request.row(budget)
            if not self._grow(row):
                break
            self._running.append(self._waiting.popleft())
            rows.append(row)
            budget -= row.num_new_tokens
        return rows

    def _has_room_for(self, request: _Request) -> bool:
        """True when all known tokens of a request fit into free blocks.

        A prompt that fits only in part would be preempted later. For the same reason a preempted
        request does not come back in the step that took its blocks.
        """
        return all(
            allocator.min_blocks_for(request.known_tokens, self.max_num_batched_tokens)
            <= allocator.free_blocks
            for allocator in self.allocators
        )

    def _grow(self, row: ScheduledRow) -> bool:
        """Allocate a row's blocks in all groups, or in none if one lacks blocks."""
        if not all(a.can_grow(row.request_id, row.seq_len) for a in self.allocators):
            return False
        for allocator in self.allocators:
            allocator.grow(row.request_id, row.seq_len)
        return True

    def _preempt_last(self) -> _Request:
        """Send the most recently admitted request back to the front of the queue."""
        victim = self._running.pop()
        self._release(victim)
        self.num_preemptions += 1
        self.num_discarded_tokens += victim.num_computed
        victim.num_computed = 0
        self._waiting.appendleft(victim)
        return victim

    def _release(self, request: _Request) -> None:
        for allocator in self.allocators:
            allocator.release(request.request_id)

    def _check_fits_alone(self, request: _Request) -> None:
        for group, allocator in enumerate(self.allocators):
            total, step = request.total_tokens, self.max_num_batched_tokens
            needed = allocator.min_blocks_for(total, step)
            if needed > allocator.capacity:
                raise KVBudgetError(
                    f"a KV budget smaller than one request: request {request.request_id} of "
                    f"{total} tokens needs {needed} blocks of {allocator.block_size} in KV cache "
                    f"group {group} (max_num_batched_tokens {step}), got {allocator.capacity}"
                )

    def _cannot_fit(self, row: ScheduledRow) -> KVBudgetError:
        """The error for a request that does not fit although it passed the constructor's check."""
        held = [len(allocator.tables.get(row.request_id, ())) for allocator in self.allocators]
        free = [allocator.free_blocks for allocator in self.allocators]
        return KVBudgetError(
            f"a KV budget smaller than one request: request {row.request_id} alone cannot grow to "
            f"{row.seq_len} tokens: it holds {held} blocks per KV cache group, got {free} free"
        )
