"""Masks with windows, chunks, prefixes and ranges up to the end of 32 bits, and beyond it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from attn.backends.flashinfer import FlashInferBackend
from attn.backends.torch_ref import TorchRefBackend
from attn.backends.torch_ref_mla import TorchRefMLABackend
from attn.backends.triton_attn import TritonAttentionBackend
from attn.backends.triton_mla import TritonMLABackend
from attn.backends.trtllm_mha import TrtllmMhaBackend
from attn.testing.batches import BatchSpec, Heads
from attn.testing.cases import Case, Feature, LatentCase
from attn.testing.dense_trial import DenseTrial
from attn.testing.latent_trial import LatentTrial
from attn.testing.trial import CaseResult, Trial
from specs.attention import AttentionType
from specs.devices import KNOWN_DEVICES
from specs.dtypes import DType
from specs.positions import MOST_POSITIONS
from tests.emulators import flashinfer_emulator, trtllm_emulator

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTHS = (1, 2, 16, 17, 2**30 - 1, 2**30, 2**31 - 1, 2**31, 2**40)
"""Windows and chunk sizes: small numbers, and numbers around the limit of 32 bits."""
CHUNKS = (
    *((size, lookback) for size in LENGTHS for lookback in (0, 2**31 - 1)),
    *((1, 16), (2, 17), (16, 2**30 - 1), (17, 2**30), (16, 2), (2**27, 16), (2**30, 1)),
)
"""Pairs of a chunk size and a lookback."""
STEP = BatchSpec("mask_limits", (1, 3, 40, 20), (33, 40, 40, 51))
"""A step with requests of the split-KV and of the prefill kernel, with and without context."""
SHORT = BatchSpec("mask_limits", (33, 18), (33, 18))
"""A step of an encoder: its requests have no context."""
DENSE = (TritonAttentionBackend, TorchRefBackend)


@dataclass(frozen=True)
class Marked(Feature):
    """A feature with ranges and R-SWA prefixes of its own."""

    ranges: tuple[tuple[int, int], ...] = ()
    prefixes: tuple[int, ...] = ()
    """Prefixes of requests 0, 1 and so on."""

    def mm_ranges(self, kv_len: int) -> tuple[tuple[int, int], ...]:
        return self.ranges

    def rswa_prefix_len(self, row: int) -> int:
        return self.prefixes[row % len(self.prefixes)]


def findings(trial: Trial) -> dict[str, list[str]]:
    """The oracle's findings about one forward; empty if it is right."""
    trial.write()
    record = trial.build(trial.builder())
    result = CaseResult()
    trial.judge(trial.attend(record, trial.inputs, trial.cache()), record, result)
    return result.findings


def wrong(backend: type, features: Iterator[Feature]) -> dict[str, object]:
    """The findings by feature, for features that a backend computes wrongly."""
    found = {}
    for feature in features:
        batch = STEP if feature.attn_type.is_cached else SHORT
        case = Case(feature=feature, batch=batch, heads=Heads(2, 1, 32), dtype=DType.FLOAT32)
        found[feature.name] = findings(DenseTrial(backend, case, DEVICE))
    return {name: problems for name, problems in found.items() if problems}


@pytest.mark.parametrize("backend", DENSE)
@pytest.mark.parametrize("causal", [True, False, None])
def test_a_window_of_any_size_masks_as_it_says(backend: type, causal: bool | None) -> None:
    def features() -> Iterator[Feature]:
        for window in LENGTHS:
            yield Feature(f"window {window}", causal=causal, sliding_window=window)

    assert wrong(backend, features()) == {}


@pytest.mark.parametrize("backend", DENSE)
def test_an_encoders_window_of_any_size_masks_as_it_says(backend: type) -> None:
    def features() -> Iterator[Feature]:
        kind = AttentionType.ENCODER_ONLY
        for window in LENGTHS:
            yield Feature(f"window {window}", attn_type=kind, sliding_window=window)

    assert wrong(backend, features()) == {}


