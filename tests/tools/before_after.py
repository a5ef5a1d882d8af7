"""Times of two checkouts on one GPU, side by side: to show that a change of the text costs nothing.

    python tests/tools/before_after.py measure BEFORE AFTER results.json --rounds 6
    python tests/tools/before_after.py render results.json docs/benchmarks/h100_before_after.md

BEFORE and AFTER are folders with ``attn``, ``builders``, ``specs`` and ``tests``. Every round runs
one process per checkout, in turn, backwards in every other round. A process makes each row's layer,
times its kernels on the GPU with the L2 cache flushed before each call, and times on the host one
eager forward and the ``build`` of the step. The table holds the median over the rounds, the
smallest, and the spread: (largest - smallest) / median.

This file imports a checkout's benchmark by its newer or its older place, so that one file measures
both. It needs a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

DENSE: Final = (
    ("dec_b32_4k", "auto"),
    ("dec_b32_4k", "triton"),
    ("dec_d64_sw128_sink", "auto"),
    ("pre_1x8k", "auto"),
)
"""Dense rows: a case of ``attn bench kernels``, and the choice of both kernels."""
LATENT: Final = (
    ("mla_h128_b32_4k", "auto"),
    ("mla_h16_b32_8k", "auto"),
    ("mla_fp8_h16_b128_4k", "auto"),
    ("mla_h16_b32_8k", "triton"),
)
"""Latent rows: a case, and the choice of the decode kernel."""
SPARSE: Final = (
    ("dec_656_h128_b128", True),
    ("dec_656_h16_b128", True),
    ("dec_bf16_h16_b128", True),
    ("dec_656_h16_b32", False),
)
"""Sparse rows: a case, and whether the Hopper kernel serves it."""
BUILDS: Final = "build of 256 decodes"
DENSE_US: Final = 20.0
"""Most microseconds of the host in one eager dense forward."""
BUILD_US: Final = 40.0
"""Most microseconds of the host in one ``build``."""
LAYER: Final = "layer of 16 heads"
"""A host time alone: one eager ``forward_mqa`` of SPARSE_MLA in a layer with its indexer."""

Times = dict[str, float]
"""``gpu`` and ``host`` microseconds of a row."""


def _module(*places: str) -> Any:
    """The first of some modules that exists."""
    for place in places:
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if not place.startswith(str(error.name)):
                raise
    raise ModuleNotFoundError(f"none of {', '.join(places)}")


# -- In a process of one checkout.


def _timed(call: Callable[[], object], reps: int) -> Times:
    import torch

    timing = _module("attn.bench.measure.timing", "attn.bench.timing")
    device = torch.device("cuda", 0)
    for _ in range(3):
        call()
    found = timing.time_interleaved({"call": call}, timing.make_clock(device, reps), 2, reps)
    torch.cuda.synchronize(device)
    host = timing.host_time_us(call, 100)
    torch.cuda.synchronize(device)
    return {"gpu": found["call"].median_us, "host": host}


def _member(name: str) -> Any:
    registry = importlib.import_module("attn.registry")
    return registry.AttentionBackendEnum[name]


def _builder(ours: Any, member: Any, layer: Any, kernel: str) -> Any:
    engine = importlib.import_module("specs.engine")
    choice = engine.PrefillKernel(kernel), engine.DecodeKernel(kernel)
    if hasattr(engine, "Kernels"):
        return ours.make_builder(member, layer, kernels=engine.Kernels.own(*choice))
    return ours.make_builder(member, layer, prefill_kernel=choice[0], decode_kernel=choice[1])


def _run(cases: Any, backend: str, name: str, kernel: str, reps: int) -> Times:
    """One row of a dense or a latent layer."""
    import torch

    ours = _module("attn.bench.measure.ours", "attn.bench.ours")
    inputs = _module("attn.bench.cases.inputs", "attn.bench.inputs")
    (case,) = (case for case in cases if case.name == name)
    generator = torch.Generator().manual_seed(0)
    content = inputs.make_content(case, torch.device("cuda", 0), generator)
    member = _member(backend)
    layer = ours.make_layer(member, content, generator)
    return _timed(ours.our_run(layer, _builder(ours, member, layer, kernel)).call, reps)


def _build(cases: Any) -> Times:
    """Host time of the builder's ``build`` for 256 decodes."""
    import torch

    ours = _module("attn.bench.measure.ours", "attn.bench.ours")
    inputs = _module("attn.bench.cases.inputs", "attn.bench.inputs")
    (case,) = (case for case in cases if case.name == "dec_b256_1k")
    generator = torch.Generator().manual_seed(0)
    content = inputs.make_content(case, torch.device("cuda", 0), generator)
    member = _member("TRITON_ATTN")
    layer = ours.make_layer(member, content, generator)
    return {"host": ours.plan_time(_builder(ours, member, layer, "auto"), layer).host_us}


