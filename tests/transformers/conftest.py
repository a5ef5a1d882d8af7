"""Tests inside Transformers; they run where it is installed (``make test-transformers``)."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # Nothing is fetched: every model here is made or installed.
    os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def registered() -> None:
    """Our implementation, by the device's backend; a test may register another one."""
    from attn.integrations.transformers import register

    register()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with its tokenizer."""
    from tests.transformers.small_models import save_model

    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    save_model(folder)
    return folder


@pytest.fixture
def block_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Continuous batching gives block tables on the CPU too, as it does on a GPU."""
    import torch
    from transformers.generation.continuous_batching import initialization

    ensure = initialization.ensure_decode_fast_path_is_available
    torch_with_cuda = SimpleNamespace(**{name: getattr(torch, name) for name in dir(torch)})
    torch_with_cuda.cuda = SimpleNamespace(is_available=lambda: True)

    def ensure_with_cuda(*args: Any) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(initialization, "torch", torch_with_cuda)
            ensure(*args)

    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", ensure_with_cuda)


@pytest.fixture
def packed_steps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What every layer of every step of continuous batching was called with."""
    from attn.integrations.transformers import attention, compat

    seen: list[Any] = []
    packed_step: Callable[..., Any] = compat.packed_step

    def noted(*args: Any) -> Any:
        found = packed_step(*args)
        if found[0] is not None:
            # The next step overwrites the tensor.
            starts = found[0].query_start_loc.clone()
            seen.append(dataclasses.replace(found[0], query_start_loc=starts))
        return found

    monkeypatch.setattr(attention.compat, "packed_step", noted)
    return seen


@pytest.fixture
def padded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are padded on the CPU too, as they are for CUDA graphs."""
    from transformers.generation.continuous_batching.model_runner import ModelRunner

    make = ModelRunner.__init__

    def make_padding(runner: Any, *args: Any, **kwargs: Any) -> None:
        make(runner, *args, **kwargs)
        runner.pad_inputs = True

    monkeypatch.setattr(ModelRunner, "__init__", make_padding)
