"""Kernels compile in a process whose host has replaced functions of Triton."""

from __future__ import annotations

from typing import Final

from tests.tools.jit_functions import printed_by_script

REPLACED: Final = """
import triton
# As SGLang does when it is imported.
triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else 1
triton.cdiv = lambda a, b: -(a // -b)
import attn.kernels
from tests.tools.jit_functions import jit_functions

functions = jit_functions(attn.kernels)
for name, function in functions.items():
    try:
        # Triton reads the kernel and all that it calls.
        function.cache_key
    except RuntimeError as error:
        print(f"{name}: {error}")
print(len(functions))
"""


def test_no_kernel_names_a_function_that_hosts_replace() -> None:
    *refused, count = printed_by_script(REPLACED)
    assert refused == []
    assert int(count) > 300
