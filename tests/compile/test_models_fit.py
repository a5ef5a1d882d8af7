"""The launches of the bundled models fit every NVIDIA GPU that ``attn explain`` knows.

Shared memory depends on the compute capability: GPUs of one kind differ in it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest

from specs.devices import KNOWN_DEVICES
from specs.hf_config import bundled_model_names
from tests.compile.compile_matrix import printed_by
from tests.compile.model_calls import MAJORS, Compiled
from tests.compile.variants import DEVICES

CAPABILITIES = sorted(DEVICES)
PROCESSES = ((8,), (9, 10, 12))
"""Major compute capabilities of the processes that compile side by side."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Compiled]]:
    """Compiled sizes, by major compute capability."""
    folder = tmp_path_factory.mktemp("triton")

    def compiled_for(majors: tuple[int, ...]) -> dict[int, list[Compiled]]:
        cache = folder / "-".join(map(str, majors))
        found = printed_by("model_calls", ["--major", *majors], cache)
        return {int(major): [Compiled(**one) for one in all_] for major, all_ in found.items()}

    with ThreadPoolExecutor(len(PROCESSES)) as pool:
        parts = pool.map(compiled_for, PROCESSES)
        return {major: one for part in parts for major, one in part.items()}


def test_every_major_capability_is_compiled_for() -> None:
    assert tuple(chain(*PROCESSES)) == MAJORS


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
    """Some tiles for 8.0 do not fit a GPU of 8.6, which is of the same kind."""
    room = DEVICES[86].facts.shared_memory
    large = [one for one in compiled[8] if one.shared > room]
    assert {one.kernel for one in large} >= {"prefill_kernel", "mla_decode_kernel"}
    assert all(set(one.capabilities) == {80, 87} for one in large)
