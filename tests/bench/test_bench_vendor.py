"""The table of backends over FlashInfer, without a GPU: over emulated calls of FlashInfer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from attn.bench import kernels
from attn.bench.cases.case import KernelCase
from attn.bench.cases.dense import VENDOR_CASES, BenchTable
from attn.bench.cases.inputs import make_content
from attn.bench.kernels import BenchOptions, main, make_bench, run_and_report
from attn.bench.measure import timing
from attn.bench.measure.ours import make_layer
from attn.bench.measure.pairs import Rounds, direct_call
from attn.bench.measure.timing import (
    count_launches,
    count_waits,
    eager_times_us,
    graph_times_us,
    host_times_us,
    launches_of,
    waits_of,
)
from attn.bench.peers import vllm_builder
from attn.bench.peers.dense import Refusal
from attn.bench.peers.vllm_builder import vllm_build
from attn.bench.results.lines import How, Line, Part
from attn.bench.results.render import line_text, render_markdown
from attn.bench.results.report import Report
from attn.bench.results.results import BenchResults, Verdict, line_check
from attn.bench.results.tables import flashinfer as vendor
from attn.bench.results.tables.flashinfer import vendor_lines, written_step
from attn.bench.settings import environment_of
from attn.impls.vendor.base import VendorImpl
from attn.impls.vendor.flashinfer import FlashInferImpl
from attn.registry import AttentionBackendEnum
from specs.base import SpecError
from specs.devices import KNOWN_DEVICES
from specs.dtypes import CacheDType
from tests.emulators import flashinfer_emulator, trtllm_emulator
from tests.emulators.trtllm_emulator import NEW, OLD

CPU = torch.device("cpu")
BACKENDS = ("FLASHINFER", "TRTLLM_MHA")
SHAPE: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "kind": "decode"}
TINY = {
    name: KernelCase(name=name, query_lens=(1,) * len(lens), seq_lens=lens, **SHAPE)
    for name, lens in {
        "dec_b1_8k": (90,),
        "dec_b32_4k": (40, 17, 33),
        "dec_b128_8k": (40, 17, 33),
        "dec_b256_4k": (40, 17, 33),
    }.items()
}
ROUNDS = Rounds(CPU, 2, 2, 0)


@contextmanager
def emulated(version: str = NEW) -> Iterator[None]:
    """Let both backends run here."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        stack.enter_context(flashinfer_emulator.emulated(version))
        stack.enter_context(trtllm_emulator.emulated(KNOWN_DEVICES["h200"], version))
        patch.setattr(vendor, "backend_refusals", lambda *_: [])
        yield


def lines_of(name: str, *backends: str, version: str = NEW) -> list[Line]:
    with emulated(version):
        return list(vendor_lines(TINY[name], backends or BACKENDS, ROUNDS, lambda _: None))


@pytest.mark.parametrize("name", ["dec_b1_8k", "dec_b128_8k"])
@pytest.mark.parametrize("version", [OLD, NEW])
def test_a_forward_is_timed_beside_the_call_that_it_makes(name: str, version: str) -> None:
    lines = lines_of(name, version=version)
    assert [(line.backend, line.how) for line in lines] == [
        (backend, how) for backend in BACKENDS for how in (How.DEVICE, How.EAGER, How.GRAPH)
    ]
    for line in lines:
        assert (line.part, line.other) == (Part.OVERHEAD, "direct call")
        assert line.error is not None
        assert line.error < 1e-2
        if line.how is How.GRAPH:
            assert line.reason == "needs a CUDA device"
            assert line.holds is None
            continue
        assert line.ours_us is not None
        assert line.other_us is not None
        assert line.target == ("<= direct call + 5 us" if name == "dec_b1_8k" else
                               "<= 1.02 x direct call")  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_direct_call_is_the_forward_s_own(backend: str) -> None:
    member, case = AttentionBackendEnum[backend], TINY["dec_b128_8k"]
    with emulated():
        generator = torch.Generator().manual_seed(0)
        layer = make_layer(member, make_content(case, CPU, generator), generator)
        record = vendor.decode_record(member, layer)
        query, output = layer.content.query, torch.full_like(layer.content.query, float("nan"))
        expected, impl = torch.empty_like(query), layer.impl
        assert isinstance(impl, VendorImpl)
        direct = direct_call(
            record,
            lambda step: impl.forward(
                layer.scales, query, None, None, layer.kv_cache, step, output
            ),
        )
        impl.forward(layer.scales, query, None, None, layer.kv_cache, record, expected)
        output.fill_(float("nan"))
        direct()
        assert torch.equal(output, expected)
        # The wrapper that recorded the call is gone: the record has its own wrapper again.
        assert type(getattr(record.decode, "wrapper", None)).__name__ != "_Wrapper"


