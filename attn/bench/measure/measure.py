"""Measurement of one case: every kernel is checked, then timed, then checked again."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from attn.bench.cases.case import CaseKind, KernelCase
from attn.bench.cases.inputs import Expected, expected_rows, make_content
from attn.bench.cases.needles import ContentNeedles, NeedleSource
from attn.bench.measure.judge import check_run, judged, output_of
from attn.bench.measure.ours import (
    PLAIN_KERNELS,
    Builder,
    OurLayer,
    backend_refusals,
    free_partition_of,
    make_builder,
    make_layer,
    our_run,
    plan_time,
)
from attn.bench.measure.timing import (
    Timing,
    count_allocations,
    count_launches,
    graph_times_us,
    host_times_us,
    make_clock,
    time_interleaved,
)
from attn.bench.peers.dense import KernelRun, Refusal, prepare_peer
from attn.bench.peers.latent import LATENT_ADAPTERS
from attn.bench.results.reasons import describe
from attn.bench.results.results import CaseResult, Contender, Status
from attn.bench.settings import KernelBench

OURS: Final = "ours"
FREE: Final = "free partition"
INVARIANT: Final = "batch invariant"
PLAIN: Final = "plain Triton"
HOST_ROUNDS: Final = 3
"""Most turns of every kernel under the host's clock, which scatters little."""

Log = Callable[[str], None]
Call = Callable[[], object]


def _our_runs(
    bench: KernelBench, case: KernelCase, layer: OurLayer, log: Log
) -> tuple[dict[str, KernelRun | Refusal], Builder | None]:
    """Our kernel and the variants that the case asks for."""
    member, builder = bench.member, None
    runs: dict[str, KernelRun | Refusal] = {}
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
        variants[PLAIN] = {"kernels": PLAIN_KERNELS}
    for name, options in variants.items():
        if name in runs:
            continue
        try:
            made = make_builder(member, layer, **{"kernels": bench.kernels, **options})
            runs[name] = our_run(layer, made)
        except Exception as error:
            log(traceback.format_exc())
            runs[name] = Refusal(Status.FAILED, describe(error))
            continue
        builder = made if name == OURS else builder
    return runs, builder


@dataclass
class Times:
    """What was timed of the kernels of a case, by name of the kernel."""

    alone: Mapping[str, Timing]
    """``forward`` by the device's clock."""
    plan: Mapping[str, Timing]
    """The step's plan by the device's clock."""
    planned: Mapping[str, Timing]
    """The step's plan and ``forward`` by the device's clock."""
    host: Mapping[str, Timing]
    """``forward`` on the host."""
    plan_host: Mapping[str, Timing]
    """The step's plan on the host."""
    graph: Mapping[str, Timing]
    """``forward`` in a captured graph; decodes and verifies only."""
    launches: Mapping[str, int]
    """Launches of one eager ``forward``."""
    graph_launches: Mapping[str, int]
    """Launches of one captured ``forward``."""


def _contender(name: str, outcome: Contender | float | Refusal, times: Times) -> Contender:
    if isinstance(outcome, Contender):
        return outcome
    if isinstance(outcome, Refusal):
        return Contender(name=name, status=outcome.status, reason=outcome.reason)
    timing, graph = times.alone[name], times.graph.get(name)
    return Contender(
        name=name,
        status=Status.MEASURED,
        time_us=timing.median_us,
        plan_us=_median(times.plan, name),
        planned_us=_median(times.planned, name),
        spread=timing.spread,
        graph_us=_median(times.graph, name),
        graph_spread=None if graph is None else graph.spread,
        host_us=_median(times.host, name),
        plan_host_us=_median(times.plan_host, name),
        launches=times.launches.get(name),
        graph_launches=times.graph_launches.get(name),
        calls=timing.calls,
        error=outcome,
    )


def _median(timings: Mapping[str, Timing], name: str) -> float | None:
    timing = timings.get(name)
    return None if timing is None else timing.median_us


