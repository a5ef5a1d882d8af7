"""What is compiled ahead for vLLM's layers is what their warm-up launches, key by key."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import vllm.platforms
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import Attention, mla_attention

from attn.ahead.layers import launches_of
from attn.ahead.process import Order, Summary
from attn.device import known_device
from attn.integrations.vllm import ahead, compat, members, settings
from builders.device import interprets
from builders.launch.absent import absent_gpu
from builders.launch.call import KernelCall, collected_calls
from tests.tools.cache_keys import keys_of
from tests.vllm.runner import NAME

GPU = known_device("h100")
ROOT = Path(__file__).parents[2]
compiles = pytest.mark.skipif(interprets(), reason="interpreted kernels have no keys")


@pytest.mark.skipif(not interprets(), reason="this is the process that compiles")
def test_all_of_this_in_a_process_that_compiles() -> None:
    # vLLM and what it imports warn of many things.
    options = ["-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, __file__, "-k", "its_warm_up_launches"],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@contextmanager
def on_the_gpu() -> Iterator[tuple[torch.device, list[KernelCall]]]:
    """The GPU that layers and builders are made for, and the list of their launches."""
    assert GPU.compute_capability is not None
    assert GPU.num_multiprocessors is not None
    with (
        collected_calls() as calls,
        absent_gpu(GPU.compute_capability, GPU.num_multiprocessors) as gpu,
        gpu,
    ):
        yield gpu, calls


class Projection(torch.nn.Module):
    """Stands in for ``kv_b_proj`` without quantisation."""

    quant_method = None

    def __init__(self, columns: int, rank: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(columns, rank), requires_grad=False)
        self.params_dtype = self.weight.dtype


class NoPrefill:
    """For vLLM's own choice of a prefill kernel."""

    def __init__(self, **_: Any) -> None:
        pass


class Lists:
    """Stands in for an indexer."""

    def __init__(self) -> None:
        self.topk_indices_buffer = torch.zeros(512, 512, dtype=torch.int32)


def dense(config: Any, **given: Any) -> Any:
    return Attention(
        *(32, 128, 128**-0.5),
        num_kv_heads=8,
        cache_config=config.cache_config,
        prefix=NAME,
        attn_backend=members.CUSTOM_TRITON_ATTN,
        **given,
    )


def sinks(config: Any) -> Any:
    return dense(config, sinks=torch.nn.Parameter(torch.zeros(32)), per_layer_sliding_window=128)


def latent(config: Any, **given: Any) -> Any:
    given = {"attn_backend": members.CUSTOM_TRITON_MLA, **given}
    return mla_attention.MLAAttention(
        *(16, 192**-0.5, 128, 64, 128, None, 512, Projection(16 * 256, 512)),
        cache_config=config.cache_config,
        prefix=NAME,
        **given,
    )


def sparse(config: Any) -> Any:
    indexer = Lists()
    return latent(
        config,
        use_sparse=True,
        indexer=indexer,
        topk_indices_buffer=indexer.topk_indices_buffer,
        attn_backend=members.CUSTOM_SPARSE_MLA,
    )


LAYERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "dense": (dense, {}),
    "dense fp8": (dense, {"cache_dtype": "fp8"}),
    "sinks behind a window": (sinks, {}),
    "latent": (latent, {"block_size": 64}),
    "latent fp8": (latent, {"block_size": 64, "cache_dtype": "fp8"}),
    "sparse": (sparse, {"block_size": 64}),
    "sparse fp8_ds_mla": (sparse, {"block_size": 64, "cache_dtype": "fp8_ds_mla"}),
}


@compiles
@pytest.mark.parametrize("name", LAYERS)
def test_what_a_layer_is_compiled_ahead_for_is_what_its_warm_up_launches(
    name: str,
    cuda: Callable[..., None],
    make_config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda()
    make_layer, given = LAYERS[name]
    monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", lambda *_: NoPrefill)
    config = make_config(dtype="bfloat16", **given)
    config.model_config.hf_text_config.index_topk = 512
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with on_the_gpu() as (gpu, calls), set_current_vllm_config(config):
            layer = make_layer(config)
            found = ahead.ahead_of(layer.impl, config)
            layer.process_weights_after_loading(torch.bfloat16)
            spec = layer.get_kv_cache_spec(config)
            layer.get_attn_backend().get_builder_cls()(spec, [NAME], config, gpu)
    finally:
        torch.set_default_dtype(default)
    assert found
    warmed = keys_of(calls, GPU)
    assert warmed
    compiled = set().union(*(keys_of(launches_of(one, GPU), GPU) for one in found))
    assert not warmed - compiled, sorted({key[0] for key in warmed - compiled})


class Process:
    """Stands in for the process that compiles; notes what it is given."""

    made: ClassVar[list[Process]] = []

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.orders: list[Order] = []
        self.waited: list[float] = []
        self.made.append(self)

    def compile(self, order: Order) -> None:
        self.orders.append(order)

    def finish(self, seconds: float) -> Summary | None:
        self.waited.append(seconds)
        return Summary(compiled=3, cached=1, seconds=2.5, problems=("a kernel: broken",))


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Process]]:
    """The stand-in for the process, on a machine with a Hopper GPU."""
    Process.made.clear()
    monkeypatch.setattr(ahead, "AheadProcess", Process)
    monkeypatch.setattr(ahead, "_device", lambda: GPU)
    monkeypatch.setattr(settings, "_at_start", {"TRITON_CACHE_DIR": "/at/start"})
    yield Process
    ahead._processes.clear()


