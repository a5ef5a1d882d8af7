"""Numbers that the kernels of every family use, and what they compute while they compile."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
"""log2(e). GPUs compute powers of 2: exp(x) is exp2(x * LOG2E)."""


@triton.constexpr_function
def next_power_of_2(size: int) -> int:
    """The smallest power of 2 that is at least ``size``; kernels call it while they compile.

    SGLang replaces ``triton.next_power_of_2`` by a plain function when it is imported. A kernel
    that names that one then compiles no more: Triton refuses plain functions in kernels.
    """
    return 1 << max(size - 1, 0).bit_length()
