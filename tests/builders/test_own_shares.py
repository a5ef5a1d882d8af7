"""Shares that programs plan for themselves: what they read is what the plan's launch writes."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st

from builders import kernels
from builders.segments import LIMIT
from builders.split_plan import SHARE_FIELDS
from tests.builders.test_split_kv import DEVICE, EXAMPLES, Step, planner_of, steps, tile_of


@triton.jit(do_not_specialize=["num_reqs", "max_kv_len", "decode_max", "window"])
def own_shares_kernel(
    seq_lens_ptr,
    query_start_ptr,
    rows_ptr,
    total_ptr,
    starts_ptr,
    shares_ptr,
    num_reqs,
    max_kv_len,
    decode_max,
    window,
    QUERY_TOKENS: tl.constexpr,
    KV_TILE: tl.constexpr,
    SEGMENT_UNIT: tl.constexpr,
    HEAD_LOOPS: tl.constexpr,
    WINDOW: tl.constexpr,
    TRIM: tl.constexpr,
    BUNDLED: tl.constexpr,
    GROUPS: tl.constexpr,
    REQS: tl.constexpr,
    FAR: tl.constexpr,
):
    """What the programs of every group do first; grid ``(GROUPS,)``."""
    kernels.plan_own_share(
        tl.program_id(0), tl.arange(0, REQS), seq_lens_ptr, query_start_ptr, rows_ptr, total_ptr,
        starts_ptr, shares_ptr, num_reqs, max_kv_len, decode_max, window, QUERY_TOKENS, KV_TILE,
        SEGMENT_UNIT, HEAD_LOOPS, WINDOW, TRIM, BUNDLED, GROUPS, REQS <= 32, FAR,
    )  # fmt: skip


def lengths(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """``query_start_loc`` and ``seq_lens``."""
    starts = torch.tensor([0, *(count for count, _ in step.lens)]).cumsum(0).int().to(DEVICE)
    lens = torch.tensor([kv_len for _, kv_len in step.lens], dtype=torch.int32, device=DEVICE)
    return starts, lens


def plan_own(step: Step, reqs: int, groups: range | None = None) -> dict[str, torch.Tensor]:
    """The buffers after every group, or some, has planned its own share."""
    planner = planner_of(step)
    starts, lens = lengths(step)
    b = planner.buffers
    arguments = (
        *(lens, starts, b["rows"], b["total"], b["starts"], b["shares"], len(step.lens)),
        *(planner.limits.max_kv_len, step.short_query, step.window or 0),
    )
    own_shares_kernel[(step.groups,)](
        *arguments,
        QUERY_TOKENS=step.tile.query_tokens,
        KV_TILE=step.tile.kv_tile,
        SEGMENT_UNIT=step.tile.segment_unit,
        HEAD_LOOPS=step.head_loops,
        WINDOW=step.window is not None,
        TRIM=step.is_causal,
        BUNDLED=step.is_bundled,
        GROUPS=step.groups,
        REQS=reqs,
        FAR=max(kv_len for _, kv_len in step.lens) > LIMIT,
    )
    return {name: b[name] for name in ("rows", "total", "starts", "shares")}


@st.composite
def own_steps(draw: st.DrawFn) -> Step:
    """Steps of which a program may plan its own share."""
    step = draw(steps().filter(lambda step: step.stripe is None and step.chunk is None))
    return replace(step, groups=draw(st.sampled_from([1, 2, 7, 33, 66])))


@settings(max_examples=EXAMPLES, deadline=None)
@given(step=own_steps(), reqs=st.sampled_from([32, 128]))
@example(step=Step(((0, 0),), tile_of()), reqs=32)
@example(step=Step(((1, 0), (0, 5), (1, 131_073)), tile_of(), groups=300, head_loops=3), reqs=32)
@example(step=Step(((1, 7), (1, 131_073), (1, 9), (1, 4000)) * 3, tile_of(), 66, 3), reqs=32)
@example(step=Step(((1, 8192),) * 32, tile_of(), groups=264), reqs=32)
@example(step=Step(((1, 1000),) * 64, tile_of(), groups=33), reqs=128)
@example(step=Step(((1, 4096), (0, 9)) * 64, tile_of(), groups=33), reqs=128)
@example(step=Step(((4, 8194), (3, 8193), (1, 8192)), tile_of(1), 33, is_bundled=True), reqs=32)
@example(
    step=Step(((9, 8195), (3, 16_385)), tile_of(2), 66, 2, is_causal=True, is_bundled=True),
    reqs=32,
)
@example(
    step=Step(((1, 131_073), (2, 199_000), (1, 7)), tile_of(), 66, 2, is_bundled=True), reqs=32
)
@example(step=Step(((1, 131_072),), tile_of(1, 64), 33, is_bundled=True), reqs=32)
def test_own_shares_are_those_of_the_plan(step: Step, reqs: int) -> None:
    planner = planner_of(step)
    planner.fill(*lengths(step), step.visible, step.is_causal)
    plan, own = planner.buffers, plan_own(step, reqs)
    for name in ("total", "starts"):
        assert own[name].tolist() == plan[name].tolist(), name
    num_rows = int(plan["total"][0])
    assert own["rows"][:num_rows].tolist() == plan["rows"][:num_rows].tolist()
    assert set(own["rows"][num_rows:].flatten().tolist()) <= {-5}
    for mine, share in zip(own["shares"].tolist(), plan["shares"].tolist(), strict=True):
        assert mine[:4] == share[:4]
        assert len(mine) == SHARE_FIELDS
        if mine[:2] != mine[2:4]:
            assert mine[4:] == share[4:]
