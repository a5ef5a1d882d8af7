"""Engine settings that builders and the selector read."""

import pytest

from specs.base import SpecError, parse_spec
from specs.engine import (
    DecodeKernel,
    DenseKernels,
    EngineConfig,
    Kernels,
    LatentKernels,
    ParallelConfig,
    PrefillKernel,
    SparseKernels,
    SpeculativeConfig,
)
from specs.sparse_mla import SparseKernel


@pytest.mark.parametrize(
    ("speculative", "longest"),
    [
        (None, 1),
        (SpeculativeConfig(num_speculative_tokens=1), 2),
        (SpeculativeConfig(num_speculative_tokens=3), 4),
        (SpeculativeConfig(num_speculative_tokens=3, parallel_drafting=True), 7),
    ],
)
def test_the_longest_query_of_a_decode_row(
    speculative: SpeculativeConfig | None, longest: int
) -> None:
    config = EngineConfig(max_model_len=4096, speculative=speculative)
    assert config.max_decode_query_len == longest


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (4, 4), (5, 4)])
def test_a_dcp_rank_beyond_its_group_is_refused(rank: int, size: int) -> None:
    fields = {"decode_context_parallel_size": size, "decode_context_parallel_rank": rank}
    expected = rf"decode_context_parallel_rank must be below .*\({size}\), got {rank}"
    with pytest.raises(SpecError, match=expected):
        parse_spec(ParallelConfig, fields, "parallel")


def test_the_last_dcp_rank_is_allowed() -> None:
    config = ParallelConfig(decode_context_parallel_size=4, decode_context_parallel_rank=3)
    assert config.decode_context_parallel_rank == 3


def test_engine_settings_round_trip_through_json() -> None:
    config = EngineConfig(
        max_model_len=4096,
        cudagraph_capture_sizes=(1, 2, 4),
        parallel=ParallelConfig(tensor_parallel_size=8),
        speculative=SpeculativeConfig(num_speculative_tokens=2),
        batch_invariant=True,
        kernels=Kernels(sparse=SparseKernels(decode=SparseKernel.FLASHMLA_KV)),
    )
    assert EngineConfig.model_validate_json(config.model_dump_json()) == config


def test_one_choice_between_triton_and_hopper_is_made_for_all_families() -> None:
    plain, hopper = PrefillKernel.TRITON, DecodeKernel.HOPPER
    assert Kernels.own(plain, hopper) == Kernels(
        dense=DenseKernels(prefill=plain, decode=hopper),
        latent=LatentKernels(prefill=plain, decode=hopper),
        sparse=SparseKernels(own_prefill=plain, own_decode=hopper),
    )
    assert Kernels.own() == Kernels()


def test_a_kernel_that_there_is_not_is_refused_by_the_path_of_its_field() -> None:
    fields = {"max_model_len": 1, "kernels": {"latent": {"decode": "cutlass"}}}
    with pytest.raises(SpecError, match=r"engine: field 'kernels\.latent\.decode': .*'cutlass'"):
        parse_spec(EngineConfig, fields, "engine")


@pytest.mark.parametrize("name", ["max_model_len", "max_num_seqs", "max_num_batched_tokens"])
def test_limits_are_positive(name: str) -> None:
    fields = {"max_model_len": 1, name: 0}
    with pytest.raises(SpecError, match=f"engine: field '{name}': Input should be greater than 0"):
        parse_spec(EngineConfig, fields, "engine")