@pytest.mark.parametrize("version", [OLD, NEW])
def test_fp8_is_timed_beside_bf16_with_its_write(version: str) -> None:
    lines = lines_of("dec_b32_4k", version=version)
    assert {line.part for line in lines} == {Part.WRITE}
    assert not any(line.is_broken for line in lines), lines
    for line in lines:
        assert line.target == "<= 1 x bf16"
        assert line.what.endswith("cache write included, fp8_e4m3 KV")
        assert line.error is not None
        # e4m3 keys and values are exact in the content; XQA may compute in fp8.
        assert line.error < 6e-2


@pytest.mark.parametrize("cache", [CacheDType.AUTO, CacheDType.FP8_E4M3])
def test_a_written_step_writes_the_new_tokens_rows_where_they_were(cache: CacheDType) -> None:
    member = AttentionBackendEnum["FLASHINFER"]
    case = TINY["dec_b32_4k"].replace(kv_cache_dtype=cache)
    with emulated():
        generator = torch.Generator().manual_seed(0)
        layer = make_layer(member, make_content(case, CPU, generator), generator)
        before = layer.kv_cache.clone()
        slots = layer.batch.slot_mapping
        impl = layer.impl
        assert isinstance(impl, FlashInferImpl)
        views = impl._views(layer.kv_cache, torch.bfloat16)
        for side in (views.key, views.value):
            raw = side.view(torch.uint8 if cache.is_quantized else torch.int16)
            raw[slots // case.block_size, slots % case.block_size] = 0
        assert not torch.equal(layer.kv_cache.view(torch.uint8), before.view(torch.uint8))
        written_step(member, layer).call()
        assert torch.equal(layer.kv_cache.view(torch.uint8), before.view(torch.uint8))


def test_builds_are_timed_and_say_why_vllm_s_are_not() -> None:
    lines = lines_of("dec_b256_4k")
    assert [(line.backend, line.other) for line in lines] == [
        (backend, other) for backend in BACKENDS for other in (vendor.NATIVE, vendor.XQA)
    ]
    for line in lines:
        assert line.part is Part.BUILD
        assert line.ours_us is not None
        assert line.other_us is None
        assert line.reason == "needs a CUDA device, not cpu"
        assert line.holds is None
    assert lines[0].target == "<= 0.5 x vLLM, planned decode, 0 waits"
    assert lines[1].target == ""


def test_builds_beside_vllm_s_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(
        vendor, "vllm_build", lambda case, batch, uses_xqa: lambda: calls.append(str(uses_xqa))
    )
    monkeypatch.setattr(vendor, "count_waits", lambda call, device: 3)
    lines = lines_of("dec_b256_4k", "TRTLLM_MHA")
    assert {"True", "False"} == set(calls)
    assert [line.waits for line in lines] == [3, None]
    assert lines[0].holds is False
    assert all(line.other_us is not None for line in lines)

    def waits(call: Any, device: Any) -> None:
        raise RuntimeError("called a synchronizing operation")

    monkeypatch.setattr(vendor, "count_waits", waits)
    line = lines_of("dec_b256_4k", "TRTLLM_MHA")[0]
    assert (line.waits, line.reason) == (None, "called a synchronizing operation")


def test_a_forward_that_is_wrong_or_fails_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = FlashInferImpl._attend

    def off(self: Any, part: Any, query: Any, views: Any, output: Any, *rest: Any) -> None:
        attend(self, part, query, views, output, *rest)
        output *= 1.1

    monkeypatch.setattr(FlashInferImpl, "_attend", off)
    lines = lines_of("dec_b1_8k", "FLASHINFER")
    assert [line.reason[:12] for line in lines] == ["WRONG: error"] * 3
    assert all(line.is_broken and line.holds is False for line in lines)

    def broken(*_: Any) -> None:
        raise RuntimeError("no such tile")

    monkeypatch.setattr(FlashInferImpl, "_attend", broken)
    lines = lines_of("dec_b32_4k", "FLASHINFER")
    assert {line.reason for line in lines} == {"failed: RuntimeError: no such tile"}
    monkeypatch.setattr(vendor, "make_layer", broken)
    lines = lines_of("dec_b1_8k", "FLASHINFER")
    assert {line.reason for line in lines} == {"RuntimeError: no such tile"}


def test_what_a_backend_does_not_serve_is_a_line() -> None:
    lines = list(vendor_lines(TINY["dec_b1_8k"], ("TRTLLM_MHA",), ROUNDS, lambda _: None))
    assert len(lines) == 3
    assert all(line.is_broken for line in lines)
    assert "device" in lines[0].reason or "flashinfer" in lines[0].reason


# -- vLLM's builder.


def cuda_batch() -> Any:
    return SimpleNamespace(seq_lens=SimpleNamespace(device=torch.device("cuda")))


def test_vllm_s_builder_that_cannot_be_made_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    found = vllm_build(TINY["dec_b256_4k"], cuda_batch(), uses_xqa=False)
    assert isinstance(found, Refusal)
    assert found.reason.startswith("vLLM's builder: ModuleNotFoundError")

    def fails(*_: Any) -> None:
        raise ValueError("no model")

    for name in ("vllm", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(vllm_builder, "_builder_of", fails)
    found = vllm_build(TINY["dec_b256_4k"], cuda_batch(), uses_xqa=False)
    assert isinstance(found, Refusal)
    assert found.reason == "vLLM's builder: ValueError: no model"
    built: list[Any] = []
    builder = SimpleNamespace(
        use_trtllm_decode_attention=False, build=lambda prefix, batch: built.append(batch)
    )
    monkeypatch.setattr(vllm_builder, "_builder_of", lambda *_: builder)
    monkeypatch.setattr(vllm_builder, "_common_of", lambda batch: "common")
    call = vllm_build(TINY["dec_b256_4k"], cuda_batch(), uses_xqa=False)
    assert not isinstance(call, Refusal)
    call()
    assert built == ["common"]
    other = vllm_build(TINY["dec_b256_4k"], cuda_batch(), uses_xqa=True)
    assert isinstance(other, Refusal)
    assert "does not decode so" in other.reason


# -- Timing.


def test_calls_of_both_clocks_take_turns() -> None:
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    eager = eager_times_us(calls, CPU, 2, 3)
    assert "".join(order[-12:]) == "aaabbb" + "bbbaaa"
    assert eager["a"].calls == 2
    host = host_times_us(calls, CPU, 2, 3)
    assert host["b"].calls == 6
    assert graph_times_us(calls, CPU, 2) is None
    assert count_waits(lambda: None, CPU) is None


def event(name: str, start: int, end: int) -> Any:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))


