"""Test files in the order in which they are started.

Every file runs in one process from its first test to its last. Where a long one starts last, the
other processes wait for it.
"""

from __future__ import annotations

from typing import Final

HEAVIEST: Final = (
    "tests/compile/test_models_fit.py",
    "tests/compile/test_compile.py",
    "tests/dense/test_hopper.py",
    "tests/cli/test_run.py",
    "tests/compile/test_sparse_compile.py",
    "tests/conformance/test_conformance.py",
    "tests/docs/test_docs.py",
    "tests/vendor/test_flashinfer_mla.py",
    "tests/compile/test_step_compile.py",
    "tests/splitkv/test_split_kernel.py",
    "tests/splitkv/test_split_kv.py",
    "tests/latent/test_mla_decode.py",
    "tests/dense/test_tile_borders.py",
    "tests/docs/test_examples.py",
)
"""Files that take half a minute or more, the longest first; all other files follow by name."""


def place_of(path: str) -> int:
    """Where a file comes: by its weight, and behind all of these where it is a light one.

    Args:
        path: from the root of the repository.
    """
    return HEAVIEST.index(path) if path in HEAVIEST else len(HEAVIEST)