def _sparse(name: str, is_hopper: bool, reps: int) -> Times:
    """One row of sparse attention, as its operation is called."""
    import torch

    sparse = _module("attn.bench.results.tables.sparse", "attn.bench.sparse_mla")
    cases = _module("attn.bench.cases.latent", "attn.bench.latent_cases").SPARSE_CASES
    pairs = _module("attn.bench.measure.pairs", "attn.bench.pairs")
    kernel = importlib.import_module("specs.engine").DecodeKernel
    (case,) = (case for case in cases if case.name == name)
    content = sparse.make_sparse_content(case, pairs.Rounds(torch.device("cuda", 0), 1, reps, 0))
    tile = sparse._hopper_tile(content, kernel.AUTO)[0] if is_hopper else None
    if is_hopper and tile is None:
        raise RuntimeError(f"the Hopper kernel does not serve {name}")
    return _timed(sparse.ours(content, tile).call, reps)


def _sparse_layer() -> Times:
    """Host time of one eager ``forward_mqa`` of SPARSE_MLA with 16 heads and four requests."""
    layers = _module("tests.sparse_layers", "tests.sparse.sparse_layers")
    rows = importlib.import_module("specs.rows")
    sizes = layers.Sizes(
        num_heads=16, nope=128, v=128, topk=2048, index_heads=64, index_dim=128, longest=6144,
        most_tokens=4096, requests=4,
    )  # fmt: skip
    layer = layers.SparseLayer(
        rows.LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE, "cuda", sizes=sizes
    )
    layer.fill()
    step = layer.step([(0, 4000, 1), (1, 70, 1), (2, 3000, 1), (3, 5000, 1)])
    layer.forward(step, layer.records(step), layer.blank(step))
    query, record = layer.absorbed(step), layer.builder.build(0, step.batch)
    return _timed(lambda: layer._attend(query, layer.cache, record, layer.scales), 10)


def measure(reps: int) -> dict[str, Times]:
    """Every row in this process's checkout."""
    import torch

    dense = _module("attn.bench.cases.dense", "attn.bench.cases").CASES
    latent = _module("attn.bench.cases.latent", "attn.bench.latent_cases").MLA_CASES
    calls: dict[str, Callable[[], Times]] = {}
    for name, kernel in DENSE:
        calls[f"dense {name}, {kernel}"] = lambda n=name, k=kernel: _run(
            dense, "TRITON_ATTN", n, k, reps
        )
    for name, kernel in LATENT:
        calls[f"latent {name}, {kernel}"] = lambda n=name, k=kernel: _run(
            latent, "TRITON_MLA", n, k, reps
        )
    for name, is_hopper in SPARSE:
        kernel = "hopper" if is_hopper else "triton"
        calls[f"sparse {name}, {kernel}"] = lambda n=name, h=is_hopper: _sparse(n, h, reps)
    calls[f"sparse {LAYER}"] = _sparse_layer
    calls[f"dense {BUILDS}"] = lambda: _build(dense)
    found = {}
    for name, call in calls.items():
        found[name] = call()
        torch.cuda.empty_cache()
    return found


# -- From another process.


def run(folder: Path, reps: int) -> dict[str, Times]:
    """Every row of one checkout, measured in a process of its own."""
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(Path(__file__).resolve()), "worker", "--reps", str(reps)]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{folder}: {done.stderr[-3000:]}")
    times: dict[str, Times] = json.loads(done.stdout.splitlines()[-1])
    return times


def compared(before: Path, after: Path, rounds: int, reps: int, out: Path) -> None:
    """Measure both checkouts in turn; the results so far are written after each round."""
    import torch
    import triton

    found: dict[str, list[dict[str, Times]]] = {"before": [], "after": []}
    sides = [("before", before), ("after", after)]
    for turn in range(rounds):
        for name, folder in sides if turn % 2 == 0 else reversed(sides):
            found[name].append(run(folder, reps))
        about = {
            "gpu": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "triton": triton.__version__,
        }
        out.write_text(json.dumps({"about": about, **found}) + "\n", encoding="utf-8")
        print(f"round {turn + 1} of {rounds}", flush=True)


