"""Ahead-of-time compiles of every variant, for GPUs that are not there, by several Tritons.

    python -m tests.compile.compile_matrix             # all versions; writes the table
    python -m tests.compile.compile_matrix --target 90 # by the installed Triton; prints JSON

Compiles happen in a process of their own: the tests' own runs kernels in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from builders.latent.choice import NARROW_ROWS
from builders.launch.call import KernelCall
from builders.sparse.hopper_tiles import MOST_NARROW_HEADS
from specs.dtypes import CacheDType, DType
from tests.compile.record import Record, RecordedError
from tests.compile.variants import (
    DEVICES,
    HOPPER_VARIANTS,
    INVARIANT_VARIANTS,
    MLA_VARIANTS,
    TARGETS,
    VARIANTS,
    Kernel,
    Variant,
    call_of,
)
from tests.tools.llir import mergeable_exponents
from tests.tools.sass import overwritten_operands, undefined_reads

ROOT: Final = Path(__file__).resolve().parents[2]
RESULTS: Final = ROOT / "docs/benchmarks"
VERSIONS: Final = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
"""Versions of Triton that kernels are compiled by."""


@dataclass(frozen=True)
class Set:
    """Variants that are compiled together, and the purpose of that."""

    title: str
    table: Path
    variants: tuple[Variant, ...]
    targets: tuple[int, ...]


SETS: Final = {
    "triton_attn": Set(
        "TRITON_ATTN",
        RESULTS / "compile_triton_attn.md",
        VARIANTS,
        tuple(TARGETS),
    ),
    "triton_mla": Set(
        "TRITON_MLA",
        RESULTS / "compile_triton_mla.md",
        MLA_VARIANTS,
        tuple(TARGETS),
    ),
    "invariant": Set(
        "TRITON_ATTN with batch invariance",
        RESULTS / "compile_invariant.md",
        INVARIANT_VARIANTS,
        (90,),
    ),
    "hopper": Set(
        "TRITON_ATTN on Hopper, in Gluon",
        RESULTS / "compile_hopper.md",
        HOPPER_VARIANTS,
        (90,),
    ),
}

_HEAD: Final = """\
# {title}: ahead-of-time compiles

By `make test-compile`, without a GPU: variants of `tests/compile/variants.py`, compiled to \
machine code for {targets} by Triton {versions}.

A cell is registers per thread / bytes of spill stores and loads (as `ptxas -v` counts them; \
instructions times width, wherever they stand) / KiB of shared memory. Limits of shared memory: \
{limits}. A cell in bold is a miss: it does not compile, does not fit, spills on sm_90 in a shape \
of the speed table (marked with *), or lost what `misses_of` in `tests/compile/compile_matrix.py` \
looks for: asynchronous copies, the buffers of its pipeline, products by warp group. \
`tests/compile/test_marks.py` checks that every shape that a speed table gives to a Hopper kernel \
is marked.

