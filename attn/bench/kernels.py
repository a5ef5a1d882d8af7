"""``attn bench kernels``: time of a backend's forward on the dense cases, beside its peers.

``--table hopper`` adds ragged batches and fp8 caches, times what each kernel needs once per step
too, and judges ours against the fastest of FlashAttention-3, cuDNN, FlashInfer and XQA. ``--table
mla`` does so with absorbed decode over latent caches, FlashMLA, FlashInfer and vLLM's Triton MLA.
``--table flashinfer`` is of our backends over FlashInfer, beside the calls that they make.

Also ``python -m attn.bench.kernels``, which needs nothing beyond the library itself.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch

from attn.bench.cases import (
    ALL_PEERS,
    CASES,
    PEERS,
    BenchTable,
    CaseKind,
    KernelCase,
    select_cases,
)
from attn.bench.inputs import expected_rows, make_content
from attn.bench.judge import check_run, judged, output_of
from attn.bench.latent_peers import LATENT_ADAPTERS
from attn.bench.ours import (
    Builder,
    OurLayer,
    backend_refusals,
    free_partition_of,
    make_builder,
    make_layer,
    measure_scratch,
    our_run,
    plan_time,
)
from attn.bench.peers import KernelRun, Refusal, prepare_peer
from attn.bench.reasons import describe
from attn.bench.results import (
    BenchResults,
    CaseResult,
    Contender,
    Environment,
    Status,
    checks_of,
    verdict_of,
)
from attn.bench.tables import line_text, render_markdown
from attn.bench.timing import (
    Timing,
    count_allocations,
    host_time_us,
    make_clock,
    time_interleaved,
)
from attn.bench.vendor import Rounds, vendor_lines
from attn.device import detect_device
from attn.errors import MissingDependencyError
from attn.registry import AttentionBackendEnum, RegisteredBackend
from specs.base import parse_spec
from specs.engine import DecodeKernel, PrefillKernel

OURS: Final = "ours"
FREE: Final = "free partition"
INVARIANT: Final = "batch invariant"
PLAIN: Final = "plain Triton"

COMMIT_VARIABLE: Final = "ATTN_COMMIT"

Log = Callable[[str], None]
Call = Callable[[], object]


@dataclass(frozen=True)
class KernelBench:
    """What to measure."""

    backend: str = "TRITON_ATTN"
    cases: tuple[KernelCase, ...] = CASES
    peers: tuple[str, ...] = PEERS
    rounds: int = 6
    reps: int = 20
    """Most calls per kernel and round."""
    commit: str | None = None
    """Of the code that is measured; None asks the environment, then git."""
    seed: int = 0
    table: BenchTable = BenchTable.DENSE
    decode_kernel: DecodeKernel | None = None
    """Of ours; None is the table's."""
    also: tuple[str, ...] = ()
    """Further backends, in a table of several."""

    def __post_init__(self) -> None:
        for name in ("rounds", "reps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for peer in self.peers:
            if peer not in ALL_PEERS:
                raise ValueError(f"peer must be one of {', '.join(ALL_PEERS)}, got {peer!r}")
        if self.backend not in AttentionBackendEnum:
            known = ", ".join(member.name for member in AttentionBackendEnum)
            raise ValueError(f"backend must be one of {known}, got {self.backend!r}")

    @property
    def backends(self) -> tuple[str, ...]:
        """All that are measured."""
        return self.backend, *self.also

    @property
    def member(self) -> RegisteredBackend:
        """The backend."""
        return AttentionBackendEnum[self.backend]


# -- One case.


def _our_runs(
    bench: KernelBench, case: KernelCase, layer: OurLayer, log: Log
) -> tuple[dict[str, KernelRun | Refusal], Builder | None]:
    """Our kernel and the variants that the case asks for."""
    member, builder = bench.member, None
    runs: dict[str, KernelRun | Refusal] = {}
    kernels: dict[str, Any] = {
        "prefill_kernel": bench.table.prefill_kernel,
        "decode_kernel": bench.decode_kernel or bench.table.decode_kernel,
    }
    variants: dict[str, dict[str, Any]] = {OURS: {}}
    if case.compare_free_partition:
        variants[FREE] = {"free": True}
        if free_partition_of(member) is None:
            runs[FREE] = Refusal(Status.UNAVAILABLE, "the builder has no for_free_partition")
    if case.compare_batch_invariant:
        variants[INVARIANT] = {"batch_invariant": True}
        if not member.get_class().supports_batch_invariance():
            reason = "the backend does not support batch invariance"
            runs[INVARIANT] = Refusal(Status.UNSUPPORTED, reason)
    if case.target.min_plain_rate is not None:
        variants[PLAIN] = {
            "prefill_kernel": PrefillKernel.TRITON,
            "decode_kernel": DecodeKernel.TRITON,
        }
    for name, options in variants.items():
        if name in runs:
            continue
        try:
            made = make_builder(member, layer, **(kernels | options))
            runs[name] = our_run(layer, made)
        except Exception as error:
            log(traceback.format_exc())
            runs[name] = Refusal(Status.FAILED, describe(error))
            continue
        builder = made if name == OURS else builder
    return runs, builder


def _contender(
    name: str, outcome: Contender | float | Refusal, timings: Mapping[str, Timing]
) -> Contender:
    if isinstance(outcome, Contender):
        return outcome
    if isinstance(outcome, Refusal):
        return Contender(name=name, status=outcome.status, reason=outcome.reason)
    timing, planned = timings[name], timings.get(_planned(name))
    return Contender(
        name=name,
        status=Status.MEASURED,
        time_us=timing.median_us,
        planned_us=None if planned is None else planned.median_us,
        spread=timing.spread,
        calls=timing.calls,
        error=outcome,
    )


def _planned(name: str) -> str:
    """The name of a kernel's calls with the step's plan."""
    return f"{name}, planned"


def _calls_of(bench: KernelBench, runs: Mapping[str, KernelRun]) -> dict[str, Call]:
    """What to time, each kernel's two kinds of calls one after the other."""
    calls: dict[str, Call] = {}
    for name, run in runs.items():
        calls[name] = run.call
        if run.planned is not None and bench.table.times_plans:
            calls[_planned(name)] = run.planned
    return calls


def _host_us(case: KernelCase, call: Call | None, device: torch.device) -> float | None:
    """Of one of our calls on the host, where the case asks for it."""
    if call is None or case.target.max_host_us is None:
        return None
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return host_time_us(call)


def bench_case(bench: KernelBench, case: KernelCase, device: torch.device, log: Log) -> CaseResult:
    """Check every kernel on a case, then time those that are right, in turn."""
    reasons = backend_refusals(case, bench.member)
    if reasons:
        refused = Contender(name=OURS, status=Status.UNSUPPORTED, reason="; ".join(reasons))
        return CaseResult(case=case, ours=refused)
    generator = torch.Generator().manual_seed(bench.seed)
    content = make_content(case, device, generator)
    expected = expected_rows(content)
    runs: dict[str, KernelRun | Refusal] = {}
    layer, builder = None, None
    try:
        layer = make_layer(bench.member, content, generator)
    except Exception as error:
        log(traceback.format_exc())
        runs[OURS] = Refusal(Status.FAILED, describe(error))
    else:
        runs, builder = _our_runs(bench, case, layer, log)
    latent = (LATENT_ADAPTERS,) if case.rope_size else ()
    runs.update({name: prepare_peer(name, content, *latent) for name in bench.peers})
    outcomes: dict[str, Contender | float | Refusal] = {}
    for name, run in runs.items():
        outcomes[name] = run if isinstance(run, Refusal) else check_run(name, run, expected)
        log(f"  {name:16} {_outcome_text(outcomes[name])}")
    right = {
        name: run
        for name, run in runs.items()
        if isinstance(run, KernelRun) and isinstance(outcomes[name], float)
    }
    calls = _calls_of(bench, right)
    clock = make_clock(device, bench.reps)
    timings = time_interleaved(calls, clock, bench.rounds, bench.reps)
    for name, run in right.items():
        # A kernel that is wrong now and then shows itself after many launches.
        errors = [expected.error_of(output_of(run))]
        if _planned(name) in calls:
            calls[_planned(name)]()
            errors.append(expected.error_of(output_of(run)))
        outcomes[name] = judged(name, run, max(errors))
    made = {name: _contender(name, outcome, timings) for name, outcome in outcomes.items()}
    decodes = case.kind is not CaseKind.PREFILL
    return CaseResult(
        case=case,
        ours=made[OURS],
        peers=tuple(made[name] for name in bench.peers),
        free_partition=made.get(FREE),
        batch_invariant=made.get(INVARIANT),
        plain=made.get(PLAIN),
        plan=plan_time(builder, layer) if builder and layer and decodes else None,
        host_us=_host_us(case, calls.get(OURS), device),
        # A latent output is a tensor of each call's own.
        allocations=(
            count_allocations(calls[OURS], device) if OURS in calls and not case.rope_size else None
        ),
    )


def _outcome_text(outcome: Contender | float | Refusal) -> str:
    if isinstance(outcome, float):
        return f"right, error {outcome:.1e}"
    return f"{outcome.status.value}: {outcome.reason}"


# -- A run.


def bench_kernels(
    bench: KernelBench,
    log: Log = print,
    on_result: Callable[[BenchResults], None] | None = None,
) -> BenchResults:
    """Measure all cases.

    Args:
        bench: what to measure.
        log: receives a line per kernel and case.
        on_result: receives the results so far, after each case.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    results = BenchResults(environment=environment_of(bench))
    if bench.table is BenchTable.FLASHINFER:
        return _bench_lines(bench, device, results, log, on_result)
    scratch, reason = None, ""
    if bench.table is not BenchTable.MLA:
        scratch, reason = measure_scratch(bench.member, device, bench.seed)
    results = results.replace(scratch_bytes=scratch, scratch_reason=reason)
    for case in bench.cases:
        release_memory(device)
        log(f"{case.name}: {case.what}")
        result = _bench_or_fail(bench, case, device, log)
        results = results.replace(cases=(*results.cases, result))
        log(_result_line(result, results.cases))
        if on_result is not None:
            on_result(results)
        if not _still_works(device, log):
            break
    release_memory(device)
    return results


def _bench_lines(
    bench: KernelBench,
    device: torch.device,
    results: BenchResults,
    log: Log,
    on_result: Callable[[BenchResults], None] | None,
) -> BenchResults:
    """The table whose lines compare ours with the calls that it makes."""
    rounds = Rounds(device, bench.rounds, bench.reps, bench.seed)
    for case in bench.cases:
        log(f"{case.name}: {case.what}")
        for line in vendor_lines(case, bench.backends, rounds, log):
            log(f"  {line_text(line)}")
            results = results.replace(lines=(*results.lines, line))
        release_memory(device)
        if on_result is not None:
            on_result(results)
        if not _still_works(device, log):
            break
    return results


def _bench_or_fail(
    bench: KernelBench, case: KernelCase, device: torch.device, log: Log
) -> CaseResult:
    """The case's results; a case that fails as a whole is an entry with its reason."""
    try:
        return bench_case(bench, case, device, log)
    except Exception as error:
        log(traceback.format_exc(limit=-4))
        return CaseResult(
            case=case, ours=Contender(name=OURS, status=Status.FAILED, reason=describe(error))
        )


def _still_works(device: torch.device, log: Log) -> bool:
    """An illegal access stays with the process: nothing after it can be measured."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        log(f"the device is lost: {describe(error)}")
        return False
    return True


def _result_line(result: CaseResult, others: Sequence[CaseResult]) -> str:
    parts = []
    for contender in (result.ours, result.free_partition, result.batch_invariant, *result.peers):
        if contender is not None and contender.time_us is not None:
            rate = f"{result.case.rate(contender.time_us):.0f} {result.case.unit}"
            planned = contender.planned_us
            text = f"{contender.time_us:.1f} us"
            text += "" if planned is None else f", planned {planned:.1f} us"
            parts.append(f"{contender.name} {text} ({rate})")
    verdict = verdict_of(checks_of(result, others))
    return "  " + ", ".join([*parts, "" if verdict is None else f"target {verdict.value}"])


def release_memory(device: torch.device) -> None:
    """Give what the last case held back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def environment_of(bench: KernelBench) -> Environment:
    """Machine, versions and commit of a run that starts now."""
    return Environment(
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        device=detect_device().name,
        torch=str(torch.__version__),
        triton=_version("triton"),
        vllm=_version("vllm"),
        flashinfer=_version("flashinfer-python"),
        commit=bench.commit or os.environ.get(COMMIT_VARIABLE) or _git_commit(),
        backend=", ".join(bench.backends),
        rounds=bench.rounds,
        reps=bench.reps,
        table=bench.table,
    )


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _git_commit() -> str:
    """Of this file's working tree, marked when it has changes; "unknown" without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(
            command,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


@dataclass(frozen=True)
class Report:
    """Where the results go, and which earlier ones to put with them."""

    out: Path | None = None
    """Markdown; None prints it."""
    json: Path | None = None
    """Results as data."""
    merge: tuple[Path, ...] = ()
    """Earlier results; a case measured now replaces theirs."""

    def combined(self, results: BenchResults | None) -> BenchResults:
        """New results, if any, over the earlier ones.

        Raises:
            ValueError: earlier results that cannot be read, or of another backend, device or
                table.
        """
        found = [load_results(path) for path in self.merge] + ([results] if results else [])
        if not found:
            raise ValueError("merge must name results to render, got none")
        order = [case.name for case in found[0].environment.table.cases]
        whole = found[0]
        for later in found[1:]:
            whole = later.merged(whole, order)
        return whole

    def write(self, results: BenchResults) -> None:
        """Write the files that were asked for."""
        for path, text in (
            (self.out, render_markdown(results)),
            (self.json, results.model_dump_json() + "\n"),
        ):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")


def load_results(path: Path) -> BenchResults:
    """Results as :class:`Report` writes them.

    Raises:
        SpecError: not such a file; the message names field and value.
    """
    return parse_spec(BenchResults, path.read_text(encoding="utf-8"), str(path))


def run_and_report(bench: KernelBench | None, report: Report, log: Log = print) -> bool:
    """Measure and write, after every case so that an interrupted run keeps what it has.

    Args:
        bench: what to measure; None only renders the earlier results.
        report: where to.
        log: receives lines of progress.

    Returns:
        False when a kernel of ours was wrong or failed.
    """
    if bench is None:
        whole = report.combined(None)
    else:
        if report.merge:
            # Before the run: what cannot be merged should not cost the measurement.
            report.combined(BenchResults(environment=environment_of(bench)))
        measured = bench_kernels(bench, log, lambda part: report.write(report.combined(part)))
        whole = report.combined(measured)
    report.write(whole)
    if report.out is None:
        log(render_markdown(whole))
    broken = (Status.WRONG, Status.FAILED)
    wrong = any(result.ours.status in broken for result in whole.cases)
    return not wrong and not any(line.is_broken and not line.is_refused for line in whole.lines)


_NAMES: Final = dict.fromkeys(case.name for table in BenchTable for case in table.cases)
HELP: Final = {
    "backend": "Registry name of the backend; default: the table's.",
    "table": (
        "Which cases, peers and targets: dense, hopper or mla; these time each step's plan. Or "
        "flashinfer: what our backends over FlashInfer add to its own calls."
    ),
    "case": f"Shell pattern of names, repeatable: {', '.join(_NAMES)}.",
    "peer": f"Peer to compare with, repeatable, default the table's: {', '.join(ALL_PEERS)}.",
    "decode_kernel": "Ours: triton, auto or hopper; default: the table's, auto but for dense.",
    "no_peers": "Compare with no peer.",
    "rounds": "Turns of every kernel.",
    "reps": "Most calls per turn.",
    "out": "Markdown file to write; default: print it.",
    "json": "File to write the results to as data.",
    "merge": "Earlier --json file whose other cases are kept, repeatable.",
    "render": "Measure nothing, render the merged results.",
    "commit": f"Commit that is measured; default: ${COMMIT_VARIABLE}, then git.",
}
"""Of the options, for both command lines."""


def make_bench(
    backend: str | None,
    case: Sequence[str],
    peer: Sequence[str],
    no_peers: bool,
    rounds: int,
    reps: int,
    commit: str | None,
    table: str = BenchTable.DENSE,
    decode_kernel: str | None = None,
) -> KernelBench:
    """The settings that a command line's options mean.

    Raises:
        ValueError: an unknown backend, table, decode kernel, case or peer, or both peers and none.
    """
    if peer and no_peers:
        raise ValueError(f"give peers or --no-peers, not both; got {', '.join(peer)}")
    if table not in list(BenchTable):
        raise ValueError(f"table must be one of {', '.join(BenchTable)}, got {table!r}")
    if decode_kernel is not None and decode_kernel not in list(DecodeKernel):
        raise ValueError(
            f"decode_kernel must be one of {', '.join(DecodeKernel)}, got {decode_kernel!r}"
        )
    decode = None if decode_kernel is None else DecodeKernel(decode_kernel)
    chosen = BenchTable(table)
    also = chosen.also if backend is None else ()
    backend = backend or chosen.backend
    bench = KernelBench(backend=backend, rounds=rounds, reps=reps, commit=commit, table=chosen)
    peers = () if no_peers else tuple(dict.fromkeys(peer)) or chosen.peers
    cases = select_cases(case, chosen.cases)
    return replace(bench, cases=cases, peers=peers, decode_kernel=decode, also=also)


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m attn.bench.kernels``; the exit code."""
    parser = argparse.ArgumentParser("python -m attn.bench.kernels", description=__doc__)
    parser.add_argument("--backend", help=HELP["backend"])
    parser.add_argument("--table", default=BenchTable.DENSE.value, help=HELP["table"])
    parser.add_argument("--case", action="append", default=[], help=HELP["case"])
    parser.add_argument("--peer", action="append", default=[], help=HELP["peer"])
    parser.add_argument("--decode-kernel", help=HELP["decode_kernel"])
    parser.add_argument("--no-peers", action="store_true", help=HELP["no_peers"])
    for name in ("rounds", "reps"):
        parser.add_argument(
            f"--{name}", type=int, default=getattr(KernelBench, name), help=HELP[name]
        )
    for name in ("out", "json"):
        parser.add_argument(f"--{name}", type=Path, help=HELP[name])
    parser.add_argument("--merge", type=Path, action="append", default=[], help=HELP["merge"])
    parser.add_argument("--render", action="store_true", help=HELP["render"])
    parser.add_argument("--commit", help=HELP["commit"])
    options = vars(parser.parse_args(arguments))
    report = Report(options.pop("out"), options.pop("json"), tuple(options.pop("merge")))
    render = options.pop("render")
    try:
        bench = None if render else make_bench(**options)
        passed = run_and_report(bench, report, lambda line: print(line, flush=True))
    except (ValueError, MissingDependencyError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
