"""Measurement of one case: every kernel is checked, then timed, then checked again."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from attn.bench.cases.case import CaseKind, KernelCase
from attn.bench.cases.inputs import expected_rows, make_content
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
    host_time_us,
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
    """Calls to time: each kernel's forward, followed by its forward with the plan if it has one."""
    calls: dict[str, Call] = {}
    for name, run in runs.items():
        calls[name] = run.call
        if run.planned is not None and bench.table.times_plans:
            calls[_planned(name)] = run.planned
    return calls


def _host_us(case: KernelCase, call: Call | None, device: torch.device) -> float | None:
    """Microseconds of one of our calls on the host; None where the case does not ask for it."""
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
        # Checked again after many launches, which may show an error that is not in every launch.
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
        # Not counted in latent cases, where every call allocates its output.
        allocations=(
            count_allocations(calls[OURS], device) if OURS in calls and not case.rope_size else None
        ),
    )


def _outcome_text(outcome: Contender | float | Refusal) -> str:
    if isinstance(outcome, float):
        return f"right, error {outcome:.1e}"
    return f"{outcome.status.value}: {outcome.reason}"
