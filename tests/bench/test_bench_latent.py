"""The table of latent attention: its cases, our run, and how peers are called."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn.bench.cases.case import KernelCase
from attn.bench.cases.dense import BenchTable
from attn.bench.cases.inputs import expected_rows, make_content
from attn.bench.cases.latent import MLA_CASES, MLA_PEERS
from attn.bench.kernels import BenchOptions, bench_kernels, make_bench
from attn.bench.measure.judge import check_run
from attn.bench.measure.ours import make_builder, make_layer, our_run
from attn.bench.peers import latent
from attn.bench.peers.dense import KernelRun, Refusal
from attn.bench.peers.flashinfer_jit import modules_of
from attn.bench.peers.latent import LATENT_ADAPTERS
from attn.bench.results.render import render_markdown
from attn.bench.results.results import (
    BenchResults,
    CaseResult,
    Contender,
    Status,
    Verdict,
    checks_of,
    plain_check,
)
from attn.bench.settings import KernelBench, environment_of
from attn.registry import AttentionBackendEnum
from tests.emulators.vllm_signatures import VERSIONS, signature_of

PUBLISHED = {
    "mla_h128_b1_8k": [(0.05754, 40), (0.04141, 55), (0.02656, 86)],
    "mla_h128_b32_4k": [(0.6038, 60), (0.08688, 420)],
    "mla_h128_b128_4k": [(2.424, 60), (0.2712, 538), (0.2708, 539)],
    "mla_h16_b32_8k": [(0.1838, 1643), (0.1052, 2871)],
    "mla_h16_b128_4k": [(0.3457, 1747), (0.1796, 3362), (0.1584, 3813)],
    "mla_h128_q2_b64_4k": [(0.2585, 565)],
}
"""Milliseconds and GB/s (without query and output) or TFLOP/s, whichever the kernel."""
BY_NAME = {case.name: case for case in MLA_CASES}


def tiny(name: str, **fields: Any) -> KernelCase:
    case = BY_NAME[name]
    return case.replace(query_lens=case.query_lens[:2], seq_lens=(100, 70), **fields)


TINY = (
    tiny("mla_h16_b32_8k", num_heads=4),
    tiny("mla_h128_q2_b64_4k", num_heads=4),
    tiny("mla_fp8_h16_b128_4k", num_heads=4),
)


def content_of(case: KernelCase) -> Any:
    return make_content(case, torch.device("cpu"), torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_rates_are_those_of_the_published_times(name: str) -> None:
    for milliseconds, rate in PUBLISHED[name]:
        assert BY_NAME[name].rate(1000 * milliseconds) == pytest.approx(rate, rel=0.012, abs=0.5)


def test_an_fp8_latent_is_judged_by_its_speed_over_bf16() -> None:
    case, other = BY_NAME["mla_fp8_h16_b128_4k"], BY_NAME["mla_h16_b128_4k"]

    def result(of: KernelCase, time: float) -> CaseResult:
        ours = Contender(name="ours", status=Status.MEASURED, time_us=time)
        return CaseResult(case=of, ours=ours)

    for time, verdict in ((100.0, Verdict.MET), (101.0, Verdict.NOT_MET)):
        *others, check = checks_of(result(case, time), [result(other, 160.0)])
        assert check == ("<= 1 / 1.6 of mla_h16_b128_4k", verdict)
        # FlashMLA's call over an fp8 cache is a peer, and open without it.
        assert [one.verdict for one in others] == [Verdict.NOT_MEASURED] * 2


def test_the_reference_is_right_and_the_table_has_its_peers() -> None:
    bench = make_bench(
        BenchOptions(
            case=["mla_h16_b12*", "mla_h16_b32_8k"], rounds=1, reps=1, commit="abc", table="mla"
        )
    )
    assert (bench.backend, bench.peers, len(bench.cases)) == ("TRITON_MLA", MLA_PEERS, 2)
    bench = KernelBench("TORCH_REF_MLA", TINY, MLA_PEERS, 1, 1, "abc", table=BenchTable.MLA)
    results = bench_kernels(bench, lambda _: None)
    assert [one.ours.status for one in results.cases] == [Status.MEASURED] * 3
    assert all(one.ours.planned_us for one in results.cases)
    text = render_markdown(results)
    assert "| fa3 | flashmla | flashinfer_mla | vllm_triton_mla |" in text
    assert "## Memory" not in text


class Peer:
    """Stands in for a module: its kernels give the expected rows, and note their arguments."""

    latest: Peer

    def __init__(self, content: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.content, self.calls = content, {}
        Peer.latest = self
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        facts = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))

    def get_mla_metadata(self, *given: Any) -> tuple[str, None]:
        self.calls["metadata"] = given
        return "schedule", None

    FA3_AVAILABLE = True

    def flash_mla_with_kvcache(self, **named: Any) -> tuple[Any, None]:
        self.calls["flashmla"] = named
        return named["q"][..., :512].clone(), None

    def get_mla_metadata_dense_fp8(self, *given: Any) -> tuple[str, str]:
        self.calls["fp8 metadata"] = given
        return "tiles", "splits"

    def flash_mla_with_kvcache_fp8(self, **named: Any) -> tuple[Any, None]:
        self.calls["flashmla fp8"] = named
        return named["q"].to(torch.bfloat16)[..., :512].clone(), None

    def get_scheduler_metadata(self, **named: Any) -> str:
        self.calls["schedule"] = named
        return "schedule"

    def flash_attn_varlen_func(self, **named: Any) -> Any:
        self.calls["fa3"] = named
        return named["q_v"].clone()

    def BatchMLAPagedAttentionWrapper(self, *_: Any, **named: Any) -> Any:  # noqa: N802
        return SimpleNamespace(
            plan=lambda *given: self.calls.__setitem__("plan", given),
            run=lambda *given, **named: self.calls.__setitem__("run", (given, named)),
        )

    def decode_attention_fwd(
        self, q: Any, k: Any, v: Any, o: Any, lse: Any, table: Any, lens: Any, logits: Any,
        splits: int, scale: float, page_size: int, k_scale: Any = None, is_mla: bool = False,
    ) -> None:  # fmt: skip
        self.calls["triton"] = (v.shape, logits.shape, splits, page_size, is_mla)


def prepared(name: str, case: KernelCase, patch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    peer = Peer(content_of(case), patch)
    run = LATENT_ADAPTERS[name][1](peer, peer.content)
    if isinstance(run, KernelRun):
        run.call()
        assert run.output.shape == (case.num_tokens, case.num_heads, 512)
    return run, peer.calls


def test_peers_are_called_as_they_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    decode, verify, fp8 = TINY
    run, calls = prepared("flashmla", verify, monkeypatch)
    named = calls["flashmla"]
    assert named["q"].shape == (2, 2, 4, 576)
    assert (named["head_dim_v"], named["tile_scheduler_metadata"]) == (512, "schedule")
    assert (named["softmax_scale"], named["causal"]) == (verify.scale, True)
    assert calls["metadata"][1:] == (8, 1)
    # The plan is a part of the first call with a schedule.
    assert run.plan is None
    assert run.planned is not None
    run.collect()
    assert torch.equal(run.output, named["q"][..., :512].flatten(0, 1))
    monkeypatch.setattr(latent, "import_module", lambda _: Peer.latest)
    run, calls = prepared("flashmla", fp8, monkeypatch)
    named = calls["flashmla fp8"]
    assert named["q"].dtype == named["k_cache"].dtype == torch.float8_e4m3fn
    assert (named["tile_scheduler_metadata"], named["num_splits"]) == ("tiles", "splits")
    assert calls["fp8 metadata"][1:] == (4, 1)
    assert run.tolerance == 6e-2
    assert run.plan is not None
    run, calls = prepared("fa3", verify, monkeypatch)
    named = calls["fa3"]
    shapes = [tuple(named[name].shape) for name in ("q", "q_v", "k", "v")]
    assert shapes == [(4, 4, 64), (4, 4, 512), (*named["k"].shape[:2], 1, 64), named["v"].shape]
    assert named["v"].shape[2:] == (1, 512)
    assert named["scheduler_metadata"] == "schedule"
    assert (calls["schedule"]["headdim"], calls["schedule"]["headdim_v"]) == (64, 512)
    assert calls["schedule"]["num_heads_q"] == 4
    run.collect()
    assert torch.equal(run.output, named["q_v"])
    run, calls = prepared("flashinfer_mla", fp8, monkeypatch)
    assert calls["plan"][0].tolist() == [0, 1, 2]
    assert calls["plan"][4:9] == (4, 512, 64, 64, True)
    assert [rows.shape[-1] for rows in calls["run"][0]] == [512, 64, 512, 64]
    assert calls["run"][1]["ckv_scale"] == 1.0
    run, calls = prepared("vllm_triton_mla", decode, monkeypatch)
    assert calls["triton"] == ((12, 64, 1, 512), (2, 4, 32, 513), 32, 64, True)


def test_peers_refuse_what_they_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    _, verify, fp8 = TINY
    refused = (
        ("fa3", fp8, "fp8"),
        ("flashmla", verify.replace(block_size=32), "pages of 64"),
        ("flashinfer_mla", verify.replace(num_heads=5), "5 heads"),
        ("vllm_triton_mla", verify, "one new token"),
    )
    for name, case, reason in refused:
        refusal, _ = prepared(name, case, monkeypatch)
        assert isinstance(refusal, Refusal)
        assert reason in refusal.reason


def test_flashinfer_compiles_its_latent_module_ahead() -> None:
    ((module, make, backend, *rest),) = modules_of(TINY[2])
    assert (module, make, backend) == ("flashinfer.jit", "gen_batch_mla_module", "fa3")
    assert rest[1] == torch.float8_e4m3fn
    assert rest[4:] == [512, 64, False]


def test_a_latent_content_has_one_tensor_of_rows() -> None:
    content = content_of(TINY[0])
    assert content.value.data_ptr() == content.key.data_ptr()
    assert expected_rows(content).rows.shape[-1] == 512


def test_expanded_rows_are_attended_by_triton_mla_alone() -> None:
    case = BY_NAME["ragged_mla_pre_1x8k"]
    assert case.rate(4106) == pytest.approx(670, rel=0.01)
    assert (case.is_expanded, case.is_latent, case.head_size_v) == (True, False, 128)
    tiny = case.replace(num_heads=2, num_kv_heads=2, query_lens=(70, 33), seq_lens=(70, 33))
    content, member = content_of(tiny), AttentionBackendEnum["TRITON_MLA"]
    # Triton's interpreter multiplies the bit patterns of bf16.
    halves = {name: getattr(content, name).half() for name in ("query", "key", "value")}
    content = replace(content, **halves)
    layer = make_layer(member, content, torch.Generator().manual_seed(0))
    run = our_run(layer, make_builder(member, layer))
    assert isinstance(check_run("ours", run, expected_rows(content)), float)
    other = AttentionBackendEnum["TORCH_REF_MLA"]
    layer = make_layer(other, content, torch.Generator().manual_seed(0))
    builder = make_builder(other, layer)
    with pytest.raises(ValueError, match="impl must be TRITON_MLA's to take expanded rows"):
        our_run(layer, builder)


def test_the_plain_kernel_is_judged_by_a_rate_of_its_own() -> None:
    case, slow = BY_NAME["mla_h128_b128_4k"], Contender(name="ours", status=Status.FAILED)
    for time, verdict in ((500.0, Verdict.MET), (2000.0, Verdict.NOT_MET)):
        plain = Contender(name="plain Triton", status=Status.MEASURED, time_us=time)
        result = CaseResult(case=case, ours=slow, plain=plain)
        assert plain_check(result) == (">= 250 TF", verdict)
        bench = KernelBench("TRITON_MLA", (case,), (), 1, 1, "abc", table=BenchTable.MLA)
        text = render_markdown(BenchResults(environment=environment_of(bench), cases=(result,)))
        assert "## In plain Triton" in text
    assert plain_check(CaseResult(case=case, ours=slow)) == (">= 250 TF", Verdict.NOT_MEASURED)
    assert plain_check(CaseResult(case=BY_NAME["mla_h128_b1_8k"], ours=slow)) is None


def test_the_cases_have_the_shapes_that_users_run() -> None:
    judged = [case for case in MLA_CASES if case.is_latent]
    assert {case.num_heads for case in judged} >= {12, 16, 24, 64, 96, 128}
    assert {case.block_size for case in judged} == {16, 32, 64, 128}
    assert {case.num_speculative_tokens for case in judged} == {0, 1, 3, 7}
    assert max(max(case.seq_lens) for case in judged) == 1048576
    for case in judged:
        target = case.target
        assert (target.max_ratio_to_best, target.max_graph_ratio_to_best) == (1.0, 1.0)
        assert target.against == MLA_PEERS == ("fa3", "flashmla", "flashinfer_mla", MLA_PEERS[-1])


def test_other_projects_kernels_refuse_expanded_rows() -> None:
    case = BY_NAME["ragged_mla_pre_1x8k"]
    tiny = case.replace(num_heads=2, num_kv_heads=2, query_lens=(7, 3), seq_lens=(7, 3))
    content = content_of(tiny)
    for name, (_, adapter) in LATENT_ADAPTERS.items():
        if name != "fa3":
            refusal = adapter(None, content)
            assert isinstance(refusal, Refusal)
            assert refusal.status is Status.UNSUPPORTED


def test_fa3_attends_expanded_rows_where_queries_lie() -> None:
    case = BY_NAME["ragged_mla_pre_1x8k"]
    tiny = case.replace(num_heads=2, num_kv_heads=2, query_lens=(7, 3), seq_lens=(7, 3))
    content, given = content_of(tiny), {}

    def attend(**arguments: Any) -> None:
        given.update(arguments)

    module = SimpleNamespace(FA3_AVAILABLE=True, flash_attn_varlen_func=attend)
    run = LATENT_ADAPTERS["fa3"][1](module, content)
    assert isinstance(run, KernelRun)
    run.call()
    assert given["k"].shape == (10, 2, 192)
    assert given["v"].shape == given["out"].shape == (10, 2, 128)
    assert given["cu_seqlens_k"].tolist() == [0, 7, 10]


MODULES = {
    "flash_attn_varlen_func": "vllm_flash_attn.flash_attn_interface",
    "get_scheduler_metadata": "vllm_flash_attn.flash_attn_interface",
    "flash_mla_with_kvcache": "third_party.flashmla.flash_mla_interface",
    "get_mla_metadata": "third_party.flashmla.flash_mla_interface",
    "flash_mla_with_kvcache_fp8": "v1.attention.ops.flashmla",
    "get_mla_metadata_dense_fp8": "v1.attention.ops.flashmla",
    "decode_attention_fwd": "v1.attention.ops.triton_decode_attention",
}
"""Modules of vLLM in which the peers' functions are."""


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["fa3", "flashmla", "vllm_triton_mla"])
@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_calls_fit_vllm_s_signatures(
    name: str, case: KernelCase, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, bound = content_of(case), []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    facts = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)

    def checked(function: str) -> Any:
        signature = signature_of(version, MODULES[function], function)

        def call(*given: Any, **named: Any) -> Any:
            signature.bind(*given, **named)
            bound.append(function)
            return (content.query.new_zeros(case.num_tokens, case.num_heads, 512), None)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    module = SimpleNamespace(FA3_AVAILABLE=True, **{one: checked(one) for one in MODULES})
    monkeypatch.setattr(latent, "import_module", lambda _: module)
    run = LATENT_ADAPTERS[name][1](module, content)
    if isinstance(run, Refusal):
        assert run.status is Status.UNSUPPORTED
        return
    for call in filter(None, (run.call, run.plan, run.planned)):
        call()
    assert bound


