"""The benchmark's own steps on a CPU: inputs, checks, timing, peers' calls, command lines."""

import contextlib
import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from attn.bench import kernels, settings
from attn.bench.cases.case import PEERS, KernelCase, Target
from attn.bench.cases.dense import (
    ALL_PEERS,
    CASES,
    FA4_CASE,
    HOPPER_CASES,
    PLAN_SIZES,
    BenchTable,
)
from attn.bench.cases.inputs import expected_rows, make_content, permuted_table, sampled_tokens
from attn.bench.kernels import bench_kernels, main, run_and_report
from attn.bench.measure import measure, ours
from attn.bench.measure.ours import (
    PLAN_LEN,
    engine_config,
    kv_cache_spec,
    make_layer,
    measure_plans,
)
from attn.bench.measure.timing import (
    CpuClock,
    CudaClock,
    Timing,
    count_allocations,
    graph_time_us,
    time_interleaved,
)
from attn.bench.peers import dense as peers
from attn.bench.peers import flashinfer_jit
from attn.bench.peers.dense import KernelRun, Refusal, compiled_cases, prepare_peer
from attn.bench.peers.latent import LATENT_ADAPTERS
from attn.bench.results.reasons import describe
from attn.bench.results.report import Report
from attn.bench.results.results import BenchResults, Status
from attn.bench.settings import KernelBench, environment_of
from attn.cli.app import app
from attn.impls.dense.torch_ref import TorchRefImpl
from attn.registry import AttentionBackendEnum
from builders.dense.torch_ref import TorchRefMetadataBuilder
from specs.dtypes import CacheDType
from specs.engine import DecodeKernel, Kernels
from tests.emulators.vllm_signatures import VERSIONS, signature_of

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SHAPE = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "block_size": 4}
DECODE = {"kind": "decode", "query_lens": (1, 1, 1), "seq_lens": (9, 40, 23)}
TINY = {
    case.name: case
    for case in (
        KernelCase(name="decode", **SHAPE, **DECODE, compare_free_partition=True),
        KernelCase(name="fp8", **SHAPE, **DECODE, kv_cache_dtype=CacheDType.FP8_E4M3),
        KernelCase(name="window", **SHAPE, **DECODE, sliding_window=5, sinks=True),
        KernelCase(
            name="verify",
            kind="verify",
            **SHAPE,
            query_lens=(4, 4),
            seq_lens=(4, 31),
            num_speculative_tokens=3,
        ),
        KernelCase(
            name="prefill",
            kind="prefill",
            **SHAPE,
            query_lens=(13, 6),
            seq_lens=(13, 20),
            compare_batch_invariant=True,
        ),
        KernelCase(name="mixed", kind="mixed", **SHAPE, query_lens=(1, 8), seq_lens=(17, 30)),
    )
}


LATENT = KernelCase(
    name="latent",
    **{**SHAPE, "num_kv_heads": 1, "head_size": 576, "rope_size": 64, "block_size": 64},
    **DECODE,
)


def content_of(name):
    return make_content(TINY[name], CPU, torch.Generator().manual_seed(0))


def bench_of(*names, **fields):
    chosen = tuple(TINY[name] for name in names)
    settings = {"backend": "TORCH_REF", "rounds": 2, "reps": 2, "peers": (), "commit": "abc"}
    return KernelBench(cases=chosen, **{**settings, **fields})


def quiet(line):
    pass


# -- Inputs.


