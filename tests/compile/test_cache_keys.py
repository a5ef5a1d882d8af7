"""A kernel has one key in Triton's cache, in every process.

Triton hashes the constants that a kernel and its functions use, in the order of their names. It
orders constants of one name by the addresses of their modules, which differ between processes. If
their values differ too, so does the kernel's key, and a process compiles what is in the cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
CONSTANTS: Final = """
import importlib, pkgutil
from triton.language.core import constexpr
from triton.runtime.jit import JITFunction
import attn.kernels, builders

def modules(package):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        yield importlib.import_module(found.name)

def constants_of(kernel):
    kernel.cache_key
    values = {}
    for (name, _), (value, module) in kernel.used_global_vals.items():
        if isinstance(value, constexpr):
            values.setdefault(name, {}).setdefault(str(value), []).append(module["__name__"])
    return values

kernels = {
    id(member): member
    for package in (attn.kernels, builders)
    for module in modules(package)
    for member in vars(module).values()
    if isinstance(member, JITFunction)
}
for kernel in kernels.values():
    for name, values in constants_of(kernel).items():
        if len(values) > 1:
            print(kernel.__name__, name, values)
print(len(kernels))
"""


def test_constants_of_one_name_have_one_value_in_a_kernel() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", CONSTANTS],
        env=environment, cwd=ROOT, text=True, capture_output=True, check=True,
    )  # fmt: skip
    *twofold, count = done.stdout.splitlines()
    assert twofold == []
    assert int(count) > 300
