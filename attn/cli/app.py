"""The commands: ``attn run``, ``attn generate``, ``attn explain``, ``attn bench`` and others.

Commands import torch and what needs it when they run, so that help and errors of usage are fast.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperGroup

from attn.bench.options import BenchOptions
from attn.cli.new_backend import Family, new_backend
from attn.cli.terminal import options
from attn.device import detect_device, known_device
from attn.errors import MissingDependencyError, one_line
from specs.dtypes import CacheDType
from specs.names import near_miss
from specs.rows import LatentFormat, cache_dtype_of, latent_format_of
from specs.sparse_mla import STORED_FORMATS

if TYPE_CHECKING:
    from rich.console import Console

    from attn.cli.replay import Replay, RunSettings
    from attn.cli.trace import TraceRequest
    from specs.model import ModelGeometry

USAGE_ERROR: Final = 2
INTERRUPTED: Final = 130

# The base class of command-line errors in Typer's click, which may not be the installed click.
_UsageError: Final[Any] = typer.BadParameter.__base__


class _Command(TyperGroup):
    """A group of commands that reports a usage error in one line, as the commands report theirs."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run the command line."""
        run: Any = super().main
        given = args[0] if args else extra.get("args")
        # Reports name the command that made them.
        extra.setdefault("obj", [str(word) for word in (sys.argv[1:] if given is None else given)])
        try:
            code = run(*args, standalone_mode=False, **extra)
        except _UsageError as error:
            if not standalone_mode:
                raise
            if type(error).__name__ == "NoArgsIsHelpError":
                print(error.ctx.get_help())
            else:
                print(f"error: {' '.join(error.format_message().split())}", file=sys.stderr)
            sys.exit(USAGE_ERROR)
        except typer.Abort:
            sys.exit(INTERRUPTED)
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else 0)
        return code


app = typer.Typer(
    name="attn",
    cls=_Command,
    help="Attention backends for LLM serving: run a trace, list backends, explain a choice.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Benchmarks.", no_args_is_help=True)
