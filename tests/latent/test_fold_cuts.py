"""The kernel that folds the parts of cut work items, against float64; no other row is written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from attn.kernels.latent.hopper_wide.fold import ROWS_OF_TWO, fold_cuts_kernel
from attn.testing.batches import is_poison, poisoned
from builders.latent.choice import KV_TILE
from builders.splitkv.host_twin import HostPlan, SplitRules, plan_rows
from builders.splitkv.tiles import SplitTile
from specs.base import cdiv, power_of_two

WIDTH = 512
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Step:
    """A step whose work items are cut between any two tiles."""

    tiles: tuple[int, ...]
    """Tiles of keys of each request."""
    groups: int
    heads: int = 1
    """Head tiles, each with a program of every group."""
    tile_heads: int = 5
    tokens: int = 1
    """Query tokens of each request."""

    @property
    def used(self) -> int:
        """Query rows of a work item."""
        return self.tile_heads * self.tokens

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.heads * self.tile_heads

    def plan(self) -> HostPlan:
        """The plan of the step, whose shares have at least one tile."""
        tile = SplitTile(64, self.tile_heads, self.heads, self.tokens, KV_TILE, 1, 4, 2, 1, None)
        rules = SplitRules(tile, self.groups, 1, self.tokens, least_tiles=1)
        lens = [count * KV_TILE for count in self.tiles]
        return plan_rows([self.tokens] * len(lens), lens, rules, is_causal=True)

    def programs_of(self, plan: HostPlan, item: int) -> list[int]:
        """The shares that have a tile of a work item, in the order of tiles."""
        first, last = (item, 0), (item, self.tiles[item] - 1)
        shares = zip(range(self.groups), plan.starts, plan.starts[1:], strict=False)
        return [c for c, start, stop in shares if start < stop and start <= last and stop > first]


def filled(step: Step, plan: HostPlan, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Random outputs and LSE of parts where programs store some, poison elsewhere."""
    slots = 2 * step.groups * step.heads
    cpu = torch.device("cpu")
    states = poisoned(slots, step.used, WIDTH, dtype=dtype, device=cpu)
    sums = poisoned(slots, step.used, dtype=torch.float32, device=cpu)
    for item, lane in product(range(len(step.tiles)), range(step.heads)):
        programs = step.programs_of(plan, item)
        for place, c in enumerate(programs if len(programs) > 1 else []):
            slot = 2 * (c * step.heads + lane) + (place == 0)
            assert is_poison(states[slot])
            states[slot] = torch.randn(step.used, WIDTH).to(dtype)
            sums[slot] = 3 * torch.randn(step.used)
            # A part may have no key that a row sees, and some row of an item none at all.
            blind = torch.rand(step.used) < 0.2
            blind[0] |= item == 0
            states[slot, blind] = 0
            sums[slot, blind] = -math.inf
    return states, sums


def launch(step: Step, plan: HostPlan, states: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel's output ``[T, H, WIDTH]`` and LSE ``[T, H]``."""
    rows = (len(step.tiles) * step.tokens, step.num_heads)
    out = poisoned(*rows, WIDTH, dtype=states.dtype, device=DEVICE)
    lse = poisoned(*rows, dtype=torch.float32, device=DEVICE)

    def int32(numbers: Any) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)

    nothing = int32([0])
    fold_cuts_kernel[(step.groups * step.heads * cdiv(step.used, ROWS_OF_TWO),)](
        *(out, lse, int32(plan.rows), nothing, int32(plan.starts), nothing, nothing),
        *(states.to(DEVICE), sums.to(DEVICE), step.groups),
        HEADS=step.heads,
        HEAD_LOOPS=1,
        GROUP=step.num_heads,
        TILE_HEADS=step.tile_heads,
        QUERY_TOKENS=step.tokens,
        GROUPS=power_of_two(step.groups),
        OUT_TOKEN=step.num_heads * WIDTH,
        OUT_HEAD=WIDTH,
        LSE_TOKEN=step.num_heads,
        LSE=True,
        WAITS=False,
    )
    return out.cpu(), lse.cpu()


STEPS = {
    "two_parts": Step((20, 20), 4, heads=2, tile_heads=8),
    "two_and_three": Step((7, 20, 3), 6, tile_heads=17),
    "tokens": Step((13, 1, 1, 20), 20, tile_heads=6, tokens=2),
    "as_many_as_a_row_takes": Step((8, 9, 4), 21, tile_heads=9),
    "two_turns_of_16": Step((20,), 22, tile_heads=7),
    "the_most_by_16": Step((24,), 26, heads=2, tile_heads=3),
    "the_fewest_by_32": Step((25,), 27, tile_heads=3),
    "one_tile_each": Step((64,), 66, tile_heads=64),
    "more_than_are_loaded_at_once": Step((128,), 130, heads=1, tile_heads=2),
    "some_idle": Step((3,), 9, heads=2),
    "nothing_cut": Step((4, 4, 4), 3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", STEPS)
def test_parts_of_cut_items_are_folded_and_no_other_row_is_written(
    name: str, dtype: torch.dtype
) -> None:
    step = STEPS[name]
    plan = step.plan()
    states, sums = filled(step, plan, dtype)
    out, lse = launch(step, plan, states, sums)
    for item, lane in product(range(len(step.tiles)), range(step.heads)):
        programs = step.programs_of(plan, item)
        rows = slice(item * step.tokens, (item + 1) * step.tokens)
        heads = slice(lane * step.tile_heads, (lane + 1) * step.tile_heads)
        found, found_lse = out[rows, heads].reshape(step.used, WIDTH), lse[rows, heads].flatten()
        if len(programs) == 1:
            assert is_poison(found)
            assert is_poison(found_lse)
            continue
        slots = [2 * (c * step.heads + lane) + (place == 0) for place, c in enumerate(programs)]
        m, acc = sums[slots].double(), states[slots].double()
        top = m.max(0).values
        weights = torch.exp2(m - torch.where(top.isinf(), 0.0, top))
        total = weights.sum(0)
        wanted = (acc * weights[..., None]).sum(0) / torch.where(total > 0, total, 1.0)[:, None]
        # Triton's interpreter cuts bf16 off, where a GPU rounds.
        rounding = torch.finfo(dtype).eps
        torch.testing.assert_close(found.double(), wanted, rtol=max(1e-5, rounding), atol=1e-5)
        wanted_lse = (top + total.log2()) * math.log(2)
        torch.testing.assert_close(found_lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)
