"""Both kernels of a batch-invariant layer add in one order, as their code for a Hopper GPU shows.

Triton's interpreter cannot see this: there a product has the order that a test gives it.
"""

from __future__ import annotations

from pathlib import Path

from tests.compile.compile_matrix import printed_by
from tests.compile.product_order import CACHES, HEADS, KERNELS, order_of


def test_decodes_and_prompts_add_in_one_order(tmp_path: Path) -> None:
    found = printed_by("product_order", [], tmp_path)
    assert len(found) == len(CACHES) * len(HEADS) * len(KERNELS)
    for name, order in found.items():
        of = "bf16" if "16 bits" in name else "f16"
        assert order == {"steps": [f"k16 f32.{of}.{of}"], "widths": [2], "summed": [2]}, name


def test_an_order_is_read_from_code() -> None:
    ptx = (
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {%r1};\n"
    )
    ttgir = (
        "#ttg.dot_op<{opIdx = 0, parent = #mma, kWidth = 4}>\n"
        '%sum = "tt.reduce"(%x) <{axis = 1 : i32}> ({\n'
        "^bb0(%a: f32, %b: f32):\n"
        "  %c = arith.addf %a, %b : f32\n"
        "  tt.reduce.return %c : f32\n"
        "}) : (tensor<16x128xf32, #mma>) -> tensor<16xf32, #slice>\n"
        '%most = "tt.reduce"(%x) <{axis = 1 : i32}> ({\n'
        "^bb0(%a: f32, %b: f32):\n"
        "  %c = arith.maxnumf %a, %b : f32\n"
        "  tt.reduce.return %c : f32\n"
        "}) : (tensor<16x64xf32, #mma>) -> tensor<16xf32, #slice>\n"
    )
    order = order_of(ptx, ttgir)
    assert order.steps == ["k16 f32.f16.f16", "k32 f32.e4m3.e4m3"]
    assert (order.widths, order.summed) == ([4], [128])
