"""What Gluon calls by different names in Triton 3.6 to 3.9, under one name each."""

from __future__ import annotations

from typing import Any, TypeVar, dataclass_transform

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Copy a box of a tensor descriptor into shared memory; the barrier counts its bytes."""

async_gather = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""Copy elements at pointers into shared memory, zeros where they are masked; no barrier counts it,
see :data:`arrive_behind_gathers`."""

arrive_behind_gathers = async_copy.mbarrier_arrive
"""Each thread of the partition arrives at a barrier when what it has asked for is there: with
``increment_count=False`` the barrier is to count the threads."""


@builtin
def reinterpret(memory: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """The same shared memory as another type, shape and layout."""
    method = getattr(memory, "reinterpret", None) or memory._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


@builtin
def wait_for_kernels_before(_semantic: Any = None) -> None:
    """Go on when the kernels before this one are done, and what they wrote is there.

    A kernel that is launched with ``waits`` may start before: nothing is read or written ahead of
    this. Otherwise nothing happens here.
    """
    gdc_wait(_semantic=_semantic)


@builtin
def let_kernels_behind_start(_semantic: Any = None) -> None:
    """Kernels that wait by themselves may start from here on, where there is room for them; when
    all programs have come here. What is written by then or later they see behind their wait.
    """
    gdc_launch_dependents(_semantic=_semantic)


_Class = TypeVar("_Class", bound=type)


@dataclass_transform(kw_only_default=True)
def aggregate(cls: _Class) -> _Class:
    """Make a class a structure of kernels: a value whose fields are tensors and constexprs.

    A structure is made in a kernel, by keywords, one for each annotated field: a later change of
    their order then changes no meaning. Its methods are device functions. Once made, it keeps its
    fields: later Tritons refuse an assignment.

    Raises:
        TypeError: the module postpones annotations by ``from __future__ import annotations``, but
            Triton reads them as types; or an instance is made without a field, with an unknown one
            or with one of another type.
    """
    if any(isinstance(kind, str) for kind in cls.__annotations__.values()):
        raise TypeError(f"{cls.__name__}: the annotations of its fields are postponed")
    names = tuple(cls.__annotations__)

    def __init__(self: Any, **fields: Any) -> None:  # noqa: N807
        if fields.keys() != set(names):
            odd = sorted(fields.keys() ^ set(names))
            raise TypeError(f"{cls.__name__}: fields missing or unknown: {', '.join(odd)}")
        for name in names:
            x = fields[name]
            setattr(self, name, x if isinstance(x, gl.base_value) else gl.constexpr(x))

    # Triton looks at the source of any other function, to know when a kernel has changed.
    __init__.__triton_builtin__ = True
    cls.__init__ = __init__  # type: ignore[misc]
    made: _Class = core._aggregate(cls)
    made.__aggregate_fields__ = names
    return made


thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
"""All threads of a partition, and what they wrote before."""
