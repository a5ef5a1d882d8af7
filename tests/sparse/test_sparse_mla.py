"""SPARSE_MLA's impl over its builder: right numbers for every pair of kernels and every layout.

The reference stands in for vendors' kernels, on exactly the rows and lists that these are given. So
everything around the kernels is judged.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn.impls.base import LayerScales
from attn.impls.sparse import sparse_mla as impl_module
from attn.impls.sparse.call import SparseCall
from attn.impls.sparse.sparse_mla import ATTENDERS, SparseMLAImpl
from attn.ops.mla import mla_attention
from attn.reference import sparse_mla as reference
from attn.reference.mla import absorb_query, project_latent_output
from attn.testing import oracle, stored_rows
from attn.testing.batches import POISON_BYTE, WILD_BLOCK
from attn.testing.budget import budget, low_precision_attention, lse_budget, lse_errors, row_errors
from builders.batch import CommonAttentionMetadata
from builders.launch.call import KernelCall
from builders.sparse import choice as sparse_choice
from builders.sparse import choice as sparse_mla_choice
from builders.sparse import vendor_calls as sparse_calls
from builders.sparse.arguments import ListedRows
from builders.sparse.choice import CALLED, SparsePlan
from builders.sparse.sparse_mla import SparseMLAMetadataBuilder
from specs.devices import KNOWN_DEVICES
from specs.dtypes import DType
from specs.engine import EngineConfig, Kernels, SparseKernels, SpeculativeConfig
from specs.kv_cache import MLAAttentionSpec, latent_spec
from specs.rows import LatentFormat, cache_dtype_of
from specs.sparse_mla import STORED_FORMATS, SparseKernel, rule_of
from tests.tools.interpreter import in_torch, variant_of

BF16, RAW, SCALED = STORED_FORMATS
K = SparseKernel
H, L, R, P, TOPK, BLOCKS = 4, 512, 64, 64, 12, 20
SCALE, K_SCALE = 576**-0.5, 0.25
NAMES = {BF16: "auto", RAW: "fp8_e4m3", SCALED: "fp8_ds_mla"}
CONFIG = EngineConfig(
    max_model_len=256,
    max_num_seqs=6,
    max_num_batched_tokens=64,
    num_heads=H,
    index_topk=TOPK,
    softmax_scale=SCALE,
    speculative=SpeculativeConfig(num_speculative_tokens=3),
)
STEPS = {
    "decode": ([1, 1, 1], [40, 1, 130], 0),
    "padding": ([1, 1, 0], [40, 65, 0], 2),
    "verify": ([4, 1], [70, 64], 0),
    "extend": ([9, 12], [90, 12], 0),
    "long context": ([5, 6], [250, 200], 2),
    "mixed": ([1, 4, 20, 9], [65, 100, 20, 70], 0),
    "idle": ([0, 0], [0, 0], 3),
}


@pytest.fixture(params=["h200", "b200"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A GPU with every kernel; the reference stands in for each of them."""
    capability = KNOWN_DEVICES[request.param].compute_capability
    monkeypatch.setattr(sparse_choice, "capability_of", lambda device: capability)
    monkeypatch.setattr(sparse_mla_choice, "unavailable_kernels", dict)
    monkeypatch.setattr(sparse_calls, "LOADERS", {})
    calls = {kernel: checked(kernel) for kernel in K if kernel is not K.FLASHMLA_AUTO}
    monkeypatch.setattr(impl_module, "ATTENDERS", calls)
    return str(request.param)


def by_reference(call: SparseCall) -> None:
    """Attend by torch, whatever kernel is asked for."""
    out, lse = reference.sparse_mla(
        *(call.query, call.rotary),
        ListedRows(call.rows, LatentFormat(call.row.name), call.indices, call.lens, call.k_scale),
        call.scale,
    )
    call.out.copy_(out)
    call.lse.copy_(lse)


def checked(kernel: SparseKernel) -> Any:
    """Check what a kernel's record says it is given, then attend by the reference."""
    rule = rule_of(kernel)

    def attend(call: SparseCall) -> None:
        assert LatentFormat(call.row.name) in rule.reads
        assert (call.lens is None) == rule.skips_minus_one
        assert not rule.block_sizes or call.rows.shape[1] % rule.block_sizes[0] == 0
        assert call.indices.is_contiguous()
        assert int(call.indices.max()) < call.rows.shape[0] * call.rows.shape[1]
        by_reference(call)

    return attend


