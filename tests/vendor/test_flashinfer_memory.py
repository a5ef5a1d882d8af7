"""Pinned memory of plans: memory that a queued copy still reads is not given to the next plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from builders.vendor.flashinfer_parts import pinned as flashinfer_memory
from builders.vendor.flashinfer_parts.pinned import MEMORY, PlanMemory


class Event:
    """A CUDA event of a GPU that has come as far as ``done`` says."""

    made: list[Event]

    def __init__(self) -> None:
        self.done = False
        Event.made.append(self)

    def record(self, stream: Any) -> None:
        assert stream == "stream of cuda"

    def query(self) -> bool:
        return self.done


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    Event.made = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device.type}")


def wrapper_of(device: str = "cuda") -> Any:
    return SimpleNamespace(
        device=torch.device(device), **{MEMORY: torch.zeros(8, dtype=torch.uint8)}
    )


def planned(memory: PlanMemory, wrapper: Any) -> torch.Tensor:
    memory.provide(wrapper)
    used: torch.Tensor = getattr(wrapper, MEMORY)
    memory.hold(wrapper)
    return used


def test_a_plan_never_writes_where_a_queued_copy_reads() -> None:
    memory, wrapper = PlanMemory(), wrapper_of()
    first, second, third = (planned(memory, wrapper) for _ in range(3))
    assert len({id(one) for one in (first, second, third)}) == 3
    assert len({one.data_ptr() for one in (first, second, third)}) == 3
    assert len(memory) == 3
    assert {one.shape for one in (second, third)} == {first.shape}


def test_memory_stays_a_wrappers_own_once_it_is_copied() -> None:
    memory, wrapper = PlanMemory(), wrapper_of()
    first = planned(memory, wrapper)
    Event.made[0].done = True
    assert planned(memory, wrapper) is first
    assert len(memory) == 1


def test_copies_end_in_their_order() -> None:
    memory, wrappers = PlanMemory(), [wrapper_of(), wrapper_of()]
    own = [planned(memory, wrapper) for wrapper in wrappers]
    Event.made[0].done = True
    assert planned(memory, wrappers[0]) is own[0]
    assert planned(memory, wrappers[1]) is not own[1]


def test_a_wrapper_that_makes_new_memory_keeps_the_old() -> None:
    memory, wrapper = PlanMemory(), wrapper_of()
    delattr(wrapper, MEMORY)
    memory.provide(wrapper)
    memory.hold(wrapper)
    assert len(memory) == 0
    for _ in range(2):
        memory.provide(wrapper)
        setattr(wrapper, MEMORY, torch.zeros(8, dtype=torch.uint8))
        memory.hold(wrapper)
    assert len(memory) == 2


def test_without_a_gpu_nothing_is_held() -> None:
    memory, wrapper = PlanMemory(), wrapper_of("cpu")
    first = planned(memory, wrapper)
    assert planned(memory, wrapper) is first
    assert not Event.made
    assert flashinfer_memory.PLAN_MEMORY is not memory
