"""One thread per process, and no GPU tests without a GPU."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when it is first imported: kernels then run on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
