"""One thread per process, and no GPU tests without a GPU."""

from __future__ import annotations

import os

# Read when numpy and torch are first imported, here and in the processes that tests start; their
# threads wait for each other by spinning.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from tests import interpreter

if not torch.cuda.is_available():
    # Triton reads it when it is first imported: kernels then run on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)
if os.environ.get("TRITON_INTERPRET") == "1":
    interpreter.make_quick()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