"""


@dataclass(frozen=True)
class Facts:
    """The result of one compile."""

    error: str = ""
    """Why the variant did not compile, in one line; empty if it did."""
    registers: int = 0
    stack: int = 0
    """Bytes of the stack frame of a thread."""
    spills: int = 0
    """Bytes of spill stores, and bytes of spill loads."""
    serialized: bool = False
    """Whether ``ptxas`` had to order products of warp groups that the program left unordered."""
    undefined: int = 0
    """Reads of uniform registers that some path never wrote; counted for Gluon kernels."""
    overwritten: int = 0
    """Writes to registers that a product of a warp group may still read."""
    mergeable_exponents: int = 0
    """Exponents made of a product and a sum that are rounded once; counted with batch
    invariance."""
    idle_barriers: int = 0
    """Barriers that are made but not used: the compiler gives their place to other data."""
    packed_additions: int = 0
    """Additions of two 16-bit integers at once, which :func:`packed_additions` finds."""
    shared: int = 0
    """Bytes of shared memory of a program."""
    asynchronous_copies: int = 0
    """Number of ``cp.async`` instructions."""
    warp_group_products: int = 0
    """Number of ``wgmma`` instructions."""
    wide_stores: int = 0
    """Number of stores of 16 bytes of a thread to global memory."""
    pipeline: int = 0
    """Bytes of shared memory that the stages in flight of an attending kernel need; 0 for one
    stage."""


def limit_of(target: int) -> int:
    """Bytes of shared memory that one program can have."""
    return DEVICES[target].facts.shared_memory


def misses_of(variant: Variant, target: int, facts: Facts) -> list[str]:
    """Promises that a compile does not keep."""
    if facts.error:
        return [facts.error]
    misses = []
    if facts.shared > limit_of(target):
        misses.append(f"{facts.shared} bytes of shared memory, {limit_of(target)} is the limit")
    if variant.speed and target == 90 and facts.spills:
        misses.append(f"spills {facts.spills} bytes")
    if facts.serialized:
        misses.append("products by warp group are serialized")
    if facts.undefined:
        misses.append(f"{facts.undefined} reads of registers that a path never wrote")
    if facts.overwritten:
        misses.append(f"{facts.overwritten} writes to operands of products under way")
    if facts.mergeable_exponents:
        misses.append(f"{facts.mergeable_exponents} exponents that another kernel may round twice")
    if facts.idle_barriers:
        misses.append(f"{facts.idle_barriers} barriers that nobody waits for")
    if facts.packed_additions:
        misses.append(f"{facts.packed_additions} additions of two 16-bit integers at once")
    if variant.kernel.attends:
        # Copies silently become synchronous where a hint of alignment is lost.
        if facts.pipeline and not facts.asynchronous_copies:
            misses.append("no asynchronous copies")
        if facts.shared < facts.pipeline:
            misses.append(f"{facts.shared} bytes of shared memory, stages need {facts.pipeline}")
    is_narrow = variant.layer.dtype.itemsize == 2
    by_groups = (
        *(Kernel.PREFILL, Kernel.MLA_PREFILL),
        *(Kernel.HOPPER_PREFILL, Kernel.HOPPER_MLA, Kernel.HOPPER_SPARSE),
    )
    # Latent attention multiplies by warp where there are few query rows, and fp16 over e4m3.
    layer = variant.layer
    is_few = layer.heads[0] * (1 + layer.drafts) <= NARROW_ROWS
    is_few |= layer.dtype is DType.FLOAT16 and layer.cache is CacheDType.FP8_E4M3
    by_warp = variant.kernel is Kernel.HOPPER_MLA and (layer.batch_invariant or is_few)
    by_warp |= variant.kernel is Kernel.HOPPER_SPARSE and layer.heads[0] <= MOST_NARROW_HEADS
    wants_groups = target == 90 and variant.kernel in by_groups and is_narrow and not by_warp
    if wants_groups and not facts.warp_group_products:
        misses.append("no products by warp group")
    return misses


# -- In a process of its own.


def read_log(log: str) -> dict[str, Any]:
    """Registers, stack frame, spills and complaints, read from the output of ``ptxas -v``."""
    stack, stores, loads = _largest(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log, 3
    )
    (registers,) = _largest(r"Used (\d+) registers", log, 1)
    serialized = "wgmma.mma_async instructions are serialized" in log
    return {
        "registers": registers,
        "stack": stack,
        "spills": stores + loads,
        "serialized": serialized,
    }


def _largest(pattern: str, text: str, groups: int) -> list[int]:
    """The match of ``pattern`` with the largest last number, as numbers."""
    found = [[int(number) for number in match.groups()] for match in re.finditer(pattern, text)]
    if not found:
        raise ValueError(f"ptxas said nothing like {pattern!r}: {text!r}")
    return max(found, key=lambda numbers: numbers[groups - 1])


class _Device:
    """A driver for Triton that knows its device and nothing else."""

    def __init__(self, target: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", target, 32)

    def get_current_device(self) -> int:
        # Kernels remember the target of each device, so every target is a device of its own.
        return int(self.target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


class Compiler:
    """Compiles variants in this process; equal variants are compiled once.

    Args:
        record: has the facts of earlier compiles; None compiles everything.
    """

    def __init__(self, record: Record | None = None) -> None:
        self._logs: dict[str, str] = {}
        self._record = record or Record(path=None)

    def compile(self, target: int, variants: Iterable[Variant]) -> dict[str, Facts]:
        """Facts of each variant, by name."""
        import triton

        triton.runtime.driver.set_active(_Device(target))
        return {variant.name: self._compile(variant, target) for variant in variants}

    def compile_calls(self, target: int, calls: Mapping[str, KernelCall]) -> dict[str, Facts]:
        """Facts of launches on the target, by name."""
        import triton

        triton.runtime.driver.set_active(_Device(target))
        return {name: self._facts(call, target) for name, call in calls.items()}

    def _compile(self, variant: Variant, target: int) -> Facts:
        """Compile a launch as the target would."""
        try:
            call = call_of(variant, target)
        except Exception as error:
            return Facts(error=_first_line(error))
        pipeline = 0
        if variant.kernel.attends:
            given = call.arguments
            if variant.kernel is Kernel.MLA_DECODE:
                words, rows = given["USED"] + given["ROPE_USED"], given["latent_ptr"]
            else:
                words, rows = given["K_USED"] + given["V_USED"], given["key_ptr"]
            pipeline = (call.num_stages - 1) * given["KV_TILE"] * words * rows.element_size()
        attends = variant.kernel.attends or variant.kernel is Kernel.HOPPER_PREFILL
        invariant = attends and variant.layer.batch_invariant
        return self._facts(call, target, pipeline, variant.kernel.is_of_hopper, invariant)

    def _facts(
        self,
        call: KernelCall,
        target: int,
        pipeline: int = 0,
        is_gluon: bool = False,
        is_invariant: bool = False,
    ) -> Facts:
        log = io.StringIO()
        kind = f"facts {pipeline} {int(is_gluon)} {int(is_invariant)}"
        try:
            with contextlib.redirect_stdout(log), self._record.watching(kind):
                compiled = call.kernel.warmup(grid=call.grid, **call.arguments, **call.options)
            if compiled.metadata.target.arch != target:
                raise RuntimeError(f"compiled for {compiled.metadata.target}")
            read = read_log(self._logs.setdefault(compiled.hash, log.getvalue()))
        except RecordedError as recorded:
            return Facts(**recorded.facts)
        except Exception as error:
            return Facts(error=_first_line(error))
        ptx = compiled.asm["ptx"]
        if "ret;" not in ptx:
            # LLVM made a trap of a kernel that Triton had no tensor memory for.
            return Facts(error="the kernel is a trap")
        products = ptx.count("wgmma.mma_async")
        reads_code = is_gluon or products
        sass = _disassembled(compiled.asm["cubin"]) if reads_code else ""
        facts = Facts(
            **read,
            undefined=len(undefined_reads(sass)) if is_gluon else 0,
            overwritten=len(overwritten_operands(sass)),
            mergeable_exponents=(
                len(mergeable_exponents(compiled.asm["llir"])) if is_invariant else 0
            ),
            idle_barriers=len(idle_barriers(compiled.asm["ttgir"])),
            packed_additions=packed_additions(ptx),
            shared=compiled.metadata.shared,
            asynchronous_copies=len(re.findall(r"\bcp\.async\.c[ag]\.", ptx)),
            warp_group_products=products,
            wide_stores=ptx.count("st.global.v4.b32"),
            pipeline=pipeline,
        )
        self._record.note(kind, compiled.hash, asdict(facts))
        return facts


def _disassembled(cubin: bytes) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [tool, "-sass", file.name], capture_output=True, text=True, check=True
        )
    return done.stdout


def idle_barriers(ttgir: str) -> list[str]:
    """Names of a kernel's mbarriers that nothing but their initialisation touches.

    The compiler takes such a barrier for dead and keeps other data in its place. To the GPU it is
    still a barrier: on an H200 such data changed when another process's context came or went
    meanwhile.
    """
    lines = [line.split(" loc(")[0] for line in ttgir.splitlines()]

    def is_used(name: str) -> bool:
        pattern = re.compile(re.escape(name) + r"(?![\w#-])")
        for line in lines:
            if not pattern.search(line) or "init_barrier" in line:
                continue
            result, _, operation = line.strip().partition(" = ")
            if result == name:
                continue
            if "memdesc_index" not in operation or is_used(result):
                return True
        return False

    made = re.findall(r"(%[\w-]+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<[\dx]*xi64,", ttgir)
    return [name for name in made if not is_used(name)]


def packed_additions(ptx: str) -> int:
    """Number of additions of two 16-bit integers at once in a kernel's PTX.

    LLVM makes them of small numbers, such as the query token that a row of a tile belongs to, where
    the number of heads is no power of two. Where only the lower sum is used and one addend is a
    constant, ptxas 12.8 adds 0 in its place: latent attention of 20 heads left out the last key.
    """
    return len(re.findall(r"\badd\.[su]16x2\b", ptx))


def _first_line(error: BaseException) -> str:
    """The innermost cause in one line; for the assembler, its first complaint."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    complaints = [line.split("; ")[-1] for line in lines if re.search(r"error\s+:", line)]
    return f"{type(error).__name__}: {[*complaints, lines[0]][0][:160]}"


