"""The markdown of a kernel benchmark's results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from attn.bench.cases.dense import PLAN_SIZES, BenchTable
from attn.bench.cases.latent import TOPK
from attn.bench.cases.needles import MOST_DRAWS
from attn.bench.measure.timing import GRAPH_CALLS
from attn.bench.results.case_tables import (
    case_table,
    graph_table,
    kernel_table,
    microseconds,
    percent,
    rate_text,
    ratio_text,
    scientific,
    standings_line,
    table,
    time_text,
)
from attn.bench.results.lines import Line, Part
from attn.bench.results.results import (
    MOST_SPREAD,
    BenchResults,
    CaseResult,
    Contender,
    Environment,
    Verdict,
    allocation_check,
    checks_of,
    free_partition_check,
    host_check,
    invariant_check,
    line_check,
    plain_check,
    plan_check,
    scratch_check,
)

_HOW_CLOCK = (
    "Median of single calls ({reps} per round at most, {rounds} rounds, the kernels in turn within "
    "a round, backwards in every other), {clock}. "
)
_HOW_JUDGED = (
    "Times of kernels are per layer of a model: `forward + plan / {layers}`, for ours and for "
    "every peer, measured in one process. `alone` is `forward` by itself; `plan` is what the "
    "kernel needs once per step, timed by itself: `build` of our builder, "
    "`get_scheduler_metadata` of FlashAttention-3, `plan` of FlashInfer, whose lengths lie in "
    "pinned memory. `planned` is one call of both together. What a plan computes on the host "
    "counts as far as the GPU has to wait for it. FlashMLA plans in the first call of a step: one "
    "call with its plan and the other layers' calls without are averaged. Where a peer's call with "
    "its whole plan took less, that time counts. `host` is the host's time in one eager `forward`. "
)
_HOW_INPUTS = (
    "GB/s counts each live key and value once, plus query and output; TF counts "
    "visible pairs only, 4 x head size flops per pair and query head. Keys and values are random, "
    "block tables permuted, pages hold {block_sizes} tokens, unused slots of our cache NaN. A "
    "kernel's sampled rows are compared with float64 before it is timed and again after, and "
    "before it with queries that each look for one key, in decodes for every key in turn up to "
    "{needles} keys a head; `error` "
    "is the largest relative norm. `spread` is (largest - smallest) / median of the rounds' "
    "medians of `forward`. A lead or a lag within the larger spread of the two is level; a lag of "
    "more than {most_spread} is a lag."
)
_CUDA_CLOCK = (
    "CUDA events around each call, 256 MiB written before it to empty the L2 cache, launches "
    "queued ahead of the GPU"
)
_CPU_CLOCK = "by the host's clock, caches as they are"
_LEGEND_HOPPER = (
    "`cudnn` is torch's scaled_dot_product_attention over contiguous keys and values where all "
    "requests are whole prompts of one length, and cuDNN's paged one, called by FlashInfer, "
    "elsewhere."
)
_LEGEND_MLA = (
    "Heads of 576 are 512 of the latent and 64 of the rotary part; GB/s counts a latent row once, "
    "TF 2 x (576 + 512) flops per pair and head. `fa3` is vLLM's FLASH_ATTN_MLA, `flashmla` vLLM's "
    "FLASHMLA, `vllm_triton_mla` vLLM's TRITON_MLA; `flashinfer_mla` runs on fa3. Over an fp8 "
    "cache FlashMLA is given queries in e4m3, which an engine's layer makes by a launch that is "
    "not counted; ours are in bf16, and the kernel rounds them where the case says so."
)
_LEGEND = "Times in us. `-`: no such kernel; `n/a`: cannot run here; empty: not asked for."


_HOW_LINES = (
    "Each pair of times is taken in one process, in turn ({rounds} rounds), on the same tensors; "
    "medians. `device` is the GPU's time alone: {clock}. `eager` is that of calls one after the "
    "other, from the end of a first one to that of the last, divided by their number, the host's "
    "time included and the L2 cache as it is. `graph` is that of one of {calls} calls in a CUDA "
    "graph. `host` is the host's time in a call. `direct call` is the function or wrapper of "
    "FlashInfer that "
    "`forward` calls, with the tensors and numbers that `forward` gave it. Lines of fp8 time the "
    "cache write of the step's tokens and its decode, cast and scatter in one launch, over an "
    "e4m3 cache beside a bf16 one. Builds are of vLLM's FLASHINFER on the same batch, which has "
    "its lengths on the host too. `waits` are calls that return when the GPU is done, counted by "
    "torch's profiler in a warm build, which also runs under "
    '`torch.cuda.set_sync_debug_mode("error")`. Results are compared with float64 before they '
    "are timed; `error` is the largest relative norm."
)
_HOW_LATENT = (
    "Each pair of times is taken in one process, in turn ({rounds} rounds), on the same tensors; "
    "medians. `device` is the GPU's time alone: {clock}. `eager` is that of calls one after the "
    "other, from the end of a first one to that of the last, divided by their number, the host's "
    "time included and the L2 cache as it is. `graph` is that of one of {calls} calls in a CUDA "
    "graph. `direct call` is `run` of the `BatchMLAPagedAttentionWrapper` that `forward_mqa` "
    "calls, planned for "
    "the step, with the tensors that it gave it. Lines of RoPE time one call of "
    "`do_rope_quantize_and_kv_cache_update`, which rotates and rounds to e4m3 the absorbed queries "
    "and latent rows of the step's tokens, and writes the rows: in one launch, or by FlashInfer's "
    "`mla_rope_quantize_fp8` and a launch that writes its rows. TRTLLM_MLA by TRITON_MLA's plain "
    "kernel stands beside TRITON_MLA for information. Results are compared with float64 before "
    "they are timed and again after; `error` is the largest relative norm, where e4m3 is stored "
    "its rounding included, which is to the nearest in every element."
)
_LEGEND_SPARSE = (
    "Heads of 576 are 512 of the latent and 64 of the rotary part. Rows of queries list {topk} "
    "tokens each, drawn at random from what they see; TF counts 2 x (576 + 512) flops per listed "
    "row and head. `fa3` is vLLM's FLASH_ATTN_MLA_SPARSE, `flashmla` vLLM's FLASHMLA_SPARSE. Every "
    "call turns the listed positions into slots, ours and theirs, and FlashMLA's joins and pads "
    "its queries to 64 or 128 heads."
)
_HOW_SPARSE_LINES = (
    "Lines of bytes: `device` is the GPU's time alone, with launches queued ahead and an empty L2 "
    "cache; `graph` is that of one of {calls} calls in a CUDA graph. TB/s counts the bytes that "
    "are read and written. `deepgemm` is DeepGEMM's paged logits as vLLM calls them, its schedule "
    "made before."
)
_PARTS = {
    Part.OVERHEAD: "A forward beside the call that it makes",
    Part.WRITE: "fp8 beside bf16, cache write included",
    Part.BUILD: "A step's build beside vLLM's",
    Part.ROPE: "RoPE, e4m3 and the cache write",
    Part.KERNEL: "By another backend's kernel",
    Part.LISTS: "Tiles of the portable kernel",
    Part.STREAM: "Bytes of the cache",
}


def render_markdown(results: BenchResults, since: str = "") -> str:
    """The markdown tables of a run.

    Args:
        results: the results.
        since: a sentence on what has changed since the measured commit; empty for none.
    """
    if results.environment.table.has_lines:
        return _render_lines(results, since)
    environment = results.environment
    table_, cases = environment.table, results.cases
    sizes = sorted({result.case.block_size for result in cases})
    layers = sorted({result.case.layers for result in cases})
    how = (_HOW_CLOCK + _HOW_JUDGED + _HOW_INPUTS).format(
        reps=environment.reps,
        rounds=environment.rounds,
        clock=_CPU_CLOCK if environment.device == "cpu" else _CUDA_CLOCK,
        layers=" or ".join(map(str, layers)) or "layers",
        block_sizes=" or ".join(map(str, sizes)) or "no",
        most_spread=percent(MOST_SPREAD),
        needles=MOST_DRAWS,
    )
    title = f"# {environment.backend} on {environment.device}"
    legend = {
        BenchTable.HOPPER: _LEGEND_HOPPER,
        BenchTable.MLA: _LEGEND_MLA,
        BenchTable.SPARSE_MLA: _LEGEND_SPARSE.format(topk=TOPK),
    }
    parts = [
        f"{title}, against the fastest kernels for it" if table_.takes_hopper else title,
        measured_line(results.environment),
        *filter(None, [since]),
        how,
        " ".join(filter(None, [_summary(results), standings_line(results)])),
        "## Cases",
        f"{_LEGEND} {legend.get(table_, '')}".rstrip(),
        case_table(cases, table_.peers),
        *_section("In a captured graph", _graphs(results)),
        *_section("Every kernel", kernel_table(cases)),
        *_section("On the host", _host_table(results)),
        *_section("Batch-invariant decode against a free partition", _free_table(results)),
        *_section(_invariant_title(results), _invariant_table(results)),
        *_section("In plain Triton", _plain_table(results)),
        *_section("The step's plan", _plan_table(results)),
        *_section("Plans of one engine", _plan_sizes(results)),
        *([] if table_.is_latent else _section("Memory", _memory_table(results))),
        *_line_sections(results.lines),
        *_section("Not measured", _reasons(results)),
    ]
    return "\n\n".join(parts) + "\n"


def _graphs(results: BenchResults) -> str:
    """Times per layer in a captured graph, under a line that says how they are measured."""
    found = graph_table(results.cases, results.environment.table.peers)
    if not found:
        return ""
    how = (
        f"One of {GRAPH_CALLS} calls of `forward` in a CUDA graph, every launch counted, and the "
        "plan's part as above. The calls read one cache, of which the L2 cache keeps what it can."
    )
    return f"{how}\n\n{found}"


def measured_line(environment: Environment) -> str:
    """When and with which versions something was measured."""
    versions = ", ".join(
        f"{name} {getattr(environment, name)}" for name in ("torch", "triton", "vllm", "flashinfer")
    )
    return f"{environment.date}, commit {environment.commit}; {versions}."


def _render_lines(results: BenchResults, since: str) -> str:
    environment = results.environment
    clock = _CPU_CLOCK if environment.device == "cpu" else _CUDA_CLOCK
    checks = [check for line in results.lines if (check := line_check(line)) is not None]
    counts = Counter(check.verdict for check in checks)
    how = _HOW_LATENT if environment.table is BenchTable.TRTLLM_MLA else _HOW_LINES
    parts = [
        f"# {environment.backend} on {environment.device}, beside FlashInfer's own calls",
        measured_line(results.environment),
        *filter(None, [since]),
        how.format(rounds=environment.rounds, clock=clock, calls=GRAPH_CALLS),
        "Targets: " + ", ".join(f"{counts[v]} {v.value}" for v in Verdict) + ".",
    ]
    parts += _line_sections(results.lines)
    parts += _section("Not measured", "\n".join(_line_reasons(results.lines)))
    return "\n\n".join(parts) + "\n"


def _line_sections(lines: Sequence[Line]) -> list[str]:
    """A section with a table for each part that has lines."""
    found = []
    for part, title in _PARTS.items():
        own = [line for line in lines if line.part is part]
        how = "" if part is not Part.STREAM else _HOW_SPARSE_LINES.format(calls=GRAPH_CALLS)
        body = [*filter(None, [how]), _line_table(own)] if own else []
        found += _section(title, "\n\n".join(body))
    return found


def _line_reasons(lines: Sequence[Line]) -> list[str]:
    """Every reason once, with the lines that it applies to."""
    reasons: dict[str, list[str]] = {}
    for line in lines:
        if line.reason:
            named = f"{line.backend} {line.case} {line.how.value}"
            reasons.setdefault(line.reason, []).append(named)
    return [f"- {reason} ({', '.join(names)})" for reason, names in reasons.items()]


def _line_table(lines: Sequence[Line]) -> str:
    header = ["backend", "case", "what", "time of", "ours, us", "beside", "its, us", "ours / its"]
    header += ["ours - its, us", "spread", "its spread", "error", "waits", "target", "verdict"]
    # Tables without rates omit the column.
    has_rates = any(line.amount is not None for line in lines)
    header[5:5] = ["rate"] * has_rates
    rows = []
    for line in lines:
        check, ours, its = line_check(line), line.ours_us, line.other_us
        paired = ours is not None and its is not None
        missing = "failed" if line.is_broken else "n/a"
        rows.append(
            [
                line.backend,
                line.case,
                line.what,
                line.how.value,
                missing if ours is None else f"**{ours:.1f}**",
                *[_line_rate(line)] * has_rates,
                line.other,
                "n/a" if its is None else f"{its:.1f}",
                f"{(ours or 0.0) / (its or 1.0):.3f}" if paired else "",
                f"{(ours or 0.0) - (its or 0.0):.1f}" if paired else "",
                percent(line.spread),
                percent(line.other_spread),
                scientific(line.error),
                "" if line.waits is None else str(line.waits),
                "" if check is None else check.text,
                "" if check is None else check.verdict.value,
            ]
        )
    return table(header, rows)


def _line_rate(line: Line) -> str:
    if line.rate is None:
        return ""
    return f"{line.rate:.0f} {line.unit}" if line.rate >= 10 else f"{line.rate:.2f} {line.unit}"


def line_text(line: Line) -> str:
    """A line of a table as text for a log."""
    check = line_check(line)
    times = [
        f"{name} {time:.1f} us"
        for name, time in ((line.backend, line.ours_us), (line.other, line.other_us))
        if time is not None
    ]
    times += filter(None, [_line_rate(line)])
    verdict = "" if check is None else f"{check.text}: {check.verdict.value}"
    parts = [f"{line.part.value} {line.how.value}", *times, verdict, line.reason]
    return ", ".join(filter(None, parts))


def _section(title: str, body: str) -> list[str]:
    return [f"## {title}", body] if body else []


def _summary(results: BenchResults) -> str:
    checks = [check for result in results.cases for check in checks_of(result, results.cases)]
    for judge in (host_check, plain_check, invariant_check):
        checks += [check for result in results.cases if (check := judge(result)) is not None]
    checks += [free_partition_check(r) for r in results.cases if r.case.compare_free_partition]
    checks += [check for line in results.lines if (check := line_check(line)) is not None]
    if not results.environment.table.is_latent:
        checks += [scratch_check(results), allocation_check(results)]
    checks += filter(None, [plan_check(results)])
    counts = Counter(check.verdict for check in checks)
    return "Targets: " + ", ".join(f"{counts[v]} {v.value}" for v in Verdict) + "."


def _host_table(results: BenchResults) -> str:
    """Host time of one eager forward: a row for each case that has a bound."""
    peers = results.environment.table.peers
    rows = []
    for result in results.cases:
        check = host_check(result)
        if check is None:
            continue
        ours = result.ours
        rows.append(
            [
                result.case.name,
                "n/a" if ours.host_us is None else f"**{ours.host_us:.1f}**",
                microseconds(ours.plan_host_us),
                *(
                    time_text(peer, None if peer is None else peer.host_us)
                    for peer in map(result.peer, peers)
                ),
                check.text,
                check.verdict.value,
            ]
        )
    if not rows:
        return ""
    how = (
        "Microseconds of the host in one eager `forward`, with an idle GPU at first and without "
        "waiting for it. `build` is that of our step's plan."
    )
    return f"{how}\n\n{table(['case', 'ours', 'build', *peers, 'target', 'verdict'], rows)}"


def _own(result: CaseResult, contender: Contender | None) -> str:
    """Time per layer of a kernel of ours."""
    return time_text(contender, result.cost(contender))


def _free_table(results: BenchResults) -> str:
    header = ["case", "invariant", "free", "invariant / free", "target", "verdict"]
    rows = []
    for result in results.cases:
        if result.case.compare_free_partition:
            check = free_partition_check(result)
            ours, free = result.ours, result.free_partition
            times = [_own(result, ours), _own(result, free) or "n/a"]
            times.append(ratio_text(result.ratio(free)))
            rows.append([result.case.name, *times, check.text, check.verdict.value])
    return table(header, rows) if rows else ""


def _invariant_title(results: BenchResults) -> str:
    is_own = results.environment.table is BenchTable.INVARIANCE
    return "With batch invariance" if is_own else "Batch-invariant prefill"


def _invariant_table(results: BenchResults) -> str:
    header = ["case", "default", "rate", "invariant", "rate", "invariant / default"]
    has_bounds = any(result.case.target.max_invariant_ratio for result in results.cases)
    header += ["target", "verdict"] * has_bounds
    rows = []
    for result in results.cases:
        if result.case.compare_batch_invariant:
            ours, other = result.ours, result.batch_invariant
            ratio = result.ratio(other)
            cells = [_own(result, ours), rate_text(result, ours)]
            cells += [_own(result, other) or "n/a", rate_text(result, other)]
            cells.append(ratio_text(ratio and 1 / ratio))
            check = invariant_check(result)
            judged = ["", ""] if check is None else [check.text, check.verdict.value]
            rows.append([result.case.name, *cells, *judged * has_bounds])
    return table(header, rows) if rows else ""


def _plain_table(results: BenchResults) -> str:
    header = ["case", "plain Triton", "rate", "ours / plain", "target", "verdict"]
    rows = []
    for result in results.cases:
        check, plain = plain_check(result), result.plain
        if check is not None:
            cells = [_own(result, plain) or "n/a", rate_text(result, plain)]
            cells.append(ratio_text(result.ratio(plain)))
            rows.append([result.case.name, *cells, check.text, check.verdict.value])
    return table(header, rows) if rows else ""


def _plan_table(results: BenchResults) -> str:
    header = ["case", "kernels of build, us", "build on the host, us", "forward, us"]
    rows = []
    for result in results.cases:
        if result.plan is not None:
            gpu = "n/a" if result.plan.gpu_us is None else f"{result.plan.gpu_us:.1f}"
            forward = time_text(result.ours, result.ours.time_us)
            rows.append([result.case.name, gpu, f"{result.plan.host_us:.1f}", forward])
    return table(header, rows) if rows else ""


def _plan_sizes(results: BenchResults) -> str:
    check = plan_check(results)
    if check is None:
        return ""
    header = ["decodes", "as long, us", "uneven, us"]
    rows = [
        [str(plan.num_reqs), f"{plan.even_us:.1f}", f"{plan.uneven_us:.1f}"]
        for plan in results.plans
    ]
    text = f"Every plan, of cases too, {check.text}: {check.verdict.value}."
    if not rows:
        return f"Of one engine's plans by their number of decodes none was measured. {text}"
    engine = f"an engine of up to {PLAN_SIZES[-1]} requests"
    how = f"The kernels of `build` in a CUDA graph, of {engine}. {text}"
    return f"{how}\n\n{table(header, rows)}"


def _memory_table(results: BenchResults) -> str:
    scratch, allocation = scratch_check(results), allocation_check(results)
    size, counts = results.scratch_bytes, [result.allocations for result in results.cases]
    known = [count for count in counts if count is not None]
    rows = [
        [
            "scratch, 256 sequences, 32/8 heads, head size 128",
            "n/a" if size is None else f"{size / (1 << 20):.1f} MiB",
            scratch.text,
            scratch.verdict.value,
        ],
        [
            f"allocations in ten forwards, most of {len(known)} cases",
            str(max(known)) if known else "n/a",
            allocation.text,
            allocation.verdict.value,
        ],
    ]
    return table(["what", "measured", "target", "verdict"], rows)


def _reasons(results: BenchResults) -> str:
    """Every reason once, with the cases that it applies to."""
    found: dict[tuple[str, str], list[str]] = {}
    for result in results.cases:
        extra = (result.free_partition, result.batch_invariant, result.plain)
        for contender in (result.ours, *result.peers, *(item for item in extra if item)):
            if contender.reason:
                what = f"{contender.name}, {contender.status.value}"
                found.setdefault((what, contender.reason), []).append(result.case.name)
        if result.plan is not None and result.plan.reason:
            found.setdefault(("plan", result.plan.reason), []).append(result.case.name)
    if results.scratch_reason:
        found[("scratch", results.scratch_reason)] = []
    if results.plans_reason:
        found[("plans of one engine", results.plans_reason)] = []
    lines = []
    for (what, reason), names in found.items():
        lines.append(f"- {what}: {reason}" + (f" ({', '.join(names)})" if names else ""))
    return "\n".join([*lines, *_line_reasons(results.lines)])
