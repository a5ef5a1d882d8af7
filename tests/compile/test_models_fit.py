"""What the bundled models launch fits every NVIDIA GPU that ``attn explain`` knows.

Shared memory is a property of the compute capability: GPUs of one kind differ in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specs.devices import KNOWN_DEVICES
from specs.hf_config import bundled_model_names
from tests.compile.model_calls import MAJORS, Compiled
from tests.compile.variants import DEVICES

ROOT = Path(__file__).resolve().parents[2]
CAPABILITIES = sorted(DEVICES)


def compiled_for(major: int, cache: Path) -> list[Compiled]:
    """In a process of its own, without the interpreter."""
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "tests.compile.model_calls", "--major", str(major)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [Compiled(**one) for one in json.loads(done.stdout.splitlines()[-1])]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Compiled]]:
    """By major compute capability."""
    # Made one after another: pytest links to the latest, which two threads undo for each other.
    caches = [tmp_path_factory.mktemp("triton") for _ in MAJORS]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(MAJORS, pool.map(compiled_for, MAJORS, caches), strict=True))


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_what_models_launch_compiles_and_fits(
    compiled: dict[int, list[Compiled]], capability: int
) -> None:
    room = DEVICES[capability].facts.shared_memory
    launched = [one for one in compiled[capability // 10] if capability in one.capabilities]
    assert [one for one in launched if one.error] == []
    assert [one for one in launched if one.shared > room] == []
    of = {
        name
        for one in launched
        for models in one.of
        for name in models.split(" on ")[0].split(", ")
    }
    assert of == set(bundled_model_names())


def test_each_known_gpu_has_its_capability_among_them() -> None:
    known = {
        device.compute_capability.to_int()
        for device in KNOWN_DEVICES.values()
        if device.compute_capability is not None
    }
    assert known == set(DEVICES)


def test_a_gpu_of_99_kib_is_given_smaller_tiles_than_another_of_its_kind(
    compiled: dict[int, list[Compiled]],
) -> None:
    """Some tiles of 8.0 do not fit a GPU of 8.6, which is of the same kind."""
    room = DEVICES[86].facts.shared_memory
    large = [one for one in compiled[8] if one.shared > room]
    assert {one.kernel for one in large} >= {"prefill_kernel", "mla_decode_kernel"}
    assert all(set(one.capabilities) == {80, 87} for one in large)
