"""Prompts whose tokens attend together over joint lists: when, and with the oracle's values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn.impls.sparse import sparse_mla as impl
from attn.kernels.sparse import hopper_launch
from attn.kernels.sparse.hopper_narrow.kernel import hopper_narrow_sparse_kernel
from attn.kernels.sparse.hopper_wide.kernel import hopper_sparse_kernel
from builders.launch.call import KernelCall
from builders.sparse.joint import REACH
from specs.dtypes import DType
from specs.engine import DecodeKernel, Kernels, ParallelConfig, PrefillKernel, SparseKernels
from specs.rows import LatentFormat
from tests.sparse.sparse_layers import Sizes, SparseLayer
from tests.tools import gluon_in_numpy

TOPK = 24
HOPPER = Kernels(
    sparse=SparseKernels(own_prefill=PrefillKernel.HOPPER, own_decode=DecodeKernel.TRITON)
)
STEPS = (
    ([(0, 0, 40), (1, 0, 61)], 0),
    # Decodes beside prompts with context; the last group has tokens of no request.
    ([(2, 0, 1), (3, 0, 1), (0, 40, 19), (1, 61, 8)], 3),
)


def layer_of(
    layout: LatentFormat = LatentFormat.BF16, heads: int = 16, **other: Any
) -> SparseLayer:
    sizes = Sizes(num_heads=heads, topk=TOPK, longest=512, dtype=DType.FLOAT16)
    return SparseLayer(layout, sizes=sizes, **{"kernels": HOPPER} | other)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[KernelCall]:
    """Launches of the kernel for joint lists, which numpy runs."""
    translation = gluon_in_numpy.Translation()
    return gluon_in_numpy.take_over(monkeypatch, hopper_sparse_kernel, translation)


@pytest.mark.parametrize("heads", [6, 16, 17])
def test_prompts_have_the_oracles_values(heads: int, calls: list[KernelCall]) -> None:
    layer = layer_of(heads=heads)
    for turn, (parts, padding) in enumerate(STEPS):
        step = layer.step(parts, padding)
        layer.check(step, layer.run(step))
        assert len(calls) == turn + 1
    tokens = {6: 8, 16: 4, 17: 2}[heads]
    assert [call.arguments["TOKENS"] for call in calls] == [tokens] * 2


def test_lists_are_joined_where_they_have_most_keys_in_common_and_fill_the_device(
    calls: list[KernelCall],
) -> None:
    layer = layer_of()
    joint = layer.builder._joint
    # The CPU stands for a device of three multiprocessors.
    assert [joint.serves(count, [TOPK]) for count in (1, 8, 9, 100)] == [False, False, True, True]
    assert joint.serves(100, [5, REACH[LatentFormat.BF16] * TOPK])
    assert not joint.serves(100, [5, REACH[LatentFormat.BF16] * TOPK + 1])
    record = layer.builder.build(0, layer.step([(0, 0, 1), (1, 0, 60)]).batch)
    assert record.decode.joint is None
    assert record.prefill_rows.joint.lists.entries.shape == (15, 4 * TOPK)
    few = layer.builder.build(0, layer.step([(0, 0, 8)]).batch)
    assert few.prefill_rows.joint is None
    far = layer.builder.build(0, layer.step([(0, REACH[LatentFormat.BF16] * TOPK - 59, 60)]).batch)
    assert far.prefill_rows.joint is None


@pytest.mark.parametrize(
    "other",
    [
        {"layout": LatentFormat.FP8_NOPE_FP8_ROPE},
        {"heads": 33},
        {"kernels": Kernels()},
        {"batch_invariant": True, "kernels": Kernels()},
        {"parallel": ParallelConfig(decode_context_parallel_size=2)},
    ],
    ids=["e4m3", "many heads", "portable", "invariant", "ranks"],
)
def test_layers_whose_tokens_attend_alone(other: dict[str, Any]) -> None:
    assert layer_of(**other).builder._joint is None


def test_tokens_attend_alone_where_the_cache_has_too_many_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Entries of joint lists have fewer bits for the number of a row."""
    layer = layer_of()
    step = layer.step(*STEPS[0])
    # The portable kernel takes the rows, for the interpreter does not run the Hopper kernel.
    monkeypatch.setattr(hopper_launch, "is_aligned", lambda *tensors: False)
    layer.check(step, layer.run(step))
    monkeypatch.undo()
    lists = layer.builder.build(0, step.batch).prefill_rows.joint.lists
    query = torch.empty(1, 16, 576, dtype=torch.float16)
    for rows, joins in ((1 << 28) - 1, True), (1 << 28, False):
        cache = torch.empty(1, dtype=torch.float16).expand(rows, 1, 576)
        assert impl.can_join(lists, query[..., :512], query[..., 512:], cache) == joins


def test_warm_up_launches_joint_lists(calls: list[KernelCall], monkeypatch: Any) -> None:
    layer = layer_of()
    steps = [record for _, record in layer.builder.warm_up_steps()]
    joint = [record for record in steps if record.prefill_rows and record.prefill_rows.joint]
    assert len(joint) == 1
    launch = KernelCall.launch_through_triton

    def launched(call: KernelCall) -> None:
        if call.kernel is not hopper_narrow_sparse_kernel:
            launch(call)

    monkeypatch.setattr(KernelCall, "launch_through_triton", launched)
    layer.impl.warm_up(layer.scales, layer.cache, layer.builder, torch.float16)
    assert {call.arguments["TOKENS"] for call in calls} == {4}
