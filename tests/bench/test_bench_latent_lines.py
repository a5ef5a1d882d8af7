"""The table of backends over FlashInfer's latent kernels, without a GPU: over emulated calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from attn.bench import kernels
from attn.bench.cases import case as model
from attn.bench.cases import inputs
from attn.bench.cases.case import KernelCase
from attn.bench.cases.dense import BenchTable
from attn.bench.cases.latent import LATENT_VENDOR_CASES, ROPE_CASE
from attn.bench.kernels import BenchOptions, main, make_bench, run_and_report
from attn.bench.measure import ours
from attn.bench.measure.pairs import BrokenError, Rounds
from attn.bench.measure.rotation import Rotation, misrounded
from attn.bench.peers.flashinfer_jit import modules_of
from attn.bench.results.lines import How, Line, Part
from attn.bench.results.report import Report
from attn.bench.results.results import BenchResults, Verdict, line_check
from attn.bench.results.tables import flashinfer_mla as latent_lines
from attn.bench.results.tables.flashinfer_mla import DIRECT, VENDOR_ROPE
from attn.impls.vendor.flashinfer_mla import FlashInferMlaImpl
from attn.impls.vendor.trtllm_mla import TrtllmMlaImpl
from attn.kernels.lang.numerics import INTERPRETED
from builders.vendor.flashinfer_parts.install import FlashInferUnavailableError
from specs.dtypes import DType
from tests.emulators import flashinfer_mla_emulator, flashinfer_rope_emulator
from tests.emulators.trtllm_mla_emulator import NEW, OLD

CPU = torch.device("cpu")
ROUNDS = Rounds(CPU, 2, 2, 0)
BACKENDS = ("FLASHINFER_MLA", "TRTLLM_MLA")
HOWS = [How.DEVICE, How.EAGER, How.GRAPH]
BY_NAME = {case.name: case for case in LATENT_VENDOR_CASES}


def tiny(name: str) -> KernelCase:
    case = BY_NAME[name]
    lens = (40, 70, 33)
    return case.replace(query_lens=(1,) * 3, seq_lens=lens, num_heads=4)


TINY = tuple(tiny(name) for name in BY_NAME)


@contextmanager
def emulated(version: str = NEW) -> Iterator[None]:
    """Let all backends run here."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        stack.enter_context(flashinfer_mla_emulator.emulated(version))
        stack.enter_context(flashinfer_rope_emulator.emulated(version))
        patch.setattr(latent_lines, "backend_refusals", lambda *_: [])
        yield


@pytest.fixture
def in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use fp16, since Triton's interpreter multiplies the bit patterns of bf16."""
    if not INTERPRETED.value:
        pytest.skip("needs Triton's interpreter")
    for module in (model, inputs, ours):
        monkeypatch.setattr(module, "MODEL_DTYPE", DType.FLOAT16)


def lines_of(name: str, *backends: str, version: str = NEW) -> list[Line]:
    with emulated(version):
        given = tiny(name), backends or BACKENDS, ROUNDS, print
        return list(latent_lines.latent_lines(*given))


@pytest.mark.parametrize("version", [OLD, NEW])
@pytest.mark.parametrize("name", ["mla_h128_b128_4k", "mla_h16_b128_4k"])
def test_a_forward_is_timed_beside_the_run_that_it_calls(name: str, version: str) -> None:
    lines = lines_of(name, "FLASHINFER_MLA", version=version)
    assert [line.how for line in lines] == HOWS
    for line in lines:
        assert (line.part, line.other) == (Part.OVERHEAD, DIRECT)
        assert line.target == "<= 1.02 x direct call"
        assert line.error is not None
        assert line.error < 1e-2
        if line.how is How.GRAPH:
            assert line.reason == "needs a CUDA device"
            assert line.holds is None
        else:
            assert line.ours_us is not None
            assert line.other_us is not None


def test_an_fp8_cache_is_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from builders.vendor import flashinfer_mla
    from tests.tools.gpus import hopper

    monkeypatch.setattr(flashinfer_mla, "device_facts", lambda _: hopper(3))
    lines = lines_of("mla_fp8_h16_b128_4k", "FLASHINFER_MLA")
    assert len(lines) == 3
    assert not any(line.is_broken for line in lines), lines


