"""The examination as text, made to be pasted into a report: no frames, no colours needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attn.cli.doctor.examination import Examination
from attn.cli.doctor.machine import Machine
from attn.cli.doctor.serving import Serving
from attn.cli.doctor.vllm import Vllm


def examination_lines(found: Examination) -> Iterator[str]:
    """The lines of the report."""
    yield f"attn doctor: {_result(found)}"
    yield found.command
    yield from _part("Machine", _machine_lines(found.machine))
    installation = found.installation
    yield from _part(
        "Installed",
        [
            *(f"{name} {version}" for name, version in installation.versions.items()),
            *(f"{name}: not installed; for {use}" for name, use in installation.missing.items()),
        ],
    )
    yield from _part(f"Backends on {found.asked_device}", _serving_lines(found.serving))
    yield from _part(f"vLLM on {found.asked_device}", _vllm_lines(found.vllm))
    if found.self_test:
        yield from _part(f"Self-test on {found.machine.device}", _trial_lines(found))


def _result(found: Examination) -> str:
    if not found.self_test:
        return "no self-test was run"
    failed = [trial.name for trial in found.self_test if not trial.passed]
    if failed:
        return f"the self-test FAILED: {'; '.join(failed)}"
    seconds = sum(trial.seconds for trial in found.self_test)
    return f"the self-test passed, {len(found.self_test)} trials in {seconds:.0f} s"


def _part(title: str, lines: Iterable[str]) -> Iterator[str]:
    yield ""
    yield title
    yield from (f"  {line}" for line in lines)


def _machine_lines(machine: Machine) -> Iterator[str]:
    yield f"system {machine.system}"
    yield (
        f"processor {machine.processor}, usable cores {machine.usable_cores:g}, busy cores "
        f"{machine.busy_cores:g}, threads {machine.threads}, memory {machine.memory_gib:g} GiB"
    )
    if machine.problem is not None:
        yield f"problem: {machine.problem}"
    if machine.compute_capability is None and machine.device_memory_gib is None:
        yield "no GPU" if machine.problem is None else "the CPU is used instead"
        return
    capability = machine.compute_capability
    yield (
        f"GPU {machine.device}, {machine.device_kind}"
        + ("" if capability is None else f", compute capability {capability}")
        + f", {machine.free_device_memory_gib:g} of {machine.device_memory_gib:g} GiB free"
    )
    yield f"torch's CUDA or ROCm {machine.cuda}, driver {machine.driver or 'unknown'}"


def _serving_lines(serving: Iterable[Serving]) -> Iterator[str]:
    for one in serving:
        yield f"{one.model}, {one.layers} ({one.family})"
        for phase in one.phases:
            kernel = f", {phase.kernel}" if phase.kernel else ""
            yield f"  {phase.phase}: {phase.backend or 'NO BACKEND'}{kernel}"
        yield from (f"  note: {note}" for note in one.notes)
        if one.is_reference:
            yield "  a reference in plain torch, too slow to serve"
        for name, reasons in one.others.items():
            yield f"  not {name}: {'; '.join(reasons)}"


def _vllm_lines(vllm: Vllm) -> Iterator[str]:
    if vllm.version is not None:
        yield f"vllm {vllm.version}"
    yield f"entry point {'installed' if vllm.entry_point else 'not installed'}"
    for kind, path in vllm.custom.items():
        yield f"--attention-backend CUSTOM is {path} for {kind} layers"
    if vllm.replaced:
        yield f"replaced by ours: {', '.join(vllm.replaced)}"
    yield from (f"{name}={value}" for name, value in vllm.variables.items())
    yield from (f"problem: {problem}" for problem in vllm.problems)


def _trial_lines(found: Examination) -> Iterator[str]:
    for trial in found.self_test:
        head = "ok  " if trial.passed else "FAIL"
        backend = f" by {trial.backend}" if trial.backend else ""
        yield f"{head} {trial.name}{backend}, {trial.seconds:.1f} s: {trial.said}"
