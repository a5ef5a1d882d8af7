"""Tests of the vLLM plugin; they run where vLLM is installed (``make test-vllm``)."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py", "*/test_*.py"]
else:
    # Layers are made for a GPU that does not exist; their kernels run in Triton's interpreter.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Runs code in processes where vLLM was imported and nothing has changed it."""
    from tests.vllm.fresh import FreshProcesses

    processes = FreshProcesses(tmp_path_factory.mktemp("fresh"))
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's configuration without weights."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("model")
    LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=2048,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def make_config(model_folder: Path) -> Callable[..., Any]:
    """A vLLM configuration with few and small limits."""
    from vllm.config import (
        AttentionConfig,
        CacheConfig,
        DeviceConfig,
        ModelConfig,
        SchedulerConfig,
        VllmConfig,
    )

    def make(
        *,
        dtype: str = "float16",
        block_size: int = 16,
        cache_dtype: str = "auto",
        backend: str | None = "CUSTOM",
        max_model_len: int = 256,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 512,
        model: Path | None = None,
        **others: Any,
    ) -> Any:
        model_config = ModelConfig(
            model=str(model or model_folder),
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=max_model_len,
        )
        scheduler = SchedulerConfig(
            max_model_len=max_model_len,
            is_encoder_decoder=False,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        return VllmConfig(
            model_config=model_config,
            cache_config=CacheConfig(block_size=block_size, cache_dtype=cache_dtype),
            scheduler_config=scheduler,
            device_config=DeviceConfig(device="cpu"),
            attention_config=AttentionConfig(backend=backend),
            **others,
        )

    return make


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The plugin's module, unregistered before and after; earlier selections are forgotten."""
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from attn.integrations.vllm import plugin as module
    from attn.integrations.vllm import settings

    def forget() -> None:
        for name in module._registered:
            AttentionBackendEnum[name].clear_override()
        module._registered.clear()
        selector._cached_get_attn_backend.cache_clear()

    # The variable is set first, so that the plugin's own changes of it are undone too.
    for variable in (*settings.VARIABLES, settings.RAY_VARIABLE):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    # On some GPUs the plugin registers other classes of models.
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    forget()
    yield module
    forget()


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Call the fixture, with a configuration set, for vLLM's groups of one process."""
    from vllm import distributed

    def start() -> None:
        method = (tmp_path / "group").as_uri()
        distributed.init_distributed_environment(1, 0, method, 0, "gloo")
        distributed.initialize_model_parallel(1, 1, backend="gloo")

    yield start
    distributed.destroy_model_parallel()
    distributed.destroy_distributed_environment()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, make_config: Callable[..., Any]) -> Any:
    """vLLM's CUDA platform with a chosen capability: call the fixture with major and minor."""
    for name in ("vllm._C_stable_libtorch", "vllm._C"):
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    # These are imported before the platform is CUDA: later they would want binaries that are
    # missing.
    import vllm.model_executor.layers.attention
    import vllm.platforms
    import vllm.v1.worker.gpu.attn_utils
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    make_config()
    monkeypatch.setattr("vllm.utils.torch_utils.PIN_MEMORY", False)

    def pretend(major: int = 9, minor: int = 0) -> None:
        class Pretended(CudaPlatformBase):
            @classmethod
            def get_device_capability(cls, device_id: int = 0) -> Any:
                return DeviceCapability(major, minor)

            @classmethod
            def get_device_name(cls, device_id: int = 0) -> str:
                return "a device that is not there"

        platform = Pretended()
        monkeypatch.setattr(vllm.platforms, "_current_platform", platform)
        # This module keeps the platform of its first import, which another test may have caused.
        arguments = sys.modules.get("vllm.engine.arg_utils")
        if arguments is not None:
            monkeypatch.setattr(arguments, "current_platform", platform)

    pretend()
    return pretend