def test_waits_are_those_within_the_call() -> None:
    own = event("attn.bench.profiled", 10, 20)
    on_gpu = event("attn.bench.profiled", 14, 40)
    launch = event("cudaLaunchKernel", 11, 12)
    others = [event("cudaDeviceSynchronize", 5, 6), event("cudaDeviceSynchronize", 30, 31)]
    assert waits_of([on_gpu, own, launch, *others]) == 0
    copies = [event("cudaMemcpyAsync", 13, 14), event("cudaMemcpy", 15, 16)]
    assert waits_of([own, launch, *others, *copies, event("cudaStreamSynchronize", 17, 18)]) == 2
    with pytest.raises(RuntimeError, match="saw no launch"):
        waits_of([own, *others])


def test_launches_are_those_within_the_call() -> None:
    own = event("attn.bench.profiled", 10, 20)
    names = (
        *("cudaLaunchKernel", "cuLaunchKernelEx", "cudaMemcpyAsync", "cudaMemsetAsync"),
        *("aten::cat", "cudaStreamIsCapturing", "cudaEventRecord"),
    )
    inside = [event(name, 11 + at, 12 + at) for at, name in enumerate(names)]
    assert launches_of([own, *inside, event("cudaLaunchKernel", 30, 31)]) == 4
    with pytest.raises(RuntimeError, match="saw no launch"):
        launches_of([own])
    assert count_launches(lambda: None, CPU) is None


