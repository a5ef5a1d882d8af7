"""Tokens/s of Transformers' continuous batching: ours beside ``sdpa``.

    python -m attn.bench.engine.continuous --json 5.17.json
    python -m attn.bench.engine.continuous --render 5.17.json 5.24.json --out TABLE.md

The benchmark needs Transformers and a GPU, but no model files and no network: the model has the
sizes of Llama-3.1-8B with fewer layers, and its weights are drawn on the GPU. Each contender runs
in a process of its own, with a limit of time; one that fails leaves its last error in the results.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from attn.bench.command import USER_ERRORS, Parser, check_writable, require_gpu, usage_error
from attn.bench.engine.continuous_worker import (
    CONTENDERS,
    OURS,
    REFERENCE,
    Job,
    Measured,
    perform,
    run_job,
)
from attn.bench.results.origin import read_results
from attn.errors import MissingDependencyError
from specs.base import Spec, parse_spec

TARGET: Final = 2.0
"""Tokens/s of ours over those of ``sdpa``, at least."""
LEAST_SECONDS: Final = 30
"""A contender is not started with less time than this."""
WORDS: Final = {
    "attn": "ours, decodes in CUDA graphs",
    "attn_eager": "ours, without graphs",
    "sdpa": "torch's scaled_dot_product_attention",
}


class ContinuousResults(Spec):
    """What one run of the benchmark measured, with one version of Transformers."""

    job: Job
    measured: tuple[Measured, ...]

    def of(self, contender: str) -> Measured | None:
        """What a contender measured; None where it failed or was not asked for."""
        found = (one for one in self.measured if one.contender == contender)
        return next((one for one in found if one.seconds), None)

    @property
    def ratio(self) -> float | None:
        """Tokens/s of ours over those of ``sdpa``."""
        ours, other = self.of(OURS) or self.of("attn_eager"), self.of(REFERENCE)
        if ours is None or other is None:
            return None
        return ours.tokens_per_s / other.tokens_per_s


def measure(job: Job, contenders: Sequence[str], budget_s: float) -> ContinuousResults:
    """Measure contenders one after the other.

    Args:
        job: what each of them does.
        contenders: names of :data:`CONTENDERS`.
        budget_s: seconds for all of them; the last ones are left out where it is used up.
    """
    begin, measured = time.monotonic(), []
    for place, name in enumerate(contenders):
        left = budget_s - (time.monotonic() - begin)
        if left < LEAST_SECONDS:
            measured.append(Measured(contender=name, problem="no time was left"))
            continue
        # A contender leaves time for those after it.
        limit = min(left, max(left / (len(contenders) - place), LEAST_SECONDS) * 1.3)
        found = _run(job.replace(contender=name), limit)
        left = budget_s - (time.monotonic() - begin)
        if not found.seconds and name == REFERENCE and left > LEAST_SECONDS:
            # A mask of all tokens by all keys may not fit into memory.
            found = _run(job.replace(contender=name, step_tokens=job.step_tokens // 4), left)
        measured.append(found)
    return ContinuousResults(job=job, measured=tuple(measured))


def joined(results: Sequence[ContinuousResults]) -> list[ContinuousResults]:
    """Results of one version of Transformers as one run.

    What a later run measured replaces what an earlier one has of the same contender.

    Raises:
        ValueError: two runs of one version asked for other work.
    """
    runs: dict[str, ContinuousResults] = {}
    for run in results:
        version = _version(run)
        known = runs.get(version, run.replace(measured=()))
        if known.job.replace(rounds=1) != run.job.replace(rounds=1):
            raise ValueError(f"runs of Transformers {version} must have one job, got two")
        kept = {one.contender: one for one in known.measured}
        for one in run.measured:
            if one.seconds or one.contender not in kept:
                kept[one.contender] = one
        order = sorted(kept.values(), key=lambda one: CONTENDERS.index(one.contender))
        runs[version] = known.replace(measured=tuple(order))
    return list(runs.values())


def _run(job: Job, limit_s: float) -> Measured:
    print(f"{job.contender}, steps of {job.step_tokens}: at most {limit_s:.0f} s", flush=True)
    found = run_job(job, limit_s)
    print(f"  {found.line}", flush=True)
    return found


def render_markdown(results: Sequence[ContinuousResults]) -> str:
    """The page of results, from one run per version of Transformers."""
    first = results[0].job
    machines = {one.environment["device"] for run in results for one in run.measured if one.seconds}
    parts = [
        f"# Transformers' continuous batching on {', '.join(sorted(machines)) or 'no GPU'}",
        "\n".join(_when(run) for run in results),
        f"Llama-3.1-8B's shape with {first.layers} layers, random bf16 weights; {first.requests} "
        f"requests of {first.prompt_tokens} tokens, {first.new_tokens} new tokens each, greedy. "
        f"Pages of {first.page_tokens} tokens, at most {first.step_tokens} tokens a step. "
        "Tokens/s is by the wall clock over one `generate_batch` of all requests, their new tokens "
        "counted, best of the rounds after one to warm up; `spread` is (longest - shortest) / "
        "shortest. Each contender has a process of its own. `logits` is the largest difference of "
        "a prompt's logits from `sdpa` in the same process, over the largest of them. `same "
        "tokens` counts leading tokens that agree with `sdpa`'s, over the first requests.",
        "## Tokens/s",
        _table(results),
        "## Targets",
        _targets(results),
    ]
    problems = [
        f"- Transformers {_version(run)}, {one.contender}: {one.problem}"
        for run in results
        for one in run.measured
        if one.problem
    ]
    if problems:
        parts += ["## Not measured, or cut short", "\n".join(problems)]
    return "\n\n".join(parts) + "\n"


def _when(run: ContinuousResults) -> str:
    measured = [one.environment for one in run.measured if one.seconds]
    found = measured[0] if measured else {}
    # Contenders may have been measured one by one.
    commits = dict.fromkeys(one.get("commit", "unknown") for one in measured)
    return (
        f"- Transformers {found.get('transformers', 'unknown')}: {found.get('device', 'no GPU')}, "
        f"{found.get('date', 'no date')}, commit {', '.join(commits) or 'unknown'}; torch "
        f"{found.get('torch', 'unknown')}, triton {found.get('triton', 'unknown')}."
    )


def _version(run: ContinuousResults) -> str:
    return next((one.environment["transformers"] for one in run.measured if one.seconds), "unknown")


def _table(results: Sequence[ContinuousResults]) -> str:
    header = ("Transformers", "attention", "tokens/s", "spread", "/ sdpa", "logits", "same tokens")
    rows = []
    for run in results:
        reference = run.of(REFERENCE)
        for one in run.measured:
            if not one.seconds:
                continue
            ratio = "" if reference is None else f"{one.tokens_per_s / reference.tokens_per_s:.2f}"
            logits = "" if one.logits is None else f"{one.logits:.4f}"
            words = WORDS[one.contender]
            if one.step_tokens != run.job.step_tokens:
                words += f", {one.step_tokens} tokens a step"
            rows.append(
                (
                    _version(run),
                    words,
                    f"{one.tokens_per_s:,.0f}",
                    f"{one.spread:.1%}".replace("%", " %") if one.seconds[1:] else "one round",
                    ratio,
                    logits,
                    "" if reference in (None, one) else _same(one, reference),
                )
            )
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _same(one: Measured, other: Measured | None) -> str:
    """``37 of 64``: leading tokens that two contenders have in common."""
    assert other is not None
    same = total = 0
    for ours, theirs in zip(one.tokens, other.tokens, strict=False):
        total += len(theirs)
        for left, right in zip(ours, theirs, strict=False):
            if left != right:
                break
            same += 1
    return f"{same} of {total}"


def _targets(results: Sequence[ContinuousResults]) -> str:
    lines = ["| target | measured | verdict |", "| --- | --- | --- |"]
    for run in results:
        ratio = run.ratio
        measured = "-" if ratio is None else f"{ratio:.2f} x"
        verdict = "not measured" if ratio is None else "met" if ratio >= TARGET else "NOT met"
        target = f"Transformers {_version(run)}: >= {TARGET:.0f} x sdpa"
        lines.append(f"| {target} | {measured} | {verdict} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or render results; the exit code is 2 for bad input.

    Args:
        argv: the arguments; None takes the process's.
    """
    parser = Parser(
        prog="python -m attn.bench.engine.continuous",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("--contender", action="append", choices=CONTENDERS, help="one of several")
    for name, field in Job.model_fields.items():
        if field.annotation is not str:
            parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=field.default)
    parser.add_argument("--budget", type=float, default=220, help="seconds for all contenders")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--render", nargs="+", type=Path, help="results to make a page of")
    parser.add_argument("--out", type=Path, help="write the page to this file")
    parser.add_argument("--worker", nargs=2, type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    try:
        if asked.worker is not None:
            source, target = asked.worker
            job = parse_spec(Job, source.read_text(encoding="utf-8"), str(source))
            for found in perform(job):
                # A reader never sees half of it.
                half = target.with_suffix(".half")
                half.write_text(found.model_dump_json(), encoding="utf-8")
                half.replace(target)
            return 0
        for option, path in (("--json", asked.json), ("--out", asked.out)):
            check_writable(option, path)
        if asked.render:
            runs = joined(
                [read_results(ContinuousResults, path, "results") for path in asked.render]
            )
        else:
            require_gpu("continuous")
            _require_transformers()
            names = [name for name in Job.model_fields if hasattr(asked, name)]
            job = Job(**{name: getattr(asked, name) for name in names if name != "contender"})
            runs = [measure(job, asked.contender or CONTENDERS, asked.budget)]
            if asked.json is not None:
                asked.json.write_text(runs[0].model_dump_json(indent=1) + "\n", encoding="utf-8")
        page = render_markdown(runs)
        if asked.out is not None:
            asked.out.write_text(page, encoding="utf-8")
        else:
            print(page)
    except USER_ERRORS as error:
        return usage_error(error)
    return 0


def _require_transformers() -> None:
    """Refuse to go on without Transformers.

    Raises:
        MissingDependencyError: it is not installed.
    """
    import importlib.util

    if importlib.util.find_spec("transformers") is None:
        raise MissingDependencyError("transformers", "the benchmark of continuous batching")


if __name__ == "__main__":
    sys.exit(main())
