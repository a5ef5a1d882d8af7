"""The table of sparse latent attention without a GPU: calls run, and right is told from wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn.bench import kernels
from attn.bench.cases import case as model
from attn.bench.cases import sparse as cases
from attn.bench.cases.case import KernelCase, PeerBound
from attn.bench.cases.dense import TILES, BenchTable
from attn.bench.cases.latent import CONVERSION_CASE, INDEX_CASE, SPARSE_CASES, SPARSE_PEERS
from attn.bench.cases.sparse import sparse_content
from attn.bench.kernels import BenchOptions, main, make_bench, run_and_report
from attn.bench.measure import ours as layers
from attn.bench.measure import sparse as measure
from attn.bench.measure.judge import check_run
from attn.bench.measure.pairs import Rounds
from attn.bench.measure.sparse import bench_sparse_case, our_sparse_run
from attn.bench.peers import sparse as peers
from attn.bench.peers.dense import KernelRun, Refusal
from attn.bench.results.lines import How, Line, Part
from attn.bench.results.report import Report
from attn.bench.results.results import BenchResults, Contender, Status, Verdict, line_check
from attn.bench.results.tables import sparse as bench
from attn.bench.results.tables.sparse import ALONE, DEEP_GEMM, FEW, has_lines, sparse_lines
from attn.kernels.lang.numerics import INTERPRETED
from attn.registry import AttentionBackendEnum
from builders.sparse import vendor_calls as sparse_calls
from specs.dtypes import DType
from specs.engine import Kernels
from specs.rows import LatentFormat
from specs.sparse_mla import SparseKernel
from tests.emulators.sparse_calls_emulator import emulated
from tests.emulators.vllm_signatures import VERSIONS, signature_of

CPU = torch.device("cpu")
ROUNDS = Rounds(CPU, 1, 1, 0)
BY_NAME = {case.name: case for case in SPARSE_CASES}
LINES = (CONVERSION_CASE, INDEX_CASE)
ATTENDED = ("dec_656_h16_b1", "ver_656_h16_q4_b16", "dec_576_h16_b128", "pre_bf16_h16_4k")
BACKENDS = ("SPARSE_MLA",)
MEMBER = AttentionBackendEnum["SPARSE_MLA"]


def tiny(name: str) -> KernelCase:
    case = BY_NAME[name]
    rows, new = min(case.num_reqs, 2), min(case.query_lens[0], 4)
    lens = {"query_lens": (new,) * rows, "seq_lens": (256,) * rows}
    return case.replace(**lens, topk=128, num_heads=min(case.num_heads, 16))


@pytest.fixture
def in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use fp16, since Triton's interpreter multiplies the bit patterns of bf16."""
    if torch.cuda.is_available() or not INTERPRETED.value:
        pytest.skip("needs Triton's interpreter")
    for module in (model, cases, layers, measure, bench):
        monkeypatch.setattr(module, "MODEL_DTYPE", DType.FLOAT16)
    # The backend is for GPUs, and its kernels run by the interpreter here.
    monkeypatch.setattr(measure, "backend_refusals", lambda case, member: [])


def settings(**fields: Any) -> Any:
    options = {"rounds": 1, "reps": 1, "commit": "abc", "table": BenchTable.SPARSE_MLA, **fields}
    return make_bench(BenchOptions(**options))


def lines_of(name: str) -> list[Line]:
    return list(sparse_lines(tiny(name), BACKENDS, ROUNDS, print))


# -- Attention over lists.


@pytest.mark.usefixtures("in_halves")
@pytest.mark.parametrize("name", ATTENDED)
def test_our_layer_is_right_and_timed_with_its_plan(name: str) -> None:
    result = bench_sparse_case(settings(), tiny(name), CPU, print)
    assert result.ours.status is Status.MEASURED, result.ours
    assert result.ours.error is not None
    assert result.ours.error < 5e-3
    assert result.ours.plan_us is not None
    assert result.ours.host_us is not None
    assert result.cost(result.ours) == result.ours.layer_us(61)
    assert [peer.name for peer in result.peers] == list(SPARSE_PEERS)
    assert {peer.status for peer in result.peers} == {Status.UNAVAILABLE}


@pytest.mark.usefixtures("in_halves")
@pytest.mark.parametrize("fault", ["lost", "page"])
def test_one_wrong_entry_of_a_list_is_found(fault: str) -> None:
    content = sparse_content(tiny("dec_656_h16_b8"), CPU, 0)
    assert isinstance(outcome(content), float)
    if fault == "lost":
        wrong = content.positions.clone()
        wrong[1, 77] = -1
        changed = {"positions": wrong}
    else:
        table = content.block_table.clone()
        table[0, 1] = table[1, 2]
        changed = {"block_table": table}
    faulty = cases.SparseContent(**{**vars_of(content), **changed})
    found = outcome(content, our_sparse_run(MEMBER, faulty, Kernels()))
    assert isinstance(found, Contender), found
    assert found.status is Status.WRONG