def test_latent_queries_lie_as_in_an_engine() -> None:
    content = content_of(TINY[1])
    assert content.parts is not None
    absorbed, rotary = content.parts
    assert torch.equal(torch.cat([absorbed, rotary], -1), content.query)
    # A product for each head, transposed; and the end of a longer row.
    assert absorbed.transpose(0, 1).is_contiguous()
    assert (absorbed.stride(-1), rotary.stride(-1)) == (1, 1)
    assert rotary.stride()[:2] == (4 * (128 + 64), 128 + 64)
    pointers = {one.untyped_storage().data_ptr() for one in (absorbed, rotary, content.query)}
    assert len(pointers) == 3
    layer = make_layer(
        AttentionBackendEnum["TORCH_REF_MLA"], content, torch.Generator().manual_seed(0)
    )
    seen: list[Any] = []
    forward = type(layer.impl).forward_mqa

    def noted(self: Any, query: Any, *given: Any) -> Any:
        seen.append(query)
        return forward(self, query, *given)

    run = our_run(layer, make_builder(AttentionBackendEnum["TORCH_REF_MLA"], layer))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(layer.impl), "forward_mqa", noted)
        run = our_run(layer, make_builder(AttentionBackendEnum["TORCH_REF_MLA"], layer))
        run.call()
    ((one, two),) = seen
    assert (one.data_ptr(), two.data_ptr()) == (absorbed.data_ptr(), rotary.data_ptr())
