"""One thread per process, and no GPU tests without a GPU."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
