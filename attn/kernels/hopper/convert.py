"""The converter: a warp group that turns 8-bit keys and values into operands of 16 bits."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attn.kernels.hopper.tiles import told
from attn.kernels.stored import E4M3, E5M2

_E4M3, _E5M2 = gl.constexpr(E4M3), gl.constexpr(E5M2)


def _ptx(pair: str, shift: int, power: int) -> gl.constexpr:
    """PTX over four bytes in ``$2``, to pairs in ``$0`` and ``$1``.

    A byte goes to the top of a half word, its exponent and mantissa down to where the wider type
    has them; ``power``, a power of two of that type, makes up for the bias of its exponents. All of
    it is exact, subnormals too. What is no number in 8 bits becomes a finite one: slots that
    nothing was written to may hold any byte, and weight 0 has to be enough to leave them out.
    """
    moves = (("0x5040", "$0"), ("0x7060", "$1"))
    steps = [
        f"prmt.b32 a, $2, 0, {_swapped(selector)}; and.b32 b, a, 0x7F007F00; shr.u32 b, b, {shift};"
        f" and.b32 a, a, 0x80008000; or.b32 a, a, b; mul.rn.{pair} {to}, a, c;"
        for selector, to in moves
    ]
    factor = hex(power << 16 | power)
    return gl.constexpr("{ .reg .b32 a, b, c; mov.b32 c, " + factor + "; " + " ".join(steps) + " }")


def _swapped(selector: str) -> str:
    """The selector for ``prmt`` with its two operands exchanged."""
    return "0x" + "".join(str(int(digit) ^ 4) for digit in selector[2:])


# Biases: 7 of e4m3, 15 of e5m2 and fp16, 127 of bf16. 2^120, 2^112 in bf16; 2^8 in fp16.
_E4M3_BF16 = _ptx("bf16x2", 4, 0x7B80)
_E5M2_BF16 = _ptx("bf16x2", 3, 0x7780)
_E4M3_FP16 = _ptx("f16x2", 1, 0x5C00)


@gluon.jit
def _widened(raw, KIND: gl.constexpr, DTYPE: gl.constexpr):
    """Bytes as numbers of 16 bits."""
    if KIND == _E5M2:
        gl.static_assert(DTYPE.is_bf16(), "fp16 has e5m2's infinities")
        wide = gl.inline_asm_elementwise(
            _E5M2_BF16, "=r,=r,r", [raw], dtype=gl.int16, is_pure=True, pack=4
        )
    elif DTYPE.is_bf16():
        wide = gl.inline_asm_elementwise(
            _E4M3_BF16, "=r,=r,r", [raw], dtype=gl.int16, is_pure=True, pack=4
        )
    else:
        wide = gl.inline_asm_elementwise(
            _E4M3_FP16, "=r,=r,r", [raw], dtype=gl.int16, is_pure=True, pack=4
        )
    return wide.to(DTYPE, bitcast=True)


@gluon.jit
def _convert_tile(
    sent, turn, staged, staged_full, staged_empty, tiles, full, empty, KIND: gl.constexpr,
    DTYPE: gl.constexpr, WIDTH: gl.constexpr, STAGED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The ``sent``-th tile that the producer staged, into stage ``turn % STAGES``."""
    # Eight elements of a thread: a store of 16 bytes, side by side with its neighbours'.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    slot = sent % STAGED
    stage = turn % STAGES
    mbarrier.wait(staged_full.index(slot), (sent // STAGED) & 1)
    raw = staged.index(slot).load(LAYOUT)
    # A fresh barrier lets parity 1 pass at once.
    mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
    tiles.index(stage).store(_widened(raw, KIND, DTYPE))
    # Generic accesses before wgmma reads the one, and before TMA overwrites the other.
    fence_async_shared()
    mbarrier.arrive(full.index(stage), count=1)
    mbarrier.arrive(staged_empty.index(slot), count=1)


@gluon.jit
def convert(
    staged, staged_full, staged_empty, k_tiles, v_tiles, records, q_full, q_empty, k_full, k_empty,
    v_full, v_empty, KIND: gl.constexpr, DTYPE: gl.constexpr, WIDTH: gl.constexpr,
    STAGED: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warp group: every tile of keys and values, in the order in which they are staged."""
    turn = 0
    done = 0
    mbarrier.wait(q_full.index(0), 0)
    _, _, _, _, _, _, _, low, high = told(records, 0)
    while high > 0:
        mbarrier.arrive(q_empty.index(turn % Q_STAGES), count=1)
        _convert_tile(
            2 * done, done, staged, staged_full, staged_empty, k_tiles, k_full, k_empty, KIND,
            DTYPE, WIDTH, STAGED, STAGES,
        )  # fmt: skip
        for i in range(done + 1, done + high - low):
            _convert_tile(
                2 * i - 1, i, staged, staged_full, staged_empty, k_tiles, k_full, k_empty, KIND,
                DTYPE, WIDTH, STAGED, STAGES,
            )  # fmt: skip
            _convert_tile(
                2 * i, i - 1, staged, staged_full, staged_empty, v_tiles, v_full, v_empty, KIND,
                DTYPE, WIDTH, STAGED, STAGES,
            )  # fmt: skip
        done += high - low
        _convert_tile(
            2 * done - 1, done - 1, staged, staged_full, staged_empty, v_tiles, v_full, v_empty,
            KIND, DTYPE, WIDTH, STAGED, STAGES,
        )  # fmt: skip
        turn += 1
        stage = turn % Q_STAGES
        mbarrier.wait(q_full.index(stage), (turn // Q_STAGES) & 1)
        _, _, _, _, _, _, _, low, high = told(records, stage)
