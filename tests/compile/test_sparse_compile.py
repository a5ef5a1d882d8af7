"""Sparse latent attention and its indexer compiled for GPUs that are not there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.compile.compile_matrix import (
    ByTarget,
    Facts,
    facts_printed_by,
    limit_of,
    side_by_side,
)
from tests.compile.variants import TARGETS


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ByTarget:
    def compiled_for(targets: Sequence[int], cache: Path) -> ByTarget:
        given = ["--set", "tested", "--target", *targets]
        return facts_printed_by("sparse_variants", given, cache)

    return side_by_side(compiled_for, tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("target", TARGETS)
def test_launches_compile_and_fit(compiled: dict[int, dict[str, Facts]], target: int) -> None:
    for name, facts in compiled[target].items():
        assert facts.error == "", name
        assert facts.shared <= limit_of(target), name
        assert facts.packed_additions == 0, name
        assert facts.idle_barriers == 0, name
        assert not facts.serialized, name
        assert facts.overwritten == 0, name


def test_nothing_spills_on_hopper(compiled: dict[int, dict[str, Facts]]) -> None:
    assert {name: facts.spills for name, facts in compiled[90].items() if facts.spills} == {}


def test_many_heads_are_multiplied_by_warp_group_once(
    compiled: dict[int, dict[str, Facts]],
) -> None:
    for name, facts in compiled[90].items():
        if "128 heads" in name and "fold" not in name:
            # There are 4 steps of the rotary part, 32 of the latent part and 4 x 2 of the values.
            # If every group computed all scores, there would be twice as many of the first.
            assert 0 < facts.warp_group_products <= 48, name
            assert facts.asynchronous_copies > 0, name
        if "logits" in name:
            assert facts.warp_group_products > 0, name
        if "logits" in name and "hopper" not in name:
            assert facts.asynchronous_copies > 0, name


def test_pages_of_logits_are_copied_ahead(compiled: dict[int, dict[str, Facts]]) -> None:
    """Shared memory has queries and four pages; five programs fit."""
    facts = compiled[90]["paged logits e4m3 hopper"]
    assert facts.warp_group_products == 4
    # Four copies bring queries. Four bring keys and one brings scales, for each of three pages
    # ahead of the loop and for a page in it.
    assert facts.asynchronous_copies == 4 + 4 * 5
    assert facts.shared == 64 * 128 + 4 * 64 * 132
    assert 5 * (facts.shared + 1024) <= limit_of(90) + 1024
    assert facts.registers <= 96


def test_rows_are_copied_ahead(compiled: dict[int, dict[str, Facts]]) -> None:
    facts = compiled[90]["bf16 8 heads 4096 rows"]
    assert facts.asynchronous_copies > 0
    # Three steps of 32 rows are held, and two of them are in flight.
    assert facts.shared >= 2 * 32 * 1152
