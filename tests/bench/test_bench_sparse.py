"""The table of sparse latent attention: every call runs, and right results are told from wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn.bench import sparse_mla as bench
from attn.bench.sparse_mla import CASES, Content, error_of, main, ours
from attn.ops.dispatch import has_kernel
from attn.ops.sparse_mla import tile_for


@pytest.mark.skipif(
    torch.cuda.is_available() or not has_kernel(torch.ones(1)), reason="needs the interpreter"
)
def test_all_calls_run_and_are_judged(capsys: pytest.CaptureFixture[str]) -> None:
    one = ["--small", "--rounds", "1", "--all-tiles", "--only", "dec_bf16_h16_b1", "index"]
    assert main(one) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| case | kernel |")
    assert {line.count("|") for line in lines} == {8}
    named = [line for line in lines if line.startswith("| dec_bf16_h16_b1 | ours")]
    assert len(named) == 1 + len(bench.FEW)
    assert all(float(line.split("|")[-2]) < 2e-3 for line in named)
    assert sum("selection" in line for line in lines) == 3
    assert any("| FlashMLA | not importable" in line for line in lines)


def test_wrong_results_show() -> None:
    (case,) = [case for case in CASES if case.name == "dec_656_h16_b1"]
    case = replace(case, context=256, topk=64)
    content = Content(case, torch.device("cpu"))
    _, out = ours(content, tile_for(content.query[..., :512], content.indices, case.layout))
    assert error_of(content, out.zero_()) == 1.0
    assert content.nbytes == 64 * 656
    assert content.flops == 2.0 * 64 * 16 * (576 + 512)
