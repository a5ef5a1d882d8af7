"""``attn bench kernels``: time of a backend's forward on the dense cases, beside its peers.

``--table`` chooses another table. ``hopper`` adds ragged batches and fp8 caches, includes the plan
that each kernel needs once per step, and compares with the fastest of FlashAttention-3, cuDNN,
FlashInfer and XQA. ``mla`` compares absorbed decode over latent caches with FlashMLA, FlashInfer
and vLLM's Triton MLA. ``flashinfer`` compares our dense backends over FlashInfer with the calls
that they make, and ``trtllm_mla`` our latent ones. ``sparse_mla`` compares latent attention over
lists with FlashAttention-3 and FlashMLA, and measures the conversion of a cache and the indexer.
``invariance`` compares dense kernels with batch invariance with the same without.

``python -m attn.bench.kernels`` runs the same benchmark and needs nothing beyond the library.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from attn.bench.cases.case import KernelCase
from attn.bench.cases.dense import BenchTable, select_cases
from attn.bench.command import USER_ERRORS, Parser, require_gpu, usage_error
from attn.bench.measure.measure import OURS, Log, bench_case
from attn.bench.measure.ours import measure_plans, measure_scratch
from attn.bench.measure.pairs import Rounds
from attn.bench.measure.sparse import bench_sparse_case
from attn.bench.options import DECODE_OPTIONS, HELP, BenchOptions
from attn.bench.results.reasons import describe
from attn.bench.results.render import line_text, render_markdown
from attn.bench.results.report import Report
from attn.bench.results.results import (
    BenchResults,
    CaseResult,
    Contender,
    Status,
    checks_of,
    verdict_of,
)
from attn.bench.results.tables.flashinfer import vendor_lines
from attn.bench.results.tables.flashinfer_mla import latent_lines
from attn.bench.results.tables.sparse import has_lines, sparse_lines
from attn.bench.settings import KernelBench, environment_of
from specs.engine import DecodeKernel


def bench_kernels(
    bench: KernelBench,
    log: Log = print,
    on_result: Callable[[BenchResults], None] | None = None,
) -> BenchResults:
    """Measure all cases.

    Args:
        bench: settings of the run.
        log: receives a line per kernel and case.
        on_result: receives the results so far, after each case.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    results = BenchResults(environment=environment_of(bench))
    if bench.table.has_lines:
        return _bench_lines(bench, device, results, log, on_result)
    scratch, reason = None, ""
    if not bench.table.is_latent:
        scratch, reason = measure_scratch(bench.member, device, bench.seed)
    results = results.replace(scratch_bytes=scratch, scratch_reason=reason)
    if bench.table.bounds_plans:
        plans, reason = measure_plans(bench.member, device, bench.kernels)
        results = results.replace(plans=plans, plans_reason=reason)
    for case in bench.cases:
        release_memory(device)
        log(f"{case.name}: {case.what}")
        if bench.table is BenchTable.SPARSE_MLA and has_lines(case, bench.peers):
            rounds = Rounds(device, bench.rounds, bench.reps, bench.seed)
            for line in sparse_lines(case, bench.backends, rounds, log):
                log(f"  {line_text(line)}")
                results = results.replace(lines=(*results.lines, line))
        else:
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
    """Measure a table of lines, which compare our backends with the calls that they make."""
    rounds = Rounds(device, bench.rounds, bench.reps, bench.seed)
    lines_of = latent_lines if bench.table is BenchTable.TRTLLM_MLA else vendor_lines
    for case in bench.cases:
        log(f"{case.name}: {case.what}")
        for line in lines_of(case, bench.backends, rounds, log):
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
    """Measure a case; where the whole case fails, its result holds the reason."""
    try:
        measure = bench_sparse_case if case.topk else bench_case
        return measure(bench, case, device, log)
    except Exception as error:
        log(traceback.format_exc(limit=-4))
        return CaseResult(
            case=case, ours=Contender(name=OURS, status=Status.FAILED, reason=describe(error))
        )


def _still_works(device: torch.device, log: Log) -> bool:
    """False after an illegal memory access, which leaves this process unable to use the GPU."""
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
            layer = f"{result.cost(contender):.1f} us a layer"
            parts.append(f"{contender.name} {layer}, alone {contender.time_us:.1f} us ({rate})")
    verdict = verdict_of(checks_of(result, others))
    return "  " + ", ".join([*parts, "" if verdict is None else f"target {verdict.value}"])


