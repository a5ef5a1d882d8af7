"""Settings and environment of a kernel benchmark."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from attn.bench.cases.case import PEERS, KernelCase
from attn.bench.cases.dense import ALL_PEERS, CASES, TILES, BenchTable
from attn.bench.options import COMMIT_VARIABLE, BenchOptions
from attn.bench.results.origin import installed, versions
from attn.bench.results.results import Environment
from attn.device import detect_device
from attn.registry import AttentionBackendEnum, RegisteredBackend
from specs.engine import DecodeKernel, Kernels


@dataclass(frozen=True)
class KernelBench:
    """Settings of a kernel benchmark."""

    backend: str = "TRITON_ATTN"
    cases: tuple[KernelCase, ...] = CASES
    peers: tuple[str, ...] = PEERS
    rounds: int = BenchOptions.rounds
    reps: int = BenchOptions.reps
    """Most calls per kernel and round."""
    commit: str | None = None
    """Commit of the measured code; None asks the environment, then git."""
    seed: int = 0
    table: BenchTable = BenchTable.DENSE
    decode_kernel: DecodeKernel | None = None
    """Our backend's ``decode_kernel`` setting; None means the table's."""
    also: tuple[str, ...] = ()
    """Names of further backends of ours to measure."""
    command: str = ""
    """The command line, for the results."""

    @property
    def kernels(self) -> Kernels:
        """Our kernels that this benchmark measures."""
        decode = self.decode_kernel or self.table.decode_kernel
        return Kernels.own(self.table.prefill_kernel, decode)

    def __post_init__(self) -> None:
        for name in ("rounds", "reps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for peer in self.peers:
            is_tiles = peer == TILES and self.table is BenchTable.SPARSE_MLA
            if peer not in ALL_PEERS and not is_tiles:
                raise ValueError(f"peer must be one of {', '.join(ALL_PEERS)}, got {peer!r}")
        # The backend may be given in lower case or by an alias; results hold its registry name.
        object.__setattr__(self, "backend", AttentionBackendEnum[self.backend].name)

    @property
    def backends(self) -> tuple[str, ...]:
        """Names of all backends to measure."""
        return self.backend, *self.also

    @property
    def member(self) -> RegisteredBackend:
        """The registry's entry of the backend."""
        return AttentionBackendEnum[self.backend]


def environment_of(bench: KernelBench) -> Environment:
    """Machine, versions and commit of a run that starts now."""
    return Environment(
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        device=detect_device().name,
        torch=str(torch.__version__),
        triton=_version("triton"),
        vllm=_version("vllm"),
        flashinfer=_version("flashinfer-python"),
        commit=bench.commit or os.environ.get(COMMIT_VARIABLE) or _git_commit(),
        backend=", ".join(bench.backends),
        rounds=bench.rounds,
        reps=bench.reps,
        table=bench.table,
        command=bench.command,
        versions=versions(),
    )


def _version(distribution: str) -> str:
    return installed(distribution) or "not installed"


def _git_commit() -> str:
    """Commit of this file's working tree, marked when it has changes; "unknown" without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(
            command,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"
