"""The table of sparse latent attention without a GPU: calls run, and right is told from wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn.bench import kernels
from attn.bench.cases import case as model
from attn.bench.cases.case import KernelCase
from attn.bench.cases.dense import TILES, BenchTable
from attn.bench.cases.latent import CONVERSION_CASE, INDEX_CASE, SPARSE_CASES
from attn.bench.kernels import BenchOptions, main, make_bench, run_and_report
from attn.bench.measure.pairs import Rounds
from attn.bench.peers.dense import KernelRun
from attn.bench.results.lines import How, Line, Part
from attn.bench.results.report import Report
from attn.bench.results.results import BenchResults, Verdict, line_check
from attn.bench.results.tables import sparse as bench
from attn.bench.results.tables.sparse import ALONE, FEW, FLASHMLA, sparse_lines
from attn.kernels.lang.numerics import INTERPRETED
from builders.sparse import vendor_calls as sparse_calls
from specs.dtypes import DType
from specs.engine import DecodeKernel
from specs.rows import LatentFormat
from specs.sparse_mla import SparseKernel
from tests.emulators.sparse_calls_emulator import emulated

ROUNDS = Rounds(torch.device("cpu"), 1, 1, 0)
BY_NAME = {case.name: case for case in SPARSE_CASES}
NAMES = ("dec_656_h16_b1", "dec_576_h16_b128", "pre_bf16_h16_4k", CONVERSION_CASE, INDEX_CASE)
BACKENDS = ("SPARSE_MLA",)


def tiny(name: str) -> KernelCase:
    case = BY_NAME[name]
    rows = min(case.num_reqs, 3)
    new = (1,) * rows if case.query_lens[0] == 1 else (4,)
    lens = (256,) * rows
    return case.replace(query_lens=new, seq_lens=lens, topk=128, num_heads=min(case.num_heads, 16))


@pytest.fixture
def in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use fp16, since Triton's interpreter multiplies the bit patterns of bf16."""
    if torch.cuda.is_available() or not INTERPRETED.value:
        pytest.skip("needs Triton's interpreter")
    for module in (model, bench):
        monkeypatch.setattr(module, "MODEL_DTYPE", DType.FLOAT16)


def lines_of(name: str, **options: Any) -> list[Line]:
    return list(sparse_lines(tiny(name), BACKENDS, ROUNDS, print, **options))


@pytest.mark.usefixtures("in_halves")
@pytest.mark.parametrize("name", NAMES)
def test_every_case_is_timed_and_right(name: str) -> None:
    lines = lines_of(name)
    assert [line.how for line in lines] == [How.DEVICE, How.GRAPH]
    for line in lines:
        assert not line.is_broken, line.reason
        assert line.error is not None
        assert line.error < (1e-30 if name == CONVERSION_CASE else 5e-3)
        assert line.part is (Part.STREAM if name in (CONVERSION_CASE, INDEX_CASE) else Part.LISTS)
        assert line.unit == ("TB/s" if line.part is Part.STREAM else "TF")
    device, graph = lines
    assert device.ours_us is not None
    assert device.amount is not None
    assert device.rate == device.amount / device.ours_us
    assert graph.reason.endswith("needs a CUDA device")


def test_the_cases_and_targets_are_those_of_the_issue() -> None:
    table = BenchTable.SPARSE_MLA
    assert (table.backend, table.peers, table.cases) == ("SPARSE_MLA", (FLASHMLA,), SPARSE_CASES)
    assert table.has_lines
    assert table.takes_hopper
    assert table.decode_kernel is DecodeKernel.AUTO
    targets = {
        (case.name, line.how.value): line.target
        for case in SPARSE_CASES
        for line in bench._asked(case, "SPARSE_MLA", FLASHMLA)
        if line.target
    }
    assert targets == {
        ("dec_656_h128_b128", "device"): ">= 250 TF",
        ("dec_656_h16_b1", "graph"): "<= 12 us",
        ("pre_bf16_h128_4k", "device"): ">= 350 TF",
        (CONVERSION_CASE, "device"): ">= 3.5 TB/s",
        (INDEX_CASE, "device"): ">= 2.5 TB/s",
    }
    padded, same = {"max_ratio": 0.5}, {"max_ratio": 1.0}
    assert {
        ("dec_656_h128_b128", How.DEVICE): same,
        ("dec_656_h16_b128", How.DEVICE): padded,
        ("dec_656_h8_b128", How.DEVICE): padded,
        ("pre_bf16_h128_4k", How.DEVICE): same,
        ("pre_bf16_h16_4k", How.DEVICE): padded,
    } == bench.HOPPER_TARGETS
    case = BY_NAME["dec_656_h128_b128"]
    assert case.flops == 2 * 128 * 2048 * 128 * (576 + 512)
    assert case.nbytes == 128 * 2048 * 656
    assert case.what == "decode 128/1/576, 128 x 32768, top-k 2048, fp8_ds_mla KV"
    assert BY_NAME["pre_bf16_h128_4k"].flops == 2 * 4096 * 2048 * 128 * (576 + 512)
    for name, layout in (
        ("dec_656_h16_b1", LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE),
        ("dec_576_h16_b128", LatentFormat.FP8_NOPE_FP8_ROPE),
        ("dec_bf16_h16_b1", LatentFormat.BF16),
    ):
        assert BY_NAME[name].latent_format is layout


