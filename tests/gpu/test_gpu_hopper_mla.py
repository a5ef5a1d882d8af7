"""The Hopper latent kernels on a GPU: every case that they serve, graphs, repeated launches."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from attn.backends.triton_mla import TritonMLABackend
from attn.device import detect_device
from attn.testing.batches import BatchSpec, Layer
from attn.testing.cases import LatentCase, cases_for
from attn.testing.conformance import check_case
from attn.testing.latent_trial import LatentTrial
from attn.testing.trial import CaseResult, Trial
from specs.attention import AttentionType
from specs.devices import DeviceKind, kind_of
from specs.dtypes import CacheDType, DType
from specs.engine import DecodeKernel, EngineConfig, Kernels, SpeculativeConfig
from specs.kv_cache import MLAAttentionSpec
from tests.conformance.test_random_attention import LARGE, SEED, batch_specs
from tests.dense.hopper_cases import is_latent_served
from tests.gpu import test_gpu_triton_attn as gpu
from tests.gpu.test_gpu_triton_attn import BLOCK, DEVICE, Results, Setup

HERE = detect_device().compute_capability
CACHES = (CacheDType.AUTO, CacheDType.FP8_E4M3)
CASES = [
    case
    for case in cases_for(TritonMLABackend)
    if isinstance(case, LatentCase) and is_latent_served(case)
]
LONG_CASES = [
    LatentCase(
        BatchSpec("latent_long", (2, 1, 3, 1), (1100, 9000, 4097, 20), num_speculative_tokens=2),
        heads,
        DType.BFLOAT16,
        cache_dtype,
        block_size=block_size,
    )
    for heads, block_size, cache_dtype in product((1, 16, 64, 128), (16, 48, 64, 128), CACHES)
]
"""Rows of many segments."""
SHORT_CASES = [
    LatentCase(
        BatchSpec("latent_short", (1, 1, 1, 1, 0), (1, 300, 70, 2000, 0)),
        heads,
        DType.BFLOAT16,
        cache_dtype,
    )
    for heads, cache_dtype in product((3, 7, 12, 20, 24, 40, 48, 96), CACHES)
]
"""Decodes of any number of heads."""
PLAIN = Setup(heads=16, num_blocks=2048, decode_kernel=DecodeKernel.HOPPER)
"""A setup of latent layers: its KV heads and head size are not used."""
E4M3 = replace(PLAIN, cache_dtype=CacheDType.FP8_E4M3)


def rounds_queries(case: LatentCase) -> bool:
    """Whether the wide kernel takes a case's decodes over e4m3."""
    rows = case.num_heads * (1 + (case.batch.num_speculative_tokens or 0))
    is_wide = rows > 32 and case.dtype is DType.BFLOAT16
    return is_wide and case.cache_dtype is CacheDType.FP8_E4M3


KINDS = {
    "few": (replace(PLAIN, speculative=None), 1),
    "decode": (PLAIN, 1),
    "long": (replace(PLAIN, speculative=None, max_len=1 << 20), 1),
    "verify": (PLAIN, 4),
    "fp16": (replace(PLAIN, dtype=DType.FLOAT16), 2),
    "one_head": (replace(PLAIN, heads=1), 4),
    "h20": (replace(PLAIN, heads=20), 4),
    "h64": (replace(PLAIN, heads=64), 1),
    "h128": (replace(PLAIN, heads=128), 1),
    "h128_verify": (replace(PLAIN, heads=128, speculative=1), 2),
    "wide": (replace(PLAIN, heads=4, speculative=15, max_tokens=2048), 16),
    "e4m3": (E4M3, 1),
    "e4m3_long": (replace(E4M3, speculative=None, max_len=1 << 20), 1),
    "e4m3_verify": (E4M3, 4),
    "e4m3_fp16_h20": (replace(E4M3, dtype=DType.FLOAT16, heads=20), 2),
    "e4m3_h64": (replace(E4M3, heads=64), 1),
    "e4m3_h128": (replace(E4M3, heads=128), 1),
    "e4m3_h128_verify": (replace(E4M3, heads=128, speculative=1), 2),
    "e4m3_rounded": (replace(E4M3, heads=128, speculative=1, fp8_mla_queries=True), 2),
}
INVARIANT = [
    kind
    for kind, (setup, _) in KINDS.items()
    if setup.heads * (1 + (setup.speculative or 0)) <= (32 if kind.startswith("e4m3") else 16)
]
"""The kinds in which a row's cuts depend on that row alone; in the others the batch decides."""
STEPS: dict[str, Any] = {
    "uniform_decode": lambda rows, tokens: [1] * rows,
    "all_padding": lambda rows, tokens: [0] * rows,
    "ragged_verify": gpu.STEPS["ragged_verify"],
}
RANDOM_SHARDS = 6

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        HERE is None or kind_of(HERE) is not DeviceKind.SM90, reason="needs a Hopper GPU"
    ),
]