def test_a_forward_that_is_wrong_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = FlashInferMlaImpl._attend

    def off(self: Any, *given: Any) -> None:
        attend(self, *given)
        given[-1][0].mul_(1.1)

    monkeypatch.setattr(FlashInferMlaImpl, "_attend", off)
    lines = lines_of("mla_h16_b128_4k", "FLASHINFER_MLA")
    assert [line.reason[:12] for line in lines] == ["WRONG: error"] * 3
    assert all(line.is_broken and line.holds is False for line in lines)


# -- Rotation, e4m3 and cache write.


@pytest.mark.parametrize("version", [OLD, NEW])
def test_one_launch_is_timed_beside_flashinfer_s_and_a_write(version: str) -> None:
    lines = lines_of(ROPE_CASE, version=version)
    assert [(line.backend, line.how) for line in lines] == [("TRTLLM_MLA", how) for how in HOWS]
    for line in lines:
        assert (line.part, line.other) == (Part.ROPE, VENDOR_ROPE)
        assert not line.is_broken, line.reason
        assert line.error is not None
        # Rounding to four bits.
        assert 1e-3 < line.error < 2**-4
    targets = [line.target for line in lines]
    assert targets == ["", "", f"<= 0.5 x {VENDOR_ROPE}, <= 6 us"]
    assert lines[0].other_us is not None
    assert lines[2].reason == "needs a CUDA device"
    assert "3 tokens, 4 heads of 512 + 64" in lines[0].what