app.add_typer(bench, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        import attn

        print(f"attn-backends {attn.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Attention backends for LLM serving: run a trace, list backends, explain a choice."""


@contextmanager
def _clear_errors() -> Iterator[None]:
    """Turn errors that a user can cause into one line and exit code 2.

    With ``ATTN_DEBUG=1`` they are raised, with a traceback.
    """
    try:
        yield
    except (ValueError, NotImplementedError, MissingDependencyError, OSError) as error:
        from builders.checks.debug import debug_enabled

        if debug_enabled():
            raise
        print(f"error: {one_line(error)}", file=sys.stderr)
        raise typer.Exit(USAGE_ERROR) from None


@app.command()
def run(
    context: typer.Context,
    model: options.Model = "llama-3.2-1b",
    trace: options.Trace = None,
    synthetic: options.Synthetic = False,
    backend: options.Backend = None,
    layers: options.Layers = 2,
    requests: options.Requests = 16,
    seed: options.Seed = 0,
    threads: options.Threads = None,
    kv_cache_dtype: options.KVDtype = "auto",
    block_size: options.BlockSize = None,
    tp: options.Ranks = 1,
    max_num_seqs: options.MaxNumSeqs = 32,
    max_num_batched_tokens: options.MaxNumBatchedTokens = 2048,
    kv_memory: options.KVMemory = None,
    kv_layout: options.KVLayout = None,
    speculative: options.Speculative = 0,
    dense_prefill_kernel: options.DensePrefill = None,
    dense_decode_kernel: options.DenseDecode = None,
    latent_prefill_kernel: options.LatentPrefill = None,
    latent_decode_kernel: options.LatentDecode = None,
    latent_rows_kernel: options.LatentRows = None,
    sparse_prefill_kernel: options.SparsePrefill = None,
    sparse_decode_kernel: options.SparseDecode = None,
    sparse_own_prefill_kernel: options.SparseOwnPrefill = None,
    sparse_own_decode_kernel: options.SparseOwnDecode = None,
    check_rows: options.CheckRows = 3,
    corrupt: options.Corrupt = None,
    report: options.ReportFolder = None,
    html: options.RunHtml = None,
    compare: options.RunCompare = None,
) -> None:
    """Serve a request trace's continuous batch and check sampled rows in float64."""
    with _clear_errors():
        if trace is not None and synthetic:
            raise ValueError("give --trace or --synthetic, not both")
        if corrupt is not None and not check_rows:
            raise ValueError("--corrupt needs --check-rows above 0: nothing else sees the fault")
        from rich.console import Console

        from attn.cli.explain import remarks
        from attn.cli.kernels import check_families, kernels_of
        from attn.cli.pages.output import RunOutput
        from attn.cli.replay import Replay, RunSettings, reference_notes
        from attn.cli.report import print_summary
        from attn.cli.terminal.threads import use_threads
        from specs.hf_config import load_model_geometry

        console = Console()
        # Tried before the run, so that a path that cannot be written does not lose the results.
        output = RunOutput(report, html, compare)
        output.check()
        geometry = load_model_geometry(model)
        for remark in remarks(geometry):
            print(remark)
        kernels = kernels_of(
            dense_prefill_kernel=dense_prefill_kernel,
            dense_decode_kernel=dense_decode_kernel,
            latent_prefill_kernel=latent_prefill_kernel,
            latent_decode_kernel=latent_decode_kernel,
            latent_rows_kernel=latent_rows_kernel,
            sparse_prefill_kernel=sparse_prefill_kernel,
            sparse_decode_kernel=sparse_decode_kernel,
            sparse_own_prefill_kernel=sparse_own_prefill_kernel,
            sparse_own_decode_kernel=sparse_own_decode_kernel,
        )
        check_families(kernels, geometry)
        chosen = geometry.select_layers(min(layers, geometry.num_layers)).local(tp)
        if layers > geometry.num_layers:
            console.print(
                f"--layers {layers}: {geometry.name} has {geometry.num_layers}, which are all run",
                highlight=False,
            )
        taken, clipped = _requests(trace, requests, seed, chosen)
        settings = RunSettings(
            model=chosen,
            device=detect_device(),
            backend=backend,
            kv_cache_dtype=_cache_dtype(kv_cache_dtype, kv_layout, chosen),
            block_size=block_size,
            tensor_parallel_size=tp,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_memory_bytes=None if kv_memory is None else parse_bytes(kv_memory),
            check_rows=check_rows,
            seed=seed,
            fault=corrupt,
            kernels=kernels,
            num_speculative_tokens=speculative,
        )
        taken_threads = use_threads(threads, settings.device)
        replay = Replay(settings, taken)
        for note in reference_notes(replay.groups, settings.device):
            console.print(note, highlight=False)
        if taken_threads is not None:
            console.print(str(taken_threads), highlight=False, soft_wrap=True)
        _run_with_progress(replay, console)
        shown = {
            "trace": "synthetic" if trace is None else trace.name,
            "layers": f"{chosen.num_layers} of {geometry.num_layers}",
            **_shown(settings),
            **_said(
                kv_layout=kv_layout,
                speculative=speculative,
                threads=None if taken_threads is None else taken_threads.count,
            ),
        }
        outcome = replay.report(shown, clipped, context.obj)
        print_summary(outcome, console)
        output.write(outcome, console)
    if replay.interrupted:
        raise typer.Exit(INTERRUPTED)
    code = _exit_code(settings, outcome.passed)
    if code:
        raise typer.Exit(code)


def _exit_code(settings: RunSettings, passed: bool) -> int:
    """Exit code of a finished run: 1 where a check failed, 2 where no check saw a ``--corrupt``."""
    if settings.fault is not None and passed:
        print(
            f"error: no sampled row was long enough to show {settings.fault.value!r}; "
            "take longer requests or more --check-rows",
            file=sys.stderr,
        )
        return USAGE_ERROR
    return 1 if settings.check_rows and not passed else 0


def _shown(settings: RunSettings) -> dict[str, object]:
    """The settings of a run, as its report shows them."""
    from attn.cli.kernels import named_kernels

    fault = settings.fault
    return {
        "kv_cache_dtype": settings.kv_cache_dtype.value,
        "tp": settings.tensor_parallel_size,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "corrupt": None if fault is None else fault.value,
        **{
            named.option.replace("-", "_"): named.kernel.value
            for named in named_kernels(settings.kernels)
        },
    }


def _said(**options: object) -> dict[str, object]:
    """The options that were given: those that are not None."""
    return {name: value for name, value in options.items() if value}


def _cache_dtype(name: str, layout: str | None, model: ModelGeometry) -> CacheDType:
    """The KV cache dtype for ``--kv-cache-dtype`` and ``--kv-layout``.

    Raises:
        ValueError: the layout is unknown, a layer is not latent, or dtype and layout do not go
            together.
    """
    given = served_cache_dtype(name)
    if layout is None:
        return given
    try:
        rows = LatentFormat(layout)
    except ValueError:
        names = ", ".join(STORED_FORMATS)
        raise ValueError(f"kv-layout must be one of {names}, got {layout!r}") from None
    if not all(layer.kind.is_mla for layer in model.layers):
        raise ValueError(f"kv-layout names rows of latent layers, and {model.name} has others")
    named = cache_dtype_of(rows)
    if given is not CacheDType.AUTO and latent_format_of(given) is not rows:
        raise ValueError(
            f"kv-layout {rows.value} is kv-cache-dtype {named.value!r}, got {given.value!r} too"
        )
    return named if given is CacheDType.AUTO else given


def served_cache_dtype(name: str) -> CacheDType:
    """A KV cache dtype that some backend serves.

    Raises:
        ValueError: the name is unknown, or no backend serves the format.
    """
    from attn.selector import served_cache_dtypes

    served = served_cache_dtypes()
    try:
        found = CacheDType.parse(name)
    except ValueError:
        found = None
    if found not in served:
        raise ValueError(
            f"kv-cache-dtype must be one of {', '.join(served)}, got {name!r}"
            f"{near_miss(name, served)}"
        )
    return found


def _requests(
    trace: Path | None, count: int, seed: int, model: ModelGeometry
) -> tuple[list[TraceRequest], int]:
    from attn.cli.trace import fit_to_limit, read_trace, synthetic_trace

    taken = synthetic_trace(count, seed) if trace is None else read_trace(trace, count)
    return fit_to_limit(taken, model.max_position_embeddings)


def _run_with_progress(replay: Replay, console: Console) -> None:
    from attn.cli.report import StepRecord
    from attn.cli.terminal.progress import progress

    total, done = sum(replay.lengths), 0
    with progress(console, "attention", "tokens") as update:

        def on_step(record: StepRecord) -> None:
            nonlocal done
            done += record.tokens
            # Tokens that are computed again count again, so they are added to the total.
            update(done, total + replay.scheduler.num_discarded_tokens)

        replay.run(on_step)


def parse_bytes(text: str) -> int:
    """``"512MiB"``, ``"2 GB"`` or ``"1048576"`` as bytes.

    Raises:
        ValueError: not a positive size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    if match is None or Decimal(match[1]) <= 0:
        raise ValueError(f"size must be a positive number of bytes such as 512MiB, got {text!r}")
    power = "kmgt".find(match[2].lower()) + 1 if match[2] else 0
    return int(Decimal(match[1]) * (1024 if match[3] else 1000) ** power)


@app.command()
def generate(
    context: typer.Context,
    hf: options.ModelFolder,
    prompt: options.Prompt,
    max_new_tokens: options.MaxNewTokens = 64,
    backend: options.Backend = None,
    threads: options.Threads = None,
    compare: options.CompareAttention = None,
    report: options.GenerateReport = None,
) -> None:
    """Generate text with a local model of Transformers, by our attention."""
    with _clear_errors():
        from attn.cli.generate import check, summary, write_report
        from attn.integrations.transformers.generation import Request
        from attn.integrations.transformers.generation import generate as generate_text

        other = None if compare is None else compare.value
        request = Request(hf, prompt, max_new_tokens, backend, other)
        check(request, report)
        from attn.cli.terminal.threads import use_threads

        use_threads(threads, detect_device())
        outcome = generate_text(request, lambda text: print(text, end="", flush=True))
        print("\n")
        for line in summary(outcome):
            print(line)
        if report is not None:
            for path in write_report(outcome, context.obj, report):
                print(f"wrote {path}")


@app.command()
def backends(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table of features for the documentation.")
    ] = False,
) -> None:
    """What this machine can run, and why not the rest."""
    with _clear_errors():
        from rich.console import Console

        from attn.cli.explain import feature_table, print_backends

        if markdown:
            print(feature_table())
        else:
            print_backends(detect_device(), Console())


@app.command()
def explain(
    model: options.Model = "llama-3.1-8b",
    device: options.AnyDevice = None,
    backend: options.Backend = None,
    allow_reference: options.AllowReference = False,
    kv_cache_dtype: options.KVDtype = "auto",
    block_size: options.BlockSize = None,
    kernels: options.WithKernels = False,
    as_json: options.AsJson = False,
) -> None:
    """Which backend each kind of layer gets, with a reason for every other one."""
    with _clear_errors():
        from rich.console import Console

        from attn.cli.explain import Question, print_decisions
        from specs.hf_config import load_model_geometry

        question = Question(
            model=load_model_geometry(model),
            device=detect_device() if device is None else known_device(device),
            kv_cache_dtype=served_cache_dtype(kv_cache_dtype),
            block_size=block_size,
            backend=backend,
            allow_reference=allow_reference,
        )
        served = print_decisions(question, Console(), as_json=as_json, kernels=kernels)
    if not served:
        raise typer.Exit(1)


@app.command()
def warm(
    model: options.Model,
    device: options.AnyDevice = None,
    kv_cache_dtype: options.KVDtype = "auto",
    block_size: options.BlockSize = None,
    tp: options.AllRanks = 1,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.EngineSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = 8192,
    speculative: options.Drafts = 0,
    jobs: options.Jobs = None,
) -> None:
    """Fill Triton's cache with the kernels that vLLM will launch for a model; needs no GPU.

    Name the settings that vLLM will be started with. Triton's cache is the folder that
    TRITON_CACHE_DIR names, or ~/.triton/cache. The exit code is 1 where a kernel does not compile.
    """
    with _clear_errors():
        from attn.cli.explain import remarks
        from attn.cli.terminal.threads import usable_cores
        from attn.cli.warm import Wanted
        from attn.cli.warm import warm as fill_cache
        from specs.hf_config import load_model_geometry

        geometry = load_model_geometry(model)
        for remark in remarks(geometry):
            print(remark)
        wanted = Wanted(
            model=geometry.local(tp),
            device=detect_device() if device is None else known_device(device),
            kv_cache_dtype=served_cache_dtype(kv_cache_dtype),
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            speculative=speculative,
        )
        warmed = fill_cache(wanted, jobs or max(1, round(usable_cores())), print_flushed)
    if warmed.failed:
        raise typer.Exit(1)


@app.command()
def doctor(
    context: typer.Context,
    model: options.Models = None,
    device: options.AnyDevice = None,
    no_self_test: options.NoSelfTest = False,
    as_json: options.AsJson = False,
) -> None:
    """What this machine has, which backend serves what and why, and a self-test in float64.

    The text is made to be pasted into a report. The self-test replays small batches of a dense, a
    latent and a sparse layer on this machine; the exit code is 1 where it fails.
    """
    with _clear_errors():
        from attn.bench.results.origin import command_line
        from attn.cli.doctor.examination import examine
        from attn.cli.doctor.show import examination_lines
        from attn.cli.terminal.progress import print_line

        on_trial = None if no_self_test else lambda name: print_line(f"self-test: {name}")
        found = examine(model, device, command_line(context.obj), on_trial)
        if as_json:
            print(found.model_dump_json(indent=2))
        else:
            print("\n".join(examination_lines(found)))
    if not found.passed:
        raise typer.Exit(1)


@app.command("new-backend")
def new_backend_command(
    name: Annotated[str, typer.Argument(help="Such as MY_ATTN.")],
    parent: Annotated[Path, typer.Option("--dir", help="Folder to make the package in.")] = Path(),
    family: Annotated[Family, typer.Option(help="Layers that it serves.")] = Family.DENSE,
) -> None:
    """Write a package with a backend that works, for you to put your kernel in."""
    with _clear_errors():
        for line in new_backend(name, parent, family):
            print(line)


@bench.command("build")
def bench_build_command(
    num_reqs: options.NumReqs = 256,
    repeats: options.Repeats = 2000,
) -> None:
    """Microseconds of CPU that each backend's builder takes for a batch of decodes."""
    with _clear_errors():
        from attn.bench.build import bench_build

        for line in bench_build(num_reqs, repeats):
            print(line, flush=True)


@bench.command("kernels")
def bench_kernels_command(
    context: typer.Context,
    backend: options.BenchBackend = None,
    table: options.BenchTable = BenchOptions.table,
    case: options.BenchCases = None,
    peer: options.BenchPeers = None,
    no_peers: options.NoPeers = False,
    dense_decode_kernel: options.BenchDenseDecode = None,
    latent_decode_kernel: options.BenchLatentDecode = None,
    sparse_own_decode_kernel: options.BenchSparseDecode = None,
    rounds: options.Rounds = BenchOptions.rounds,
    reps: options.Reps = BenchOptions.reps,
    commit: options.Commit = None,
    out: options.Out = None,
    json: options.JsonFile = None,
    html: options.BenchHtml = None,
    compare: options.BenchCompare = None,
    merge: options.Merge = None,
    render: options.Render = False,
) -> None:
    """Time a backend's forward on a table's cases, beside other projects' kernels."""
    with _clear_errors():
        from attn.bench.kernels import check_and_report, make_bench
        from attn.bench.results.report import Report
        from attn.cli.terminal.progress import Heartbeat

        settings = None
        if not render:
            typed = BenchOptions(
                backend=backend,
                case=case or (),
                peer=peer or (),
                no_peers=no_peers,
                rounds=rounds,
                reps=reps,
                commit=commit,
                table=table,
                dense_decode_kernel=dense_decode_kernel,
                latent_decode_kernel=latent_decode_kernel,
                sparse_own_decode_kernel=sparse_own_decode_kernel,
            )
            settings = make_bench(typed)
        report = Report(out, json, tuple(merge or ()), html, compare, tuple(context.obj))
        with Heartbeat(print_flushed, is_terminal=sys.stdout.isatty()) as log:
            passed = check_and_report(settings, report, log)
    if not passed:
        raise typer.Exit(1)


def print_flushed(line: str) -> None:
    """Print a line at once, also into a file."""
    print(line, flush=True)