# -- From another process.

ByTarget = dict[int, dict[str, Facts]]
"""Facts by name of the variant, for each target."""

PROCESSES: Final = ((90,), (80, 86, 100, 120))
"""Targets of each of the processes that compile for tests side by side; all take about as long."""


def printed_by(
    module: str, arguments: Iterable[object], cache: Path, triton: Path | None = None
) -> Any:
    """Run a module of this folder in a new process that compiles kernels.

    Args:
        module: its name in this folder.
        arguments: of its command.
        cache: Triton's cache.
        triton: folder to take Triton from; None takes what is installed.

    Returns:
        The JSON in the last line that it prints.

    Raises:
        RuntimeError: the process failed; its last words are in the message.
    """
    paths = [triton, ROOT, os.environ.get("PYTHONPATH")]
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_DUMP_PTXAS_LOG": "1",
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path is not None),
    }
    command = [sys.executable, "-m", f"tests.compile.{module}", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def facts_printed_by(
    module: str, arguments: Iterable[object], cache: Path, triton: Path | None = None
) -> ByTarget:
    """The facts, by target and name, that a module prints when :func:`printed_by` runs it."""
    found = printed_by(module, arguments, cache, triton)
    return {
        int(target): {name: Facts(**facts) for name, facts in by_name.items()}
        for target, by_name in found.items()
    }


def side_by_side(compiled: Callable[[Sequence[int], Path], ByTarget], folder: Path) -> ByTarget:
    """Compile for every target, in as many processes as :data:`PROCESSES` has.

    Args:
        compiled: given targets and Triton's cache, starts one process and returns its facts.
        folder: for the caches.
    """
    caches = [folder / "-".join(map(str, targets)) for targets in PROCESSES]
    with ThreadPoolExecutor(len(PROCESSES)) as pool:
        parts = pool.map(compiled, PROCESSES, caches)
        return {target: facts for part in parts for target, facts in part.items()}


def facts_of(
    targets: Sequence[int],
    *,
    tested_only: bool,
    cache: Path,
    triton: Path | None = None,
    of: Sequence[str] = ("triton_attn",),
) -> ByTarget:
    """Compile variants in a new process.

    Args:
        targets: compute capabilities.
        tested_only: only what ``make test`` compiles for each.
        cache: Triton's cache.
        triton: folder to take Triton from; None takes what is installed.
        of: names in :data:`SETS`.

    Raises:
        RuntimeError: the process failed; its last words are in the message.
    """
    given = ["--set", *of, "--target", *targets, *(["--tested-only"] if tested_only else [])]
    return facts_printed_by("compile_matrix", given, cache, triton)


def install(version: str, folder: Path) -> Path | None:
    """A folder with a version of Triton, made if missing; None for the installed version."""
    if importlib.metadata.version("triton") == version:
        return None
    target = folder / f"triton-{version}"
    if not (target / "triton").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", str(target), f"triton=={version}"], check=True)
    return target


Results = dict[tuple[str, int], dict[str, Facts]]
"""Facts by variant, for each version and target."""


def compile_all(of: str, folder: Path, processes: int) -> Results:
    """Facts of every variant of a set, for every version and every target."""
    folders = {version: install(version, folder) for version in VERSIONS}
    columns = [(version, target) for version in VERSIONS for target in SETS[of].targets]

    def column(key: tuple[str, int]) -> dict[str, Facts]:
        with tempfile.TemporaryDirectory() as cache:
            version, target = key
            found = facts_of(
                [target], tested_only=False, cache=Path(cache), triton=folders[version], of=[of]
            )
            return found[target]

    with ThreadPoolExecutor(processes) as pool:
        return dict(zip(columns, pool.map(column, columns), strict=True))


def table_of(results: Results, of: Set = SETS["triton_attn"]) -> str:
    """The published table."""
    limits = ", ".join(f"{limit_of(target) // 1024} on sm_{target}" for target in of.targets)
    versions = ", ".join(dict.fromkeys(version for version, _ in results))
    targets = ", ".join(f"sm_{target}" for target in of.targets)
    lines = [_HEAD.format(title=of.title, versions=versions, targets=targets, limits=limits)]
    titles = [f"{version} sm_{target}" for version, target in results]
    lines.append(f"| variant | {' | '.join(titles)} |\n")
    lines.append(f"| --- |{' ---: |' * len(titles)}\n")
    for variant in of.variants:
        cells = []
        for (_, target), facts in results.items():
            one = facts[variant.name]
            cell = f"{one.registers} / {one.spills} / {one.shared / 1024:.0f}"
            cell = one.error.replace("|", " ") or cell
            cells.append(f"**{cell}**" if misses_of(variant, target, one) else cell)
        lines.append(f"| {variant.name}{' *' if variant.speed else ''} | {' | '.join(cells)} |\n")
    return "".join(lines)


def main() -> int:
    """The command; returns 1 if a promise is not kept."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--set", nargs="+", choices=SETS, default=[*SETS], help="of variants")
    parser.add_argument("--target", type=int, nargs="+", choices=TARGETS, help="compile here")
    parser.add_argument("--tested-only", action="store_true", help="what `make test` compiles")
    parser.add_argument("--folder", type=Path, default=ROOT / "build", help="of other versions")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    if given.target is not None:
        compiler = Compiler(Record() if given.tested_only else None)
        variants = [variant for name in given.set for variant in SETS[name].variants]
        found = {
            target: compiler.compile(
                target, [v for v in variants if not given.tested_only or target in v.tested]
            )
            for target in given.target
        }
        print(json.dumps(found, default=asdict))
        return 0
    lines = []
    for name in given.set:
        of, results = SETS[name], compile_all(name, given.folder, given.processes)
        of.table.parent.mkdir(parents=True, exist_ok=True)
        of.table.write_text(table_of(results, of), encoding="utf-8")
        lines += [
            f"Triton {version} sm_{target} {variant.name}: {miss}"
            for (version, target), facts in results.items()
            for variant in of.variants
            for miss in misses_of(variant, target, facts[variant.name])
        ]
    print("\n".join(lines), file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
