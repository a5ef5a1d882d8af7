"""In which order the compiled kernels of a batch-invariant layer add up, for a GPU not there.

    python -m tests.compile.product_order # by the installed Triton; prints JSON

Rows have the same bits in tiles of any number of rows where products add the same 16 terms in each
step, and where all other sums are of two numbers (docs/notebook/invariance.md).
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Final

import triton

from builders.launch.call import KernelCall
from specs.dtypes import CacheDType
from tests.compile.compile_matrix import _Device
from tests.compile.record import Record, RecordedError
from tests.compile.variants import Kernel, Layer, Variant, call_of

CACHES: Final = {
    "16 bits": CacheDType.AUTO,
    "e4m3": CacheDType.FP8,
    "e5m2": CacheDType.FP8_E5M2,
    "int8": CacheDType.INT8_PER_TOKEN_HEAD,
}
KERNELS: Final = (Kernel.DECODE, Kernel.PREFILL)
HEADS: Final = ((32, 8, 128), (64, 8, 64))


@dataclass(frozen=True)
class Order:
    """The order of a kernel's sums, as far as its instructions decide it."""

    steps: list[str]
    """The terms of a step of every instruction that multiplies, and the types of the sum and of
    both operands. The sizes of tiles are left out."""
    widths: list[int]
    """Neighbouring terms that a thread holds of an operand in registers."""
    summed: list[int]
    """Numbers that a sum over an axis adds."""


def order_of(ptx: str, ttgir: str) -> Order:
    """Read the order of a kernel's sums from two forms of its code."""
    by_warp = re.findall(r"mma\.sync\.aligned\.m\d+n\d+(k\d+)\.row\.col\.(f\d+\.\w+\.\w+)", ptx)
    by_group = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m\d+n\d+(k\d+)\.(f\d+\.\w+\.\w+)", ptx)
    widths = re.findall(r"kWidth = (\d+)", ttgir)
    # A reduction names its axis ahead of its body, and its operand's type behind it.
    reductions = re.findall(
        r'"tt\.reduce"\(.*?axis = (\d+).*?\n.*?\n(.*?)\n.*?\n\s*\}\) : \(tensor<([\dx]+)x', ttgir
    )
    summed = {
        int(shape.split("x")[int(axis)]) for axis, body, shape in reductions if "arith.addf" in body
    }
    steps = {" ".join(step) for step in (*by_warp, *by_group)}
    return Order(sorted(steps), sorted({int(width) for width in widths}), sorted(summed))


def order_by(call: KernelCall, record: Record) -> Order:
    """The order of sums in a launch on the active target; compiled if the record has it not."""
    try:
        with record.watching("order"):
            made = call.kernel.warmup(grid=call.grid, **call.arguments, **call.options)
    except RecordedError as recorded:
        return Order(**recorded.facts)
    order = order_of(made.asm["ptx"], made.asm["ttgir"])
    record.note("order", made.hash, asdict(order))
    return order


def orders() -> dict[str, Order]:
    """The order of sums in both portable kernels of each layer, on sm_90."""
    triton.runtime.driver.set_active(_Device(90))
    found, record = {}, Record()
    for heads in HEADS:
        for cache, cache_dtype in CACHES.items():
            for kernel in KERNELS:
                layer = Layer(heads=heads, cache=cache_dtype, batch_invariant=True)
                call = call_of(Variant(kernel, cache, layer), 90)
                name = f"{kernel.value} {'/'.join(map(str, heads))} {cache}"
                found[name] = order_by(call, record)
    return found


if __name__ == "__main__":
    print(json.dumps(orders(), default=asdict))
