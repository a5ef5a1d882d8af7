"""Replays with drafts, and with a kernel of a latent backend asked for by name."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from attn.cli.app import app
from attn.cli.blocks import BlockAllocator
from attn.cli.replay import Replay, RunSettings
from attn.cli.scheduler import Scheduler, StepPlan
from attn.cli.trace import TraceRequest
from attn.kernels.lang.numerics import INTERPRETED
from attn.registry import AttentionBackendEnum
from specs.attention import MlaKernel
from specs.devices import KNOWN_DEVICES, Device
from specs.dtypes import CacheDType, DType
from specs.engine import Kernels
from specs.hf_config import load_model_geometry
from specs.kv_cache import MLAAttentionSpec
from tests.emulators import flashinfer_mla_emulator

REQUESTS = [TraceRequest(0.0, *one) for one in ((40, 30), (17, 12), (9, 1), (33, 20))]
LATENT = {
    "model_type": "deepseek_v3",
    "torch_dtype": "float16",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
    "q_lora_rank": 32,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
}


def plans_of(drafts: int) -> list[StepPlan]:
    spec = MLAAttentionSpec(block_size=16, dtype=DType.FLOAT16)
    allocator = BlockAllocator(64, 16, spec, seed=0)
    scheduler = Scheduler(REQUESTS, [allocator], 4, 64, drafts)
    plans = []
    while (plan := scheduler.schedule()) is not None:
        plans.append(plan)
        scheduler.commit(plan)
    assert scheduler.finished == len(REQUESTS)
    assert allocator.used_blocks == 0
    return plans


def test_drafts_make_decodes_longer_and_steps_fewer() -> None:
    plain, drafted = plans_of(0), plans_of(3)
    assert {row.num_new_tokens for plan in plain for row in plan.rows if not row.is_prefilling} == {
        1
    }
    lens = [row.num_new_tokens for plan in drafted for row in plan.rows if not row.is_prefilling]
    assert set(lens) == {1, 2, 3, 4}
    assert len(drafted) < len(plain)
    assert sum(plan.num_decode_tokens for plan in drafted) == sum(lens)
    assert sum(plan.num_tokens for plan in drafted) > sum(plan.num_tokens for plan in plain)


def test_refused_drafts_are_computed_again_from_where_they_began() -> None:
    ends: dict[int, int] = {}
    again = 0
    for plan in plans_of(3):
        for row in plan.rows:
            last = ends.get(row.request_id, 0)
            assert row.context_len <= last
            assert row.context_len > last - 4 or last == 0
            again += row.context_len < last
            ends[row.request_id] = row.seq_len
    assert again
    assert ends == {index: one.num_cached_tokens for index, one in enumerate(REQUESTS)}


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "latent.json"
    path.write_text(json.dumps(LATENT))
    return str(path)


def test_the_command_takes_drafts(model: str) -> None:
    given = ["run", "--model", model, "--requests", "3", "--backend", "TORCH_REF_MLA"]
    result = CliRunner().invoke(app, [*given, "--speculative", "3"])
    assert result.exit_code == 0, result.output


def test_a_kernel_that_a_backend_does_not_have_is_refused(model: str) -> None:
    given = [
        "run",
        "--model",
        model,
        "--backend",
        "TORCH_REF_MLA",
        "--latent-rows-kernel",
        "triton",
    ]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2
    assert "kernel triton not supported" in result.output


@pytest.mark.skipif(not INTERPRETED.value, reason="needs Triton's interpreter")
@pytest.mark.parametrize(
    ("backend", "kernel", "cache"),
    [
        ("TRTLLM_MLA", MlaKernel.TRITON, CacheDType.AUTO),
        ("TRTLLM_MLA", MlaKernel.TRITON, CacheDType.FP8),
        ("FLASHINFER_MLA", MlaKernel.AUTO, CacheDType.AUTO),
    ],
)
def test_a_replay_with_drafts_is_right(
    backend: str,
    kernel: MlaKernel,
    cache: CacheDType,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Choices are those for a GPU, and the interpreter or an emulator runs the kernels."""
    if AttentionBackendEnum[backend].missing():
        pytest.skip("flashinfer is not installed")
    monkeypatch.setattr(Device, "torch_type", property(lambda self: "cpu"))
    emulated: Any = nullcontext()
    if backend == "FLASHINFER_MLA":
        emulated = flashinfer_mla_emulator.emulated("0.7.2.post1")
    settings = RunSettings(
        model=load_model_geometry(model),
        device=KNOWN_DEVICES["h200"],
        backend=backend,
        kv_cache_dtype=cache,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kernels=Kernels.own(rows=kernel),
        num_speculative_tokens=3,
    )
    with emulated:
        replay = Replay(settings, REQUESTS[1:])
        replay.run(lambda step: None)
    report = replay.report({}, 0)
    assert report.finished_requests == 3
    assert report.passed
    assert torch.get_default_dtype() == torch.float32