def make_layers(config: Any, *makers: Callable[..., Any]) -> None:
    with set_current_vllm_config(config):
        for make in makers:
            make(config)
            config.compilation_config.static_forward_context.clear()


def test_one_process_gets_every_layer_and_is_waited_for_once(
    plugin: Any,
    cuda: Callable[..., None],
    make_config: Callable[..., Any],
    process: type[Process],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cuda()
    monkeypatch.setattr(ahead, "current_platform", vllm.platforms.current_platform)
    monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", lambda *_: NoPrefill)
    monkeypatch.setattr(ahead.logger, "propagate", True)
    config = make_config(dtype="bfloat16")
    make_layers(config, dense, latent, dense)
    (one,) = process.made
    assert one.environment == {"TRITON_CACHE_DIR": "/at/start"}
    backends = [order.ahead.backend for order in one.orders]
    assert backends == ["TRITON_ATTN", "TRITON_MLA", "TRITON_ATTN"]
    assert one.orders[0] == one.orders[2]
    # Latent layers get the block size that their backend prefers, if the user named none.
    assert [order.ahead.spec.block_size for order in one.orders] == [16, 16, 16]
    monkeypatch.setenv("TRITON_CACHE_DIR", "/of/the/model")
    with caplog.at_level("INFO"), ahead.warming_up():
        assert os.environ["TRITON_CACHE_DIR"] == "/at/start"
    assert os.environ["TRITON_CACHE_DIR"] == "/of/the/model"
    assert "3 kernels compiled while the model was loaded, 1 were in Triton's cache" in caplog.text
    with ahead.warming_up():
        pass
    assert len(one.waited) == 1


def test_a_block_size_that_nobody_named_is_the_backends(
    cuda: Callable[..., None],
    make_config: Callable[..., Any],
    process: type[Process],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda()
    monkeypatch.setattr(ahead, "current_platform", vllm.platforms.current_platform)
    monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", lambda *_: NoPrefill)
    config = make_config(dtype="bfloat16", block_size=None)
    make_layers(config, latent, dense)
    (one,) = process.made
    assert [order.ahead.spec.block_size for order in one.orders] == [64, 16]


@pytest.mark.parametrize("why", ["off", "another rank", "no GPU", "a failure"])
def test_no_process_is_started_where_it_would_not_help(
    why: str,
    cuda: Callable[..., None],
    make_config: Callable[..., Any],
    process: type[Process],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda()
    if why != "no GPU":
        monkeypatch.setattr(ahead, "current_platform", vllm.platforms.current_platform)
    if why == "off":
        monkeypatch.setenv(settings.AHEAD_VARIABLE, "0")
    if why == "another rank":
        monkeypatch.setattr(compat, "local_rank", lambda: 1)
    if why == "a failure":
        monkeypatch.setattr(ahead, "_device", lambda: 1 / 0)
    make_layers(make_config(dtype="bfloat16"), dense)
    assert process.made == []


def test_without_a_variable_at_the_start_there_is_none_while_warming_up(
    process: type[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "_at_start", {"HOME": "/root"})
    monkeypatch.setenv("TRITON_CACHE_DIR", "/of/the/model")
    with contextlib.suppress(ValueError), ahead.warming_up():
        assert "TRITON_CACHE_DIR" not in os.environ
        raise ValueError("broken")
    assert os.environ["TRITON_CACHE_DIR"] == "/of/the/model"


def test_a_switch_is_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.AHEAD_VARIABLE, "yes")
    with pytest.raises(ValueError, match="ATTN_VLLM_COMPILE_AHEAD must be 0 or 1, got 'yes'"):
        settings.check()
