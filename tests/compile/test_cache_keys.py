"""A kernel has one key in Triton's cache, in every process.

Triton hashes the constants that a kernel and its functions use, in the order of their names. It
orders constants of one name by the addresses of their modules, which differ between processes. If
their values differ too, so does the kernel's key, and a process compiles what is in the cache.
"""

from __future__ import annotations

from typing import Final

from tests.tools.jit_functions import printed_by_script

CONSTANTS: Final = """
from collections import defaultdict
from triton.language.core import constexpr
import attn.kernels, builders
from tests.tools.jit_functions import jit_functions

functions = jit_functions(attn.kernels, builders)
for function_name, function in functions.items():
    # Triton reads the kernel and all that it calls.
    function.cache_key
    modules = defaultdict(lambda: defaultdict(list))
    for (name, _), (value, module) in function.used_global_vals.items():
        if isinstance(value, constexpr):
            modules[name][str(value)].append(module["__name__"])
    for name, by_value in modules.items():
        if len(by_value) > 1:
            print(function_name, name, dict(by_value))
print(len(functions))
"""


def test_constants_of_one_name_have_one_value_in_a_kernel() -> None:
    *clashes, count = printed_by_script(CONSTANTS)
    assert clashes == []
    assert int(count) > 300