@pytest.mark.parametrize("name", TINY)
def test_tables_are_permuted_and_share_no_block(name):
    case = TINY[name]
    table, num_blocks = permuted_table(case, torch.Generator().manual_seed(1))
    used = [row[: -(-length // 4)] for row, length in zip(table, case.seq_lens, strict=True)]
    ids = torch.cat(used).tolist()
    assert len(set(ids)) == len(ids)
    assert ids != sorted(ids)
    assert min(ids) > 0
    assert max(ids) < num_blocks
    assert table.dtype == torch.int32


def test_content_is_zero_where_no_token_lives():
    content = content_of("decode")
    live = torch.zeros(content.key.shape[:2], dtype=torch.bool).flatten()
    live[content.slots] = True
    assert len(content.slots) == sum(content.case.seq_lens)
    for side in (content.key, content.value):
        rows = side.flatten(0, 1)
        assert not rows[~live].any()
        assert rows[live].any(dim=-1).all()


def test_our_cache_holds_the_content_and_nan():
    content = content_of("decode")
    layer = make_layer(AttentionBackendEnum["TORCH_REF"], content, torch.Generator().manual_seed(9))
    assert not torch.equal(layer.batch.block_table_tensor, content.block_table)
    assert int(layer.kv_cache.isnan().logical_not().sum()) == 72 * 2 * 2 * 16
    for row, length in enumerate(content.case.seq_lens):
        ours = layer.kv_cache[layer.batch.block_table_tensor[row].long(), 0].flatten(0, 1)
        theirs = content.key[content.block_table[row].long()].flatten(0, 1)
        assert torch.equal(ours[:length], theirs[:length])


def test_samples_hold_the_ends_of_the_batch_of_lengths_and_of_queries():
    assert sampled_tokens(TINY["decode"]) == [(0, 0), (1, 0), (2, 0)]
    assert set(sampled_tokens(TINY["verify"])) >= {(0, 0), (0, 3), (1, 0), (1, 3)}


def test_expected_rows_notice_a_shifted_token_a_head_and_nan():
    content = content_of("prefill")
    expected = expected_rows(content)
    output = torch.zeros_like(content.query)
    assert expected.error_of(output) == 1.0
    output[expected.tokens[:, None], expected.heads] = expected.rows.to(output.dtype)
    assert expected.error_of(output) < 5e-3
    assert expected.error_of(output.roll(1, 0)) > 0.1
    assert expected.error_of(output.roll(1, 1)) > 0.1
    output[-1, 1] = float("nan")
    assert not expected.error_of(output) < 1


def test_engine_limits_hold_the_case():
    for case in (*CASES, *HOPPER_CASES):
        config = engine_config(case)
        assert config.max_model_len >= max(case.seq_lens)
        assert config.max_num_seqs >= case.num_reqs
        assert config.max_num_batched_tokens >= case.num_tokens
        assert config.num_heads == case.num_heads
        assert config.max_decode_query_len == 1 + case.num_speculative_tokens
        assert not config.batch_invariant
    assert engine_config(CASES[0], batch_invariant=True).batch_invariant


# -- A run.


@pytest.mark.parametrize("name", TINY)
def test_the_reference_is_right_and_timed_on_every_kind_of_case(name):
    results = bench_kernels(bench_of(name), quiet)
    (result,) = results.cases
    assert result.ours.status is Status.MEASURED, result.ours
    assert result.ours.error < 5e-3
    assert result.ours.calls == 4
    assert result.ours.time_us > 0
    assert (result.plan is None) == (name == "prefill")
    assert result.allocations is None
    assert results.scratch_bytes is None
    assert results.environment.commit == "abc"


@pytest.mark.parametrize("kernel", [DecodeKernel.TRITON, DecodeKernel.AUTO])
def test_plans_of_one_engine_are_built_for_every_number_of_decodes(monkeypatch, kernel):
    member, built = AttentionBackendEnum.TORCH_REF, []
    kernels = Kernels.own(decode=kernel)
    assert measure_plans(member, CPU, kernels) == ((), "needs a CUDA device")

    def timed(call, device):
        engine = call.func.__self__.vllm_config
        assert engine.kernels == kernels
        assert engine.max_num_seqs == PLAN_SIZES[-1]
        record = call()
        built.append((len(record.seq_lens), record.seq_lens.tolist()))
        return 2.5

    monkeypatch.setattr(ours, "graph_time_us", timed)
    plans, reason = measure_plans(member, CPU, kernels)
    assert reason == ""
    assert [plan.num_reqs for plan in plans] == list(PLAN_SIZES)
    assert {(plan.even_us, plan.uneven_us) for plan in plans} == {(2.5, 2.5)}
    assert [count for count, _ in built] == [size for size in PLAN_SIZES for _ in range(2)]
    for count, lens in built:
        assert len(lens) == count
        assert 1 <= min(lens) <= max(lens) <= 2 * PLAN_LEN
    # Lengths are equally far apart, in random order.
    assert sorted(built[-1][1]) == [*range(1, 2 * PLAN_LEN, 2 * PLAN_LEN // PLAN_SIZES[-1])]
    assert sorted(built[-1][1]) != built[-1][1]
    assert set(built[-2][1]) == {PLAN_LEN}

    def fails(call, device):
        raise RuntimeError("no graph")

    monkeypatch.setattr(ours, "graph_time_us", fails)
    assert measure_plans(member, CPU, kernels) == ((), "RuntimeError: no graph")


def test_a_wrong_kernel_is_reported_and_not_timed(monkeypatch):
    forward = TorchRefImpl.forward

    def off(self, *arguments, **options):
        return forward(self, *arguments, **options).mul_(1.02)

    monkeypatch.setattr(TorchRefImpl, "forward", off)
    lines = []
    (result,) = bench_kernels(bench_of("decode"), lines.append).cases
    assert result.ours.status is Status.WRONG
    assert result.ours.time_us is None
    assert result.ours.error == pytest.approx(0.02, rel=0.2)
    assert any("WRONG: error 2" in line for line in lines)


def test_output_that_is_not_written_is_wrong(monkeypatch):
    monkeypatch.setattr(TorchRefImpl, "forward", lambda *arguments, **options: None)
    (result,) = bench_kernels(bench_of("decode"), quiet).cases
    assert result.ours.status is Status.WRONG


def test_a_kernel_that_is_wrong_now_and_then_is_found(monkeypatch):
    forward, calls = TorchRefImpl.forward, []

    def sometimes(self, *arguments, **options):
        calls.append(1)
        return forward(self, *arguments, **options).mul_(2 if len(calls) > 4 else 1)

    monkeypatch.setattr(TorchRefImpl, "forward", sometimes)
    (result,) = bench_kernels(bench_of("mixed"), quiet).cases
    assert result.ours.status is Status.WRONG


def test_a_kernel_that_raises_has_failed(monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("no such tile\nand more")

    monkeypatch.setattr(TorchRefImpl, "forward", broken)
    (result,) = bench_kernels(bench_of("decode"), quiet).cases
    assert (result.ours.status, result.ours.reason) == ("failed", "RuntimeError: no such tile")
    monkeypatch.setattr(TorchRefMetadataBuilder, "build", broken)
    lines = []
    (result,) = bench_kernels(bench_of("decode"), lines.append).cases
    assert result.ours.status is Status.FAILED
    assert any("Traceback" in line for line in lines)
    monkeypatch.setattr(TorchRefImpl, "do_kv_cache_update", broken)
    (result,) = bench_kernels(bench_of("decode"), quiet).cases
    assert result.ours.status is Status.FAILED


def test_a_backend_that_cannot_serve_a_case_is_not_run():
    (result,) = bench_kernels(bench_of("decode", backend="TORCH_REF_MLA"), quiet).cases
    assert result.ours.status is Status.UNSUPPORTED
    assert "non-MLA not supported" in result.ours.reason


def test_the_free_partition_is_timed_where_the_builder_offers_one(monkeypatch):
    (result,) = bench_kernels(bench_of("decode"), quiet).cases
    assert result.free_partition.status is Status.UNAVAILABLE
    made = []

    def free(cls, *arguments):
        made.append(arguments)
        return cls(*arguments)

    monkeypatch.setattr(
        TorchRefMetadataBuilder, "for_free_partition", classmethod(free), raising=False
    )
    (result,) = bench_kernels(bench_of("decode"), quiet).cases
    assert result.free_partition.status is Status.MEASURED
    ((spec, names, config, device),) = made
    assert (spec.block_size, names, config.num_heads, device) == (4, ["layers.0"], 4, CPU)


def test_batch_invariant_prefill_is_timed_where_supported(monkeypatch):
    (result,) = bench_kernels(bench_of("prefill"), quiet).cases
    assert result.batch_invariant.status is Status.UNSUPPORTED
    backend = AttentionBackendEnum["TORCH_REF"].get_class()
    monkeypatch.setattr(backend, "supports_batch_invariance", classmethod(lambda cls: True))
    (result,) = bench_kernels(bench_of("prefill"), quiet).cases
    assert result.batch_invariant.status is Status.MEASURED


def test_peers_are_checked_and_timed_beside_ours(monkeypatch):
    def fake(name, content):
        output = torch.empty_like(content.query)
        if name == "flashinfer":
            return Refusal(Status.UNSUPPORTED, "not this one")
        if name == "xqa":
            return KernelRun(lambda: output.zero_(), output)
        layer = make_layer(
            AttentionBackendEnum["TORCH_REF"], content, torch.Generator().manual_seed(5)
        )
        spec = kv_cache_spec(content.case)
        builder = TorchRefMetadataBuilder(spec, [], engine_config(content.case), CPU)
        record = builder.build(0, layer.batch)
        arguments = (layer.scales, content.query, None, None, layer.kv_cache, record, output)
        return KernelRun(lambda: layer.impl.forward(*arguments), output)

    monkeypatch.setattr(measure, "prepare_peer", fake)
    (result,) = bench_kernels(bench_of("decode", peers=PEERS), quiet).cases
    assert [peer.status.value for peer in result.peers] == [
        "measured",
        "unsupported",
        "WRONG",
        "measured",
    ]
    assert result.best().name in ("fa3", "vllm_triton")


def test_the_hopper_table_times_plans_and_the_host_too(monkeypatch):
    case = TINY["prefill"].replace(compare_batch_invariant=False, target=Target(max_host_us=1e9))
    built = []
    build = TorchRefMetadataBuilder.build

    def counted(self, *arguments, **options):
        built.append(1)
        return build(self, *arguments, **options)

    monkeypatch.setattr(TorchRefMetadataBuilder, "build", counted)
    bench = bench_of("prefill", table=BenchTable.HOPPER)
    bench = dataclasses.replace(bench, cases=(case,))
    results = bench_kernels(bench, quiet)
    (result,) = results.cases
    assert results.environment.table is BenchTable.HOPPER
    assert result.ours.status is Status.MEASURED, result.ours
    assert min(result.ours.planned_us, result.ours.plan_us) > 0
    assert result.cost(result.ours) == result.ours.time_us + result.ours.plan_us / 32
    assert result.ours.host_us > 0
    assert result.ours.plan_host_us > 0
    # A prefill is captured by no engine, and a CPU has neither graphs nor launches to count.
    assert (result.ours.graph_us, result.ours.launches) == (None, None)
    # The first plan; plans alone and plans with a forward, by the device's clock and the plan by
    # the host's: one to warm up and two in two rounds each; and one whose result is judged.
    assert len(built) == 1 + 3 * (1 + 2 * 2) + 1


def test_graphs_and_launches_of_decodes_are_noted_and_what_fails_is_told(monkeypatch):
    def graphs(calls, device, rounds, failed):
        failed["ours"] = RuntimeError("not in a capture")
        return {}

    lines = []
    monkeypatch.setattr(measure, "graph_times_us", graphs)
    (result,) = bench_kernels(bench_of("decode", table=BenchTable.HOPPER), lines.append).cases
    assert result.ours.graph_us is None
    assert any("cannot be captured: RuntimeError: not in a capture" in line for line in lines)

    def timed(calls, device, rounds, failed):
        return {name: Timing(7.0, 0.1, rounds) for name in calls}

    def counted(call, device, in_graph):
        if in_graph:
            raise RuntimeError("the profiler saw no launch")
        return 3

    monkeypatch.setattr(measure, "graph_times_us", timed)
    monkeypatch.setattr(measure, "count_launches", counted)
    (result,) = bench_kernels(bench_of("decode", table=BenchTable.HOPPER), quiet).cases
    assert (result.ours.graph_us, result.ours.graph_spread) == (7.0, 0.1)
    # A dense forward is one launch, which is not counted.
    assert (result.ours.launches, result.ours.graph_launches) == (None, None)
    latent = dataclasses.replace(
        bench_of("decode", table=BenchTable.MLA, backend="TORCH_REF_MLA"), cases=(LATENT,)
    )
    lines = []
    (result,) = bench_kernels(latent, lines.append).cases
    assert (result.ours.launches, result.ours.graph_launches) == (3, None)
    assert any("launches were not counted: RuntimeError: the profiler" in line for line in lines)
    (prefill,) = bench_kernels(bench_of("prefill", table=BenchTable.HOPPER), quiet).cases
    assert prefill.ours.graph_us is None


def test_a_plan_that_spoils_the_result_is_found(monkeypatch):
    build, calls = TorchRefMetadataBuilder.build, []

    def second_is_other(self, prefix, batch):
        calls.append(1)
        shorter = batch.replace(seq_lens=batch.seq_lens - 3)
        return build(self, prefix, batch if len(calls) == 1 else shorter)

    monkeypatch.setattr(TorchRefMetadataBuilder, "build", second_is_other)
    (result,) = bench_kernels(bench_of("decode", table=BenchTable.HOPPER), quiet).cases
    assert result.ours.status is Status.WRONG


# -- Timing.


def test_calls_are_timed_in_turn():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    timings = time_interleaved(calls, CpuClock(), rounds=3, reps=2)
    assert "".join(order) == "ab" + "aabb" + "bbaa" + "aabb"
    assert timings["a"].calls == 6
    assert timings["a"].spread >= 0


def test_long_calls_are_repeated_less_often():
    asked = []

    class Slow:
        def warm_up(self, call):
            return 90_000.0

        def measure(self, call, reps):
            asked.append(reps)
            return [1.0, 3.0, 2.0][:reps]

    clock = Slow()
    timing = time_interleaved({"a": lambda: None}, clock, rounds=2, reps=20)["a"]
    assert asked == [3, 3]
    assert (timing.median_us, timing.spread, timing.calls) == (2.0, 0.0, 6)


def test_device_numbers_are_none_on_a_cpu():
    assert count_allocations(lambda: None, CPU) is None
    assert graph_time_us(lambda: None, CPU) is None


@pytest.mark.gpu
def test_cuda_clock_and_allocation_count():
    device = torch.device("cuda")
    tensor = torch.ones(1 << 20, device=device)
    clock = CudaClock(device, 4)
    timing = time_interleaved({"a": lambda: tensor.add_(1)}, clock, 2, 4)["a"]
    assert 0 < timing.median_us < 10_000
    assert count_allocations(lambda: tensor.add_(1), device) == 0
    assert count_allocations(lambda: tensor + 1, device) == 10
    assert graph_time_us(lambda: tensor.add_(1), device) > 0


# -- Peers.


class Recorder:
    """Stands in for a module of another project, and keeps the arguments of calls."""

    KVQuantMode = SimpleNamespace(NONE="none", FP8_PER_TENSOR="fp8")

    def __init__(self):
        self.calls = {}

    def __getattr__(self, name):
        def record(*arguments, **options):
            self.calls[name] = (arguments, options)
            return self

        return record


def call_of(adapter, case_name):
    """The recorded calls of a peer's plan and run, by function."""
    module = Recorder()
    run = peers._ADAPTERS[adapter][1](module, content_of(case_name))
    assert isinstance(run, KernelRun), run
    run.call()
    return module.calls, run


@pytest.mark.parametrize("name", ALL_PEERS)
def test_peers_need_a_cuda_device(name):
    adapters = {**peers._ADAPTERS, **LATENT_ADAPTERS}
    refusal = prepare_peer(name, content_of("decode"), adapters)
    assert refusal == Refusal(Status.UNAVAILABLE, "needs a CUDA device, not cpu")


def test_peers_that_cannot_be_imported_or_planned_say_why(monkeypatch):
    content = SimpleNamespace(device=torch.device("cuda"))

    def broken(module, content):
        raise KeyError("plan")

    missing = {"fa3": ("no_such_module", broken), "xqa": ("json", broken)}
    monkeypatch.setattr(peers, "_ADAPTERS", missing)
    refusal = prepare_peer("fa3", content)
    assert refusal.status is Status.UNAVAILABLE
    assert "ModuleNotFoundError: No module named 'no_such_module'" in refusal.reason
    assert prepare_peer("xqa", content) == Refusal(Status.FAILED, "KeyError: 'plan'")
    with pytest.raises(ValueError, match="peer must be one of fa3, xqa, got 'fa2'"):
        prepare_peer("fa2", content)


def test_a_compiler_s_complaint_stands_in_the_reason():
    output = "[1/2] nvcc --expt-error-free a.cu\n/x/a.cu(79): error: too much\nb.cu: error: too"
    error = RuntimeError(f"Ninja build failed. Ninja output:\n{output}")
    expected = "RuntimeError: Ninja build failed. Ninja output: error: too much"
    assert describe(error) == expected
    assert describe(ValueError("one\ntwo")) == "ValueError: one"
    assert describe(KeyError()) == "KeyError"


def test_folders_of_a_machine_are_left_out_of_what_is_said_of_an_error():
    error = RuntimeError("at /home/me/site/x.cuh:70: 1/2 of a/b, see https://x.org/docs/a")
    expected = "RuntimeError: at x.cuh:70: 1/2 of a/b, see https://x.org/docs/a"
    assert describe(error) == expected


def test_flash_attention_is_called_as_vllm_calls_it():
    calls, run = call_of("fa3", "window")
    _, options = calls["flash_attn_varlen_func"]
    assert options["window_size"] == [4, 0]
    assert options["s_aux"].dtype == torch.bfloat16
    assert options["q_descale"] is None
    assert options["out"] is run.output
    assert calls["get_scheduler_metadata"][1]["window_size"] == (4, 0)
    calls, run = call_of("fa3", "fp8")
    _, options = calls["flash_attn_varlen_func"]
    assert options["q"].dtype == options["k"].dtype == torch.float8_e4m3fn
    assert options["k_descale"].shape == (3, 2)
    assert run.tolerance == 6e-2


def test_flash_attention_with_one_split_is_a_peer_of_batch_invariance():
    for adapter, splits in (("fa3", 0), ("fa3_one_split", 1)):
        calls, _ = call_of(adapter, "decode")
        assert calls["flash_attn_varlen_func"][1]["num_splits"] == splits
        assert calls["get_scheduler_metadata"][1]["num_splits"] == splits
    assert BenchTable.INVARIANCE.peers == ("fa3", "fa3_one_split")


def test_vllm_triton_gets_split_buffers_up_to_its_threshold():
    calls, _ = call_of("vllm_triton", "verify")
    _, options = calls["unified_attention"]
    assert options["seq_threshold_3D"] == 64
    assert options["softmax_segm_output"].shape == (64, 4, 16, 16)
    assert (options["max_seqlen_q"], options["max_seqlen_k"]) == (4, 31)
    assert options["kv_quant_mode"] == "none"
    assert call_of("vllm_triton", "fp8")[0]["unified_attention"][1]["kv_quant_mode"] == "fp8"


def test_flashinfer_plans_pages_outside_the_call():
    calls, _ = call_of("flashinfer", "decode")
    arguments, options = calls["plan"]
    assert arguments[0].tolist() == [0, 3, 13, 19]
    assert len(arguments[1]) == 19
    assert arguments[2].tolist() == [1, 4, 3]
    assert arguments[3:] == (4, 2, 16, 4)
    assert options["window_left"] == -1
    assert calls["BatchDecodeWithPagedKVCacheWrapper"][1]["use_tensor_cores"]
    for name, backend in (("verify", "fa2"), ("prefill", "fa3")):
        calls, _ = call_of("flashinfer", name)
        assert calls["BatchPrefillWithPagedKVCacheWrapper"][1]["backend"] == backend
        assert calls["plan"][1]["causal"]
    refusal = peers._ADAPTERS["flashinfer"][1](Recorder(), content_of("window"))
    assert refusal.status is Status.UNSUPPORTED


def test_a_planned_call_plans_anew_with_the_same_arguments():
    calls, planned = [], {}

    class Counting(Recorder):
        def __getattr__(self, name):
            if name in ("plan", "run", "get_scheduler_metadata", "flash_attn_varlen_func"):
                calls.append(name)
            return super().__getattr__(name)

    for adapter in ("flashinfer", "fa3"):
        run = peers._ADAPTERS[adapter][1](Counting(), content_of("mixed"))
        planned[adapter] = calls[:]
        calls.clear()
        run.call()
        assert len(calls) == 1
        calls.clear()
        run.planned()
        planned[adapter] += calls
        calls.clear()
    assert planned == {
        "flashinfer": ["plan", "plan", "run"],
        "fa3": [*["get_scheduler_metadata"] * 2, "flash_attn_varlen_func"],
    }
    assert call_of("xqa", "decode")[1].planned is None


def test_cudnn_takes_whole_prompts_by_torch_and_the_rest_from_pages(monkeypatch):
    whole = KernelCase(name="whole", kind="prefill", **SHAPE, query_lens=(9, 9), seq_lens=(9, 9))
    content = make_content(whole, CPU, torch.Generator().manual_seed(0))
    # On a CPU, torch's own attention computes what cuDNN would.
    used = []

    def chosen(backend):
        used.append(backend)
        return contextlib.nullcontext()

    module = SimpleNamespace(sdpa_kernel=chosen, SDPBackend=torch.nn.attention.SDPBackend)
    run = peers._cudnn(module, content)
    run.call()
    run.collect()
    assert expected_rows(content).error_of(run.output) < 5e-3
    assert used == [torch.nn.attention.SDPBackend.CUDNN_ATTENTION]
    assert run.planned is None

    paged = Recorder()
    monkeypatch.setattr(peers, "import_module", lambda name: paged)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    run = peers._cudnn(module, content_of("mixed"))
    _, options = paged.calls["cudnn_batch_prefill_with_kv_cache"]
    assert options["batch_offsets_q"].tolist() == [0, 64, 9 * 64]
    assert options["actual_seq_lens_q"].flatten().tolist() == [1, 8]
    assert options["actual_seq_lens_kv"].shape == (2, 1, 1, 1)
    assert (options["max_token_per_sequence"], options["max_sequence_kv"]) == (8, 30)
    assert options["causal"]
    assert options["out"] is run.output

    run = peers._cudnn(module, content_of("decode"))
    arguments, options = paged.calls["cudnn_batch_decode_with_kv_cache"]
    assert [tuple(one.shape[1:]) for one in arguments[:3]] == [(4, 16), (2, 4, 16), (2, 4, 16)]
    assert options["actual_seq_lens_kv"].flatten().tolist() == [9, 40, 23]
    assert options["max_sequence_kv"] == 40
    assert options["out"] is run.output

    def broken(*_, **__):
        raise RuntimeError("no such graph")

    paged.cudnn_batch_decode_with_kv_cache = broken
    assert peers._cudnn(module, content_of("decode")).status is Status.FAILED

    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(peers, "import_module", missing)
    for name in ("prefill", "decode"):
        refusal = peers._cudnn(module, content_of(name))
        # Not measured, which leaves a target open; not unsupported, with which it could be met.
        assert refusal.status is Status.UNAVAILABLE
        assert "No module named 'cudnn'" in refusal.reason
    for changes, said in (
        ({"sliding_window": 5}, "a window"),
        ({"kv_cache_dtype": CacheDType.FP8_E4M3}, "a quantised cache"),
    ):
        odd = dataclasses.replace(content, case=whole.replace(**changes))
        assert said in peers._cudnn(module, odd).reason


def test_flash_attention_4_is_measured_in_one_case():
    case = KernelCase(name=FA4_CASE, kind="prefill", **SHAPE, query_lens=(9,), seq_lens=(9,))
    content = make_content(case, CPU, torch.Generator().manual_seed(0))
    module = Recorder()
    run = peers._ADAPTERS["fa4"][1](module, content)
    run.call()
    _, options = module.calls["flash_attn_varlen_func"]
    assert (options["fa_version"], options["k"].shape) == (4, (9, 2, 16))
    assert options["out"] is run.output
    refusal = peers._ADAPTERS["fa4"][1](module, content_of("prefill"))
    assert refusal.status is Status.UNSUPPORTED
    module.FA4_AVAILABLE = False
    assert peers._ADAPTERS["fa4"][1](module, content).status is Status.UNAVAILABLE
    assert "fa4" in BenchTable.HOPPER.peers
    # A target does not wait for it, but its time counts where it is measured.
    assert all("fa4" not in case.target.against for case in HOPPER_CASES)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("adapter", ["fa3", "fa4"])
@pytest.mark.parametrize("name", ["decode", "fp8", "verify", "mixed", FA4_CASE])
def test_flash_attention_s_calls_fit_vllm_s_signatures(adapter, name, version):
    whole = KernelCase(name=FA4_CASE, kind="prefill", **SHAPE, query_lens=(9,), seq_lens=(9,))
    case = TINY.get(name, whole)
    module = Recorder()
    run = peers._ADAPTERS[adapter][1](module, make_content(case, CPU, torch.Generator()))
    if isinstance(run, Refusal):
        assert run.status is Status.UNSUPPORTED
        return
    run.call()
    assert module.calls
    for function, (arguments, options) in module.calls.items():
        where = "vllm_flash_attn.flash_attn_interface"
        signature_of(version, where, function).bind(*arguments, **options)


def test_xqa_takes_decodes_and_a_causal_mask_for_verifies():
    calls, _ = call_of("xqa", "window")
    _, options = calls["xqa_batch_decode_with_kv_cache"]
    assert (options["window_left"], options["mask"], options["max_seq_len"]) == (4, None, 40)
    assert options["seq_lens"].dtype == torch.uint32
    calls, run = call_of("xqa", "verify")
    _, options = calls["xqa_batch_decode_with_kv_cache"]
    assert options["out"].shape == (2, 4, 4, 16)
    assert options["out"].data_ptr() == run.output.data_ptr()
    assert options["mask"].dtype == torch.uint16
    assert options["mask"].shape == (2, 4, 2)
    assert options["mask"][1].view(torch.int16).tolist() == [[1, 0], [3, 0], [7, 0], [15, 0]]
    refusal = peers._ADAPTERS["xqa"][1](Recorder(), content_of("mixed"))
    assert refusal.status is Status.UNSUPPORTED


def test_flashinfer_s_modules_are_those_that_its_calls_compile():
    bf16, fp8, index = torch.bfloat16, torch.float8_e4m3fn, torch.int32
    prefill, fa2 = flashinfer_jit.PREFILL_MAKER, flashinfer_jit.fa2_maker()
    xqa = ("flashinfer.jit.xqa", "gen_xqa_module")
    assert list(flashinfer_jit.modules_of(TINY["fp8"])) == [
        (*fa2, "fa2", bf16, fp8, bf16, index, 16, 16, 0, False, False, False),
        (*xqa, bf16, fp8, 4, 16, 2, False, bf16, 1),
    ]
    assert list(flashinfer_jit.modules_of(TINY["window"])) == [
        (*xqa, bf16, bf16, 4, 16, 2, True, bf16, 1)
    ]
    assert list(flashinfer_jit.modules_of(TINY["verify"]))[1][-1] == 4
    (mixed,) = flashinfer_jit.modules_of(TINY["mixed"])
    assert mixed[:3] == (*prefill, "fa3")


def test_flashinfer_s_modules_are_compiled_once_longest_first_whatever_fails(monkeypatch):
    built, lines = [], []

    def make(*key):
        def build(verbose):
            built.append(key)
            if 4 in key[-1:]:
                raise RuntimeError("too many tokens")

        name = f"{key[0]} module {key[-1]}"
        return SimpleNamespace(name=name, build=build, is_aot=False)

    functions = SimpleNamespace(gen_batch_prefill_module=make, gen_xqa_module=make)
    setattr(functions, flashinfer_jit.FA2_MAKER[1], make)
    monkeypatch.setattr(flashinfer_jit, "import_module", lambda name: functions)
    monkeypatch.setenv("MAX_JOBS", "1")
    monkeypatch.setattr(flashinfer_jit, "modules_at_once", lambda *_: 1)
    cases = [TINY[name] for name in ("decode", "mixed", "decode", "prefill")]
    assert flashinfer_jit.compile_flashinfer(cases, lines.append)
    assert [key[0] for key in built] == ["fa3", "fa2", torch.bfloat16]
    assert len(lines) == 3
    assert not flashinfer_jit.compile_flashinfer([TINY["verify"], TINY["decode"]], lines.append)
    assert len(built) == 6
    assert sum(" module 4: RuntimeError: too many tokens" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("files", "memory_gib", "cores", "modules"),
    [(4, 128, 16, 4), (4, 28, 64, 1), (1, 28, 64, 6), (8, 1024, 64, 8), (4, 1, 1, 1)],
)
def test_compilers_fit_into_memory_and_cores(files, memory_gib, cores, modules):
    found = flashinfer_jit.modules_at_once(files, memory_gib << 30, cores)
    assert found == modules
    if found > 1:
        assert found * files * 3.5 <= 0.8 * memory_gib
        assert found * files <= cores
    assert flashinfer_jit.free_memory() > 0


def test_cases_of_every_table_are_compiled_by_name():
    names = [case.name for case in compiled_cases()]
    assert {case.name for table in BenchTable for case in table.cases} <= set(names)
    assert len(set(names)) == len(names)
    (twin,) = (case for case in compiled_cases() if case.name == "dec_fp8_b32_4k")
    assert twin.kv_cache_dtype is CacheDType.FP8_E4M3
    assert {module[1] for module in flashinfer_jit.modules_of(twin)} == {
        flashinfer_jit.fa2_maker()[1],
        "gen_xqa_module",
    }


# -- Command lines.


def test_the_files_of_a_run_render_and_merge(tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    table = tmp_path / "table.md"
    assert run_and_report(bench_of("decode"), Report(json=first), quiet)
    report = Report(out=table, json=second, merge=(first,))
    assert run_and_report(bench_of("mixed"), report, quiet)
    whole = BenchResults.model_validate_json(second.read_text())
    assert {result.case.name for result in whole.cases} == {"decode", "mixed"}
    again = tmp_path / "again.md"
    assert main(["--render", "--merge", str(second), "--out", str(again)]) == 0
    assert again.read_text() == table.read_text()


def test_files_are_written_after_every_case(tmp_path, monkeypatch):
    seen, path = [], tmp_path / "a.json"
    bench_case = kernels.bench_case

    def watched(*arguments):
        seen.append(path.exists())
        return bench_case(*arguments)

    monkeypatch.setattr(kernels, "bench_case", watched)
    run_and_report(bench_of("decode", "mixed"), Report(json=path), quiet)
    assert seen == [False, True]


def test_a_wrong_kernel_of_ours_fails_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(TorchRefImpl, "forward", lambda *arguments, **options: None)
    path = tmp_path / "a.json"
    assert not run_and_report(bench_of("decode"), Report(json=path), quiet)
    assert main(["--render", "--merge", str(path)]) == 1
    assert CliRunner().invoke(app, ["bench", "kernels", "--render", "--merge", path]).exit_code == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--case", "dec_b9"], "case must match one of dec_b1_8k"),
        (
            ["--backend", "FA9"],
            "unknown attention backend 'FA9'; registered: TRITON_ATTN, TRITON_MLA",
        ),
        (["--peer", "fa9"], "peer must be one of fa3"),
        (["--peer", "fa3", "--no-peers"], "not both"),
        (
            ["--table", "blackwell"],
            "dense, hopper, mla, invariance, flashinfer, trtllm_mla, sparse_mla, got 'blackwell'",
        ),
        (["--case", "rag6_d64"], "case must match one of dec_b1_8k"),
        (["--merge", "nowhere.json"], "nowhere.json"),
        (["--render"], "merge must name results"),
    ],
)
def test_errors_of_both_command_lines_name_what_was_wrong(options, message, capsys):
    given = options if "--backend" in options else ["--backend", "TORCH_REF", *options]
    result = CliRunner().invoke(app, ["bench", "kernels", *given])
    assert result.exit_code == 2
    assert message in result.stderr
    assert main(given) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_holds_no_results_is_refused(tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text('{"cases": [], "schema_version": 2}')
    assert main(["--render", "--merge", str(path)]) == 2
    assert "field 'environment'" in capsys.readouterr().err


def test_the_command_measures(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "select_cases", lambda patterns, cases: (TINY["window"],))
    monkeypatch.setattr(kernels, "require_gpu", lambda command: None)
    out = tmp_path / "table.md"
    options = ["--backend", "TORCH_REF", "--rounds", "1", "--reps", "1", "--commit", "abc"]
    result = CliRunner().invoke(app, ["bench", "kernels", *options, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "fa3              unavailable" in result.output
    assert "| window | decode 4/2/16, 1 x 9, 1 x 40, 1 x 23, window 5, sinks |" in out.read_text()


def test_the_module_runs_without_the_cli_s_packages():
    code = (
        "import sys; sys.modules.update(typer=None, rich=None, triton=None, flashinfer=None)\n"
        "from attn.bench.kernels import main\n"
        "sys.exit(main(['--backend', 'TORCH_REF', '--case', 'none']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "case must match one of" in done.stderr


def test_settings_out_of_range_are_refused():
    for name in ("rounds", "reps"):
        with pytest.raises(ValueError, match=f"{name} must be positive, got 0"):
            KernelBench(backend="TORCH_REF", **{name: 0})


def test_the_commit_comes_from_the_option_the_environment_or_git(monkeypatch):
    monkeypatch.setenv("ATTN_COMMIT", "from_env")
    assert environment_of(bench_of()).commit == "abc"
    assert environment_of(bench_of(commit=None)).commit == "from_env"
    monkeypatch.delenv("ATTN_COMMIT")
    monkeypatch.setattr(
        settings.subprocess, "run", lambda *arguments, **options: SimpleNamespace(stdout="")
    )
    assert environment_of(bench_of(commit=None)).commit == "unknown"


def test_a_case_that_fails_as_a_whole_is_an_entry_and_the_next_one_runs(monkeypatch):
    def broken(case, *args):
        if case.name == "decode":
            raise RuntimeError("no memory left")
        return make_content(case, *args)

    monkeypatch.setattr(measure, "make_content", broken)
    first, second = bench_kernels(bench_of("decode", "fp8"), quiet).cases
    assert first.ours.status is Status.FAILED
    assert "no memory left" in first.ours.reason
    assert second.ours.status is Status.MEASURED
