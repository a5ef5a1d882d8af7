"""Options of ``attn bench kernels`` and their help, readable without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

COMMIT_VARIABLE: Final = "ATTN_COMMIT"
"""Variable that names the measured commit where ``--commit`` does not."""

DECODE_OPTIONS: Final = ("dense_decode_kernel", "latent_decode_kernel", "sparse_own_decode_kernel")
"""Options that name a decode kernel of ours, one for each family of layers."""


@dataclass(frozen=True)
class BenchOptions:
    """The options of a benchmark as they were typed on the command line; see ``HELP``."""

    backend: str | None = None
    case: Sequence[str] = ()
    peer: Sequence[str] = ()
    no_peers: bool = False
    rounds: int = 6
    reps: int = 20
    commit: str | None = None
    table: str = "dense"
    dense_decode_kernel: str | None = None
    latent_decode_kernel: str | None = None
    sparse_own_decode_kernel: str | None = None


HELP: Final = {
    "backend": "Registry name of the backend; default: the table's.",
    "table": (
        "Which cases, peers and targets: dense, hopper, mla or sparse_mla; or invariance, what "
        "batch invariance costs; or flashinfer or trtllm_mla, what our backends over FlashInfer "
        "add to its own calls."
    ),
    "case": "Shell pattern of names of cases, repeatable; a name that is unknown lists them all.",
    "peer": (
        "Peer to compare with, repeatable; default: the table's. A name that is unknown lists them "
        "all; sparse_mla also has tiles, other tiles of ours."
    ),
    "dense_decode_kernel": (
        "Ours in dense, hopper and invariance: triton, auto or hopper; default: auto, in dense "
        "triton."
    ),
    "latent_decode_kernel": "Ours in mla: triton, auto or hopper; default: auto.",
    "sparse_own_decode_kernel": "Ours in sparse_mla: triton, auto or hopper; default: auto.",
    "no_peers": "Compare with no peer.",
    "rounds": "Turns of every kernel.",
    "reps": "Most calls per turn.",
    "out": "Markdown file to write; default: print it.",
    "json": "File to write the results to as data.",
    "html": "File for one page with tables, ratios and the roofline, which needs no network.",
    "compare": "Earlier --json file; says which times moved by more than the spread of the rounds.",
    "merge": "Earlier --json file whose other cases are kept, repeatable.",
    "render": "Measure nothing, render the merged results.",
    "commit": f"Commit that is measured; default: ${COMMIT_VARIABLE}, then git.",
}
"""Help texts of the options, for ``attn bench kernels`` and ``python -m attn.bench.kernels``."""