class Step:
    """A step over a cache whose unused slots are NaN, with lists of every kind."""

    def __init__(self, name: str, layout: LatentFormat, seed: int = 0) -> None:
        self.query_lens, self.seq_lens, padding = STEPS[name]
        self.layout, self.random = layout, torch.Generator().manual_seed(seed)
        columns = max(-(-length // P) for length in [*self.seq_lens, 1]) + 1
        table = torch.full((len(self.seq_lens), columns), WILD_BLOCK // P, dtype=torch.int32)
        free = 1 + torch.randperm(BLOCKS - 1, generator=self.random).int()
        for req, length in enumerate(self.seq_lens):
            used = -(-length // P)
            table[req, :used], free = free[:used], free[used:]
        batch = CommonAttentionMetadata.from_lengths(self.query_lens, self.seq_lens, table, P)
        self.tokens = batch.num_actual_tokens
        rows = self.tokens + padding
        slots = torch.cat([batch.slot_mapping, torch.full((padding,), -1)])
        self.batch = batch.replace(slot_mapping=slots, num_actual_tokens=rows)
        spec = latent_spec(layout, P, topk=TOPK)
        assert isinstance(spec, MLAAttentionSpec)
        self.spec = spec
        self.cache = spec.layout().allocate(BLOCKS, fill_byte=POISON_BYTE)
        self.keys = [self.normal(length, L + R) for length in self.seq_lens]
        self.query = self.normal(rows, H, L + R)
        self.lists = self._lists(rows)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random).bfloat16()

    def _lists(self, rows: int) -> Tensor:
        """Lists with duplicates and gaps, shorter than their room; padding has stale lists."""
        lists = torch.randint(0, 9999, (rows, TOPK), generator=self.random).int()
        for req, row, visible in self.each_row():
            lists[row] = torch.randint(0, visible, (TOPK,), generator=self.random).int()
            lists[row, visible:] = -1
            lists[row, 3] = -1
            if req == 0 and row % 2:
                lists[row] = -1
        return lists

    def each_row(self) -> list[tuple[int, int, int]]:
        """Request, row and visible keys of each query token."""
        found, row = [], 0
        for req, (new, length) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            for token in range(new):
                found.append((req, row, length - new + token + 1))
                row += 1
        return found

    def write_context(self, impl: SparseMLAImpl, scales: LayerScales) -> None:
        """Write everything that was cached before by torch, then the step's rows by the impl."""
        starts = self.batch.query_start_loc_cpu.tolist()
        new_rows = torch.zeros(self.batch.num_actual_tokens, L + R, dtype=torch.bfloat16)
        for req, rows in enumerate(self.keys):
            context = len(rows) - self.query_lens[req]
            at = torch.arange(context)
            slots = self.batch.block_table_tensor[req, at // P].long() * P + at % P
            with in_torch():
                self._write(impl, scales, rows[:context], slots)
            new_rows[starts[req] : starts[req + 1]] = rows[context:]
        self._write(impl, scales, new_rows, self.batch.slot_mapping)
        self.new_rows = new_rows

    def _write(self, impl: SparseMLAImpl, scales: LayerScales, rows: Tensor, slots: Tensor) -> None:
        impl.do_kv_cache_update(
            *(rows[:, :L], rows[:, None, L:], self.cache, slots, impl.kv_cache_dtype),
            scales._k_scale,
        )

    def expected(self, converted: dict[bool, bool]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The oracle's state, and the state of careful maths in bf16.

        ``converted`` says for decode and prefill (key ``is_prefill``) whether bf16 rows are
        block-scaled for the kernel.
        """
        rows = len(self.query)
        out, lse = torch.zeros(rows, H, L).double(), torch.full((rows, H), -torch.inf).double()
        low, low_lse = torch.zeros(rows, H, L), torch.full((rows, H), -torch.inf)
        rules = oracle.Rules(scale=SCALE, causal=False)
        for req, row, _ in self.each_row():
            is_prefill = self.query_lens[req] > 4
            name = NAMES[SCALED] if converted[is_prefill] else NAMES[self.layout]
            real = stored_rows.quantized_latent(self.keys[req], name, torch.tensor(K_SCALE), L)
            one = self.query[row : row + 1].double()
            listed = self.lists[row : row + 1]
            given = (one[..., :L], one[..., L:], real[:, :L], real[:, L:], listed, SCALE)
            state = oracle.sparse_mla(*given)
            out[row], lse[row] = state[0][0], state[1][0]
            picked = real[listed[0][listed[0] >= 0].long()][:, None]
            state = low_precision_attention(one, picked, picked[..., :L], 0, rules, torch.bfloat16)
            low[row], low_lse[row] = state[0][0].float(), state[1][0]
        return out, lse, low, low_lse


def impl_of(layout: LatentFormat, lists: Tensor) -> SparseMLAImpl:
    impl = SparseMLAImpl(
        *(H, L + R, SCALE, 1, None, None, cache_dtype_of(layout).value),
        kv_lora_rank=L,
        qk_nope_head_dim=32,
        qk_rope_head_dim=R,
        qk_head_dim=32 + R,
        v_head_dim=16,
        kv_b_proj=SimpleNamespace(weight=torch.randn(H * 48, L)),
        indexer=SimpleNamespace(topk_indices_buffer=lists),
    )
    impl.process_weights_after_loading(torch.bfloat16)
    return impl


def scales_of() -> LayerScales:
    scales = LayerScales.of()
    scales._k_scale = torch.tensor(K_SCALE)
    return scales


def works(step: Step, prefill: SparseKernel, decode: SparseKernel) -> Any:
    """The builder of a pair of kernels, or None where it is refused."""
    config = CONFIG.replace(kernels=Kernels(sparse=SparseKernels(prefill=prefill, decode=decode)))
    with suppress(ValueError):
        return SparseMLAMetadataBuilder(step.spec, ["layers.0"], config, "cpu")
    return None


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("layout", STORED_FORMATS)
def test_every_pair_of_kernels_computes_the_same_right_numbers(
    layout: LatentFormat, name: str, device: str
) -> None:
    step = Step(name, layout)
    impl, scales = impl_of(layout, step.lists), scales_of()
    step.write_context(impl, scales)
    # Lists and rows are converted by kernels on one device, and by torch on the other.
    with in_torch() if device == "b200" else nullcontext():
        walk(step, name, impl, scales)


def walk(step: Step, name: str, impl: SparseMLAImpl, scales: LayerScales) -> None:
    """Every pair of kernels that is not refused."""
    layout = step.layout
    states: dict[tuple[bool, bool], Any] = {}
    seen: set[SparsePlan] = set()
    for prefill, decode in product(K, K):
        builder = works(step, prefill, decode)
        if builder is None:
            continue
        record = builder.build(0, step.batch)
        # The kernel of a phase without rows makes no difference.
        if record.plan in seen:
            continue
        seen.add(record.plan)
        query = step.query if len(seen) == 1 else (step.query[..., :L], step.query[..., L:])
        out, lse = impl.forward_mqa(query, step.cache, record, scales)
        assert lse is not None
        converted = {
            is_prefill: layout is BF16 and rows is not None and rows.plan.reads is SCALED
            for is_prefill, rows in ((False, record.decode), (True, record.prefill_rows))
        }
        key = converted[False], converted[True]
        if key not in states:
            states[key] = step.expected(converted)
        wanted, wanted_lse, low, low_lse = states[key]
        assert float(row_errors(out, wanted).max()) <= budget(wanted, low, torch.bfloat16)
        assert float(lse_errors(lse, wanted_lse).max()) <= lse_budget(wanted_lse, low_lse)
    kernels = {
        rows.kernel for plan in seen for rows in (plan.decode, plan.prefill) if rows is not None
    }
    assert len(kernels) >= 2 or name == "idle"


def test_a_layer_runs_from_projections_to_values(device: str) -> None:
    """The layer absorbs queries, attends and projects values."""
    step = Step("mixed", RAW)
    impl, scales = impl_of(RAW, step.lists), scales_of()
    step.write_context(impl, scales)
    record = works(step, K.TRITON_SPARSE, K.TRITON_SPARSE).build(0, step.batch)
    q = step.normal(step.tokens, H, 32 + R)
    output = torch.full((step.tokens + 2, H * 16), 7.0, dtype=torch.bfloat16)
    new = step.new_rows
    mla_attention(impl, scales, q, new[:, :L], new[:, L:], step.cache, record, output)
    assert bool((output[step.tokens :] == 7).all())
    absorbed = absorb_query(q[..., :32], impl.W_UK), q[..., 32:]
    # The numbers are judged by the tests above.
    latent, _ = impl.forward_mqa(absorbed, step.cache, record, scales)
    values = project_latent_output(latent, impl.W_UV).flatten(1)
    assert torch.equal(output[: step.tokens], values[: step.tokens])
    assert bool(values.isfinite().all())
    assert bool((values != 0).any(-1).sum() >= step.tokens - 1)


def test_rows_past_the_step_s_are_neutral(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step("mixed", BF16)
    impl, scales = impl_of(BF16, step.lists), scales_of()
    step.write_context(impl, scales)
    record = works(step, K.TRITON_SPARSE, K.TRITON_SPARSE).build(0, step.batch)
    new_empty = torch.Tensor.new_empty

    def full_of_nan(x: Tensor, *shape: Any, **fields: Any) -> Tensor:
        """Memory that holds what was there before: NaN."""
        room = new_empty(x, *shape, **fields)
        return room.fill_(torch.nan) if room.dtype in (torch.bfloat16, torch.float32) else room

    monkeypatch.setattr(torch.Tensor, "new_empty", full_of_nan)
    longer = torch.cat([step.query, step.query[:3]])
    out, lse = impl.forward_mqa(longer, step.cache, record, scales)
    assert lse is not None
    assert bool(out[: step.tokens].isfinite().all())
    assert not out[step.tokens :].any()
    assert bool((lse[step.tokens :] == -torch.inf).all())


def test_a_captured_step_reads_what_a_rebuilt_one_says(device: str) -> None:
    for layout, decode in ((RAW, K.FLASHMLA_KV), (SCALED, K.TRITON_SPARSE)):
        step = Step("padding", layout)
        impl, scales = impl_of(layout, step.lists), scales_of()
        step.write_context(impl, scales)
        builder = works(step, K.TRITON_SPARSE, decode)
        batch = step.batch
        early = batch.replace(
            seq_lens=torch.tensor([1, 2, 0], dtype=torch.int32),
            seq_lens_cpu_upper_bound=torch.tensor([1, 2, 0], dtype=torch.int32),
        )
        captured = builder.build_for_cudagraph_capture(early)
        builder.build(0, batch)
        # A graph would read the early record, over buffers as they are now.
        assert captured.decode is not None
        captured.decode.block_table = batch.block_table_tensor
        out, lse = impl.forward_mqa(step.query, step.cache, captured, scales)
        wanted, wanted_lse, low, low_lse = step.expected({False: False, True: False})
        assert lse is not None
        assert float(row_errors(out, wanted).max()) <= budget(wanted, low, torch.bfloat16)
        assert float(lse_errors(lse, wanted_lse).max()) <= lse_budget(wanted_lse, low_lse)


@pytest.mark.parametrize("layout", [BF16, RAW, SCALED])
@pytest.mark.parametrize("name", STEPS)
def test_the_library_s_own_kernel_is_its_operation(name: str, layout: LatentFormat) -> None:
    """The library's own kernel attends on any device; tests of its own judge the kernel."""
    step = Step(name, layout)
    impl, scales = impl_of(layout, step.lists), scales_of()
    with in_torch():
        step.write_context(impl, scales)
        record = works(step, K.TRITON_SPARSE, K.TRITON_SPARSE).build(0, step.batch)
        out, lse = impl.forward_mqa(step.query, step.cache, record, scales)
    assert lse is not None
    wanted, wanted_lse, low, low_lse = step.expected({False: False, True: False})
    assert float(row_errors(out, wanted).max()) <= budget(wanted, low, torch.bfloat16)
    assert float(lse_errors(lse, wanted_lse).max()) <= lse_budget(wanted_lse, low_lse)


@pytest.mark.parametrize("layout", STORED_FORMATS)
def test_a_warm_up_runs_every_kernel_and_leaves_the_cache_alone(
    layout: LatentFormat, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: set[SparseKernel] = set()
    for kernel, attend in dict(impl_module.ATTENDERS).items():

        def noted(call: SparseCall, kernel: SparseKernel = kernel, attend: Any = attend) -> None:
            called.add(kernel)
            attend(call)
            assert not call.out.any()

        monkeypatch.setitem(impl_module.ATTENDERS, kernel, noted)  # type: ignore[misc]
    attend_listed = impl_module.attend_listed

    def noted_own(launcher: Any, launch: Any, tensors: Any) -> None:
        called.add(K.TRITON_SPARSE)
        attend_listed(launcher, launch, tensors)
        assert not tensors.output.any()

    monkeypatch.setattr(impl_module, "attend_listed", noted_own)
    step = Step("mixed", layout)
    impl, scales = impl_of(layout, step.lists), scales_of()
    kept = step.cache.view(torch.uint8).clone()
    for prefill, decode in product(K, K):
        builder = works(step, prefill, decode)
        if builder is None:
            continue
        called.clear()
        impl.warm_up(scales, step.cache, builder, torch.bfloat16)
        assert called == {plan.kernel for plan in builder._plans}
    assert torch.equal(step.cache.view(torch.uint8), kept)


@pytest.mark.parametrize("layout", STORED_FORMATS)
def test_serving_after_a_warm_up_meets_no_new_variant(
    layout: LatentFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[KernelCall] = []
    launch = KernelCall.launch_through_triton

    def noted(call: KernelCall) -> None:
        launches.append(call)
        launch(call)

    monkeypatch.setattr(KernelCall, "launch_through_triton", noted)
    step, scales = Step("mixed", layout), scales_of()
    builder = works(step, K.TRITON_SPARSE, K.TRITON_SPARSE)
    impl_of(layout, step.lists).warm_up(scales, step.cache, builder, torch.bfloat16)
    known = {variant_of(call) for call in launches}
    for name in STEPS:
        step = Step(name, layout)
        impl = impl_of(layout, step.lists)
        launches.clear()
        step.write_context(impl, scales)
        record = builder.build(0, step.batch)
        # An engine's absorbed queries lie head by head in memory.
        absorbed = step.query[..., :L].transpose(0, 1).contiguous().transpose(0, 1)
        impl.forward_mqa((absorbed, step.query[..., L:]), step.cache, record, scales)
        assert launches
        assert {variant_of(call) for call in launches} <= known


def test_kernels_that_are_called_are_those_that_can_be_chosen() -> None:
    assert set(ATTENDERS) == set(CALLED)


def test_what_the_impl_cannot_do_is_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step("decode", BF16)
    impl, scales = impl_of(BF16, step.lists), scales_of()
    record = works(step, K.TRITON_SPARSE, K.FA3 if device == "h200" else K.TRTLLM)
    monkeypatch.setattr(impl_module, "ATTENDERS", {})
    with pytest.raises(NotImplementedError, match="is not called by SPARSE_MLA yet"):
        impl.forward_mqa(step.query, step.cache, record.build(0, step.batch), scales)
    with pytest.raises(ValueError, match="attend lists, in forward_mqa"):
        impl.forward_mha(
            *[step.query] * 4, record.build(0, step.batch), scales._k_scale, step.query
        )
    with pytest.raises(ValueError, match="indexer must have a topk_indices_buffer"):
        impl_of(BF16, None)  # type: ignore[arg-type]
    raw = impl_of(RAW, step.lists)
    scales._k_scale = torch.ones(2)
    with pytest.raises(ValueError, match="k_scale must be a float32 scalar"):
        raw.forward_mqa(step.query, step.cache, record.build(0, step.batch), scales)


def test_block_scaled_rows_are_rotated_before_they_are_written() -> None:
    lists = torch.zeros(1, 1, dtype=torch.int32)
    assert impl_of(RAW, lists).fused_rope_kvcache_supported()
    scaled = impl_of(SCALED, lists)
    assert not scaled.fused_rope_kvcache_supported()
    one, rows = torch.ones(()), torch.zeros(1, L + R)
    with pytest.raises(NotImplementedError, match="rows are not rotated and written in one"):
        scaled.do_rope_and_kv_cache_update(
            *(rows[:, None, L:], rows[:, :L], rows[:, L:], torch.zeros(1).int(), rows[:, L:], True),
            *(torch.zeros(1, P, 656, dtype=torch.uint8), torch.zeros(1).long(), "fp8_ds_mla", one),
        )


def test_the_model_s_types_are_known_to_the_rows() -> None:
    impl = impl_of(BF16, torch.zeros(1, 1, dtype=torch.int32))
    row = impl._row(cache_dtype_of(BF16), torch.float16)
    assert row["nope"].dtype is DType.FLOAT16