def test_without_flashinfer_ours_is_timed_alone() -> None:
    def absent() -> None:
        raise FlashInferUnavailableError("flashinfer is not installed")

    # This patch is undone before the emulator's, which would otherwise come back after it.
    with emulated(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("builders.vendor.flashinfer_parts.rope.load_rope", absent)
        lines = list(latent_lines.latent_lines(tiny(ROPE_CASE), BACKENDS, ROUNDS, print))
    assert all(line.reason.startswith("flashinfer is not installed") for line in lines)
    assert lines[0].ours_us is not None
    assert lines[0].other_us is None
    assert not any(line.is_broken for line in lines)


@pytest.mark.parametrize("fault", ["rounding", "slot", "later"])
def test_a_rotation_that_is_wrong_is_a_line(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rotate, calls = TrtllmMlaImpl.do_rope_quantize_and_kv_cache_update, []

    def off(self: Any, *given: Any) -> None:
        rotate(self, *given)
        cache, _, q_out = given[-3:]
        calls.append(1)
        if fault == "rounding":
            q_out.view(torch.uint8)[1, 2, 3] ^= 1
        elif fault == "slot":
            cache.view(torch.uint8).flatten(0, 1)[0] = 0
        elif len(calls) > 3:
            q_out.view(torch.uint8)[0] = 0x7F

    monkeypatch.setattr(TrtllmMlaImpl, "do_rope_quantize_and_kv_cache_update", off)
    lines = lines_of(ROPE_CASE)
    reasons = [line.reason for line in lines if line.is_broken]
    assert len(reasons) == 3
    wanted = "rows of other slots" if fault == "slot" else "elements of queries are not the nearest"
    assert all(wanted in reason for reason in reasons)


def test_elements_that_are_not_the_nearest_are_counted() -> None:
    real = torch.tensor([[1.0, 1.06, 500.0, -0.001, 3.0]]).double()
    band = torch.full_like(real, 1e-6)
    stored = real.clamp(-448, 448).float().to(torch.float8_e4m3fn)
    assert misrounded(stored, real, band) == 0
    other = (stored.view(torch.uint8) ^ 0x80).view(torch.float8_e4m3fn)
    assert misrounded(other, real, band) == 5
    stored.view(torch.uint8)[0, 1] += 1
    stored.view(torch.uint8)[0, 4] = 0x7F
    assert misrounded(stored, real, band) == 2
    nothing = torch.zeros(0, dtype=torch.int64)
    codes = torch.full((1, 4, 5), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    rotation = Rotation(lambda: None, stored, codes, nothing, (real, band), (real[:0], band[:0]))
    with pytest.raises(BrokenError, match="5 elements of queries"):
        rotation.error()


# -- By TRITON_MLA's kernel.


@pytest.mark.usefixtures("in_halves")
def test_triton_mla_stands_beside_for_information() -> None:
    lines = lines_of("mla_h16_b128_4k", "TRTLLM_MLA")
    assert [line.how for line in lines] == HOWS
    for line in lines:
        assert (line.part, line.other) == (Part.KERNEL, "TRITON_MLA, plain")
        assert not line.is_broken, line.reason
        assert line.target == ""
        assert line_check(line) is None
    assert lines[0].other_us is not None


# -- The table.


def test_the_cases_are_those_of_the_targets() -> None:
    table = BenchTable.TRTLLM_MLA
    assert (table.backend, table.also, table.peers) == (*BACKENDS[:1], BACKENDS[1:], ())
    assert table.has_lines
    assert not table.takes_hopper
    rope = BY_NAME[ROPE_CASE]
    assert (rope.num_tokens, rope.num_heads, rope.head_size) == (128, 128, 576)
    for case in table.cases:
        assert case.query_lens == (1,) * 128
        if case.name != ROPE_CASE:
            assert case.seq_lens == (4096,) * 128


def test_what_flashinfer_compiles_is_known_ahead() -> None:
    assert [module[:2] for module in modules_of(BY_NAME[ROPE_CASE])] == [
        ("flashinfer.jit.rope", "gen_rope_module")
    ]
    ((module, make, backend, *_),) = modules_of(BY_NAME["mla_h128_b128_4k"])
    assert (module, make, backend) == ("flashinfer.jit", "gen_batch_mla_module", "fa3")


@pytest.mark.parametrize(
    ("ours_us", "other_us", "verdict"),
    [
        (5.9, 12.0, Verdict.MET),
        (6.1, 20.0, Verdict.NOT_MET),
        (5.9, 11.0, Verdict.NOT_MET),
        (5.9, None, Verdict.NOT_MEASURED),
        (6.1, None, Verdict.NOT_MET),
    ],
)
def test_both_bounds_of_a_rotation_are_judged(
    ours_us: float, other_us: float | None, verdict: Verdict
) -> None:
    line = lines_of(ROPE_CASE)[2].replace(ours_us=ours_us, other_us=other_us)
    check = line_check(line)
    assert check is not None
    assert check.verdict is verdict


def test_what_no_backend_serves_here_is_a_line() -> None:
    for name in (ROPE_CASE, "mla_h16_b128_4k"):
        lines = list(latent_lines.latent_lines(tiny(name), BACKENDS, ROUNDS, print))
        assert len(lines) == (3 if name == ROPE_CASE else 6)
        assert all(line.is_refused for line in lines)
        assert all("device" in line.reason for line in lines)


@pytest.mark.usefixtures("in_halves")
def test_the_table_has_a_row_per_line(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [tiny(name) for name in ("mla_h16_b128_4k", ROPE_CASE)]
    monkeypatch.setattr(kernels, "select_cases", lambda patterns, cases: tuple(chosen))
    out, data = tmp_path / "table.md", tmp_path / "table.json"
    bench = make_bench(BenchOptions(rounds=1, reps=1, commit="abc", table=BenchTable.TRTLLM_MLA))
    assert bench.backends == BACKENDS
    with emulated():
        assert run_and_report(bench, Report(out=out, json=data), lambda _: None)
    text = out.read_text()
    assert "# FLASHINFER_MLA, TRTLLM_MLA on cpu, beside FlashInfer's own calls" in text
    results = BenchResults.model_validate_json(data.read_text())
    assert len(results.lines) == 3 + 3 + 3
    assert not any(line.is_broken for line in results.lines), results.lines
    rows = [row for row in text.splitlines() if row.startswith(("| FLASH", "| TRTLLM"))]
    assert len(rows) == len(results.lines)
    for title in ("A forward beside", "RoPE, e4m3", "By another backend's kernel"):
        assert f"## {title}" in text
    assert "`mla_rope_quantize_fp8`" in text
    again = tmp_path / "again.md"
    options = ["--render", "--merge", str(data), "--merge", str(data), "--out", str(again)]
    assert main(["--table", "trtllm_mla", *options]) == 0
    assert again.read_text() == text
