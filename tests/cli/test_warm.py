"""``attn warm``: what it compiles is what serving launches, so that nothing is compiled then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attn.ahead.layers import LAUNCHES, LayerAhead, launches_of
from attn.ahead.process import AheadProcess, Order
from attn.cli.warm import Wanted, layers_ahead
from attn.device import known_device
from specs.dtypes import CacheDType
from specs.engine import EngineConfig
from specs.hf_config import load_model_geometry
from specs.kv_cache import FullAttentionSpec
from tests.cli.test_bad_input import invoke, the_line

SERVED = """
import torch
from attn.ahead.layers import launches_of
from attn.device import known_device
from attn.impls.base import LayerScales
from attn.impls.dense.triton_attn import TritonAttentionImpl
from builders.dense.triton_attn import TritonAttentionMetadataBuilder
from builders.launch.absent import absent_gpu
from builders.launch.ahead import compile_ahead
from builders.launch.call import collected_calls
from specs.engine import EngineConfig
from specs.kv_cache import FullAttentionSpec
from specs.layouts import KVPacking
from tests.tools.cache_keys import keys_of

device = known_device("a10")

def launches(block_size):
    with collected_calls() as calls, absent_gpu(device.compute_capability, 72) as gpu:
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=64)
        config = EngineConfig(max_model_len=256, max_num_seqs=8, num_heads=4)
        builder = TritonAttentionMetadataBuilder(spec, ["layer"], config, gpu)
        impl = TritonAttentionImpl(4, 64, 0.125, 2)
        kv_cache = spec.layout(packing=KVPacking.PACKED).allocate(2, gpu)
        impl.warm_up(LayerScales.of(device=gpu), kv_cache, builder, torch.bfloat16)
    return calls

others = keys_of(launches(48), device) - keys_of(launches(16), device)
outcomes = compile_ahead(launches(16), device.compute_capability, 1)
assert not any(one.error for one in outcomes), outcomes
print(sum(one.compiled for one in outcomes), sum(one.cached for one in outcomes), len(others))
"""
"""The launches of a layer, made without :mod:`attn.ahead`; prints how many were compiled, how many
were cached, and how many kernels are others with blocks of another size."""

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "vocab_size": 128,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """Run Python with Triton's compiler and an empty cache."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
    }

    def done(*words: str) -> str:
        found = subprocess.run(
            [sys.executable, *words], env=environment, capture_output=True, text=True
        )
        assert found.returncode == 0, found.stdout + found.stderr
        return found.stdout

    return done


def test_serving_after_it_compiles_nothing(run: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    limits = ["--max-num-seqs", "8", "--device", "a10", "--jobs", "2"]
    said = run("-m", "attn.cli", "warm", "--model", str(tmp_path), *limits)
    assert "2 full_attention layers: TRITON_ATTN" in said
    for kernel in ("prefill_kernel", "decode_kernel", "plan_kernel", "write_kv_kernel"):
        assert f"  {kernel}: " in said
    assert "compiled for a10 (compute capability 8.6), 0 were in the cache" in said
    assert f"2 jobs; cache: {tmp_path / 'cache'}" in said
    compiled, cached, others = map(int, run("-c", SERVED).split())
    assert compiled == 0
    assert cached >= 4
    assert others > 0


def test_a_process_compiles_what_it_is_given_and_says_so(tmp_path: Path) -> None:
    device = known_device("a10")
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64)
    layer = load_model_geometry("llama-3.2-1b").layers[0].replace(num_heads=4, num_kv_heads=2)
    engine = EngineConfig(max_model_len=256, max_num_seqs=8)
    ahead = LayerAhead(
        backend="TRITON_ATTN", layer=layer, dtype="bfloat16", spec=spec, engine=engine
    )
    cache = tmp_path / "cache"
    process = AheadProcess({**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)})
    order = Order(ahead=ahead, device=device, jobs=2)
    process.compile(order)
    process.compile(order)
    process.compile(Order(ahead=ahead.replace(backend="TORCH_REF"), device=device, jobs=2))
    summary = process.finish(300)
    assert summary is not None
    assert summary.compiled >= 4
    assert summary.cached == 0
    (problem,) = summary.problems
    assert "TORCH_REF" in problem
    assert len(list(cache.glob("*/*.cubin"))) == summary.compiled


def test_a_process_that_ends_early_is_no_error() -> None:
    process = AheadProcess({"PATH": os.environ["PATH"], "TRITON_CACHE_DIR": "/nowhere"})
    process._process.kill()
    process._process.wait()
    layer = wanted_of("llama-3.1-8b")
    (ahead,) = layers_ahead(layer.model.layers[0], layer)
    process.compile(Order(ahead=ahead, device=layer.device, jobs=1))
    assert process.finish(10) is None


def test_a_process_ends_with_its_engine() -> None:
    process = AheadProcess(os.environ)
    assert process._process.stdin is not None
    process._process.stdin.close()
    assert process._process.wait(120) != 0
    assert process.finish(10) is None


def test_what_is_compiled_depends_on_the_kind_of_layer() -> None:
    def backends(name: str, cache: CacheDType = CacheDType.AUTO) -> list[str]:
        wanted = wanted_of(name, kv_cache_dtype=cache)
        layers = wanted.model.kinds
        return [one.backend for layer in layers for one in layers_ahead(layer, wanted)]

    assert backends("llama-3.1-8b") == ["TRITON_ATTN"]
    assert backends("gpt-oss-20b") == ["TRITON_ATTN"] * 2
    assert backends("deepseek-v3") == ["TRITON_MLA"]
    # Short prompts either attend densely or not.
    assert backends("deepseek-v3.2") == ["SPARSE_MLA"] * 2
    assert set(LAUNCHES) == {"TRITON_ATTN", "TRITON_MLA", "SPARSE_MLA"}


def wanted_of(name: str, **fields: Any) -> Wanted:
    given: dict[str, Any] = {
        "model": load_model_geometry(name),
        "device": known_device("h200"),
        "kv_cache_dtype": CacheDType.AUTO,
        "block_size": None,
        "max_model_len": None,
        "max_num_seqs": None,
        "max_num_batched_tokens": 8192,
        "speculative": 0,
    }
    return Wanted(**{**given, **fields})


def test_limits_are_those_of_vllm_where_none_are_given() -> None:
    assert wanted_of("llama-3.1-8b").engine().max_num_seqs == 1024
    small = wanted_of("llama-3.1-8b", device=known_device("a10"), speculative=2).engine()
    assert small.max_num_seqs == 256
    assert small.max_model_len == 131072
    assert small.max_decode_query_len == 3
    assert wanted_of("llama-3.1-8b", device=known_device("a100")).engine().max_num_seqs == 256


def test_bad_input_is_one_line() -> None:
    model = ["warm", "--model", "llama-3.1-8b"]
    assert "NVIDIA GPU, got mi300x" in the_line(invoke(*model, "--device", "mi300x"))
    assert "TRITON_INTERPRET" in the_line(invoke(*model, "--device", "h100"))


def test_only_backends_with_kernels_of_the_library_are_made_ahead() -> None:
    ahead = layers_ahead(wanted_of("llama-3.1-8b").model.layers[0], wanted_of("llama-3.1-8b"))[0]
    with pytest.raises(ValueError, match="TRITON_ATTN, TRITON_MLA, SPARSE_MLA, got 'TRTLLM_MHA'"):
        launches_of(ahead.replace(backend="TRTLLM_MHA"), known_device("h200"))
    with pytest.raises(ValueError, match="NVIDIA GPU, got cpu"):
        launches_of(ahead, known_device("cpu"))
