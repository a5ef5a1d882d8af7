"""One thread per process, and no GPU tests without a GPU."""

from __future__ import annotations

import os

# Read when numpy and torch are first imported, here and in the processes that tests start; their
# threads wait for each other by spinning.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from tests.tools import interpreter, weights

if not torch.cuda.is_available():
    # Triton reads it when it is first imported: kernels then run on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest_plugins = ["attn.testing.plugin", "pytester"]

torch.set_num_threads(1)
if os.environ.get("TRITON_INTERPRET") == "1":
    interpreter.make_quick()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The heaviest files come first; tests of a file stay in their order."""
    items.sort(key=lambda item: weights.place_of(item.nodeid.partition("::")[0]))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Failures go to the file that ``ATTN_TEST_FAILURES`` names as they happen: a run
    with a limit of time may be cut off before its summary.
    """
    path = os.environ.get("ATTN_TEST_FAILURES")
    # Workers hand their reports to the process that started them.
    if path and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{report.nodeid} ({report.when})\n{report.longreprtext}\n\n")
