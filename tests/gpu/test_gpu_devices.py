"""The library's tables of GPUs agree with what the driver says of this GPU."""

from __future__ import annotations

import pytest
import torch

from attn.device import detect_device
from builders.device import device_facts

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


@pytest.mark.skipif(torch.version.hip is not None, reason="ROCm has no compute capability")
def test_shared_memory_of_a_program_and_of_a_multiprocessor() -> None:
    properties, facts = torch.cuda.get_device_properties(DEVICE), device_facts(DEVICE)
    assert facts == detect_device(0).facts
    assert facts.shared_memory == properties.shared_memory_per_block_optin
    of_all = properties.shared_memory_per_multiprocessor
    assert facts.shared_memory + facts.reserved_shared_memory == of_all
