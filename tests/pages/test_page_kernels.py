"""The kernels that write page tables and lists compile for every GPU; what they write is tested
with their launchers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TARGETS = (80, 90, 100, 120)
CODE = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from builders.pages import device as kernels

TARGETS = {targets}
SIZES = {{"PAGE_SIZE": 16, "REQS": 256, "TILE": 256}}
VARIANTS = {{
    "page_table_kernel": [SIZES | {{"PAGES_PER_BLOCK": 2}}],
    "page_list_kernel": [
        SIZES,
        SIZES | {{"skipped_ptr": None}},
        SIZES | {{"skipped_ptr": None, "query_start_ptr": None, "places_ptr": None}},
    ],
    "phase_tables_kernel": [SIZES | {{"WINDOW": False}}, SIZES | {{"WINDOW": True}}],
    "widened_pages_kernel": [SIZES | {{"WINDOW": False}}, SIZES | {{"WINDOW": True}}],
    "sparse_rows_kernel": [{{"STEPS": 9, "TILE": 256}}],
    "context_slots_kernel": [{{"PAGE_SIZE": 64, "STEPS": 9, "TILE": 256}}],
}}
found = []
for name, variants in VARIANTS.items():
    kernel = getattr(kernels, name)
    for constants in variants:
        signature = {{}}
        for argument in kernel.arg_names:
            type_ = "*i32" if argument.endswith("_ptr") else "i32"
            type_ = "i64" if argument == "table_stride" else type_
            signature[argument] = "constexpr" if argument in constants else type_
        for target in TARGETS:
            source = ASTSource(kernel, signature, constexprs=constants)
            made = triton.compile(source, target=GPUTarget("cuda", target, 32))
            found.append([name, target, made.metadata.shared, len(made.asm["cubin"])])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, int, int, int]]:
    """Kernel, target, bytes of shared memory, bytes of code, by a process that compiles."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
    }
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(targets=TARGETS)],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(row) for row in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.parametrize(
    "kernel",
    [
        *("page_table_kernel", "page_list_kernel", "phase_tables_kernel"),
        *("sparse_rows_kernel", "context_slots_kernel"),
    ],
)
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_and_fits(
    compiled: list[tuple[str, int, int, int]], kernel: str, target: int
) -> None:
    own = [row for row in compiled if row[:2] == (kernel, target)]
    assert own
    for _, _, shared, code in own:
        # Sums over the requests go through shared memory, and little else.
        assert shared <= 16 << 10
        assert code > 0
