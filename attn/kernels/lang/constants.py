"""Numbers that the kernels of every family use."""

from __future__ import annotations

import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
"""log2(e). GPUs compute powers of 2: exp(x) is exp2(x * LOG2E)."""