def test_a_call_that_cannot_be_captured_leaves_the_others_their_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def captured(call: Any, device: torch.device) -> Any:
        return call()

    def broken() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(timing, "_captured", captured)
    monkeypatch.setattr(timing, "_replay_us", lambda graph, device: graph)
    calls, on_gpu = {"a": lambda: 2.0, "b": broken}, torch.device("cuda")
    failed: dict[str, Exception] = {}
    times = graph_times_us(calls, on_gpu, 3, failed)
    assert times is not None
    assert {name: one.median_us for name, one in times.items()} == {"a": 2.0}
    assert [*failed] == ["b"]
    with pytest.raises(RuntimeError, match="not permitted"):
        graph_times_us(calls, on_gpu, 3)


@pytest.mark.gpu
def test_launches_of_real_calls_are_counted() -> None:
    device = torch.device("cuda")
    one, two = (torch.ones(8, device=device) for _ in range(2))
    for in_graph in (False, True):
        assert count_launches(lambda: one.add_(1), device, in_graph) == 1
        assert count_launches(lambda: torch.cat([one, two]).add_(1), device, in_graph) == 2
        assert count_launches(lambda: one.new_zeros(8), device, in_graph) == 1


@pytest.mark.gpu
def test_waits_of_real_calls_are_counted() -> None:
    device = torch.device("cuda")
    tensor = torch.ones(8, device=device)
    assert count_waits(lambda: tensor.add_(1), device) == 0
    with pytest.raises(RuntimeError, match="synchroni"):
        count_waits(lambda: tensor.add_(1).sum().item(), device)
    times = graph_times_us({"a": lambda: tensor.add_(1)}, device, 2)
    assert times is not None
    assert times["a"].median_us > 0


# -- The table.


def line(**fields: Any) -> Line:
    given: dict[str, Any] = {
        "part": Part.OVERHEAD,
        "case": "dec_b1_8k",
        "what": "decode",
        "backend": "FLASHINFER",
        "how": How.DEVICE,
        "other": "direct call",
    }
    return Line(**{**given, **fields})


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({"ours_us": 10.2, "other_us": 10.0, "max_ratio": 1.02}, Verdict.MET),
        ({"ours_us": 10.3, "other_us": 10.0, "max_ratio": 1.02}, Verdict.NOT_MET),
        ({"ours_us": 10.0, "other_us": 10.0, "max_ratio": 1.0}, Verdict.LEVEL),
        ({"ours_us": 9.9, "other_us": 10.0, "max_ratio": 1.0}, Verdict.MET),
        ({"ours_us": 10.1, "other_us": 10.0, "max_ratio": 1.0}, Verdict.NOT_MET),
        ({"ours_us": 9.9, "other_us": 10.0, "max_ratio": 1.0, "other_spread": 0.02},
         Verdict.LEVEL),
        ({"ours_us": 10.1, "other_us": 10.0, "max_ratio": 1.0, "spread": 0.02}, Verdict.LEVEL),
        ({"ours_us": 10.1, "other_us": 10.0, "max_ratio": 1.0, "spread": 0.02, "max_us": 10.0},
         Verdict.NOT_MET),
        ({"ours_us": 10.2, "other_us": 10.0, "max_ratio": 1.02, "spread": 0.5}, Verdict.MET),
        ({"ours_us": 15.0, "other_us": 10.0, "max_more_us": 5.0}, Verdict.MET),
        ({"ours_us": 15.1, "other_us": 10.0, "max_more_us": 5.0}, Verdict.NOT_MET),
        ({"ours_us": 15.0, "max_more_us": 5.0}, Verdict.NOT_MEASURED),
        ({"max_ratio": 1.0, "is_broken": True}, Verdict.NOT_MET),
        ({"ours_us": 4.0, "other_us": 10.0, "max_ratio": 0.5, "asks_waits": True, "waits": 0},
         Verdict.MET),
        ({"ours_us": 4.0, "other_us": 10.0, "max_ratio": 0.5, "asks_waits": True},
         Verdict.NOT_MEASURED),
        ({"ours_us": 4.0, "max_ratio": 0.5, "asks_waits": True, "waits": 1}, Verdict.NOT_MET),
        ({"ours_us": 4.0, "max_ratio": 0.5, "asks_waits": True, "waits": 0},
         Verdict.NOT_MEASURED),
    ],
)  # fmt: skip
def test_a_target_is_met_only_by_numbers(fields: dict[str, Any], verdict: Verdict) -> None:
    check = line_check(line(**fields))
    assert check is not None
    assert check.verdict is verdict