def _cell(values: list[float]) -> tuple[float, float]:
    """The median of a side's rounds, and their spread."""
    middle = statistics.median(values)
    return middle, (max(values) - min(values)) / middle


def table(results: dict[str, Any], kind: str) -> list[str]:
    """The rows of a table of ``gpu`` or ``host`` times, with a verdict each."""
    lines = [
        "| row | before, us | least | spread | after, us | least | spread | after / before "
        "| verdict |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in results["after"][0]:
        sides = [
            [times[name][kind] for times in results[side] if kind in times[name]]
            for side in ("before", "after")
        ]
        if not all(sides):
            continue
        (old, old_spread), (new, new_spread) = (_cell(side) for side in sides)
        spread, change = max(old_spread, new_spread), new / old - 1
        verdict = "level" if abs(change) <= spread else "slower" if change > 0 else "faster"
        lines.append(
            f"| {name} | {old:.1f} | {min(sides[0]):.1f} | {old_spread:.1%} "
            f"| {new:.1f} | {min(sides[1]):.1f} | {new_spread:.1%} "
            f"| {new / old:.3f} | {verdict} |"
        )
    return lines


def targets(results: dict[str, Any]) -> list[str]:
    """The rows of a table that judges the host time of each row by its family's target."""
    lines = [
        "| row | after, us | least | target, us | verdict |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in results["after"][0]:
        old, new = (
            [times[name]["host"] for times in results[side]] for side in ("before", "after")
        )
        family, middle = name.split()[0], statistics.median(new)
        most = BUILD_US if name.endswith(BUILDS) else DENSE_US if family == "dense" else min(old)
        verdict = "met by the least alone" if min(new) <= most else "NOT met"
        verdict = "met" if middle <= most else verdict
        lines.append(f"| {name} | {middle:.1f} | {min(new):.1f} | {most:.1f} | {verdict} |")
    return lines


def rendered(results: dict[str, Any], before: str, after: str) -> str:
    """The document."""
    about = results["about"]
    rounds = len(results["after"])
    return "\n".join(
        [
            f"# Two versions of this library on {about['gpu']}",
            "",
            f"`before` is {before}, `after` is {after}; torch {about['torch']}, Triton "
            f"{about['triton']}. The versions ran in processes of their own, in turn, {rounds} "
            "rounds, by `tests/tools/before_after.py`. A time is the median of the rounds, `least` "
            "their smallest. A spread is (largest - smallest) / median of one side's rounds. A "
            "difference within the larger spread is called level.",
            "",
            "## On the GPU",
            "",
            "CUDA events around each call, 256 MiB written before it, launches queued ahead.",
            "",
            *table(results, "gpu"),
            "",
            "## On the host",
            "",
            "One eager forward of a layer, or one `build` of a step, without waiting for the GPU. "
            "The GPU machine shares its processors with other work: in some rounds everything on "
            "the host takes up to twice as long, in both versions. The least of the rounds is the "
            "time of a host that is not disturbed.",
            "",
            *table(results, "host"),
            "",
            f"An eager dense forward may take the host {DENSE_US:.0f} us, `build` of 256 decodes "
            f"{BUILD_US:.0f} us. A latent or a sparse forward may take the least that it took "
            "before.",
            "",
            *targets(results),
            "",
        ]
    )


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    given = commands.add_parser("measure")
    given.add_argument("before", type=Path)
    given.add_argument("after", type=Path)
    given.add_argument("out", type=Path)
    given.add_argument("--rounds", type=int, default=6)
    given.add_argument("--reps", type=int, default=15)
    given = commands.add_parser("worker")
    given.add_argument("--reps", type=int, default=15)
    given = commands.add_parser("render")
    given.add_argument("results", type=Path)
    given.add_argument("out", type=Path)
    given.add_argument("--before", default="the older version")
    given.add_argument("--after", default="this version")
    options = parser.parse_args()
    if options.command == "worker":
        print(json.dumps(measure(options.reps)))
    elif options.command == "measure":
        both = options.before.resolve(), options.after.resolve()
        compared(*both, options.rounds, options.reps, options.out)
    else:
        results = json.loads(options.results.read_text(encoding="utf-8"))
        text = rendered(results, options.before, options.after)
        options.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
