"""Results of earlier compiles: ``make test`` compiles a launch only if it has changed since.

    python -m tests.compile.record           # compiles changed launches, and writes record.json
    python -m tests.compile.record --anew    # compiles everything that make test compiles

A compile depends on the kernel, all that it calls, the launch, the target and Triton's own build.
Triton's hash names all of these, and ``record.json`` has the facts of each by that hash. A launch
whose hash is not there is compiled. So a record that is old costs time, and hides nothing. It is
not used at all where the code that reads facts has changed.

Every day another part of the record is compiled again all the same, and has to be equal.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from unittest import mock

ROOT: Final = Path(__file__).resolve().parents[2]
PATH: Final = Path(__file__).with_name("record.json")
FOLDER: Final = "ATTN_COMPILE_RECORD"
"""Environment variable: a folder for the facts of all compiles of this process."""
READERS: Final = (
    "compile/compile_matrix.py",
    "compile/model_calls.py",
    "compile/product_order.py",
    "tools/sass.py",
)
"""Files of ``tests`` that read facts from what was compiled."""
TESTS: Final = (
    "tests/compile/test_compile.py",
    "tests/compile/test_invariant_compile.py",
    "tests/compile/test_models_fit.py",
    "tests/compile/test_product_order.py",
    "tests/compile/test_sparse_compile.py",
    "tests/compile/test_step_compile.py",
    "tests/dense/test_hopper.py",
)
"""Test files that compile."""
PARTS: Final = 20
"""Days until the whole record has been compiled again."""


class RecordedError(Exception):
    """Ends a compile whose facts are known.

    Args:
        facts: the facts.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        super().__init__(facts)
        self.facts = facts


def readers_hash() -> str:
    """Hash of the code that reads facts."""
    texts = [(ROOT / "tests" / name).read_bytes() for name in READERS]
    return hashlib.sha256(b"".join(texts)).hexdigest()


def is_of_day(key: str, day: int) -> bool:
    """Whether a launch is compiled on a day though its facts are known.

    Args:
        key: Triton's hash of the launch.
        day: number of the day, from any first day.
    """
    return int(key[:8], 16) % PARTS == day % PARTS


class Record:
    """Facts by Triton's hash, and what else they depend on.

    Args:
        path: of the record; None uses none.
        day: number of the day; None takes today's.
    """

    def __init__(self, path: Path | None = PATH, day: int | None = None) -> None:
        self._path = path
        self._day = int(time.time() // 86400) if day is None else day
        self._made: dict[str, dict[str, Any]] = {}
        if FOLDER in os.environ:
            atexit.register(self._write, Path(os.environ[FOLDER]))

    @cached_property
    def known(self) -> Mapping[str, dict[str, Any]]:
        """The facts of the record, by their keys."""
        if self._path is None or not self._path.exists():
            return {}
        read = json.loads(self._path.read_text(encoding="utf-8"))
        facts: dict[str, dict[str, Any]] = read["facts"]
        return facts if read["readers"] == readers_hash() else {}

    @contextmanager
    def watching(self, kind: str) -> Iterator[None]:
        """Within, a compile whose facts are known ends before it begins.

        Args:
            kind: how facts are read.

        Raises:
            RecordedError: the facts are known.
        """
        from triton.compiler import compiler

        opened = compiler.get_cache_manager

        def manager_of(key: str) -> Any:
            facts = self.known.get(f"{kind} {key}")
            if facts is not None and not is_of_day(key, self._day):
                self._made[f"{kind} {key}"] = facts
                raise RecordedError(facts)
            return opened(key)

        with mock.patch.object(compiler, "get_cache_manager", manager_of):
            yield

    def note(self, kind: str, key: str, facts: dict[str, Any]) -> None:
        """Keep the facts of a compile.

        Args:
            kind: how facts are read.
            key: Triton's hash of the launch.
            facts: fields and values.

        Raises:
            ValueError: the record has other facts of the same compile.
        """
        name = f"{kind} {key}"
        known = self.known.get(name, facts)
        if known != facts:
            raise ValueError(f"the record says {known} of {name}, and it compiles to {facts}")
        self._made[name] = facts

    def _write(self, folder: Path) -> None:
        path = folder / f"{os.getpid()}-{id(self)}.json"
        path.write_text(json.dumps(self._made), encoding="utf-8")


def main() -> int:
    """Run the tests that compile, and write the record of all that they compile."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--anew", action="store_true", help="do not use the present record")
    if parser.parse_args().anew:
        PATH.unlink(missing_ok=True)
    facts: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "1", *TESTS]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {FOLDER: folder}, check=False)
        for path in Path(folder).glob("*.json"):
            facts |= json.loads(path.read_text(encoding="utf-8"))
    # A line for each, so that a change shows what it changed.
    lines = ",\n".join(f'"{name}": {json.dumps(facts[name])}' for name in sorted(facts))
    text = f'{{"readers": "{readers_hash()}", "facts": {{\n{lines}\n}}}}\n'
    PATH.write_text(text, encoding="utf-8")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