@pytest.mark.parametrize(
    ("name", "how", "ours_us", "other_us", "verdict"),
    [
        # 73.0 GF: 292 us are 250 TF.
        ("dec_656_h128_b128", How.DEVICE, 290.0, None, Verdict.MET),
        ("dec_656_h128_b128", How.DEVICE, 295.0, 900.0, Verdict.NOT_MET),
        ("dec_656_h8_b128", How.DEVICE, 100.0, 201.0, Verdict.MET),
        ("dec_656_h8_b128", How.DEVICE, 100.0, 199.0, Verdict.NOT_MET),
        ("dec_656_h8_b128", How.DEVICE, 100.0, None, Verdict.NOT_MEASURED),
        ("dec_656_h16_b1", How.GRAPH, 12.1, None, Verdict.NOT_MET),
        ("dec_656_h16_b1", How.GRAPH, None, None, Verdict.NOT_MEASURED),
        # 2.58 GB, and 277 MB.
        (CONVERSION_CASE, How.DEVICE, 730.0, None, Verdict.MET),
        (CONVERSION_CASE, How.DEVICE, 740.0, None, Verdict.NOT_MET),
        (INDEX_CASE, How.DEVICE, 110.0, None, Verdict.MET),
        (INDEX_CASE, How.DEVICE, 111.0, None, Verdict.NOT_MET),
    ],
)
def test_times_are_judged(
    name: str, how: How, ours_us: float | None, other_us: float | None, verdict: Verdict
) -> None:
    targets = bench.TARGETS if (name, how) in bench.TARGETS else bench.HOPPER_TARGETS
    asked = bench._asked(BY_NAME[name], "SPARSE_MLA", FLASHMLA, targets)
    (line,) = (one for one in asked if one.how is how)
    check = line_check(line.replace(ours_us=ours_us, other_us=other_us))
    assert check is not None
    assert check.verdict is verdict


@pytest.mark.usefixtures("in_halves")
@pytest.mark.parametrize("name", ["dec_656_h16_b1", CONVERSION_CASE, INDEX_CASE])
def test_wrong_results_are_lines_without_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def off(*given: Any, **named: Any) -> None:
        """A kernel that writes nothing."""

    for function in ("sparse_mla", "convert_blocks", "paged_index_logits"):
        monkeypatch.setattr(bench, function, off)
    lines = lines_of(name)
    assert len(lines) == 2
    assert all(line.is_broken and line.ours_us is None for line in lines)
    targets = [line.holds for line in lines if line.target]
    assert targets == [False]


@pytest.mark.usefixtures("in_halves")
def test_other_tiles_are_lines_of_their_own() -> None:
    lines = lines_of("dec_656_h16_b1", peers=(TILES,))
    names = {line.backend for line in lines}
    # Tiles of 32 keys are usual, except on Hopper.
    assert len(names) == 1 + len(FEW.keys() - {"32 keys"})
    assert "SPARSE_MLA, one state, 32 keys" in names
    assert all(line.other == ALONE and not line.is_broken for line in lines), lines
    assert len({line.key for line in lines}) == len(lines)
    assert not any(line.target for line in lines if line.backend != "SPARSE_MLA")


def test_a_kernel_that_is_not_there_is_a_refusal() -> None:
    for line in lines_of("dec_656_h16_b1", kernel=DecodeKernel.HOPPER):
        assert line.is_refused
        assert line.backend == "SPARSE_MLA, hopper"
        assert line.reason == "kernels in Gluon do not run on cpu"


@pytest.mark.parametrize("name", ["dec_656_h16_b1", "dec_656_h128_b128", "pre_bf16_h16_4k"])
def test_flashmla_is_called_as_its_interface_has_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bench.make_sparse_content(tiny(name), ROUNDS)
    raw = bench.make_sparse_content(tiny("dec_576_h16_b128"), ROUNDS)
    assert "reads no fp8_nope_fp8_rope rows" in str(bench.flashmla(raw))
    with emulated() as found:
        load = sparse_calls.LOADERS[SparseKernel.FLASHMLA_KV]
        monkeypatch.setattr(bench, "load_flashmla", load)
        run = bench.flashmla(content)
        assert isinstance(run, KernelRun)
        run.call()
        assert run.collect is not None
        run.collect()
    assert content.expected.error_of(run.output) < 5e-3
    assert len(found.called) == 1


@pytest.mark.usefixtures("in_halves")
def test_the_table_has_a_row_per_line(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [tiny(name) for name in ("dec_656_h16_b1", CONVERSION_CASE)]
    monkeypatch.setattr(kernels, "select_cases", lambda patterns, cases: tuple(chosen))
    out, data = tmp_path / "table.md", tmp_path / "table.json"
    made = make_bench(BenchOptions(rounds=1, reps=1, commit="abc", table=BenchTable.SPARSE_MLA))
    assert made.backends == BACKENDS
    assert run_and_report(made, Report(out=out, json=data), lambda _: None)
    text = out.read_text()
    assert "# SPARSE_MLA on cpu, beside FlashMLA" in text
    results = BenchResults.model_validate_json(data.read_text())
    assert len(results.lines) == 4
    rows = [row for row in text.splitlines() if row.startswith("| SPARSE_MLA")]
    assert len(rows) == 4
    for title in ("Latent attention over lists, beside FlashMLA", "Bytes of the cache"):
        assert f"## {title}" in text
    assert "| ours, us | rate | beside |" in text
    assert "<= 12 us" in text
    again = tmp_path / "again.md"
    options = ["--render", "--merge", str(data), "--merge", str(data), "--out", str(again)]
    assert main(["--table", "sparse_mla", *options]) == 0
    assert again.read_text() == text


def test_tiles_are_a_peer_of_this_table_alone() -> None:
    made = make_bench(
        BenchOptions(peer=[TILES], rounds=1, reps=1, commit="abc", table=BenchTable.SPARSE_MLA)
    )
    assert made.peers == (TILES,)
    with pytest.raises(ValueError, match="peer must be one of fa3"):
        make_bench(BenchOptions(peer=[TILES], rounds=1, reps=1, commit="abc", table=BenchTable.MLA))
