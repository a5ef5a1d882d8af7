"""Decode context parallelism of latent layers: ranks one after another, against the definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn.backends.triton_mla import TritonMLABackend
from attn.impls.base import LayerScales
from attn.impls.latent.triton_mla import TritonMLAImpl
from attn.testing import budget, oracle, stored_rows
from attn.testing.batches import (
    BatchSpec,
    LatentWeights,
    Projection,
    Request,
    latent_requests,
    latent_weights,
)
from attn.testing.budget import low_precision
from attn.testing.latent_trial import latent_output, low_latent_output
from builders.batch import CommonAttentionMetadata
from builders.latent.prefill import EXPANDED_WIDTH
from builders.latent.triton_mla import TritonMLAMetadata, TritonMLAMetadataBuilder
from builders.launch.call import KernelCall
from builders.splitkv.planner import SplitPlanner
from builders.splitkv.stripe import Stripe
from specs.dtypes import CacheDType, DType
from specs.engine import EngineConfig, ParallelConfig, SpeculativeConfig
from specs.kv_cache import AnyKVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec
from tests.emulators.flashinfer_emulator import MadeOnDevice, OnDevice, on_device
from tests.latent.rank_turns import Gather, in_turns
from tests.tools.interpreter import variant_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, RANK, NOPE, ROPE, VALUE, BLOCK = 2, 64, 32, 32, 32, 16
REQS, COLUMNS, TOKENS = 5, 8, 4
"""Requests and columns of the block table; most tokens of a decode."""
STEPS = {
    "decode": ((1, 1, 1, 1), (70, 1, 33, 2)),
    "verify": ((3, 4, 1, 2), (70, 33, 17, 2)),
    "prefill without context": ((40, 20), (40, 20)),
    "prefill": ((20, 7, 9), (93, 8, 26)),
    "mix": ((1, 4, 2, 30, 9), (90, 33, 2, 45, 9)),
}
"""By name: new tokens of every request, and its length. Some ranks keep none of the short ones."""


def stripes_of(ranks: int, interleave: int) -> list[Stripe]:
    return [Stripe(ranks, rank, interleave) for rank in range(ranks)]


class Rank:
    """One rank's part of a layer: its query heads, and a cache of its own tokens."""

    def __init__(
        self,
        stripe: Stripe,
        weights: LatentWeights,
        dtype: DType = DType.FLOAT32,
        cache_dtype: CacheDType = CacheDType.AUTO,
        **config: Any,
    ) -> None:
        self.stripe = stripe
        first = stripe.rank * HEADS
        self.heads = slice(first, first + HEADS)
        self.spec = MLAAttentionSpec(
            block_size=BLOCK,
            dtype=dtype,
            cache_dtype=cache_dtype,
            kv_lora_rank=RANK,
            qk_rope_head_dim=ROPE,
        )
        known: dict[str, Any] = {
            "max_model_len": 256,
            "max_num_seqs": REQS + 1,
            "max_num_batched_tokens": 64,
            "num_heads": HEADS * stripe.size,
            "parallel": ParallelConfig(
                decode_context_parallel_size=stripe.size,
                decode_context_parallel_rank=stripe.rank,
                dcp_interleave=stripe.interleave,
            ),
            "speculative": SpeculativeConfig(num_speculative_tokens=TOKENS - 1),
        }
        engine = EngineConfig(**{**known, **config})
        self.builder = TritonMLAMetadataBuilder(self.spec, ["layers.0"], engine, DEVICE)
        own = replace(
            weights,
            num_heads=HEADS,
            w_uk=weights.w_uk[:, self.heads],
            w_uv=weights.w_uv[:, self.heads],
        )
        self.impl = TritonMLAImpl(
            *(HEADS, RANK + ROPE, weights.scale, 1),
            kv_cache_dtype=cache_dtype.value,
            kv_lora_rank=RANK,
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=ROPE,
            qk_head_dim=NOPE + ROPE,
            v_head_dim=VALUE,
            kv_b_proj=Projection(own.kv_b_proj().to(DEVICE)),
        )
        self.impl.process_weights_after_loading(dtype.torch)
        self.layer = LayerScales.of(k=0.5, device=DEVICE)
        # NaN stands where no token lives: nothing else may be read.
        self.cache = self.spec.layout().allocate(REQS * COLUMNS + 2, DEVICE, fill_byte=0xFF)
        ids = torch.arange(REQS * COLUMNS, dtype=torch.int32) + 2
        # Behind a request's last block the table has blocks of nobody.
        self.table = ids.view(REQS, COLUMNS).to(DEVICE)

    def write(self, requests: list[Request]) -> None:
        """Write every token, as an engine does: other ranks' tokens have slot -1."""
        for row, request in enumerate(requests):
            place = self.stripe.local_positions(torch.arange(len(request.key), dtype=torch.int32))
            at = place.clamp(min=0).long()
            slots = self.table[row].cpu()[at // BLOCK].long() * BLOCK + at % BLOCK
            slots = torch.where(place >= 0, slots, -1).to(DEVICE)
            latent, rope = request.key[:, 0].to(DEVICE).split([RANK, ROPE], -1)
            self.impl.do_kv_cache_update(
                *(latent, rope, self.cache, slots, self.impl.kv_cache_dtype, self.layer._k_scale)
            )

    def batch(self, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> Any:
        table = self.table[: len(seq_lens)]
        every = table.repeat(1, self.stripe.size)
        batch = CommonAttentionMetadata.from_lengths(query_lens, seq_lens, every, BLOCK)
        # An engine gives the rank's lengths too; they are computed from those of all ranks.
        return batch.replace(block_table_tensor=table, dcp_local_seq_lens=batch.seq_lens)


class Step:
    """A step of a layer on all ranks."""

    def __init__(
        self,
        stripes: list[Stripe],
        step: tuple[tuple[int, ...], tuple[int, ...]],
        dtype: DType = DType.FLOAT32,
        cache_dtype: CacheDType = CacheDType.AUTO,
        **config: Any,
    ) -> None:
        self.query_lens, self.seq_lens = step
        generator = torch.Generator().manual_seed(5)
        heads = HEADS * len(stripes)
        self.dtype, self.cache_dtype = dtype.torch, cache_dtype
        self.weights = latent_weights(generator, heads, self.dtype, RANK, NOPE, ROPE, VALUE)
        spec = BatchSpec("ranks", self.query_lens, self.seq_lens)
        self.requests = latent_requests(generator, spec, self.weights, self.dtype, BLOCK)
        self.ranks = [
            Rank(stripe, self.weights, dtype, cache_dtype, **config) for stripe in stripes
        ]
        for rank in self.ranks:
            rank.write(self.requests)
        self.query = torch.cat([request.query for request in self.requests]).to(DEVICE)
        self.records = [rank.builder.build(0, rank.batch(*step)) for rank in self.ranks]

    def absorbed(self, tokens: int) -> Tensor:
        """Queries of all ranks' heads for leading tokens: ``[tokens, heads, L + r]``."""
        nope, rope = self.query[:tokens].split([NOPE, ROPE], -1)
        w_uk = self.weights.w_uk.to(DEVICE, torch.float64)
        return torch.cat([torch.einsum("thp,lhp->thl", nope.double(), w_uk).to(nope), rope], -1)

    def states(self) -> list[tuple[Tensor, Tensor]]:
        """The decodes' state on every rank."""
        found = []
        for rank, record in zip(self.ranks, self.records, strict=True):
            query = self.absorbed(record.num_decode_tokens)
            out, lse = rank.impl.forward_mqa(query, rank.cache, record, rank.layer)
            assert lse is not None
            found.append((out.clone(), lse.clone()))
        return found

    def decoded(self) -> Tensor:
        """The merged output of the decodes, ``[T, heads, V]``."""
        outs, lses = (torch.stack([state[side] for state in self.states()]) for side in (0, 1))
        assert not outs[lses.isneginf()].any()
        assert outs.isfinite().all()
        shares = torch.softmax(lses.double(), 0).nan_to_num()
        latent = (outs.double() * shares[..., None]).sum(0)
        w_uv = self.weights.w_uv.to(DEVICE, torch.float64)
        return torch.einsum("thl,lhv->thv", latent, w_uv).to(self.dtype)

    def prefilled(self) -> Tensor:
        """The outputs of the prefills of all ranks' heads, ``[T, heads, V]``."""

        def work_of(rank: Rank, record: TritonMLAMetadata) -> Callable[[Gather], Tensor]:
            def run(gather: Gather) -> Tensor:
                rank.impl.all_gather = gather
                return self.prefill(rank, record)

            return run

        pairs = zip(self.ranks, self.records, strict=True)
        return torch.cat(in_turns([work_of(*pair) for pair in pairs]), 1)

    def prefill(self, rank: Rank, record: TritonMLAMetadata) -> Tensor:
        since = record.num_decode_tokens
        new = [request.key[request.context_len :, 0] for request in self.requests]
        latent, rope = torch.cat(new)[since:].to(DEVICE).split([RANK, ROPE], -1)
        query = self.query[since:, rank.heads].contiguous()
        output = query.new_full((len(query), HEADS * VALUE), float("nan"))
        rank.impl.forward_mha(
            *(query, latent, rope, rank.cache, record, rank.layer._k_scale, output)
        )
        return output.view(-1, HEADS, VALUE)

    def check(self) -> None:
        """Compare the step with the definition, whatever the ranks."""
        parts = []
        if self.records[0].num_decodes:
            parts.append(self.decoded())
        if self.records[0].num_prefills:
            parts.append(self.prefilled())
        actual = torch.cat(parts).cpu()
        exact = torch.cat([latent_output(self.weights, request) for request in self.requests])
        low = torch.cat([self._low(request) for request in self.requests]).double()
        error = budget.row_errors(actual, exact).max()
        assert error <= budget.budget(exact, low, self.dtype)

    def _low(self, request: Request) -> Tensor:
        rows, scale = request.key[:, 0], torch.tensor(0.5)
        stored = stored_rows.quantized_latent(rows, self.cache_dtype.value, scale, RANK)

        def attend(query: Tensor, rows: Tensor) -> Tensor:
            keys, first = rows[:, None], request.first_position
            values = keys[..., :RANK]
            return low_precision(query, keys, values, first, request.rules, self.dtype)[0]

        is_decode = len(request.query) <= TOKENS
        return low_latent_output(self.weights, request, stored, attend if is_decode else None)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is NaN."""
    made = torch.Tensor.new_empty

    def fill(like: Tensor, *given: Any, **named: Any) -> Tensor:
        found = made(like, *given, **named)
        return found.fill_(float("nan")) if found.is_floating_point() else found

    monkeypatch.setattr(torch.Tensor, "new_empty", fill)


@pytest.mark.parametrize(("ranks", "interleave"), [(2, 1), (2, 16), (3, 1), (3, 4)])
@pytest.mark.parametrize("name", STEPS)
def test_a_layer_over_several_ranks_is_the_whole_layer(
    name: str, ranks: int, interleave: int
) -> None:
    Step(stripes_of(ranks, interleave), STEPS[name]).check()


@pytest.mark.parametrize("name", ["mix", "verify"])
@pytest.mark.parametrize("cache_dtype", [CacheDType.AUTO, CacheDType.FP8])
def test_every_cache_can_be_shared(name: str, cache_dtype: CacheDType) -> None:
    Step(stripes_of(2, 1), STEPS[name], DType.FLOAT16, cache_dtype).check()


@pytest.mark.parametrize(("tokens", "chunks"), [(1, 3), (100, 2), (10**6, 1)])
def test_context_is_exchanged_in_chunks_of_the_workspace(
    monkeypatch: pytest.MonkeyPatch, tokens: int, chunks: int
) -> None:
    step = Step(stripes_of(2, 1), STEPS["prefill"])
    for rank in step.ranks:
        monkeypatch.setattr(rank.builder.expanded, "workspace_tokens", tokens)
    step.records = [rank.builder.build(0, rank.batch(*STEPS["prefill"])) for rank in step.ranks]
    context = step.records[0].prefill.context
    assert len(context.lens) == 2 * chunks
    assert context.lens.sum(0).tolist() == [73, 1, 17]
    step.check()


def test_exchanged_rows_count_for_the_bound_of_the_workspace() -> None:
    """Per token of fp32: keys and values of two heads, and rows of the rank and of both ranks."""
    token = HEADS * 2 * EXPANDED_WIDTH * 4 + 3 * (RANK + ROPE) * 4
    step = Step(stripes_of(2, 1), STEPS["prefill"], mla_workspace_bytes=token * 300)
    assert step.ranks[0].builder.expanded.workspace_tokens == 300
    with pytest.raises(ValueError, match=rf"mla_workspace_bytes \({token}\) must hold one chunk"):
        Step(stripes_of(2, 1), STEPS["prefill"], mla_workspace_bytes=token)


def test_states_are_the_definition_over_the_keys_that_a_rank_keeps() -> None:
    """Out and LSE of each rank, so that no error of one rank hides behind another's."""
    step = Step(stripes_of(2, 4), STEPS["verify"])
    for rank, (out, lse) in zip(step.ranks, step.states(), strict=True):
        token = 0
        for request in step.requests:
            kept = rank.stripe.local_positions(torch.arange(len(request.key), dtype=torch.int32))
            for place in range(len(request.query)):
                query = step.absorbed(token + 1)[token:].cpu()
                seen = request.first_position + place + 1
                keys = request.key[:seen][kept[:seen] >= 0]
                values = keys[..., :RANK]
                if len(keys) == 0:
                    assert not out[token].any()
                    assert lse[token].isneginf().all()
                else:
                    first = len(keys) - 1
                    right = oracle.attention(query, keys, values, first, request.rules)
                    dtype = query.dtype
                    low = low_precision(query, keys, values, first, request.rules, dtype)
                    found = out[token][None].cpu(), lse[token][None].cpu()
                    most = budget.budget(right[0], low[0], dtype)
                    assert budget.row_errors(found[0], right[0]).max() <= most
                    most_lse = budget.lse_budget(right[1], low[1])
                    assert budget.lse_errors(found[1], right[1]).max() <= most_lse
                token += 1


def test_padding_has_no_keys_on_any_rank() -> None:
    """Tokens and requests behind the batch's own, as in a captured graph."""
    step = Step(stripes_of(2, 1), STEPS["verify"])
    for rank in step.ranks:
        batch = rank.batch(*STEPS["verify"])
        tokens = batch.num_actual_tokens
        starts = torch.cat([batch.query_start_loc, batch.query_start_loc[-1:]])
        table = torch.cat([rank.table[:4], rank.table.new_full((1, COLUMNS), 1 << 20)])
        padded = batch.replace(
            num_reqs=5,
            num_actual_tokens=tokens + 3,
            query_start_loc=starts,
            query_start_loc_cpu=starts.cpu(),
            seq_lens=torch.cat([batch.seq_lens, batch.seq_lens.new_zeros(1)]),
            slot_mapping=torch.cat([batch.slot_mapping, batch.slot_mapping.new_full((3,), -1)]),
            block_table_tensor=table,
            seq_lens_cpu_upper_bound=None,
        )
        query = torch.cat([step.absorbed(tokens), step.absorbed(3)])
        plain = step.records[rank.stripe.rank]
        right = rank.impl.forward_mqa(query[:tokens], rank.cache, plain, rank.layer)
        found = rank.impl.forward_mqa(query, rank.cache, rank.builder.build(0, padded), rank.layer)
        assert torch.equal(found[0][:tokens], right[0])
        assert torch.equal(found[1][:tokens], right[1])
        assert not found[0][tokens:].any()
        assert found[1][tokens:].isneginf().all()


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_record_is_planned_anew_from_what_its_lengths_are_now(drafts: int) -> None:
    """As a graph of draft steps does it: the lengths grow in their place."""
    speculative = SpeculativeConfig(num_speculative_tokens=drafts) if drafts else None
    lens = ((1, 1, 1), (40, 18, 2))
    step = Step(stripes_of(2, 1), lens, speculative=speculative)
    for number, rank in enumerate(step.ranks):
        batch = rank.batch(lens[0], (37, 17, 1))
        record = rank.builder.build(0, batch)
        batch.seq_lens.copy_(torch.tensor(lens[1]))
        rank.builder.update_draft_decode_metadata(record)
        step.records[number] = record
    step.check()


def test_a_record_serves_another_groups_blocks() -> None:
    step = Step(stripes_of(2, 1), STEPS["mix"])
    right = [state[0] for state in step.states()]
    for number, rank in enumerate(step.ranks):
        batch = rank.batch(*STEPS["mix"])
        elsewhere = rank.builder.build(0, batch.replace(block_table_tensor=rank.table.flip(0)))
        table, slots = batch.block_table_tensor, batch.slot_mapping
        step.records[number] = rank.builder.update_block_table(elsewhere, table, slots)
    assert all(torch.equal(state[0], one) for state, one in zip(step.states(), right, strict=True))
    step.check()


def test_lengths_of_requests_are_those_of_the_rank() -> None:
    """An engine masks what it merges by these."""
    step = Step(stripes_of(3, 4), STEPS["mix"])
    for stripe, record in zip(stripes_of(3, 4), step.records, strict=True):
        assert record.decode.seq_lens.tolist() == [stripe.local_len(n) for n in (90, 33, 2)]
        assert record.decode.query_start_loc.tolist() == [0, 1, 5, 7]
        assert record.query_start_loc.tolist() == [0, 1, 5, 7, 37, 46]


@pytest.mark.parametrize("name", STEPS)
def test_a_build_reads_nothing_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = latent_weights(torch.Generator(), 2 * HEADS, torch.float32, RANK, NOPE, ROPE, VALUE)
    rank = Rank(Stripe(2, 1, 4), weights)
    monkeypatch.setattr(SplitPlanner, "fill", lambda *_, **__: None)
    names = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
    batch = rank.batch(*STEPS[name])
    given = batch.replace(**{one: on_device(getattr(batch, one).cpu()) for one in names})
    with MadeOnDevice():
        builder = TritonMLAMetadataBuilder(rank.spec, ["0"], rank.builder.vllm_config, "cpu")
        record = builder.build(0, given)
        builder.update_draft_decode_metadata(record)
        builder.update_block_table(record, given.block_table_tensor, given.slot_mapping)
    if record.ranked is not None:
        assert isinstance(record.ranked.step.seq_lens, OnDevice)
    if record.prefill is not None and record.prefill.context is not None:
        assert isinstance(record.prefill.context.exchanged(1).block_table, OnDevice)


@pytest.mark.parametrize("cache_dtype", [CacheDType.AUTO, CacheDType.FP8])
def test_serving_after_a_warm_up_meets_no_new_variant(
    monkeypatch: pytest.MonkeyPatch, cache_dtype: CacheDType
) -> None:
    step = Step(stripes_of(2, 1), STEPS["mix"], DType.FLOAT16, cache_dtype)
    rank, launches = step.ranks[0], []
    launch = KernelCall.launch_through_triton

    def noted(call: KernelCall) -> None:
        launches.append(call)
        launch(call)

    monkeypatch.setattr(KernelCall, "launch_through_triton", noted)
    rank.impl.all_gather = lambda rows: torch.cat([rows] * 2)
    rank.cache.view(torch.uint8).fill_(0x3C)
    rank.impl.warm_up(rank.layer, rank.cache, rank.builder, torch.float16)
    known = {variant_of(call) for call in launches}
    launches.clear()
    for limit in (1, 10**6):
        monkeypatch.setattr(rank.builder.expanded, "workspace_tokens", limit)
        record = rank.builder.build(0, rank.batch(*STEPS["mix"]))
        query = step.absorbed(record.num_decode_tokens)
        rank.impl.forward_mqa(query, rank.cache, record, rank.layer)
        step.prefill(rank, record)
    assert launches
    assert {variant_of(call) for call in launches} <= known


def test_ranks_must_be_able_to_exchange_context() -> None:
    step = Step(stripes_of(2, 1), STEPS["prefill"])
    with pytest.raises(ValueError, match="all_gather must be set where ranks share"):
        step.prefill(step.ranks[0], step.records[0])


def test_queries_have_the_heads_of_all_ranks() -> None:
    step = Step(stripes_of(2, 1), STEPS["decode"])
    rank = step.ranks[0]
    with pytest.raises(ValueError, match=rf"q must have shape \[\*, {2 * HEADS}, {RANK + ROPE}\]"):
        rank.impl.forward_mqa(step.absorbed(4)[:, :HEADS], rank.cache, step.records[0], rank.layer)


@pytest.mark.parametrize(
    ("spec", "config", "words"),
    [
        (
            SlidingWindowMLASpec(block_size=BLOCK, sliding_window=9),
            {},
            "must be MLAAttentionSpec with .*_size 2, got SlidingWindowMLASpec",
        ),
        (
            MLAAttentionSpec(block_size=BLOCK, dcp_sharded=False),
            {},
            "must be MLAAttentionSpec with .*_size 2, got dcp_sharded=False",
        ),
        (
            MLAAttentionSpec(block_size=BLOCK),
            {"num_heads": 3},
            r"num_heads \(3\) counts the heads of all ranks and must be a multiple of .*\(2\)",
        ),
    ],
)
def test_a_group_that_ranks_cannot_share_is_refused(
    spec: AnyKVCacheSpec, config: dict[str, Any], words: str
) -> None:
    parallel = ParallelConfig(decode_context_parallel_size=2)
    engine = EngineConfig(**{"max_model_len": 64, "num_heads": 4, "parallel": parallel, **config})
    with pytest.raises(ValueError, match=words):
        TritonMLAMetadataBuilder(spec, ["layers.0"], engine, DEVICE)
    assert TritonMLABackend.supports_dcp()


@pytest.mark.parametrize("stripe", [Stripe(1, 0, 1), Stripe(2, 1, 1), Stripe(3, 2, 4)])
def test_lengths_and_positions_of_a_rank_follow_from_each_other(stripe: Stripe) -> None:
    positions = torch.arange(-2, 60, dtype=torch.int32)
    lens = torch.arange(61, dtype=torch.int32)
    local = stripe.local_lens(lens)
    assert local.tolist() == [stripe.local_len(length) for length in range(61)]
    found = stripe.local_positions(positions)
    assert local.dtype == found.dtype == torch.int32
    kept = [place for place in range(60) if local[place + 1] > local[place]]
    assert positions[found >= 0].tolist() == kept
    assert found[found >= 0].tolist() == list(range(len(kept)))


@pytest.mark.parametrize("is_faulty", [False, True])
@pytest.mark.parametrize(
    "fault", ["rows share a length", "a context piece is another rank's", "lengths of rank 0"]
)
def test_faults_are_noticed(monkeypatch: pytest.MonkeyPatch, fault: str, is_faulty: bool) -> None:
    """A step is right without a fault, and wrong with a fault of one of its parts."""
    seeded: dict[str, Callable[[], None]] = {
        "rows share a length": lambda: _share_lengths(monkeypatch),
        "a context piece is another rank's": lambda: _swap_pieces(monkeypatch),
        "lengths of rank 0": lambda: monkeypatch.setattr(
            Stripe,
            "local_lens",
            lambda stripe, lens: _LOCAL_LENS(replace(stripe, rank=0), lens),
        ),
    }
    if is_faulty:
        seeded[fault]()
    name = "prefill" if fault.startswith("a context") else "verify"
    step = Step(stripes_of(2, 1), STEPS[name])
    if is_faulty:
        with pytest.raises(AssertionError):
            step.check()
    else:
        step.check()


_LOCAL_LENS = Stripe.local_lens


def _share_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token of a verify sees the keys of the request's last one."""
    from builders.latent.ranks import RankRows

    refill = RankRows.refill

    def shared(rows: RankRows, step: Any, ranked: Any, tokens: int) -> Tensor:
        local = refill(rows, step, ranked, tokens)
        owner, _ = rows._owners(step, tokens)
        rows._buffers.write("row_lens", local[owner])
        return local

    monkeypatch.setattr(RankRows, "refill", shared)


def _swap_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from builders.latent.prefill import LatentContext

    exchanged = LatentContext.exchanged
    monkeypatch.setattr(
        LatentContext,
        "exchanged",
        lambda context, piece: exchanged(context, piece // 2 * 2 + (1 - piece % 2)),
    )