def vars_of(content: Any) -> dict[str, Any]:
    return {name: getattr(content, name) for name in type(content).__dataclass_fields__}


def outcome(content: Any, run: KernelRun | None = None) -> Contender | float:
    made = run or our_sparse_run(MEMBER, content, Kernels())
    return check_run("ours", made, content.expected, content)


def test_tokens_list_what_they_see_and_slots_are_those_of_the_table() -> None:
    content = sparse_content(tiny("ver_656_h16_q4_b16"), CPU, 0)
    case = content.case
    for token, (request, positions) in enumerate(
        zip(content.requests.tolist(), content.positions.tolist(), strict=True)
    ):
        assert len(set(positions)) == case.topk
        assert max(positions) <= 256 - 4 + token % 4
        pages = content.block_table[request].tolist()
        slots = [pages[at // 64] * 64 + at % 64 for at in positions]
        assert content.indices[token].tolist() == slots
    assert torch.equal(torch.cat(content.parts, -1), content.query)
    with pytest.raises(ValueError, match="topk must be at most the keys of a token, got 300"):
        sparse_content(case.replace(topk=300), CPU, 0)


def test_the_cases_and_targets_are_those_of_the_issue() -> None:
    table = BenchTable.SPARSE_MLA
    assert (table.backend, table.peers, table.cases) == ("SPARSE_MLA", SPARSE_PEERS, SPARSE_CASES)
    assert not table.has_lines
    assert table.takes_hopper
    padded = (PeerBound(peer="flashmla", max_ratio=0.5),)
    for case in SPARSE_CASES:
        target = case.target
        if has_lines(case):
            continue
        is_prefill = case.name.startswith("pre")
        judged = None if "576" in case.name else 1.0
        assert target.max_ratio_to_best == judged
        assert target.max_graph_ratio_to_best == (None if is_prefill else judged)
        assert target.against == SPARSE_PEERS
        assert target.max_ratios == (
            padded
            if case.name in ("dec_656_h16_b128", "dec_656_h8_b128", "pre_bf16_h16_4k")
            else ()
        )
    rates = {case.name: case.target.min_plain_rate for case in SPARSE_CASES}
    assert {name: rate for name, rate in rates.items() if rate} == {
        "dec_656_h128_b128": 250,
        "pre_bf16_h128_4k": 350,
    }
    assert BY_NAME["dec_656_h16_b1"].target.max_graph_us == 12
    lines = {
        (name, line.how.value): line.target
        for name in LINES
        for line in bench._asked(BY_NAME[name], "SPARSE_MLA", DEEP_GEMM)
        if line.target
    }
    assert lines == {
        (CONVERSION_CASE, "device"): ">= 3.5 TB/s",
        (INDEX_CASE, "device"): "<= 1 x deepgemm, >= 2.5 TB/s",
    }
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


# -- Peers.


def slots_by_hand(
    requests: Any, table: Any, positions: Any, return_valid_counts: bool = False, **named: Any
) -> Any:
    """What vLLM's function computes."""
    page = named["BLOCK_SIZE"]
    found = table[requests.long()].gather(1, (positions // page).long()) * page + positions % page
    counts = (positions >= 0).sum(1).int()
    return (found, counts) if return_valid_counts else found


def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(triton_convert_req_index_to_global_index=slots_by_hand)
    monkeypatch.setattr(peers, "import_module", lambda _: module)
    monkeypatch.setattr(peers, "load_flashmla", sparse_calls.LOADERS[SparseKernel.FLASHMLA_KV])
    whole = sparse_calls.LOADERS[SparseKernel.FA3]()

    def attend(**named: Any) -> Any:
        """vLLM's backend wants no LSE, and causal is the same for a query of one token."""
        return whole.function(**{**named, "causal": False, "return_softmax_lse": True})[0]

    loaded = SimpleNamespace(function=attend, is_vllm=True)
    monkeypatch.setattr(peers, "load_fa3", lambda: loaded)


@pytest.mark.parametrize("peer", SPARSE_PEERS)
@pytest.mark.parametrize(
    "name", ["dec_656_h16_b8", "ver_656_h16_q4_b16", "dec_bf16_h16_b8", "pre_bf16_h16_4k"]
)
def test_peers_are_called_as_their_interfaces_have_it(
    peer: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = sparse_content(tiny(name), CPU, 0)
    with emulated() as found:
        with_vllm(monkeypatch)
        run = peers.SPARSE_ADAPTERS[peer](content)
        if peer == "fa3" and "656" in name:
            assert isinstance(run, Refusal)
            assert run.status is Status.UNSUPPORTED
            return
        assert isinstance(run, KernelRun), run
        error = check_run(peer, run, content.expected, content)
        assert isinstance(error, float), error
        if run.planned is not None:
            run.planned()
    assert found.called


def test_peers_that_read_no_such_rows_or_are_not_there_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = sparse_content(tiny("dec_576_h16_b8"), CPU, 0)
    for peer in SPARSE_PEERS:
        refusal = peers.SPARSE_ADAPTERS[peer](raw)
        assert isinstance(refusal, Refusal)
        assert "reads no fp8_nope_fp8_rope rows" in refusal.reason
        away = peers.prepare_sparse_peer(peer, raw)
        assert away == Refusal(Status.UNAVAILABLE, "needs a CUDA device, not cpu")
    with pytest.raises(ValueError, match="peer must be one of fa3, flashmla, got 'xqa'"):
        peers.prepare_sparse_peer("xqa", raw)
    content = SimpleNamespace(query=SimpleNamespace(device=torch.device("cuda")))

    def missing(_: Any) -> None:
        raise ModuleNotFoundError("No module named 'vllm'")

    monkeypatch.setitem(peers.SPARSE_ADAPTERS, "fa3", missing)
    gone: Any = peers.prepare_sparse_peer("fa3", content)  # type: ignore[arg-type]
    assert (gone.status, "No module named 'vllm'" in gone.reason) == (Status.UNAVAILABLE, True)


@pytest.mark.parametrize("version", VERSIONS)
def test_calls_fit_vllm_s_signatures(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = []

    def checked(module: str, function: str, result: Any) -> Any:
        signature = signature_of(version, module, function)

        def call(*given: Any, **named: Any) -> Any:
            signature.bind(*given, **named)
            bound.append(function)
            return result(*given, **named) if callable(result) else result

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    lists = "v1.attention.backends.mla.sparse_utils"
    attention = "vllm_flash_attn.flash_attn_interface"
    content = sparse_content(tiny("dec_bf16_h16_b8"), CPU, 0)
    convert = checked(lists, "triton_convert_req_index_to_global_index", slots_by_hand)
    module = SimpleNamespace(triton_convert_req_index_to_global_index=convert)
    monkeypatch.setattr(peers, "import_module", lambda _: module)
    varlen = checked(attention, "flash_attn_varlen_func", content.query[..., :512])
    monkeypatch.setattr(peers, "load_fa3", lambda: SimpleNamespace(function=varlen, is_vllm=True))
    run = peers.SPARSE_ADAPTERS["fa3"](content)
    assert isinstance(run, KernelRun)
    run.call()
    mla = "third_party.flashmla.flash_mla_interface"
    wide = content.query.new_zeros(2, 64, 512)
    functions = SimpleNamespace(
        prefill=checked(mla, "flash_mla_sparse_fwd", (wide,)),
        with_cache=checked(mla, "flash_mla_with_kvcache", (wide[:, None],)),
        new_schedule=object,
    )
    monkeypatch.setattr(peers, "load_flashmla", lambda: functions)
    for name in ("dec_bf16_h16_b8", "dec_656_h16_b8"):
        run = peers.SPARSE_ADAPTERS["flashmla"](sparse_content(tiny(name), CPU, 0))
        assert isinstance(run, KernelRun)
        run.call()
    assert len(set(bound)) == 4
    deep = "utils.deep_gemm"
    module = SimpleNamespace(
        get_paged_mqa_logits_metadata=checked(deep, "get_paged_mqa_logits_metadata", None),
        fp8_fp4_paged_mqa_logits=checked(deep, "fp8_fp4_paged_mqa_logits", torch.zeros(2, 128)),
    )
    monkeypatch.setattr(bench, "import_module", lambda _: module)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132)
    )
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *given, device=None, **named: real(*given, **named))
    query = QueryOnGpu(torch.zeros(2, 4, 128))
    tensors: Any = (query, torch.zeros(2, 4), torch.zeros(4, 64, 132), torch.zeros(2, 2))
    made = bench.prepare_deep_gemm(*tensors, torch.tensor([128, 128]))
    assert isinstance(made, KernelRun), made
    made.call()
    assert made.collect is not None
    made.collect()
    assert len(set(bound)) == 6


class QueryOnGpu:
    """A tensor that says that it is on a GPU."""

    device = torch.device("cuda")

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __getitem__(self, place: Any) -> torch.Tensor:
        return self.rows[place]

    def __len__(self) -> int:
        return len(self.rows)


# -- Lines.


@pytest.mark.usefixtures("in_halves")
@pytest.mark.parametrize("name", LINES)
def test_bytes_are_lines_that_are_timed_and_right(name: str) -> None:
    lines = lines_of(name)
    assert [line.how for line in lines] == [How.DEVICE, How.GRAPH]
    for line in lines:
        assert not line.is_broken, line.reason
        assert line.error is not None
        assert line.error < (1e-30 if name == CONVERSION_CASE else 5e-3)
        assert (line.part, line.unit) == (Part.STREAM, "TB/s")
        assert line.other == (ALONE if name == CONVERSION_CASE else DEEP_GEMM)
    device, graph = lines
    assert device.ours_us is not None
    assert device.amount is not None
    assert device.rate == device.amount / device.ours_us
    assert graph.reason.endswith("needs a CUDA device")
    if name == INDEX_CASE:
        assert "deepgemm: needs a CUDA device" in device.reason
        # Never met without the peer.
        check = line_check(device.replace(ours_us=1e-6))
        assert check is not None
        assert check.verdict is Verdict.NOT_MEASURED


@pytest.mark.parametrize(
    ("name", "ours_us", "other_us", "verdict"),
    [
        # 2.58 GB, and 277 MB.
        (CONVERSION_CASE, 730.0, None, Verdict.MET),
        (CONVERSION_CASE, 740.0, None, Verdict.NOT_MET),
        (INDEX_CASE, 110.0, 111.0, Verdict.MET),
        (INDEX_CASE, 110.0, 110.0, Verdict.LEVEL),
        (INDEX_CASE, 111.0, 120.0, Verdict.NOT_MET),
        (INDEX_CASE, 111.0, 111.0, Verdict.NOT_MET),
        (INDEX_CASE, 100.0, 99.0, Verdict.NOT_MET),
        (INDEX_CASE, 100.0, None, Verdict.NOT_MEASURED),
    ],
)
def test_times_are_judged(
    name: str, ours_us: float | None, other_us: float | None, verdict: Verdict
) -> None:
    asked = bench._asked(BY_NAME[name], "SPARSE_MLA", DEEP_GEMM)
    (line,) = (one for one in asked if one.how is How.DEVICE)
    check = line_check(line.replace(ours_us=ours_us, other_us=other_us))
    assert check is not None
    assert check.verdict is verdict


@pytest.mark.usefixtures("in_halves")
@pytest.mark.parametrize("name", LINES)
def test_wrong_results_are_lines_without_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def off(*given: Any, **named: Any) -> None:
        """A kernel that writes nothing."""

    for function in ("convert_blocks", "paged_index_logits"):
        monkeypatch.setattr(bench, function, off)
    lines = lines_of(name)
    assert len(lines) == 2
    assert all(line.is_broken and line.ours_us is None for line in lines)
    targets = [line.holds for line in lines if line.target]
    assert targets == [False]


@pytest.mark.usefixtures("in_halves")
def test_tiles_are_lines_of_their_own() -> None:
    assert has_lines(BY_NAME["dec_656_h16_b1"], (TILES,))
    lines = lines_of("dec_656_h16_b1")
    names = {line.backend for line in lines}
    # Tiles of 32 keys are usual, except on Hopper.
    assert len(names) == 1 + len(FEW.keys() - {"32 keys"})
    assert "SPARSE_MLA, one state, 32 keys" in names
    assert all(line.other == ALONE and not line.is_broken for line in lines), lines
    assert len({line.key for line in lines}) == len(lines)
    assert not any(line.target for line in lines)


@pytest.mark.usefixtures("in_halves")
def test_the_table_has_rows_and_lines(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [tiny(name) for name in ("dec_656_h16_b1", CONVERSION_CASE)]
    monkeypatch.setattr(kernels, "select_cases", lambda patterns, cases: tuple(chosen))
    out, data = tmp_path / "table.md", tmp_path / "table.json"
    made = settings()
    assert made.backends == BACKENDS
    assert run_and_report(made, Report(out=out, json=data), lambda _: None)
    text = out.read_text()
    assert "# SPARSE_MLA on cpu, against the fastest kernels for it" in text
    results = BenchResults.model_validate_json(data.read_text())
    assert (len(results.cases), len(results.lines)) == (1, 2)
    assert len([row for row in text.splitlines() if row.startswith("| SPARSE_MLA")]) == 2
    assert "`forward + plan / 61`" in text
    assert "## Bytes of the cache" in text
    assert "## Memory" not in text
    assert "<= 12 us in a graph" in text
    again = tmp_path / "again.md"
    options = ["--render", "--merge", str(data), "--merge", str(data), "--out", str(again)]
    assert main(["--table", "sparse_mla", *options]) == 0
    assert again.read_text() == text


def test_tiles_are_a_peer_of_this_table_alone() -> None:
    assert settings(peer=[TILES]).peers == (TILES,)
    with pytest.raises(ValueError, match="peer must be one of fa3"):
        settings(peer=[TILES], table=BenchTable.MLA)
