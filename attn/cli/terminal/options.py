"""Options of the ``attn`` command, in groups; the module loads no torch, so that help is fast."""

from __future__ import annotations

from enum import StrEnum, unique
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from attn.bench.options import HELP
from attn.cli.faults import Fault
from attn.cli.generate import Other
from specs.attention import MlaKernel
from specs.devices import KNOWN_DEVICES
from specs.dtypes import CacheDType
from specs.engine import DecodeKernel, PrefillKernel
from specs.names import bundled_model_names
from specs.sparse_mla import STORED_FORMATS, SparseKernel

CACHE_DTYPES: Final = (
    CacheDType.AUTO,
    CacheDType.FLOAT16,
    CacheDType.BFLOAT16,
    CacheDType.FP8,
    CacheDType.FP8_E4M3,
    CacheDType.FP8_E5M2,
    CacheDType.FP8_DS_MLA,
    CacheDType.INT4_PER_TOKEN_HEAD,
    CacheDType.INT8_PER_TOKEN_HEAD,
    CacheDType.FP8_PER_TOKEN_HEAD,
)
"""Formats that the help of ``--kv-cache-dtype`` names: :func:`attn.selector.served_cache_dtypes`
with every optional package installed."""


@unique
class Group(StrEnum):
    """Groups of options in a command's help."""

    WORK = "What to run"
    ENGINE = "Engine settings"
    KERNELS = "Kernels by name"
    CHECKS = "Checks"
    MEASURING = "How to measure"
    OUTPUT = "Output"


def option(group: Group, *names: str, metavar: str | None = None, **settings: Any) -> Any:
    """An option of a group.

    Args:
        group: the panel of the help that shows the option.
        names: the names on the command line; by default the parameter's.
        metavar: a short word for the value, so that the option's name fits into 80 columns.
        settings: further arguments of ``typer.Option``.
    """
    return typer.Option(*names, metavar=metavar, rich_help_panel=group.value, **settings)


def _kernel(about: str, names: type[StrEnum]) -> Any:
    """An option that names a kernel."""
    return option(Group.KERNELS, metavar="KERNEL", help=f"{about}: {', '.join(names)}.")


_MODEL_HELP: Final = f"A config.json, or one of {', '.join(bundled_model_names())}."

Model = Annotated[str, option(Group.WORK, "--model", "-m", metavar="MODEL", help=_MODEL_HELP)]
Models = Annotated[
    list[str] | None,
    option(
        Group.WORK,
        "--model",
        "-m",
        metavar="MODEL",
        help=f"{_MODEL_HELP} Repeatable; default: a dense, a latent and a sparse model.",
    ),
]
AnyDevice = Annotated[
    str | None,
    option(
        Group.WORK,
        "--device",
        "-d",
        metavar="DEVICE",
        help=f"{', '.join(KNOWN_DEVICES)}; default: this machine's.",
    ),
]
KVDtype = Annotated[
    str,
    option(
        Group.ENGINE,
        "--kv-cache-dtype",
        metavar="DTYPE",
        help=f"One of {', '.join(CACHE_DTYPES)}.",
    ),
]
Backend = Annotated[
    str | None,
    option(
        Group.WORK,
        "--backend",
        "-b",
        metavar="NAME",
        help="Use this backend or refuse; never another.",
    ),
]
BlockSize = Annotated[
    int | None,
    option(Group.ENGINE, "--block-size", min=1, metavar="N", help="Tokens per KV cache block."),
]
AsJson = Annotated[bool, option(Group.OUTPUT, "--json", help="Print data as JSON.")]
WithKernels = Annotated[
    bool,
    option(Group.OUTPUT, "--kernels", help="Say too which kernels of the backend serve."),
]
AllowReference = Annotated[
    bool,
    option(
        Group.WORK,
        "--allow-reference",
        help="On a GPU, come to a reference backend where no other serves.",
    ),
]

# -- attn run.