class LatentServing(gpu.Serving):
    """Runs TRITON_MLA's decodes over a cache with a latent row in every slot."""

    def __init__(self, setup: Setup, seed: int = 0) -> None:
        self.setup = setup
        self.generator = torch.Generator(DEVICE).manual_seed(seed)
        self.spec = MLAAttentionSpec(
            block_size=BLOCK,
            dtype=setup.dtype,
            cache_dtype=setup.cache_dtype,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
        )
        drafts = setup.speculative
        self.config = EngineConfig(
            max_model_len=setup.max_len,
            max_num_seqs=setup.max_seqs,
            max_num_batched_tokens=setup.max_tokens,
            num_heads=setup.heads,
            speculative=SpeculativeConfig(num_speculative_tokens=drafts) if drafts else None,
            kernels=Kernels.own(decode=setup.decode_kernel),
            fp8_mla_queries=setup.fp8_mla_queries,
        )
        one = torch.ones((), device=DEVICE)
        scale = one / 32 if setup.cache_dtype.is_quantized else one
        self.layer = Layer(scale, scale, one)
        self.impl = TritonMLABackend.get_impl_cls()(
            setup.heads,
            576,
            192**-0.5,
            1,
            None,
            None,
            setup.cache_dtype.value,
            None,
            AttentionType.DECODER.value,
            None,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            qk_head_dim=192,
            v_head_dim=128,
            kv_b_proj=None,
        )
        self.cache = self.spec.layout().allocate(setup.num_blocks, DEVICE)
        self.write(torch.arange(setup.num_blocks * BLOCK, device=DEVICE))

    def rows(self, count: int) -> tuple[Tensor, Tensor]:
        return self.normal(count, 512), self.normal(count, 64)

    def queries(self, count: int) -> Tensor:
        return self.normal(count, self.setup.heads, 576) * 2

    def write(self, slots: Tensor, rows: tuple[Tensor, Tensor] | None = None) -> None:
        latent, rope = rows or self.rows(len(slots))
        dtype, scale = self.setup.cache_dtype.value, self.layer._k_scale
        self.impl.do_kv_cache_update(latent, rope, self.cache, slots, dtype, scale)

    def builder(self) -> Any:
        builder = TritonMLABackend.get_builder_cls()(self.spec, ["layers.0"], self.config, DEVICE)
        build = builder.build

        def with_split(*given: Any, **named: Any) -> Any:
            record: Any = build(*given, **named)
            record.split = record.decode.split
            return record

        builder.build = with_split  # type: ignore[method-assign]
        return builder

    def forward(self, record: Any, query: Tensor, output: Tensor | None = None) -> Results:
        found, lse = self.impl.forward_mqa(query, self.cache, record, self.layer)
        assert lse is not None
        return found, lse


