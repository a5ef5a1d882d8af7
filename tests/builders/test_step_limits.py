"""Results at the limits of a step are the oracle's, so no plan leaves out a key.

The host knows the lengths, or has a bound that is larger.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from attn.registry import AttentionBackendEnum
from attn.testing.batches import BatchSpec, Heads
from attn.testing.cases import FEATURES, AnyCase, Case, LatentCase, device_for
from attn.testing.dense_trial import DenseTrial
from attn.testing.latent_trial import LatentTrial
from attn.testing.trial import CaseResult, Trial
from builders.batch import CommonAttentionMetadata
from specs.devices import KNOWN_DEVICES
from specs.dtypes import DType
from tests.emulators import (
    flashinfer_emulator,
    flashinfer_mla_emulator,
    trtllm_emulator,
    trtllm_mla_emulator,
)

STEP = BatchSpec("at_the_limit", (1, 1, 9), (130, 33, 130))
DECODES = BatchSpec("decodes_at_the_limit", (1, 1, 1), (130, 33, 130))
DENSE = Case(batch=STEP, heads=Heads(4, 2, 64), dtype=DType.FLOAT16, block_size=64)
LATENT = LatentCase(batch=STEP, dtype=DType.FLOAT16, block_size=64, rank=128)
SPARSE = replace(LATENT, lists="padded", rank=512)
NEW = "0.7.2.post1"
SERVED: dict[str, tuple[AnyCase, Callable[[], AbstractContextManager[Any]]]] = {
    "TORCH_REF": (DENSE, nullcontext),
    "TRITON_ATTN": (DENSE, nullcontext),
    "FLASHINFER": (
        replace(DENSE, dtype=DType.BFLOAT16),
        lambda: flashinfer_emulator.emulated(NEW),
    ),
    "TRTLLM_MHA": (
        replace(DENSE, dtype=DType.BFLOAT16),
        lambda: trtllm_emulator.emulated(KNOWN_DEVICES["b200"], NEW),
    ),
    "TORCH_REF_MLA": (LATENT, nullcontext),
    "TRITON_MLA": (LATENT, nullcontext),
    "FLASHINFER_MLA": (
        replace(LATENT, rank=512, batch=DECODES),
        lambda: flashinfer_mla_emulator.emulated(NEW),
    ),
    "TRTLLM_MLA": (
        replace(LATENT, dtype=DType.BFLOAT16, rank=512, batch=DECODES),
        lambda: trtllm_mla_emulator.emulated(NEW),
    ),
    "TORCH_REF_SPARSE_MLA": (SPARSE, nullcontext),
    "SPARSE_MLA": (SPARSE, nullcontext),
}


def trial_of(name: str, case: AnyCase) -> Trial:
    kind: Any = DenseTrial if isinstance(case, Case) else LatentTrial
    member = AttentionBackendEnum[name]
    # Emulated calls compute on the CPU.
    device = None if "flashinfer" in member.row.requires else device_for(member)
    trial: Trial = kind(member.get_class(), case, device or torch.device("cpu"))
    trial.write()
    return trial


def problems(
    trial: Trial, batch: CommonAttentionMetadata | None = None, **settings: Any
) -> dict[str, Any]:
    """All findings about the results of a step that was built with these settings."""
    record = trial.builder(trial.config.replace(**settings)).build(0, batch or trial.inputs.batch)
    results = trial.attend(record, trial.inputs, trial.cache())
    result = CaseResult()
    trial.judge(results, record, result)
    assert result.checked
    return result.findings


def known(trial: Trial) -> CommonAttentionMetadata:
    """The step's batch with exact lengths on the host."""
    batch = trial.inputs.batch
    lens = batch.seq_lens.cpu()
    return batch.replace(max_seq_len=int(lens.max()), seq_lens_cpu_upper_bound=lens)


@pytest.mark.parametrize("name", SERVED)
def test_a_row_of_the_longest_sequence_sees_all_of_it(name: str) -> None:
    case, calls = SERVED[name]
    with calls():
        trial = trial_of(name, case)
        batch = known(trial)
        assert problems(trial, batch, max_model_len=130) == {}
        with pytest.raises(ValueError, match=r"\(130\) exceeds max_model_len \(129\)"):
            problems(trial, batch, max_model_len=129)


@pytest.mark.parametrize("name", [name for name in SERVED if not name.startswith("FLASHINFER")])
@pytest.mark.parametrize("has_lengths", [True, False])
def test_a_bound_that_runs_ahead_changes_no_value(name: str, has_lengths: bool) -> None:
    case, calls = SERVED[name]
    with calls():
        trial = trial_of(name, case)
        batch = trial.inputs.batch
        bound = torch.full_like(batch.seq_lens, 999).cpu() if has_lengths else None
        ahead = batch.replace(max_seq_len=999, seq_lens_cpu_upper_bound=bound)
        limits = {"max_model_len": 130, "exact_host_lengths": False}
        assert problems(trial, ahead, **limits) == {}


def test_a_decode_beyond_the_model_s_length_is_refused_and_else_right() -> None:
    spec = BatchSpec("beyond", (1, 7), (515, 515))
    trial = trial_of("TRITON_ATTN", replace(DENSE, batch=spec, heads=Heads(4, 1, 64)))
    batch = known(trial)
    with pytest.raises(
        ValueError, match=r"seq_lens_cpu_upper_bound\[0\] \(515\) exceeds max_model_len \(512\)"
    ):
        problems(trial, batch, max_model_len=512)
    assert problems(trial, batch, max_model_len=515) == {}


CROSS = Case(
    feature=FEATURES["cross"],
    batch=BatchSpec("long_encoder", (1,), (3,), (33_000,)),
    heads=Heads(1, 1, 32),
    dtype=DType.FLOAT16,
)


@pytest.mark.parametrize("name", ["TRITON_ATTN", "TORCH_REF"])
def test_one_query_sees_all_of_a_long_encoder(name: str) -> None:
    trial = trial_of(name, CROSS)
    short = {"max_model_len": 448}
    assert problems(trial, max_encoder_len=33_000, **short) == {}
    message = r"encoder_seq_lens_cpu\[0\] \(33000\) exceeds max_encoder_len \(32999\)"
    with pytest.raises(ValueError, match=message):
        problems(trial, max_encoder_len=32_999, **short)
    with pytest.raises(ValueError, match=r"\(33000\) exceeds max_encoder_len \(448\)"):
        problems(trial, **short)


@pytest.mark.parametrize("name", ["TRITON_ATTN", "TORCH_REF"])
def test_an_encoder_may_be_longer_than_the_model(name: str) -> None:
    spec = BatchSpec("encoders", (1, 1, 20), (3, 9, 20), (130, 17, 130))
    trial = trial_of(name, replace(CROSS, batch=spec))
    assert problems(trial, max_model_len=20, max_encoder_len=130) == {}
    batch = trial.inputs.batch
    assert np.array_equal(batch.encoder_seq_lens_cpu, [130, 17, 130])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\(130\) exceeds max_encoder_len \(129\)"):
        problems(trial, max_model_len=20, max_encoder_len=129)
