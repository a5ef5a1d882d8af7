"""What Gluon calls by different names in Triton 3.6 to 3.9, under one name each."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Copy a box of a tensor descriptor into shared memory; the barrier counts its bytes."""


@builtin
def reinterpret(memory: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """The same shared memory as another type, shape and layout."""
    method = getattr(memory, "reinterpret", None) or memory._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
"""All threads of a partition, and what they wrote before."""
