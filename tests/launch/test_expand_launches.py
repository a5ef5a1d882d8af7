"""One layer's expansions of latent rows have the arguments of a layer that never expanded any."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from attn.kernels.latent.expand import ExpandLauncher, expand_call
from builders.latent.prefill import PagedRows
from builders.launch.call import KernelCall, collected_calls
from specs.layouts import KVViews
from tests.tools.gpus import hopper

RANK, ROPE, NOPE, SIZE_V, HEADS, PAGE = 64, 16, 32, 32, 4, 16
Case = tuple[Any, Any, KVViews, PagedRows | None, torch.Tensor | None]


def paged(table: torch.Tensor, packed: torch.Tensor | None) -> PagedRows:
    one = torch.zeros(len(table), dtype=torch.int32)
    return PagedRows(table, one, one.clone(), 2 * PAGE, packed)


def cases() -> list[Case]:
    """Expansions that differ in everything that a launch depends on."""
    found: list[Case] = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        blank = torch.zeros((), dtype=dtype).new_zeros
        keys = KVViews(blank(64, HEADS, NOPE + ROPE), blank(64, HEADS, SIZE_V))
        few = KVViews(keys.key[:32], keys.value[:32])
        weight = blank(HEADS, NOPE + SIZE_V, RANK).permute(2, 0, 1)
        weights = weight[..., :NOPE], weight[..., NOPE:]
        dense = blank(RANK, HEADS, NOPE), blank(RANK, HEADS, SIZE_V)
        rows = blank(64, RANK), blank(64, ROPE)
        whole = blank(64, RANK + ROPE)
        for given in (rows, (whole[:, :RANK], whole[:, RANK:])):
            found += [(given, each, keys, None, None) for each in (weights, dense)]
        found.append(((rows[0][:32], rows[1][:32]), weights, few, None, None))
        table = torch.zeros(2, 2, dtype=torch.int32)
        wide = torch.zeros(2, 8, dtype=torch.int32)[:, :2]
        packed = torch.zeros(3, dtype=torch.int32)
        scale = torch.ones(())
        for pages in (PAGE, 2 * PAGE):
            cache = blank(6, pages, RANK + ROPE)
            fields = cache[..., :RANK], cache[..., RANK:]
            stored = tuple(one.to(torch.float8_e4m3fn) for one in fields)
            for each in (table, wide, table.long()):
                found.append((fields, weights, keys, paged(each, None), None))
                found.append((fields, weights, keys, paged(each, packed), None))
                found.append((stored, weights, keys, paged(each, None), scale))
    return found


def same(call: KernelCall, other: KernelCall) -> bool:
    ours, theirs = call.arguments, other.arguments
    assert [*ours] == [*theirs]
    # Views are made anew in each launch.
    equal = all(
        (one.data_ptr(), one.dtype) == (theirs[name].data_ptr(), theirs[name].dtype)
        if isinstance(one, torch.Tensor)
        else one == theirs[name]
        for name, one in ours.items()
    )
    return equal and (call.grid, call.options) == (other.grid, other.options)


def test_launches_are_those_of_a_layer_that_never_ran() -> None:
    launcher, dice, given = ExpandLauncher(hopper(132)), random.Random(1), cases()
    for _ in range(300):
        rows, weights, into, pages, scale = dice.choice(given)
        with collected_calls() as calls:
            launcher.launch(rows, weights, into, pages, scale)
        wanted = expand_call(*rows, *weights, into, paged=pages, scale=scale, gpu=hopper(132))
        (call,) = calls
        assert same(call, wanted)
    # A launch of other types has a launcher of its own, since launchers do not check types.
    types = {(str(one[1][0].dtype), str(None if one[3] is None else one[3].types)) for one in given}
    assert len(launcher._variants) > len(types)


def test_rows_of_another_width_are_refused() -> None:
    rows, weights, into, _, _ = cases()[0]
    launcher = ExpandLauncher(hopper(132))
    for _ in range(2):
        with collected_calls():
            launcher.launch(rows, weights, into)
        with pytest.raises(ValueError, match="must have 64"):
            launcher.launch((rows[0][:, :32], rows[1]), weights, into)
