"""Kernels of dense layers with batch invariance, compiled for a Hopper GPU that is not there.

Nothing here can multiply as the GPU does. What can be seen is that no compiler merges a product and
a sum of the softmax into one fma in one kernel and not in the other.
"""

from __future__ import annotations

import pytest

from tests.compile.compile_matrix import Facts, facts_of, misses_of
from tests.compile.variants import INVARIANT_VARIANTS, Variant


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    cache = tmp_path_factory.mktemp("triton")
    return facts_of([90], tested_only=True, cache=cache, of=["invariant"])[90]


@pytest.mark.parametrize(
    "variant", [pytest.param(one, id=one.name) for one in INVARIANT_VARIANTS if one.tested]
)
def test_all_kernels_round_as_often(compiled: dict[str, Facts], variant: Variant) -> None:
    assert misses_of(variant, 90, compiled[variant.name]) == []
