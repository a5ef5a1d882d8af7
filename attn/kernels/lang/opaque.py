"""Values hidden from the compiler.

LLVM and ptxas compute whatever depends on a known value at the start of the kernel. The result then
occupies registers until it is used, or is spilled. A value from inline assembly prevents that: what
depends on it is computed where it is used.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from builders.launch.call import is_by_ptxas_13

_BY_PTXAS_13 = gl.constexpr(is_by_ptxas_13())


@gluon.jit
def opaque_zero():
    """A zero, int32, that LLVM does not know; what depends on it is computed where it is used."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def opaque(value):
    """An fp32 number, hidden from LLVM; what depends on it is computed where it is used."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=f,f", [value], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def opaque_int(number):
    """An int32, hidden from LLVM; what depends on it is computed where it is used."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def thread_number(like):
    """The thread's number among the program's threads, int32, for each element of ``like``.

    ``like`` is an int32 tensor. LLVM and ptxas compute values that depend on the number where they
    are used.
    """
    # Pure assembly with equal operands, so that LLVM reads the number once for all elements. The
    # opaque zero keeps LLVM from reading it earlier.
    anywhere = gl.zeros_like(like) + opaque_zero()
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x; // $1", "=r,r", [anywhere], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def program_number(HIDDEN: gl.constexpr = _BY_PTXAS_13):
    """``gl.program_id(0)``, hidden from ptxas if HIDDEN.

    Otherwise ptxas 13, and earlier ones in kernels of many registers, keep it, and values computed
    from it, since the start of the kernel, and spill them.
    """
    number = gl.program_id(0)
    if HIDDEN:
        number = gl.inline_asm_elementwise(
            "mov.u32 $0, %ctaid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    return number
