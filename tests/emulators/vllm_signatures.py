"""Signatures of vLLM's own functions, read from its files without importing them.

vLLM's modules load libraries for a GPU when they are imported, so that a machine without one can
only read them.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSIONS = ("0.26.0", "0.33.0")


def signature_of(version: str, module: str, function: str) -> inspect.Signature:
    """The signature of a function of vLLM; the test is skipped where that vLLM is not there.

    Args:
        version: one of ``VERSIONS``.
        module: dotted name below ``vllm``.
        function: its name.
    """
    path = ROOT / ".venv-vllm" / version / "vllm" / f"{module.replace('.', '/')}.py"
    if not path.exists():
        pytest.skip(f"needs vLLM {version} in .venv-vllm")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (found,) = (
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function
    )
    given, kinds = found.args, inspect.Parameter
    positional = [*given.posonlyargs, *given.args]
    first_default = len(positional) - len(given.defaults)
    made = [
        kinds(
            one.arg,
            kinds.POSITIONAL_OR_KEYWORD,
            default=None if place >= first_default else kinds.empty,
        )
        for place, one in enumerate(positional)
    ]
    if given.vararg is not None:
        made.append(kinds(given.vararg.arg, kinds.VAR_POSITIONAL))
    made += [
        kinds(one.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None)
        for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    if given.kwarg is not None:
        made.append(kinds(given.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(made)
