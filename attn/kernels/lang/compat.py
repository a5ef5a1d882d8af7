"""One name for each part of Gluon that Triton 3.6 to 3.9 call by different names."""

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
"""Copy elements at pointers into shared memory, zeros where they are masked.

No barrier counts the bytes; :data:`arrive_behind_gathers` says when they are there."""

arrive_behind_gathers = async_copy.mbarrier_arrive
"""Each thread of the partition arrives at a barrier once the elements that it asked for are there.

With ``increment_count=False`` the barrier's count must be the number of threads."""


@builtin
def reinterpret(memory: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """View shared memory with another type, shape and layout."""
    method = getattr(memory, "reinterpret", None) or memory._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


@builtin
def wait_for_kernels_before(_semantic: Any = None) -> None:
    """Wait until the kernels before this one have ended and their writes are visible.

    A kernel that is launched with ``waits`` may start before that, and must not read or write
    anything ahead of this call. In any other kernel the call does nothing.
    """
    gdc_wait(_semantic=_semantic)


@builtin
def let_kernels_behind_start(_semantic: Any = None) -> None:
    """Let the next kernel start early, if it waits by itself (:func:`wait_for_kernels_before`).

    It may start once all programs of this kernel have made this call and the GPU has room. Behind
    its wait it sees everything that this kernel writes, also after this call.
    """
    gdc_launch_dependents(_semantic=_semantic)


_Class = TypeVar("_Class", bound=type)


@dataclass_transform(kw_only_default=True)
def aggregate(cls: _Class) -> _Class:
    """Make a class a structure of kernels: a value whose fields are tensors and constexprs.

    A kernel makes a structure with one keyword for each annotated field, so that the order of the
    fields has no meaning. Methods are device functions. A field must not be assigned afterwards:
    newer versions of Triton refuse that.

    Raises:
        TypeError: the module postpones annotations by ``from __future__ import annotations``, but
            Triton reads them as types. Making an instance raises it too, for a field that is
            missing, unknown or of another type.
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

    # Triton hashes the source of every function that a kernel calls, to know when the kernel has
    # changed, except for builtins.
    __init__.__triton_builtin__ = True
    cls.__init__ = __init__  # type: ignore[misc]
    made: _Class = core._aggregate(cls)
    made.__aggregate_fields__ = names
    return made


thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
"""Wait for all threads of a partition, and make their earlier writes visible to each other."""
