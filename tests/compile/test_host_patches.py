"""Kernels compile in a process whose host has replaced functions of Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
REPLACED: Final = """
import importlib, pkgutil, triton
from triton.runtime.jit import JITFunction
# As SGLang does when it is imported.
triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else 1
triton.cdiv = lambda a, b: -(a // -b)
import attn.kernels
names = [found.name for found in pkgutil.walk_packages(attn.kernels.__path__, "attn.kernels.")]
count = 0
for name in names:
    for member, value in vars(importlib.import_module(name)).items():
        if isinstance(value, JITFunction):
            count += 1
            try:
                # Triton reads the kernel and all that it calls.
                value.cache_key
            except RuntimeError as error:
                print(f"{name}.{member}: {error}")
print(count)
"""


def test_no_kernel_names_a_function_that_hosts_replace() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", REPLACED]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, text=True, capture_output=True, check=True
    )
    *refused, count = done.stdout.splitlines()
    assert refused == []
    assert int(count) > 300
