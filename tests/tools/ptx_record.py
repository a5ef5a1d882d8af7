"""A record of the machine code of every kernel, to show that a change of the text changes none.

    python -m tests.tools.ptx_record write build/before.json
    python -m tests.tools.ptx_record write build/after.json --like build/before.json
    python -m tests.tools.ptx_record compare build/before.json build/after.json
    python -m tests.tools.ptx_record write build/decode.json --only "^decode_kernel$"

A record holds two hashes for each launch of :func:`launches`, Triton version and compute
capability: of Triton's own intermediate code with the compile options, and of the PTX. Locations,
comments and names of functions and values are left out of both. Equal intermediate code gives equal
PTX, and is made several times faster: ``--like`` takes the PTX hash of such launches from an older
record.

Compiles happen in processes of their own: the tests' own runs kernels in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

from builders.launch.call import KernelCall
from tests.compile import sparse_variants, step_variants
from tests.compile.compile_matrix import ROOT, VERSIONS, _Device, install
from tests.compile.variants import HOPPER_VARIANTS, MLA_VARIANTS, TARGETS, VARIANTS, call_of

ELSEWHERE: Final = ("3.7.1",)
"""Versions that compile for the other GPUs, where no kernel is written for one GPU alone."""
_DIGITS: Final = 16

Hashes = tuple[str, str]
"""Hash of the intermediate code and of the PTX; or the word ``error`` and what went wrong."""
Record = dict[str, dict[str, Hashes]]
"""Hashes by launch, by "version sm_target"."""


def launches(target: int) -> dict[str, Callable[[], KernelCall]]:
    """What makes each launch of each kernel for a compute capability, by a unique name."""
    variants = [*VARIANTS, *MLA_VARIANTS, *(HOPPER_VARIANTS if target == 90 else ())]
    found: dict[str, Callable[[], KernelCall]] = {
        variant.name: partial(call_of, variant, target) for variant in variants
    }
    made = {
        "sparse": sparse_variants.chosen(target) | sparse_variants.alternatives(target),
        "step": step_variants.step_calls(target),
    }
    for family, calls in made.items():
        found |= {f"{family} {name}": partial(_same, call) for name, call in calls.items()}
    return found


def _same(call: KernelCall) -> KernelCall:
    return call


# -- What is hashed.


def plain_ir(text: str) -> str:
    """MLIR without locations, its values and functions named by their order."""
    lines = [line for line in text.splitlines() if not line.startswith("#loc")]
    text = re.sub(r" loc\((?:[^()]|\([^()]*\))*\)", "", "\n".join(lines))
    return _renamed(text, r"[%@][\w$.-]+")


def plain_ptx(text: str) -> str:
    """PTX without comments and line numbers, its functions named by their order."""
    lines = [re.sub(r"//.*", "", line).strip() for line in text.splitlines()]
    text = "\n".join(line for line in lines if line and not line.startswith((".loc", ".file")))
    for name in re.findall(r"\.(?:entry|func) +(?:\([^)]*\) *)?([\w$]+)", text):
        text = re.sub(rf"\b{re.escape(name)}(?=\b|_param)", "function", text)
    return text


def _renamed(text: str, pattern: str) -> str:
    """Names that match become numbers, in the order in which they first stand."""
    names: dict[str, str] = {}
    return re.sub(
        pattern, lambda match: names.setdefault(match[0], f"{match[0][0]}{len(names)}"), text
    )


def digest(text: str) -> str:
    """A short hash."""
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


# -- In a process of its own.


class _CompiledError(Exception):
    """A compile is far enough; its argument is the text."""


def hashes_of(call: KernelCall, known: Mapping[str, str]) -> Hashes:
    """Compile one launch for the active device, up to its PTX.

    Args:
        call: the launch.
        known: PTX hashes by the hash of the intermediate code; a launch of one of them is not
            compiled any further.
    """
    from triton.backends.nvidia.compiler import CUDABackend

    add_stages, found = CUDABackend.add_stages, []

    def add(self: Any, stages: dict[str, Any], *given: Any, **named: Any) -> None:
        add_stages(self, stages, *given, **named)
        # A Triton kernel's first stage is ttir, a Gluon kernel's ttgir.
        first = next(iter(stages))
        lower, assemble = stages[first], stages["ptx"]

        def lowered(source: Any, metadata: Any) -> Any:
            module = lower(source, metadata)
            found.append(digest(f"{plain_ir(str(module))} {sorted(call.options.items())}"))
            if found[0] in known:
                raise _CompiledError(known[found[0]])
            return module

        def assembled(source: Any, metadata: Any) -> Any:
            raise _CompiledError(digest(plain_ptx(assemble(source, metadata))))

        stages[first], stages["ptx"] = lowered, assembled

    with mock.patch.object(CUDABackend, "add_stages", add):
        try:
            call.kernel.warmup(grid=call.grid, **call.arguments, **call.options)
        except _CompiledError as done:
            return found[0], done.args[0]
    raise RuntimeError("the kernel came from a cache")


def record_of(target: int, known: Mapping[str, str], only: str = "") -> dict[str, Hashes]:
    """Hashes of the launches whose kernel's name matches ``only``, in this process's Triton."""
    import triton

    triton.runtime.driver.set_active(_Device(target))
    found: dict[str, Hashes] = {}
    for name, make in launches(target).items():
        try:
            call = make()
            if re.search(only, call.kernel.fn.__name__):
                found[name] = hashes_of(call, known)
        except Exception as error:
            found[name] = "error", f"{type(error).__name__}: {error}".splitlines()[0][:160]
    return found


# -- From another process.


def columns() -> list[tuple[str, int]]:
    """Versions and compute capabilities of a whole record."""
    others = [(version, target) for version in ELSEWHERE for target in TARGETS if target != 90]
    return [*((version, 90) for version in VERSIONS), *others]


def title_of(version: str, target: int) -> str:
    """The name of a column of a record."""
    return f"{version} sm_{target}"


def column_of(
    version: str, target: int, folder: Path, older: Record, only: str = ""
) -> dict[str, Hashes]:
    """Hashes of the launches of one version for one compute capability.

    Args:
        version: of Triton.
        target: compute capability.
        folder: where versions that are not installed are kept.
        older: a record whose PTX hashes are taken over where the intermediate code is equal.
        only: a pattern of the names of kernels; all if empty.

    Raises:
        RuntimeError: the process failed; its last words are in the message.
    """
    known = dict(older.get(title_of(version, target), {}).values())
    triton = install(version, folder)
    with tempfile.TemporaryDirectory() as scratch:
        like = Path(scratch) / "known.json"
        like.write_text(json.dumps(known))
        paths = [triton, ROOT, os.environ.get("PYTHONPATH")]
        environment = os.environ | {
            "TRITON_INTERPRET": "0",
            "TRITON_CACHE_DIR": scratch,
            "TRITON_DISABLE_LINE_INFO": "1",
            "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path is not None),
        }
        command = [sys.executable, "-m", "tests.tools.ptx_record", "column", str(target), str(like)]
        command += ["--only", only]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    return {name: tuple(pair) for name, pair in json.loads(done.stdout.splitlines()[-1]).items()}


def differences(before: Record, after: Record) -> list[str]:
    """What differs between two records, a line each; of columns that both have."""
    lines = []
    for column in before.keys() & after.keys():
        old, new = before[column], after[column]
        lines += [f"{column} {name}: gone" for name in old.keys() - new.keys()]
        lines += [f"{column} {name}: new" for name in new.keys() - old.keys()]
        for name in old.keys() & new.keys():
            if "error" in (old[name][0], new[name][0]):
                lines.append(f"{column} {name}: {new[name]}, before {old[name]}")
            elif old[name][1] != new[name][1]:
                lines.append(f"{column} {name}: other PTX")
    return sorted(lines)


def read(path: Path) -> Record:
    """A record from its file."""
    columns = json.loads(path.read_text(encoding="utf-8"))
    return {
        column: {name: tuple(pair) for name, pair in found.items()}
        for column, found in columns.items()
    }


def main() -> int:
    """The command; 1 where two records differ."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write", help="compile, and write a record")
    write.add_argument("file", type=Path)
    write.add_argument("--like", type=Path, help="an older record, for equal intermediate code")
    write.add_argument("--columns", nargs="+", help='such as "3.6.0 sm_90"; all if left out')
    write.add_argument("--folder", type=Path, default=ROOT / "build", help="of Triton's versions")
    write.add_argument("--processes", type=int, default=2)
    write.add_argument("--only", default="", help="a pattern of the names of kernels")
    compare = commands.add_parser("compare", help="two records")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    column = commands.add_parser("column", help="compile by this process's Triton; prints JSON")
    column.add_argument("target", type=int, choices=TARGETS)
    column.add_argument("known", type=Path)
    column.add_argument("--only", default="")
    given = parser.parse_args()
    if given.command == "column":
        known = json.loads(given.known.read_text())
        print(json.dumps(record_of(given.target, known, given.only)))
        return 0
    if given.command == "compare":
        lines = differences(read(given.before), read(given.after))
        print("\n".join(lines) or "no difference")
        return 1 if lines else 0
    older = read(given.like) if given.like else {}
    wanted = [one for one in columns() if not given.columns or title_of(*one) in given.columns]
    with ThreadPoolExecutor(given.processes) as pool:
        found = pool.map(lambda one: column_of(*one, given.folder, older, given.only), wanted)
        record = {title_of(*one): made for one, made in zip(wanted, found, strict=True)}
    given.file.parent.mkdir(parents=True, exist_ok=True)
    given.file.write_text(json.dumps(record, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    for title, made in record.items():
        errors = [f"{name}: {pair[1]}" for name, pair in made.items() if pair[0] == "error"]
        print(f"{title}: {len(made)} launches", *errors, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