Trace = Annotated[
    Path | None,
    option(
        Group.WORK,
        metavar="FILE",
        help="CSV with TIMESTAMP, ContextTokens, GeneratedTokens (Azure's traces).",
    ),
]
Synthetic = Annotated[
    bool,
    option(Group.WORK, "--synthetic", help="Lengths drawn like the public trace's (default)."),
]
Layers = Annotated[
    int,
    option(
        Group.WORK, min=1, metavar="N", help="Layers to run, every kind first; at most the model's."
    ),
]
Requests = Annotated[
    int, option(Group.WORK, min=1, metavar="N", help="Requests to take from the trace.")
]
Seed = Annotated[
    int,
    option(
        Group.WORK, min=0, max=2**31 - 1, metavar="N", help="Seed of lengths, tensors and checks."
    ),
]
Threads = Annotated[
    int | None,
    option(
        Group.WORK,
        min=1,
        metavar="N",
        help="Threads on the CPU; default: as many as there are idle cores, at least 1.",
    ),
]
Ranks = Annotated[
    int,
    option(
        Group.ENGINE,
        "--tp",
        min=1,
        metavar="N",
        help="Tensor-parallel ranks; one of them is run.",
    ),
]
MaxNumSeqs = Annotated[
    int, option(Group.ENGINE, min=1, metavar="N", help="Most requests in a step.")
]
MaxNumBatchedTokens = Annotated[
    int, option(Group.ENGINE, min=1, metavar="N", help="Most tokens in a step.")
]
KVMemory = Annotated[
    str | None,
    option(
        Group.ENGINE,
        metavar="SIZE",
        help="KV cache of all layers, such as 512MiB; default: what is needed.",
    ),
]
KVLayout = Annotated[
    str | None,
    option(
        Group.ENGINE,
        metavar="ROWS",
        help=f"Rows of a latent cache: {', '.join(STORED_FORMATS)}.",
    ),
]
Speculative = Annotated[
    int,
    option(
        Group.ENGINE,
        min=0,
        metavar="N",
        help="Drafts that each decode verifies; some are refused.",
    ),
]
DensePrefill = Annotated[
    PrefillKernel | None, _kernel("TRITON_ATTN, rows of prompts", PrefillKernel)
]
DenseDecode = Annotated[DecodeKernel | None, _kernel("TRITON_ATTN, decodes", DecodeKernel)]
LatentPrefill = Annotated[
    PrefillKernel | None, _kernel("Latent layers, rows of prompts, expanded", PrefillKernel)
]
LatentDecode = Annotated[DecodeKernel | None, _kernel("TRITON_MLA, decodes", DecodeKernel)]
LatentRows = Annotated[MlaKernel | None, _kernel("TRTLLM_MLA, rows in latent space", MlaKernel)]
SparsePrefill = Annotated[SparseKernel | None, _kernel("SPARSE_MLA, rows of prompts", SparseKernel)]
SparseDecode = Annotated[SparseKernel | None, _kernel("SPARSE_MLA, decodes", SparseKernel)]
SparseOwnPrefill = Annotated[
    PrefillKernel | None, _kernel("triton_sparse, rows of prompts", PrefillKernel)
]
SparseOwnDecode = Annotated[DecodeKernel | None, _kernel("triton_sparse, decodes", DecodeKernel)]
CheckRows = Annotated[
    int,
    option(
        Group.CHECKS,
        min=0,
        metavar="N",
        help="Tokens per step and kind of layer checked in float64.",
    ),
]
Corrupt = Annotated[
    Fault | None,
    option(
        Group.CHECKS,
        metavar="FAULT",
        help=f"Break the backend on purpose: the checks must see it. One of {', '.join(Fault)}.",
    ),
]
ModelFolder = Annotated[
    Path,
    option(
        Group.WORK,
        "--hf",
        metavar="FOLDER",
        help="A local model of Transformers: config.json, weights and tokenizer.",
    ),
]
Prompt = Annotated[str, option(Group.WORK, "--prompt", metavar="TEXT", help="Text to continue.")]
MaxNewTokens = Annotated[
    int, option(Group.WORK, min=1, metavar="N", help="Tokens to generate, at most.")
]
CompareAttention = Annotated[
    Other | None,
    option(
        Group.CHECKS,
        "--compare",
        metavar="NAME",
        help="Generate by this attention of Transformers too (eager, sdpa), and compare logits.",
    ),
]
GenerateReport = Annotated[
    Path | None,
    option(
        Group.OUTPUT,
        "--report",
        metavar="FOLDER",
        help="Write generate.json and generate.svg into this folder.",
    ),
]
ReportFolder = Annotated[
    Path | None,
    option(
        Group.OUTPUT, metavar="FOLDER", help="Write report.json and timeline.png into this folder."
    ),
]
RunHtml = Annotated[
    Path | None,
    option(
        Group.OUTPUT,
        "--html",
        metavar="FILE",
        help="Write one page with tables, timeline and errors, which needs no network.",
    ),
]
RunCompare = Annotated[
    Path | None,
    option(
        Group.OUTPUT,
        "--compare",
        metavar="FILE",
        help="Earlier report.json; says what moved by more than the noise of the steps.",
    ),
]

