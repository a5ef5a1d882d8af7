"""``attn run``, ``attn backends``, ``attn explain``, ``attn bench``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from typer.core import TyperGroup

from attn.bench.build import bench_build
from attn.bench.kernels import HELP, BenchOptions, check_and_report, make_bench
from attn.bench.results.report import Report
from attn.bench.settings import KernelBench
from attn.cli.corrupt import Fault
from attn.cli.explain import Question, feature_table, print_backends, print_decisions, remarks
from attn.cli.kernels import check_families, kernels_of, named_kernels
from attn.cli.new_backend import Family, new_backend
from attn.cli.replay import Replay, RunSettings, reference_notes
from attn.cli.report import StepRecord, print_summary, write_report
from attn.cli.trace import TraceRequest, fit_to_limit, read_trace, synthetic_trace
from attn.device import detect_device, known_device
from attn.errors import MissingDependencyError, one_line
from attn.selector import served_cache_dtypes
from builders.checks.debug import debug_enabled
from specs.attention import MlaKernel
from specs.devices import KNOWN_DEVICES
from specs.dtypes import CacheDType
from specs.engine import DecodeKernel, PrefillKernel
from specs.hf_config import bundled_model_names, load_model_geometry
from specs.model import ModelGeometry
from specs.names import near_miss
from specs.rows import LatentFormat, cache_dtype_of, latent_format_of
from specs.sparse_mla import STORED_FORMATS, SparseKernel

USAGE_ERROR: Final = 2
INTERRUPTED: Final = 130

# The base class of command-line errors in Typer's click, which may not be the installed click.
_UsageError: Final[Any] = typer.BadParameter.__base__


class _Command(TyperGroup):
    """A group of commands that reports a usage error in one line, as the commands report theirs."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run the command line."""
        run: Any = super().main
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
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Benchmarks.", no_args_is_help=True)
app.add_typer(bench, name="bench")

CACHE_DTYPES: Final = served_cache_dtypes()
"""Formats that ``--kv-cache-dtype`` offers: those that at least one backend serves."""

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help=f"A config.json, or one of {', '.join(bundled_model_names())}.",
    ),
]
KVDtypeOption = Annotated[
    str, typer.Option("--kv-cache-dtype", help=f"One of {', '.join(CACHE_DTYPES)}.")
]
BackendOption = Annotated[
    str | None, typer.Option("--backend", "-b", help="Use this backend or refuse; never another.")
]
BlockSizeOption = Annotated[
    int | None, typer.Option("--block-size", min=1, help="Tokens per KV cache block.")
]


@contextmanager
def _clear_errors() -> Iterator[None]:
    """Turn errors that a user can cause into one line and exit code 2.

    With ``ATTN_DEBUG=1`` they are raised, with a traceback.
    """
    try:
        yield
    except (ValueError, NotImplementedError, MissingDependencyError, OSError) as error:
        if debug_enabled():
            raise
        print(f"error: {one_line(error)}", file=sys.stderr)
        raise typer.Exit(USAGE_ERROR) from None


