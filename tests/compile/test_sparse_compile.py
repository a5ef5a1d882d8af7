"""Sparse latent attention and its indexer compiled for GPUs that are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.compile.compile_matrix import Facts, limit_of

ROOT = Path(__file__).resolve().parents[2]
TARGETS = (90, 80, 86, 100, 120)


def facts_on(target: int, cache: Path) -> dict[str, Facts]:
    """In a process of its own, without the interpreter."""
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_DUMP_PTXAS_LOG": "1",
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "tests.compile.sparse_variants"]
    done = subprocess.run(
        [*command, "--target", str(target), "--set", "tested"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: Facts(**facts) for name, facts in found.items()}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Facts]]:
    # Made one after another: pytest links to the latest, which two threads undo for each other.
    caches = [tmp_path_factory.mktemp("triton") for _ in TARGETS]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(TARGETS, pool.map(facts_on, TARGETS, caches), strict=True))


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
            # 4 steps of the rotary part, 32 of the latent, 4 x 2 of the values; where every group
            # computes all scores there are twice as many of the first.
            assert 0 < facts.warp_group_products <= 48, name
            assert facts.asynchronous_copies > 0, name
        if "logits" in name:
            assert facts.warp_group_products > 0, name
        if "logits" in name and "hopper" not in name:
            assert facts.asynchronous_copies > 0, name


def test_keys_of_logits_stay_in_registers(compiled: dict[int, dict[str, Facts]]) -> None:
    """Of the kernel for Hopper, four of whose programs fit a multiprocessor; queries are shared."""
    facts = compiled[90]["paged logits e4m3 hopper"]
    assert facts.warp_group_products == 8
    assert facts.shared == 64 * 128 * 2
    assert facts.registers <= 128


def test_rows_are_copied_ahead(compiled: dict[int, dict[str, Facts]]) -> None:
    facts = compiled[90]["bf16 8 heads 4096 rows"]
    assert facts.asynchronous_copies > 0
    # Three steps of 32 rows, of which two are under way.
    assert facts.shared >= 2 * 32 * 1152
