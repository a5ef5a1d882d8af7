"""Launches for a GPU that is not there: where tensors say they are, and what torch tells."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from attn.impls.warm import run_compiled
from builders.device import device_facts
from builders.launch.absent import AbsentTensor, absent_gpu
from builders.launch.call import KernelCall, by_variant, collected, collected_calls
from specs.devices import ComputeCapability, GpuFacts

HOPPER = ComputeCapability(major=9, minor=0)


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    with collected_calls(), absent_gpu(HOPPER, 132) as device:
        yield device


def test_tensors_are_where_they_are_asked_to_be(gpu: torch.device) -> None:
    there = torch.zeros(2, 3, device=gpu)
    results = {
        "made": there,
        "made by name": torch.ones(2, device="cuda"),
        "made from it": there.new_zeros(4),
        "like it": torch.empty_like(there),
        "a view": there[1:].T,
        "a result": there + 1,
        "moved": torch.zeros(2).to(gpu),
        "moved by option": torch.tensor([1, 2]).to(device=gpu, dtype=torch.int64),
        "pinned and moved": torch.zeros(2, pin_memory=True).to(gpu, non_blocking=True),
    }
    for name, tensor in results.items():
        assert isinstance(tensor, AbsentTensor), name
        assert tensor.device == gpu, name
        assert tensor.is_cuda, name
        assert not tensor.is_cpu, name
    for tensor in (there.cpu(), there.to("cpu"), torch.zeros(2), torch.zeros(2, device="cpu")):
        assert type(tensor) is torch.Tensor
        assert tensor.device == torch.device("cpu")
    assert there.data_ptr() % 16 == 0


def test_torch_tells_of_the_gpu_for_as_long_as_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = object()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: told)
    with collected_calls(), absent_gpu(HOPPER, 78) as gpu:
        assert device_facts(gpu) == GpuFacts.of(HOPPER, 78)
        assert torch.cuda.get_device_capability(gpu) == (9, 0)
        assert torch.cuda.current_device() == gpu.index < torch.cuda.device_count()
        assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.get_device_properties(0) is told
    assert type(torch.zeros(1)) is torch.Tensor


def test_launches_must_be_collected() -> None:
    with pytest.raises(RuntimeError, match="must be collected"), absent_gpu(HOPPER, 132):
        pass


def test_a_warm_up_whose_launches_are_collected_runs_its_steps_once() -> None:
    call = KernelCall(object(), (1,), {})
    steps = []

    def run_steps() -> None:
        steps.append(1)
        calls = collected.get()
        assert calls is not None
        calls.append(call)

    with collected_calls() as calls:
        run_compiled(run_steps, torch.device("cuda", 0))
    assert calls == [call]
    assert steps == [1]


def test_calls_are_sorted_by_variant() -> None:
    class Kernel:
        params = ()

    one, other = Kernel(), Kernel()
    calls = [KernelCall(kernel, (1,), {"a": a}) for kernel, a in ((one, 1), (other, 2), (one, 3))]
    assert by_variant(calls) == [[calls[0], calls[2]], [calls[1]]]