@app.command()
def run(
    model: ModelOption = "llama-3.2-1b",
    trace: Annotated[
        Path | None,
        typer.Option(help="CSV with TIMESTAMP,ContextTokens,GeneratedTokens (Azure's traces)."),
    ] = None,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Lengths drawn like the public trace's (default).")
    ] = False,
    backend: BackendOption = None,
    kv_cache_dtype: KVDtypeOption = "auto",
    block_size: BlockSizeOption = None,
    layers: Annotated[
        int, typer.Option(min=1, help="Layers to run, every kind first; at most the model's.")
    ] = 2,
    requests: Annotated[int, typer.Option(min=1, help="Requests to take from the trace.")] = 16,
    tp: Annotated[
        int, typer.Option("--tp", min=1, help="Tensor-parallel ranks; one of them is run.")
    ] = 1,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most requests in a step.")] = 32,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens in a step.")
    ] = 2048,
    kv_memory: Annotated[
        str | None,
        typer.Option(help="KV cache of all layers, such as 512MiB; default: what is needed."),
    ] = None,
    check_rows: Annotated[
        int, typer.Option(min=0, help="Tokens per step and kind of layer checked in float64.")
    ] = 3,
    dense_prefill_kernel: Annotated[
        PrefillKernel | None, typer.Option(help="Kernel of TRITON_ATTN for rows of prompts.")
    ] = None,
    dense_decode_kernel: Annotated[
        DecodeKernel | None, typer.Option(help="Kernel of TRITON_ATTN for decodes.")
    ] = None,
    latent_prefill_kernel: Annotated[
        PrefillKernel | None,
        typer.Option(help="Kernel of latent layers for rows of prompts, expanded."),
    ] = None,
    latent_decode_kernel: Annotated[
        DecodeKernel | None, typer.Option(help="Kernel of TRITON_MLA for decodes.")
    ] = None,
    latent_rows_kernel: Annotated[
        MlaKernel | None, typer.Option(help="Kernel of TRTLLM_MLA for rows in latent space.")
    ] = None,
    sparse_prefill_kernel: Annotated[
        SparseKernel | None, typer.Option(help="Kernel of SPARSE_MLA for rows of prompts.")
    ] = None,
    sparse_decode_kernel: Annotated[
        SparseKernel | None, typer.Option(help="Kernel of SPARSE_MLA for decodes.")
    ] = None,
    sparse_own_prefill_kernel: Annotated[
        PrefillKernel | None, typer.Option(help="Form of triton_sparse for rows of prompts.")
    ] = None,
    sparse_own_decode_kernel: Annotated[
        DecodeKernel | None, typer.Option(help="Form of triton_sparse for decodes.")
    ] = None,
    kv_layout: Annotated[
        str | None,
        typer.Option(help=f"Rows of a latent cache: {', '.join(STORED_FORMATS)}."),
    ] = None,
    speculative: Annotated[
        int, typer.Option(min=0, help="Drafts that each decode verifies; some are refused.")
    ] = 0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**31 - 1, help="Of lengths, tensors and checks.")
    ] = 0,
    report: Annotated[
        Path | None, typer.Option(help="Write report.json and timeline.png into this folder.")
    ] = None,
    corrupt: Annotated[
        Fault | None, typer.Option(help="Break the backend on purpose: the checks must see it.")
    ] = None,
) -> None:
    """Serve a request trace's continuous batch and check sampled rows in float64."""
    console = Console()
    with _clear_errors():
        if trace is not None and synthetic:
            raise ValueError("give --trace or --synthetic, not both")
        if corrupt is not None and not check_rows:
            raise ValueError("--corrupt needs --check-rows above 0: nothing else sees the fault")
        if report is not None:
            # Made before the run, so that a path that cannot be written does not lose the results.
            report.mkdir(parents=True, exist_ok=True)
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
        replay = Replay(settings, taken)
        for note in reference_notes(replay.groups, settings.device):
            console.print(note, highlight=False)
        _run_with_progress(replay, console)
        shown = {
            "trace": "synthetic" if trace is None else trace.name,
            "layers": f"{chosen.num_layers} of {geometry.num_layers}",
            **_shown(settings),
            **_said(kv_layout=kv_layout, speculative=speculative),
        }
        outcome = replay.report(shown, clipped)
        print_summary(outcome, console)
        if report is not None:
            for path in write_report(outcome, report):
                console.print(f"wrote {path}", highlight=False)
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
    try:
        found = CacheDType.parse(name)
    except ValueError:
        found = None
    if found not in CACHE_DTYPES:
        raise ValueError(
            f"kv-cache-dtype must be one of {', '.join(CACHE_DTYPES)}, got {name!r}"
            f"{near_miss(name, CACHE_DTYPES)}"
        )
    return found


