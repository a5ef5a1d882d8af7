"""What compilers are not to know, so that it is computed where it is used: what follows
from what they know they keep in registers from the kernel's beginning on, or spill.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from builders.launch.call import is_by_ptxas_13

_BY_PTXAS_13 = gl.constexpr(is_by_ptxas_13())


@gluon.jit
def opaque_zero():
    """A zero that LLVM does not know: what depends on it is computed where it is used, and not kept
    in registers from the kernel's beginning on.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def program_number():
    """``gl.program_id(0)``; read where it is used by ptxas 13, which else keeps what it computed
    from it since the kernel's beginning, and spills it.
    """
    number = gl.program_id(0)
    if _BY_PTXAS_13:
        number = gl.inline_asm_elementwise(
            "mov.u32 $0, %ctaid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    return number