def release_memory(device: torch.device) -> None:
    """Give memory that the last case held back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def run_and_report(bench: KernelBench | None, report: Report, log: Log = print) -> bool:
    """Measure, and write the results after every case, so that an interrupted run loses none.

    Args:
        bench: settings of the run; None only renders the earlier results.
        report: files to write.
        log: receives lines of progress.

    Returns:
        False when a kernel of ours was wrong or failed.
    """
    if bench is None:
        whole = report.combined(None)
    else:
        # Before the run already, so that results that do not fit are refused early.
        report.check_fits(BenchResults(environment=environment_of(bench)))
        bench = replace(bench, command=report.command)
        measured = bench_kernels(bench, log, lambda part: report.write(report.combined(part)))
        whole = report.combined(measured)
    report.write(whole)
    if report.out is None:
        log(render_markdown(whole, report.age(whole)))
    for line in report.finish(whole):
        log(line)
    broken = (Status.WRONG, Status.FAILED)
    wrong = any(result.ours.status in broken for result in whole.cases)
    return not wrong and not any(line.is_broken and not line.is_refused for line in whole.lines)


def check_and_report(bench: KernelBench | None, report: Report, log: Log = print) -> bool:
    """:func:`run_and_report` after checks of errors that would otherwise show after the run.

    Raises:
        ValueError: a file cannot be written, an older one does not fit, or there is something to
            measure but no GPU.
        MissingDependencyError: a package that ``--html`` needs is not installed.
    """
    report.check()
    if bench is not None:
        require_gpu("attn bench kernels")
    return run_and_report(bench, report, log)


def make_bench(options: BenchOptions) -> KernelBench:
    """The settings that a command line's options mean.

    Raises:
        ValueError: an unknown backend, table, decode kernel, case or peer; both peers and none; or
            a decode kernel of layers that the table does not measure.
    """
    if options.peer and options.no_peers:
        raise ValueError(f"give peers or --no-peers, not both; got {', '.join(options.peer)}")
    if options.table not in list(BenchTable):
        raise ValueError(f"table must be one of {', '.join(BenchTable)}, got {options.table!r}")
    table = BenchTable(options.table)
    bench = KernelBench(
        backend=options.backend or table.backend,
        rounds=options.rounds,
        reps=options.reps,
        commit=options.commit,
        table=table,
    )
    peers = () if options.no_peers else tuple(dict.fromkeys(options.peer)) or table.peers
    return replace(
        bench,
        cases=select_cases(options.case, table.cases),
        peers=peers,
        decode_kernel=_decode_kernel(options, table),
        also=table.also if options.backend is None else (),
    )


def _decode_kernel(options: BenchOptions, table: BenchTable) -> DecodeKernel | None:
    """The decode kernel of ours that is named for the table's layers; None where none is."""
    found = None
    for option in DECODE_OPTIONS:
        name = getattr(options, option)
        if name is None:
            continue
        if name not in list(DecodeKernel):
            raise ValueError(f"{option} must be one of {', '.join(DecodeKernel)}, got {name!r}")
        if option != table.decode_option:
            served = ", ".join(one for one in BenchTable if one.decode_option == option)
            raise ValueError(f"{option} is of table {served}, got {table.value}")
        found = DecodeKernel(name)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m attn.bench.kernels`` and return its exit code."""
    parser = Parser("python -m attn.bench.kernels", description=__doc__)
    parser.add_argument("--backend", help=HELP["backend"])
    parser.add_argument("--table", default=BenchTable.DENSE.value, help=HELP["table"])
    parser.add_argument("--case", action="append", default=[], help=HELP["case"])
    parser.add_argument("--peer", action="append", default=[], help=HELP["peer"])
    for name in DECODE_OPTIONS:
        parser.add_argument(f"--{name.replace('_', '-')}", help=HELP[name])
    parser.add_argument("--no-peers", action="store_true", help=HELP["no_peers"])
    for name in ("rounds", "reps"):
        parser.add_argument(
            f"--{name}", type=int, default=getattr(KernelBench, name), help=HELP[name]
        )
    for name in ("out", "json", "html", "compare"):
        parser.add_argument(f"--{name}", type=Path, help=HELP[name])
    parser.add_argument("--merge", type=Path, action="append", default=[], help=HELP["merge"])
    parser.add_argument("--render", action="store_true", help=HELP["render"])
    parser.add_argument("--commit", help=HELP["commit"])
    options = vars(parser.parse_args(arguments))
    report = Report(
        options.pop("out"),
        options.pop("json"),
        tuple(options.pop("merge")),
        options.pop("html"),
        options.pop("compare"),
        ("bench", "kernels", *(sys.argv[1:] if arguments is None else arguments)),
    )
    render = options.pop("render")
    try:
        bench = None if render else make_bench(BenchOptions(**options))
        passed = check_and_report(bench, report, lambda line: print(line, flush=True))
    except USER_ERRORS as error:
        return usage_error(error)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
