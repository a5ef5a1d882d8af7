"""Which kernels a builder says that it has chosen for decodes and for prefills."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import builders.dense.triton_attn
import builders.latent.prefill
import builders.latent.triton_mla
import builders.sparse.launches
import builders.sparse.sparse_mla
from builders.dense.torch_ref import TorchRefMetadataBuilder
from builders.dense.triton_attn import TritonAttentionMetadataBuilder
from builders.latent.triton_mla import TritonMLAMetadataBuilder
from builders.sparse.sparse_mla import SparseMLAMetadataBuilder
from specs.dtypes import CacheDType, DType
from specs.engine import DecodeKernel, EngineConfig, Kernels, PrefillKernel
from specs.kv_cache import EncoderOnlyAttentionSpec, FullAttentionSpec, MLAAttentionSpec
from tests.tools.gpus import hopper

FULL = FullAttentionSpec(block_size=64, num_kv_heads=8, head_size=128, dtype=DType.BFLOAT16)
ENCODER = EncoderOnlyAttentionSpec(
    block_size=64, num_kv_heads=8, head_size=128, dtype=DType.BFLOAT16
)
LATENT = MLAAttentionSpec(
    block_size=64, dtype=DType.BFLOAT16, kv_lora_rank=512, qk_rope_head_dim=64
)
BOTH = {"decode": "hopper", "prefill": "hopper"}
NEITHER = {"decode": "triton", "prefill": "triton"}


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make builders take their device for a Hopper GPU that runs Gluon."""
    for module in (
        builders.dense.triton_attn,
        builders.latent.triton_mla,
        builders.latent.prefill,
        builders.sparse.sparse_mla,
        builders.sparse.launches,
    ):
        monkeypatch.setattr(module, "runs_gluon", lambda device: True, raising=False)
        monkeypatch.setattr(module, "device_facts", lambda device: hopper(3), raising=False)


def kernels_of(builder: Any, spec: Any, **settings: Any) -> dict[str, str]:
    limits = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    config = EngineConfig(**{**limits, "num_heads": 16, "index_topk": 64, **settings})
    made = builder(spec, ["layer.0"], config, torch.device("cpu"))
    # A dictionary's order is the log line's.
    assert list(made.phase_kernels) == sorted(made.phase_kernels)
    return dict(made.phase_kernels)


PORTABLE = Kernels.own(PrefillKernel.TRITON, DecodeKernel.TRITON)
MIXED = Kernels.own(PrefillKernel.TRITON, DecodeKernel.HOPPER)
DECODES_ON_HOPPER = Kernels.own(PrefillKernel.AUTO, DecodeKernel.HOPPER)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("spec", "settings", "expected"),
    [
        (FULL, {}, BOTH),
        (FULL, {"kernels": PORTABLE}, NEITHER),
        (FULL, {"kernels": MIXED}, {"decode": "hopper", "prefill": "triton"}),
        # With batch invariance both phases have the portable split-KV kernel's bits.
        (FULL, {"batch_invariant": True}, BOTH),
        (FULL, {"batch_invariant": True, "kernels": PORTABLE}, NEITHER),
        (FULL, {"batch_invariant": True, "kernels": DECODES_ON_HOPPER}, BOTH),
        (ENCODER, {}, {"prefill": "hopper"}),
    ],
)
def test_kernels_of_dense_layers(
    spec: Any, settings: dict[str, Any], expected: dict[str, str]
) -> None:
    assert kernels_of(TritonAttentionMetadataBuilder, spec, **settings) == expected


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, BOTH),
        ({"num_heads": 12}, BOTH),
        ({"num_heads": 96}, BOTH),
        ({"kernels": PORTABLE}, NEITHER),
        ({"kernels": MIXED}, {"decode": "hopper", "prefill": "triton"}),
        ({"batch_invariant": True}, BOTH),
        # Tiles of 16 rows would read a latent row more often.
        (
            {"batch_invariant": True, "num_heads": 96},
            {"decode": "triton", "prefill": "hopper"},
        ),
    ],
)
@pytest.mark.parametrize("cache_dtype", [CacheDType.AUTO, CacheDType.FP8])
def test_kernels_of_latent_layers(
    settings: dict[str, Any], expected: dict[str, str], cache_dtype: CacheDType
) -> None:
    if cache_dtype is CacheDType.FP8 and settings.get("num_heads") == 96:
        # Over e4m3 every tile has 16 rows.
        expected = BOTH
    spec = LATENT.replace(cache_dtype=cache_dtype)
    assert kernels_of(TritonMLAMetadataBuilder, spec, **settings) == expected


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, BOTH),
        ({"kernels": PORTABLE}, NEITHER),
        ({"kernels": MIXED}, {"decode": "hopper", "prefill": "triton"}),
        ({"dense_short_prompts": True}, {**BOTH, "short": "hopper"}),
        # With batch invariance every row attends its list.
        ({"dense_short_prompts": True, "batch_invariant": True}, NEITHER),
    ],
)
def test_kernels_of_sparse_layers(settings: dict[str, Any], expected: dict[str, str]) -> None:
    assert kernels_of(SparseMLAMetadataBuilder, LATENT, **settings) == expected


def test_on_other_devices_kernels_are_portable_and_a_reference_names_none() -> None:
    assert kernels_of(TritonAttentionMetadataBuilder, FULL) == NEITHER
    assert kernels_of(TritonMLAMetadataBuilder, LATENT) == NEITHER
    assert kernels_of(SparseMLAMetadataBuilder, LATENT) == NEITHER
    assert kernels_of(TorchRefMetadataBuilder, FULL) == {}