def test_what_has_no_target_has_no_verdict_and_what_is_broken_no_time() -> None:
    assert line_check(line(ours_us=1.0)) is None
    with pytest.raises(SpecError, match="ours_us must be None when broken"):
        line(ours_us=1.0, is_broken=True)


def test_the_table_has_a_row_per_line(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "select_cases", lambda patterns, cases: tuple(TINY.values()))
    out, data = tmp_path / "table.md", tmp_path / "table.json"
    bench = make_bench(BenchOptions(rounds=1, reps=1, commit="abc", table=BenchTable.FLASHINFER))
    assert bench.backends == BACKENDS
    with emulated():
        assert run_and_report(bench, Report(out=out, json=data), lambda _: None)
    text = out.read_text()
    assert "# FLASHINFER, TRTLLM_MHA on cpu, beside FlashInfer's own calls" in text
    results = BenchResults.model_validate_json(data.read_text())
    assert len(results.lines) == 2 * (3 + 3 + 3 + 2)
    rows = [row for row in text.splitlines() if row.startswith(("| FLASH", "| TRTLLM"))]
    assert len(rows) == len(results.lines)
    for title in ("A forward beside", "fp8 beside bf16", "A step's build", "Not measured"):
        assert f"## {title}" in text
    assert "needs a CUDA device, not cpu" in text
    # A table is the same when it is rendered again from its data, and when merged with itself.
    again = tmp_path / "again.md"
    options = ["--render", "--merge", str(data), "--merge", str(data), "--out", str(again)]
    assert main(["--table", "flashinfer", *options]) == 0
    assert again.read_text() == text


def test_lines_replace_earlier_ones_of_the_same_kind() -> None:
    results = BenchResults(
        environment=environment_of(
            make_bench(BenchOptions(rounds=1, reps=1, commit="abc", table=BenchTable.FLASHINFER))
        ),
        lines=(line(ours_us=1.0, other_us=1.0), line(how=How.EAGER, ours_us=2.0)),
    )
    later = results.replace(lines=(line(ours_us=3.0, other_us=3.0),))
    order = [case.name for case in VENDOR_CASES]
    merged = later.merged(results, order)
    assert sorted(item.ours_us for item in merged.lines) == [2.0, 3.0]
    broken = results.replace(lines=(line(is_broken=True, max_ratio=1.0, reason="no tile"),))
    text = render_markdown(broken)
    assert "failed | direct call | n/a" in text
    assert "- no tile (FLASHINFER dec_b1_8k device)" in text
    assert "1 NOT met" in text
    assert "no tile" in line_text(broken.lines[0])


def test_a_broken_line_fails_the_command_and_a_refused_one_does_not(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "select_cases", lambda patterns, cases: (TINY["dec_b1_8k"],))
    bench = make_bench(
        BenchOptions(
            backend="TRTLLM_MHA", rounds=1, reps=1, commit="abc", table=BenchTable.FLASHINFER
        )
    )
    assert bench.backends == ("TRTLLM_MHA",)
    data = tmp_path / "a.json"
    assert run_and_report(bench, Report(json=data), lambda _: None)
    lines = BenchResults.model_validate_json(data.read_text()).lines
    assert all(line.is_refused and line.holds is False for line in lines)

    def broken(*_: Any) -> None:
        raise RuntimeError("no such tile")

    monkeypatch.setattr(vendor, "make_layer", broken)
    with emulated():
        assert not run_and_report(bench, Report(json=data), lambda _: None)


def test_the_cases_are_those_of_the_targets() -> None:
    cases = {case.name: case for case in BenchTable.FLASHINFER.cases}
    assert list(cases) == ["dec_b1_8k", "dec_b32_4k", "dec_b128_8k", "dec_b256_4k"]
    assert cases["dec_b128_8k"].seq_lens == (8192,) * 128
    assert cases["dec_b32_4k"].seq_lens == (4096,) * 32
    assert cases["dec_b256_4k"].num_reqs == 256
    assert BenchTable.FLASHINFER.peers == ()
    assert BenchTable.FLASHINFER.also == ("TRTLLM_MHA",)