@pytest.fixture(autouse=True)
def _asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, "decode_kernel", DecodeKernel.HOPPER)
    monkeypatch.setattr(gpu, "Serving", LatentServing)
    monkeypatch.setattr(gpu, "STEPS", STEPS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case_that_it_serves_is_right(case: LatentCase) -> None:
    check_case(TritonMLABackend, case, DEVICE)


@pytest.mark.parametrize(
    "case", [case for case in (*CASES, *SHORT_CASES) if rounds_queries(case)], ids=str
)
def test_queries_may_be_rounded_to_e4m3(case: LatentCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, "fp8_mla_queries", True)
    check_case(TritonMLABackend, case, DEVICE)


@pytest.mark.parametrize("case", [case for case in LONG_CASES if rounds_queries(case)], ids=str)
def test_queries_may_be_rounded_over_many_tiles(
    case: LatentCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trial, "fp8_mla_queries", True)
    check_case(TritonMLABackend, case, DEVICE)


@pytest.mark.parametrize("case", LONG_CASES, ids=str)
def test_rows_of_many_segments_are_right(case: LatentCase) -> None:
    check_case(TritonMLABackend, case, DEVICE)


@pytest.mark.parametrize("case", SHORT_CASES, ids=str)
def test_decodes_of_every_number_of_heads_are_right(case: LatentCase) -> None:
    check_case(TritonMLABackend, case, DEVICE)


@pytest.mark.parametrize("shard", range(RANDOM_SHARDS))
def test_300_random_steps_of_random_layers_are_right(shard: int) -> None:
    dice = random.Random(SEED + shard)
    cases = [
        LatentCase(
            num_heads=dice.choice((1, 3, 5, 8, 16, 20, 32, 40, 64, 96, 128)),
            dtype=dice.choice((DType.BFLOAT16, DType.FLOAT16)),
            cache_dtype=dice.choice((CacheDType.AUTO, CacheDType.FP8_E4M3)),
            block_size=dice.choice((16, 32, 48, 64, 128, 528)),
        )
        for _ in range(4)
    ]

    @seed(SEED + 1_000_003 * shard)
    @settings(
        max_examples=300 // RANDOM_SHARDS,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        case = replace(
            data.draw(st.sampled_from(cases)),
            batch=data.draw(batch_specs(AttentionType.DECODER, replace(LARGE, decode_kv=9000))),
            padded_pages=data.draw(st.booleans()),
            fused_projection=data.draw(st.booleans()),
        )
        trial = LatentTrial(TritonMLABackend, case, DEVICE)
        trial.write()
        record = trial.build(trial.builder())
        results = trial.attend(record, trial.inputs, trial.cache())
        result = CaseResult()
        trial.judge(results, record, result)
        trial.check_padding(results, result)
        assert result.findings == {}, str(case)

    run()


@pytest.mark.parametrize("kind", INVARIANT)
def test_120_launches_among_other_neighbours_give_the_same_bits(kind: str) -> None:
    setup, query_len = KINDS[kind]
    gpu.check_launches(setup, query_len, launches=120, rows=48)


@pytest.mark.parametrize("shape", gpu.SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_120_launches_of_a_batch_give_the_same_bits(kind: str, shape: str) -> None:
    setup, query_len = KINDS[kind]
    gpu.check_repeats(LatentServing(setup), query_len, shape)


@pytest.mark.parametrize("kind", INVARIANT)
def test_a_row_has_one_result_alone_amid_255_others_and_in_a_verify(kind: str) -> None:
    setup, _ = KINDS[kind]
    verify = min(1 + (setup.speculative or 0), 4)
    gpu.check_alone(setup, rows=256, verify=verify)


@pytest.mark.parametrize("kind", ["few", "decode", "h20", "h128", "e4m3"])
def test_a_graph_of_decodes_replays_every_kind_of_step(kind: str) -> None:
    gpu.check_replays(KINDS[kind][0], rows=64, tokens=256, replays=1000)


@pytest.mark.parametrize("kind", ["few", "decode", "verify", "h128", "e4m3"])
def test_launches_that_are_interrupted_give_the_same_bits(kind: str) -> None:
    gpu.check_interrupted(*KINDS[kind], rows=48)
