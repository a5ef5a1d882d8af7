"""Test files in the order in which they are started.

Every file runs in one process from its first test to its last. Where a long one starts last, the
other processes wait for it.
"""

from __future__ import annotations

from typing import Final

HEAVIEST: Final = (
    "tests/conformance/test_conformance.py",
    "tests/cli/test_run.py",
    "tests/latent/test_hopper_mla.py",
    "tests/test_mutations.py",
    "tests/splitkv/test_split_kernel.py",
    "tests/docs/test_examples.py",
    "tests/dense/test_invariance.py",
    "tests/dense/test_hopper_segmented.py",
    "tests/bench/test_bench_kernels.py",
    "tests/vendor/test_trtllm_mla.py",
    "tests/vendor/test_trtllm_mha.py",
    "tests/sparse/test_hopper_sparse.py",
    "tests/sparse/test_sparse_ranks.py",
    "tests/vendor/test_flashinfer_mla.py",
    "tests/compile/test_models_fit.py",
    "tests/docs/test_docs.py",
    "tests/outside/test_new_backend.py",
)
"""Files that take half a minute or more, the longest first; all other files follow by name."""


def place_of(path: str) -> int:
    """Where a file comes: by its weight, and behind all of these where it is a light one.

    Args:
        path: from the root of the repository.
    """
    return HEAVIEST.index(path) if path in HEAVIEST else len(HEAVIEST)