def time_runs(
    bench: KernelBench,
    case: KernelCase,
    runs: Mapping[str, KernelRun],
    device: torch.device,
    log: Log,
) -> Times:
    """Time kernels that are right: each part of a step by a clock of its own, kernels in turn.

    Args:
        bench: rounds and calls.
        case: decides whether the kernels are timed in a graph.
        runs: the kernels, by name.
        device: where they run.
        log: receives why a kernel cannot be captured or its launches not counted.
    """
    parts: dict[str, dict[str, Call]] = {
        "alone": {name: run.call for name, run in runs.items()},
        "plan": {name: run.plan for name, run in runs.items() if run.plan is not None},
        "planned": {name: run.planned for name, run in runs.items() if run.planned is not None},
    }
    calls = {(part, name): call for part in parts for name, call in parts[part].items()}
    clock = make_clock(device, bench.reps)
    found = time_interleaved(calls, clock, bench.rounds, bench.reps)
    hosted = {key: call for key, call in calls.items() if key[0] != "planned"}
    hosts = host_times_us(hosted, device, min(bench.rounds, HOST_ROUNDS), bench.reps)
    graphs: Mapping[str, Timing] = {}
    counts: dict[bool, dict[str, int]] = {False: {}, True: {}}
    if case.is_bandwidth_bound:
        failed: dict[str, Exception] = {}
        graphs = graph_times_us(parts["alone"], device, bench.rounds, failed) or {}
        for name, error in failed.items():
            log(f"  {name:16} cannot be captured: {describe(error)}")
    # A profiler takes a second for each, and a dense forward is one launch.
    counted = parts["alone"] if case.rope_size else {}
    for name, call in counted.items():
        for in_graph in (False, True) if name in graphs else (False,):
            try:
                count = count_launches(call, device, in_graph)
            except Exception as error:
                log(f"  {name:16} launches were not counted: {describe(error)}")
                continue
            if count is not None:
                counts[in_graph][name] = count

    def of(timings: Mapping[tuple[str, str], Timing], part: str) -> dict[str, Timing]:
        return {name: timing for (which, name), timing in timings.items() if which == part}

    return Times(
        alone=of(found, "alone"),
        plan=of(found, "plan"),
        planned=of(found, "planned"),
        host=of(hosts, "alone"),
        plan_host=of(hosts, "plan"),
        graph=graphs,
        launches=counts[False],
        graph_launches=counts[True],
    )


def judged_and_timed(
    bench: KernelBench,
    case: KernelCase,
    prepared: tuple[Mapping[str, KernelRun | Refusal], Expected, NeedleSource],
    device: torch.device,
    log: Log,
) -> dict[str, Contender]:
    """Check kernels, time those that are right, and check them again.

    Args:
        bench: rounds and calls.
        case: the case.
        prepared: the kernels by name, sampled rows of the result, and needles.
        device: where the kernels run.
        log: receives a line for each kernel.

    Returns:
        A result for each kernel, by name.
    """
    runs, expected, needles = prepared
    outcomes: dict[str, Contender | float | Refusal] = {}
    for name, run in runs.items():
        outcomes[name] = (
            run if isinstance(run, Refusal) else check_run(name, run, expected, needles)
        )
        log(f"  {name:16} {_outcome_text(outcomes[name])}")
    right = {
        name: run
        for name, run in runs.items()
        if isinstance(run, KernelRun) and isinstance(outcomes[name], float)
    }
    times = time_runs(bench, case, right, device, log)
    for name, run in right.items():
        # Checked again after many launches, which may show an error that is not in every launch.
        errors = []
        for call in filter(None, (run.call, run.planned)):
            call()
            errors.append(expected.error_of(output_of(run)))
        outcomes[name] = judged(name, run, max(errors))
    made = {name: _contender(name, outcome, times) for name, outcome in outcomes.items()}
    return made


def bench_case(bench: KernelBench, case: KernelCase, device: torch.device, log: Log) -> CaseResult:
    """Check every kernel on a case, then time those that are right, in turn."""
    reasons = backend_refusals(case, bench.member)
    if reasons:
        refused = Contender(name=OURS, status=Status.UNSUPPORTED, reason="; ".join(reasons))
        return CaseResult(case=case, ours=refused)
    generator = torch.Generator().manual_seed(bench.seed)
    content = make_content(case, device, generator)
    expected, needles = expected_rows(content), ContentNeedles(content, bench.seed)
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
    made = judged_and_timed(bench, case, (runs, expected, needles), device, log)
    decodes, ours = case.kind is not CaseKind.PREFILL, runs.get(OURS)
    is_right = made[OURS].status is Status.MEASURED
    return CaseResult(
        case=case,
        ours=made[OURS],
        peers=tuple(made[name] for name in bench.peers),
        free_partition=made.get(FREE),
        batch_invariant=made.get(INVARIANT),
        plain=made.get(PLAIN),
        plan=plan_time(builder, layer) if builder and layer and decodes else None,
        # Not counted in latent cases, where every call allocates its output.
        allocations=(
            count_allocations(ours.call, device)
            if isinstance(ours, KernelRun) and is_right and not case.rope_size
            else None
        ),
    )


def _outcome_text(outcome: Contender | float | Refusal) -> str:
    if isinstance(outcome, float):
        return f"right, error {outcome:.1e}"
    return f"{outcome.status.value}: {outcome.reason}"
