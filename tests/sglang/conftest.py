"""Tests inside SGLang; they run where it is installed (``make test-sglang``)."""

from __future__ import annotations

import importlib.util
import os

import pytest

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import torch

    if not torch.cuda.is_available():
        # There is no GPU: kernels run in Triton's interpreter.
        os.environ.setdefault("TRITON_INTERPRET", "1")
        from tests.sglang.stand_ins import put_in_place

        put_in_place()


@pytest.fixture(scope="session", autouse=True)
def plugins() -> None:
    """SGLang's own loader finds and runs our entry point."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
