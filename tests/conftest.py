"""One thread per process, and no GPU tests without a GPU."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when it is first imported: kernels then run on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)


def _as_compiled() -> None:
    """The interpreter looks for overflows in every sum, which compiled kernels do in debug builds
    only; without that, it takes half as long.
    """
    try:
        from triton.runtime.interpreter import interpreter_builder
    except ImportError:
        return
    options = interpreter_builder.options
    interpreter_builder.options = replace(options, sanitize_overflow=False)


if os.environ.get("TRITON_INTERPRET") == "1":
    _as_compiled()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
