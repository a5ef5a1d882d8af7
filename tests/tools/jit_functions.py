"""The library's ``triton.jit`` functions, as a process has them that compiles for a GPU."""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]


def jit_functions(*packages: ModuleType) -> dict[str, Any]:
    """Every ``JITFunction`` that a module of the packages defines or imports, by ``module.name``.

    Triton's interpreter has no such functions: call this in a process of :func:`printed_by_script`.
    """
    from triton.runtime.jit import JITFunction

    modules = (
        importlib.import_module(found.name)
        for package in packages
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    )
    return {
        f"{module.__name__}.{name}": member
        for module in modules
        for name, member in vars(module).items()
        if isinstance(member, JITFunction)
    }


def printed_by_script(script: str) -> list[str]:
    """Lines that a script prints in a new process without Triton's interpreter.

    Raises:
        subprocess.CalledProcessError: the script failed.
    """
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)},
        cwd=ROOT, text=True, capture_output=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()