# -- attn warm.

MaxModelLen = Annotated[
    int | None,
    option(
        Group.ENGINE,
        "--max-model-len",
        min=1,
        metavar="N",
        help="Longest sequence, in tokens; default: the model's.",
    ),
]
EngineSeqs = Annotated[
    int | None,
    option(
        Group.ENGINE,
        "--max-num-seqs",
        min=1,
        metavar="N",
        help="Most requests in a step; default: vLLM's for this GPU.",
    ),
]
AllRanks = Annotated[
    int, option(Group.ENGINE, "--tp", min=1, metavar="N", help="Tensor-parallel ranks.")
]
Drafts = Annotated[
    int,
    option(
        Group.ENGINE, "--speculative", min=0, metavar="N", help="Drafts that each decode verifies."
    ),
]
Jobs = Annotated[
    int | None,
    option(
        Group.WORK,
        "--jobs",
        "-j",
        min=1,
        metavar="N",
        help="Compiles side by side; default: as many as there are cores.",
    ),
]

# -- attn doctor.

NoSelfTest = Annotated[bool, option(Group.CHECKS, "--no-self-test", help="Run nothing, only look.")]

# -- attn bench.

NumReqs = Annotated[int, option(Group.WORK, min=1, metavar="N", help="Decodes in the batch.")]
Repeats = Annotated[int, option(Group.MEASURING, min=1, metavar="N", help="Timed builds.")]
BenchBackend = Annotated[
    str | None, option(Group.WORK, "--backend", "-b", metavar="NAME", help=HELP["backend"])
]
BenchTable = Annotated[str, option(Group.WORK, metavar="TABLE", help=HELP["table"])]
BenchCases = Annotated[list[str] | None, option(Group.WORK, metavar="PATTERN", help=HELP["case"])]
BenchPeers = Annotated[list[str] | None, option(Group.WORK, metavar="NAME", help=HELP["peer"])]
NoPeers = Annotated[bool, option(Group.WORK, "--no-peers", help=HELP["no_peers"])]
BenchDenseDecode = Annotated[
    str | None, option(Group.KERNELS, metavar="KERNEL", help=HELP["dense_decode_kernel"])
]
BenchLatentDecode = Annotated[
    str | None, option(Group.KERNELS, metavar="KERNEL", help=HELP["latent_decode_kernel"])
]
BenchSparseDecode = Annotated[
    str | None, option(Group.KERNELS, metavar="KERNEL", help=HELP["sparse_own_decode_kernel"])
]
Rounds = Annotated[int, option(Group.MEASURING, min=1, metavar="N", help=HELP["rounds"])]
Reps = Annotated[int, option(Group.MEASURING, min=1, metavar="N", help=HELP["reps"])]
Commit = Annotated[str | None, option(Group.MEASURING, metavar="TEXT", help=HELP["commit"])]
Out = Annotated[Path | None, option(Group.OUTPUT, metavar="FILE", help=HELP["out"])]
JsonFile = Annotated[Path | None, option(Group.OUTPUT, metavar="FILE", help=HELP["json"])]
BenchHtml = Annotated[
    Path | None, option(Group.OUTPUT, "--html", metavar="FILE", help=HELP["html"])
]
BenchCompare = Annotated[
    Path | None, option(Group.OUTPUT, "--compare", metavar="FILE", help=HELP["compare"])
]
Merge = Annotated[list[Path] | None, option(Group.OUTPUT, metavar="FILE", help=HELP["merge"])]
Render = Annotated[bool, option(Group.OUTPUT, "--render", help=HELP["render"])]
