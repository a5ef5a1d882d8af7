"""The small kernels of steps compile for GPUs that are not there; what they write is tested with
their launchers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.compile.compile_matrix import ByTarget, facts_printed_by, limit_of, side_by_side
from tests.compile.variants import TARGETS

COPIES = (
    *("clear_kernel", "clear_tails_kernel", "pack_query_kernel", "unpack_state_kernel"),
    *("rope_quantize_kernel", "quantize_rows_kernel", "expand_kernel"),
)
TABLES = (
    *("page_list_kernel", "phase_tables_kernel", "dequantised_pages_kernel"),
    *("sparse_rows_kernel", "context_slots_kernel", "latent_table_kernel"),
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ByTarget:
    def compiled_for(targets: Sequence[int], cache: Path) -> ByTarget:
        return facts_printed_by("step_variants", ["--target", *targets], cache)

    return side_by_side(compiled_for, tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("target", TARGETS)
def test_every_launch_compiles_and_fits(compiled: ByTarget, target: int) -> None:
    assert {name.split()[0] for name in compiled[target]} == {*COPIES, *TABLES}
    for name, facts in compiled[target].items():
        assert facts.error == "", name
        assert facts.registers > 0, name
        assert facts.spills == 0, name
        assert facts.shared <= limit_of(target), name


@pytest.mark.parametrize("kernel", TABLES)
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_that_write_tables_need_little_shared_memory(
    compiled: ByTarget, kernel: str, target: int
) -> None:
    own = {name: facts for name, facts in compiled[target].items() if name.split()[0] == kernel}
    assert own
    for name, facts in own.items():
        # Sums over the requests go through shared memory, and little else does.
        assert facts.shared <= 16 << 10, name
