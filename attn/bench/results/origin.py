"""Where results come from: schema, command and versions; and reading results of any age."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

import attn
from specs.base import Spec, SpecError, parse_spec

S = TypeVar("S", bound=Spec)

SCHEMA_VERSION: Final = 1
"""Version of the JSON of reports and results; it grows when a field is renamed or changes its
meaning. Files without a version are older; they are read where their fields still fit."""

KERNELS_SCHEMA: Final = 2
"""Version of the JSON of ``attn bench kernels``. In version 1 kernels were judged by other times,
with a step's whole plan or without it, so that its results do not go together with newer ones."""

PACKAGES: Final = (
    "torch",
    "triton",
    "flashinfer-python",
    "vllm",
    "flash-attn",
    "flash-mla",
    "nvidia-cudnn-frontend",
    "deep-gemm",
    "numpy",
    "pydantic",
)
"""Packages whose versions a report lists where they are installed."""


def command_line(words: Sequence[str] | None = None) -> str:
    """The command that runs, as a shell reads it.

    Args:
        words: its arguments; None means those of this process.
    """
    given = sys.argv[1:] if words is None else words
    return shlex.join(["attn", *map(str, given)])


def installed(package: str) -> str | None:
    """Version of an installed package; None where it is not installed. Nothing is imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Versions of this library, Python and the installed packages that results depend on."""
    found = {package: installed(package) for package in PACKAGES}
    return {
        "attn-backends": attn.__version__,
        "python": platform.python_version(),
        **{package: version for package, version in found.items() if version is not None},
    }


def read_results(
    cls: type[S], path: Path, what: str, versions: range = range(SCHEMA_VERSION + 1)
) -> S:
    """Results from a JSON file.

    Args:
        cls: class of the results.
        path: the file.
        what: what the file must hold, in words, for errors.
        versions: schema versions that can be read; a file without one has version 0.

    Raises:
        SpecError: the file cannot be read, or holds something else; the message is one line that
            names the file.
    """
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise SpecError(f"{path}: expected {what}, got no JSON") from None
    if not isinstance(data, dict):
        raise SpecError(f"{path}: expected {what}, got a JSON {type(data).__name__}")
    version = data.get("schema_version", 0)
    if version not in versions:
        raise SpecError(
            f"{path}: expected {what} of schema_version {versions[-1]}, got {version!r}"
        )
    try:
        return parse_spec(cls, text, str(path))
    except SpecError as error:
        problem, *more = str(error).removeprefix(f"{path}: ").splitlines()
        count = f" (and {len(more)} more)" if more else ""
        age = "" if version else ", which has no schema_version"
        raise SpecError(f"{path}: expected {what}{age}: {problem}{count}") from None