@pytest.mark.parametrize("backend", DENSE)
def test_chunks_and_lookbacks_of_any_size_mask_as_they_say(backend: type) -> None:
    def features() -> Iterator[Feature]:
        for size, back in CHUNKS:
            name = f"chunk {size}, {back} back"
            yield Feature(name, attention_chunk_size=size, chunk_lookback=back)
        for size in LENGTHS[3:]:
            name = f"window {size} as chunk"
            yield Feature(name, sliding_window=size, chunk_lookback=2, window_is_chunk=True)

    assert wrong(backend, features()) == {}


@pytest.mark.parametrize("backend", DENSE)
def test_ranges_may_end_anywhere(backend: type) -> None:
    ends = (30, 2**30 - 2, 2**30 - 1, 2**30, 2**31 - 1, 2**31, 2**40)

    def features() -> Iterator[Feature]:
        for end in ends:
            spans = (1, 9), (17, end), (end, end + 1)
            for clamps in (False, True):
                window = 6 if clamps else None
                yield Marked(
                    f"range to {end}, clamped {clamps}",
                    mm_prefix=True,
                    mm_clamp_window=clamps,
                    sliding_window=window,
                    ranges=spans,
                )
        for window in (2**30, 2**31 - 1):
            yield Marked(
                f"range and window {window}",
                mm_prefix=True,
                mm_clamp_window=True,
                sliding_window=window,
                ranges=((2, 2**31 - 1),),
            )

    assert wrong(backend, features()) == {}


@pytest.mark.parametrize("backend", DENSE)
def test_prefixes_of_rswa_may_be_longer_than_their_requests(backend: type) -> None:
    prefixes = (2**31 - 1, 0, 2**30, 50), (5, 2**31 - 1, 2**31 - 64, 17)

    def features() -> Iterator[Feature]:
        for lens in prefixes:
            for window in (1, 7, 2**30, 2**31 - 1, 2**40):
                yield Marked(f"{lens}, window {window}", rswa_window=window, prefixes=lens)

    assert wrong(backend, features()) == {}


@pytest.mark.parametrize("backend", [TritonMLABackend, TorchRefMLABackend])
def test_a_window_of_latent_attention_masks_as_it_says(backend: type) -> None:
    case = LatentCase(batch=STEP, dtype=DType.FLOAT32, num_heads=1, rank=64, rope_size=32)
    found = {
        window: findings(LatentTrial(backend, replace(case, sliding_window=window), DEVICE))
        for window in LENGTHS
    }
    assert {window: problems for window, problems in found.items() if problems} == {}


def test_a_window_over_flashinfer_masks_as_it_says_and_fits_its_integers() -> None:
    case = Case(batch=STEP, heads=Heads(2, 1, 64), dtype=DType.FLOAT16)
    for window in LENGTHS:
        feature = Feature(f"window {window}", sliding_window=window)
        with flashinfer_emulator.emulated(flashinfer_emulator.VERSIONS[0]):
            trial = DenseTrial(FlashInferBackend, replace(case, feature=feature), CPU)
            assert findings(trial) == {}, window
            assert trial.builder().sizes.sliding_window == min(window, MOST_POSITIONS)


@pytest.mark.parametrize("name", ["h200", "b200"])
def test_a_window_over_trtllm_masks_as_it_says_and_fits_its_integers(name: str) -> None:
    case = Case(batch=STEP, heads=Heads(2, 1, 64), dtype=DType.BFLOAT16)
    for window in LENGTHS:
        feature = Feature(f"window {window}", sliding_window=window)
        with trtllm_emulator.emulated(KNOWN_DEVICES[name], trtllm_emulator.NEW):
            trial = DenseTrial(TrtllmMhaBackend, replace(case, feature=feature), CPU)
            assert findings(trial) == {}, window
            cut = trial.builder().sliding_window, trial.impl.sliding_window
            assert cut == (min(window, MOST_POSITIONS),) * 2