def _requests(
    trace: Path | None, count: int, seed: int, model: ModelGeometry
) -> tuple[list[TraceRequest], int]:
    taken = synthetic_trace(count, seed) if trace is None else read_trace(trace, count)
    return fit_to_limit(taken, model.max_position_embeddings)


def _run_with_progress(replay: Replay, console: Console) -> None:
    total = sum(replay.lengths)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("attention", total=total)

        def on_step(record: StepRecord) -> None:
            # Tokens that are computed again count again, so they are added to the bar's total.
            redone = replay.scheduler.num_discarded_tokens
            progress.update(task, advance=record.tokens, total=total + redone)

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
def backends(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table of features for the README.")
    ] = False,
) -> None:
    """What this machine can run, and why not the rest."""
    with _clear_errors():
        if markdown:
            print(feature_table())
        else:
            print_backends(detect_device(), Console())


@app.command()
def explain(
    model: ModelOption = "llama-3.1-8b",
    device: Annotated[
        str | None,
        typer.Option(
            "--device", "-d", help=f"{', '.join(KNOWN_DEVICES)}; default: this machine's."
        ),
    ] = None,
    backend: BackendOption = None,
    kv_cache_dtype: KVDtypeOption = "auto",
    block_size: BlockSizeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the reports as JSON.")] = False,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Say too which kernels of the backend serve.")
    ] = False,
    allow_reference: Annotated[
        bool,
        typer.Option(
            "--allow-reference",
            help="On a GPU, come to a reference backend where no other serves.",
        ),
    ] = False,
) -> None:
    """Which backend each kind of layer gets, with a reason for every other one."""
    with _clear_errors():
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
    num_reqs: Annotated[int, typer.Option(min=1, help="Decodes in the batch.")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Timed builds.")] = 2000,
) -> None:
    """Microseconds of CPU that each backend's builder takes for a batch of decodes."""
    with _clear_errors():
        for line in bench_build(num_reqs, repeats):
            print(line)


@bench.command("kernels")
def bench_kernels_command(
    backend: Annotated[str | None, typer.Option("--backend", "-b", help=HELP["backend"])] = None,
    table: Annotated[str, typer.Option(help=HELP["table"])] = KernelBench.table.value,
    dense_decode_kernel: Annotated[
        str | None, typer.Option(help=HELP["dense_decode_kernel"])
    ] = None,
    latent_decode_kernel: Annotated[
        str | None, typer.Option(help=HELP["latent_decode_kernel"])
    ] = None,
    sparse_own_decode_kernel: Annotated[
        str | None, typer.Option(help=HELP["sparse_own_decode_kernel"])
    ] = None,
    case: Annotated[list[str] | None, typer.Option(help=HELP["case"])] = None,
    peer: Annotated[list[str] | None, typer.Option(help=HELP["peer"])] = None,
    no_peers: Annotated[bool, typer.Option("--no-peers", help=HELP["no_peers"])] = False,
    rounds: Annotated[int, typer.Option(min=1, help=HELP["rounds"])] = KernelBench.rounds,
    reps: Annotated[int, typer.Option(min=1, help=HELP["reps"])] = KernelBench.reps,
    out: Annotated[Path | None, typer.Option(help=HELP["out"])] = None,
    json: Annotated[Path | None, typer.Option(help=HELP["json"])] = None,
    merge: Annotated[list[Path] | None, typer.Option(help=HELP["merge"])] = None,
    render: Annotated[bool, typer.Option("--render", help=HELP["render"])] = False,
    commit: Annotated[str | None, typer.Option(help=HELP["commit"])] = None,
) -> None:
    """Time a backend's forward on a table's cases, beside other projects' kernels."""
    with _clear_errors():
        settings = None
        if not render:
            options = BenchOptions(
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
            settings = make_bench(options)
        passed = check_and_report(settings, Report(out, json, tuple(merge or ())))
    if not passed:
        raise typer.Exit(1)
