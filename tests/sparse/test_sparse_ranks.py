"""Decode context parallelism of sparse layers: ranks one after another, against the definition.

Lists of all ranks are those of one rank that has all keys, entry by entry: logits are exact, and
full of ties.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn.backends.sparse_mla import SparseMLABackend
from attn.impls.sparse.indexer import IndexInputs
from attn.ops import rank_topk
from attn.ops.indexer import select_topk
from attn.ops.topk_transform import transform_topk
from attn.reference.mla import project_latent_output
from attn.reference.rank_topk import merge_candidates as merge_in_torch
from attn.reference.topk_transform import transform_topk as transform_in_torch
from attn.testing.budget import budget, row_errors
from builders.launch.call import KernelCall
from builders.sparse import indexer as builders
from builders.sparse.arguments import TopkLists
from builders.sparse.indexer import IndexerMetadataBuilder
from builders.sparse.sparse_mla import SparseMLAMetadataBuilder
from builders.splitkv.stripe import Stripe
from specs.dtypes import DType
from specs.engine import EngineConfig, Kernels, ParallelConfig, SparseKernels
from specs.kv_cache import IndexerSpec, MLAAttentionSpec
from specs.rows import LatentFormat
from specs.sparse_mla import STORED_FORMATS, IndexKind, SparseKernel
from tests.emulators.flashinfer_emulator import MadeOnDevice, on_device
from tests.latent.rank_turns import Gather, in_turns
from tests.sparse.sparse_layers import BLOCK, Sizes, SparseLayer, Step
from tests.sparse.test_short_prompts import expected_of
from tests.tools.interpreter import variant_of

BF16, RAW, SCALED = STORED_FORMATS
SMALL = Sizes(rank=128, rope=32, nope=16, v=16)
STEPS = {
    "prompts": ([(0, 0, 70), (1, 0, 9)], 0),
    "decodes": ([(0, 70, 1), (1, 9, 1)], 0),
    "verify": ([(0, 71, 4), (1, 10, 2), (2, 0, 1)], 2),
    "mixed": ([(0, 75, 1), (1, 12, 4), (2, 1, 30), (3, 0, 5)], 3),
    "later prompts": ([(2, 31, 36), (3, 5, 8)], 0),
    "idle": ([], 0),
    "at the end": ([(3, 13, 1), (0, 76, 54)], 0),
}
"""Parts of each step (request, cached tokens, new tokens) and its padding. Some tokens see keys of
one rank only."""


class RankLayer(SparseLayer):
    """One rank's part of a layer: its heads, and caches of its own tokens."""

    def __init__(self, stripe: Stripe, layout: LatentFormat, sizes: Sizes, **settings: Any) -> None:
        self.stripe = stripe
        parallel = ParallelConfig(
            decode_context_parallel_size=stripe.size,
            decode_context_parallel_rank=stripe.rank,
            dcp_interleave=stripe.interleave,
        )
        super().__init__(layout, sizes=sizes, parallel=parallel, **settings)

    def _impl(self, backend: Any) -> Any:
        whole, count = super()._impl(backend), self.sizes.num_heads // self.stripe.size
        first = self.stripe.rank * count
        weight = whole.kv_b_proj.weight.unflatten(0, (self.sizes.num_heads, -1))
        impl = backend.get_impl_cls()(
            *(count, self.sizes.rank + self.sizes.rope, self.scale, 1, None, None),
            self.cache_dtype.value,
            kv_lora_rank=self.sizes.rank,
            qk_nope_head_dim=self.sizes.nope,
            qk_rope_head_dim=self.sizes.rope,
            qk_head_dim=self.sizes.nope + self.sizes.rope,
            v_head_dim=self.sizes.v,
            kv_b_proj=SimpleNamespace(weight=weight[first : first + count].flatten(0, 1)),
            indexer=self.indexer,
        )
        impl.process_weights_after_loading(self.sizes.dtype.torch)
        return impl

    def local_batch(self, step: Step) -> Any:
        """The step's batch as this rank's engine makes it."""
        slots = []
        for req, done, new in step.parts:
            place = self.stripe.local_positions(torch.arange(done, done + new, dtype=torch.int32))
            at = place.clamp(min=0)
            mine = self.table[req][at // BLOCK].long() * BLOCK + at % BLOCK
            slots.append(torch.where(place >= 0, mine, -1))
        batch = step.batch
        slots.append(torch.full((batch.num_actual_tokens - sum(map(len, slots)),), -1))
        return batch.replace(slot_mapping=torch.cat(slots), dcp_local_seq_lens=batch.seq_lens)


class Ranks:
    """A layer over several ranks beside the same layer with all keys, which has the oracle."""

    def __init__(
        self,
        ranks: int,
        interleave: int,
        layout: LatentFormat = BF16,
        sizes: Sizes = SMALL,
        **settings: Any,
    ) -> None:
        self.whole = SparseLayer(layout, sizes=sizes, **settings)
        self.ranks = [
            RankLayer(Stripe(ranks, rank, interleave), layout, sizes, **settings)
            for rank in range(ranks)
        ]

    def exchanged(self, work: Callable[[RankLayer], Any]) -> list[Any]:
        """What ``work`` gives on every rank."""

        def work_of(rank: RankLayer) -> Callable[[Gather], Any]:
            def run(gather: Gather) -> Any:
                rank.indexer.all_gather = rank.impl.all_gather = gather
                return work(rank)

            return run

        return in_turns([work_of(rank) for rank in self.ranks])

    def lists(self, step: Step) -> list[Tensor]:
        """The lists that every rank writes."""

        def index(rank: RankLayer) -> Tensor:
            record = rank.index_builder.build(0, rank.local_batch(step))
            given = step.index_query, step.index_key, step.weights, rank.index_cache, record
            return rank.indexer.forward(IndexInputs(*given)).clone()

        return self.exchanged(index)

    def run(self, step: Step) -> None:
        """Run a step on all ranks, and check its lists and its merged states."""
        lists = self.lists(step)
        assert all(torch.equal(one, lists[0]) for one in lists)
        whole, states = self.whole, []
        query = whole.absorbed(step)
        for rank in self.ranks:
            record = rank.builder.build(0, rank.local_batch(step))
            self._write(rank, step, record)
            latent, lse = rank.impl.forward_mqa(query, rank.cache, record, rank.scales)
            assert latent.isfinite().all()
            assert not latent[lse.isneginf()].any()
            states.append((latent.double(), lse.double()))
        latents, lses = (torch.stack([state[side] for state in states]) for side in (0, 1))
        shares = torch.softmax(lses, 0).nan_to_num()[..., None]
        latent = (latents * shares).sum(0).to(whole.sizes.dtype.torch)
        whole.state = latent, torch.logsumexp(lses, 0).float()
        whole.indexer.topk_indices_buffer[: len(lists[0])] = lists[0]
        whole.check(step, project_latent_output(latent, whole.impl.W_UV).flatten(1))

    def _write(self, rank: RankLayer, step: Step, record: Any) -> None:
        width = rank.sizes.rank
        rank.impl.do_kv_cache_update(
            *(step.new[:, :width], step.new[:, width:], rank.cache, record.slot_mapping),
            *(rank.cache_dtype.value, rank.scales._k_scale),
        )


@pytest.mark.parametrize(
    ("layout", "ranks", "interleave", "settings"),
    [
        (BF16, 2, 1, {}),
        (BF16, 4, 4, {}),
        (RAW, 2, 1, {}),
        (SCALED, 2, 16, {}),
        (BF16, 2, 1, {"batch_invariant": True}),
    ],
)
def test_a_layer_over_several_ranks_is_the_whole_layer(
    layout: LatentFormat, ranks: int, interleave: int, settings: dict[str, Any]
) -> None:
    layers, is_first = Ranks(ranks, interleave, layout, **settings), (ranks, settings) == (2, {})
    names = STEPS if is_first and layout is BF16 else list(STEPS)[:4]
    for parts, padding in (STEPS[name] for name in names):
        layers.run(layers.whole.step(parts, padding))


@pytest.mark.parametrize(
    ("limit", "size"),
    [("LOGIT_BYTES", 3 * 64 * 4), ("CANDIDATE_BYTES", 5000), ("KEY_BYTES", 0)],
)
def test_what_does_not_fit_is_held_and_exchanged_in_turn(
    monkeypatch: pytest.MonkeyPatch, limit: str, size: int
) -> None:
    """Few rows' logits, few rows' candidates, or few requests' keys fit at a time."""
    monkeypatch.setattr(builders, limit, size)
    layers = Ranks(2, 1, sizes=replace(SMALL, longest=64))
    turns = []
    for parts in ([(0, 0, 30), (1, 0, 20), (2, 0, 9)], [(0, 30, 4), (1, 20, 30), (2, 9, 20)]):
        step = layers.whole.step(parts)
        record = layers.ranks[0].index_builder.build(0, layers.ranks[0].local_batch(step))
        assert record.prefill is not None
        turns.append(sum(len(group.chunks) for group in record.prefill.groups))
        layers.run(step)
    assert turns[1] > 1


def test_drafts_are_listed_by_what_lengths_are_now() -> None:
    """Records of draft steps are planned anew in their place, as in a graph."""
    layers = Ranks(2, 1)
    layers.run(layers.whole.step([(0, 0, 70), (1, 0, 30)]))
    step = layers.whole.step([(0, 70, 1), (1, 30, 1)])

    def index(rank: RankLayer) -> Tensor:
        batch = rank.local_batch(step)
        lens = batch.seq_lens.clone()
        earlier = batch.replace(seq_lens=(lens - 9).clone())
        record = rank.index_builder.build_for_drafting(earlier, 1)
        earlier.seq_lens.copy_(lens)
        rank.index_builder.update_draft_decode_metadata(record)
        given = step.index_query, step.index_key, step.weights, rank.index_cache, record
        return rank.indexer.forward(IndexInputs(*given)).clone()

    wanted = torch.cat(step.lists)
    assert all(torch.equal(lists, wanted) for lists in layers.exchanged(index))


def test_short_prompts_attend_every_key_of_all_ranks() -> None:
    layers = Ranks(2, 1, sizes=replace(SMALL, v=32), dense_short_prompts=True)
    first = layers.whole.step([(0, 0, 1), (1, 0, 2)])
    layers.whole.run(first)
    layers.run(first)
    for parts in ([(0, 1, 9), (1, 2, 8)], [(0, 10, 8), (2, 0, 20)]):
        step = layers.whole.step(parts)
        layers.whole.run(step)

        def prefill(rank: RankLayer, step: Step = step) -> Tensor:
            record = rank.builder.build(0, rank.local_batch(step))
            assert record.prefill is not None
            layers._write(rank, step, record)
            count, width = rank.impl.num_heads, rank.sizes.rank
            heads = slice(rank.stripe.rank * count, (rank.stripe.rank + 1) * count)
            found = step.query.new_full((len(step.query), count * rank.sizes.v), float("nan"))
            rank.impl.forward_mha(
                *(step.query[:, heads].contiguous(), step.new[:, :width], step.new[:, width:]),
                *(rank.cache, record, rank.scales._k_scale, found),
            )
            return found

        sizes = layers.whole.sizes
        found = torch.cat(layers.exchanged(prefill), -1).view(-1, sizes.num_heads, sizes.v)
        wanted, low = expected_of(layers.whole, step)
        assert float(row_errors(found, wanted).max()) <= budget(wanted, low, sizes.dtype.torch)


def test_builds_read_nothing_back() -> None:
    layers = Ranks(2, 4)
    rank = layers.ranks[1]
    names = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
    with MadeOnDevice():
        made = [
            SparseMLAMetadataBuilder(rank.spec, ["0"], rank.config, "cpu"),
            IndexerMetadataBuilder(IndexerSpec(index_head_dim=32), ["0"], rank.config, "cpu"),
        ]
        for parts, padding in STEPS.values():
            if not parts:
                continue
            batch = rank.local_batch(layers.whole.step(parts, padding))
            given = batch.replace(**{name: on_device(getattr(batch, name)) for name in names})
            for builder in made:
                record = builder.build(0, given)
                builder.update_block_table(record, given.block_table_tensor, given.slot_mapping)
                if batch.max_query_len <= made[1].threshold:
                    builder.build_for_cudagraph_capture(given)
                    builder.update_draft_decode_metadata(builder.build_for_drafting(given, 1))


def test_serving_after_a_warm_up_meets_no_new_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, launches = Ranks(2, 1), []
    rank = layers.ranks[0]
    launch = KernelCall.launch_through_triton

    def noted(call: KernelCall) -> None:
        launches.append(call)
        launch(call)

    monkeypatch.setattr(KernelCall, "launch_through_triton", noted)
    rank.indexer.all_gather = rank.impl.all_gather = lambda rows: torch.cat([rows] * 2)
    step = layers.whole.step([(0, 0, 1)])
    query, key = step.index_query[:1], step.index_key[:1]
    rank.indexer.warm_up(query, key, rank.index_cache, rank.index_builder)
    rank.impl.warm_up(rank.scales, rank.cache, rank.builder, rank.sizes.dtype.torch)
    known = {variant_of(call) for call in launches}
    launches.clear()
    for parts, padding in (STEPS[name] for name in ("prompts", "verify")):
        step = layers.whole.step(parts, padding)
        batch = rank.local_batch(step)
        record, index = rank.builder.build(0, batch), rank.index_builder.build(0, batch)
        layers._write(rank, step, record)
        given = step.index_query, step.index_key, step.weights, rank.index_cache, index
        rank.indexer.forward(IndexInputs(*given))
        rank.impl.forward_mqa(layers.whole.absorbed(step), rank.cache, record, rank.scales)
    assert launches
    assert {variant_of(call) for call in launches} <= known


def test_ranks_must_be_able_to_exchange_candidates() -> None:
    layers = Ranks(2, 1)
    step = layers.whole.step([(0, 0, 9)])
    rank = layers.ranks[0]
    record = rank.index_builder.build(0, rank.local_batch(step))
    given = step.index_query, step.index_key, step.weights, rank.index_cache, record
    with pytest.raises(ValueError, match="all_gather must be set where ranks share the keys"):
        rank.indexer.forward(IndexInputs(*given))


@pytest.mark.parametrize("is_faulty", [False, True])
@pytest.mark.parametrize("fault", ["candidates", "entries", "lengths"])
def test_faults_are_noticed(monkeypatch: pytest.MonkeyPatch, fault: str, is_faulty: bool) -> None:
    """A rank sends places for positions, reads other ranks' rows, or takes rank 0's lengths."""
    layers = Ranks(2, 1)
    if is_faulty and fault == "candidates":
        from attn.impls.sparse import indexer

        pack = rank_topk.pack_candidates
        unplaced = replace(layers.ranks[0].stripe, size=1)
        monkeypatch.setattr(
            indexer, "pack_candidates", lambda logits, lists, _: pack(logits, lists, unplaced)
        )
    if is_faulty and fault == "entries":
        for rank in layers.ranks:
            rank.builder.stripe = replace(rank.stripe, rank=1 - rank.stripe.rank)
    if is_faulty and fault == "lengths":
        layers.ranks[1].index_builder.stripe = replace(layers.ranks[1].stripe, rank=0)

    def run() -> None:
        for parts in ([(0, 0, 30), (1, 0, 29)], [(0, 30, 1), (1, 29, 4)]):
            layers.run(layers.whole.step(parts))

    if is_faulty:
        with pytest.raises(AssertionError):
            run()
    else:
        run()


@pytest.mark.parametrize("stripes", [(1, 1), (2, 1), (3, 4), (4, 16)])
def test_candidates_of_all_ranks_give_the_lists_of_all_keys(stripes: tuple[int, int]) -> None:
    size, interleave = stripes
    generator = torch.Generator().manual_seed(1)
    rows, width, topk = 7, 200, 24
    # Few values: most logits have equals.
    logits = torch.randint(-3, 4, (rows, width), generator=generator).float()
    lens = torch.tensor([0, 1, 23, 24, 25, 130, 200], dtype=torch.int32)
    wanted = torch.full((rows, topk), 7, dtype=torch.int32)
    select_topk(logits, lens, wanted)
    sent = []
    for rank in range(size):
        stripe = Stripe(size, rank, interleave)
        kept = stripe.local_positions(torch.arange(width, dtype=torch.int32)) >= 0
        own = logits[:, kept].contiguous()
        lists = torch.full((rows, topk), 7, dtype=torch.int32)
        select_topk(own, stripe.local_lens(lens), lists)
        sent.append(rank_topk.pack_candidates(own, lists, stripe))
        in_torch = rank_topk.reference.pack_candidates(own, lists, stripe)
        assert torch.equal(sent[-1], in_torch)
    candidates = torch.stack(sent)
    found, room = torch.full_like(wanted, 7), torch.full((rows, width), float("nan"))
    rank_topk.merge_candidates(candidates, lens, room, found)
    assert torch.equal(found, wanted)
    merge_in_torch(candidates, lens, found.fill_(7))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("stripe", [Stripe(2, 1, 1), Stripe(3, 2, 4)])
def test_lists_become_entries_of_the_rank_s_own_rows(stripe: Stripe, compact: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(-1, 90, (5, 24), generator=generator).int()
    visible, reqs = torch.tensor([0, 3, 40, 90, 90]).int(), torch.tensor([0, 0, 1, 1, 0]).int()
    table = torch.randperm(12, generator=generator).int().view(2, 6)
    entries = []
    for run in (transform_topk, transform_in_torch):
        out, counts = torch.full((5, 32), 7).int(), torch.full((5,), 7).int()
        given = TopkLists(ids, visible, reqs, stripe), IndexKind.PAGED, out
        kept = counts if compact else None
        if run is transform_topk:
            run(*given, block_table=table, block_size=16, counts=kept)
        else:
            run(*given, table, 16, None, None, kept)
        entries.append((out, counts))
    assert torch.equal(entries[0][0], entries[1][0])
    assert torch.equal(entries[0][1], entries[1][1])
    seen = (ids >= 0) & (ids < visible[:, None])
    own = (stripe.local_positions(ids) >= 0) & seen
    assert int((entries[0][0] >= 0).sum()) == int(own.sum())


@pytest.mark.parametrize(
    ("spec", "config", "words"),
    [
        ({"dcp_sharded": False}, {}, "dcp_sharded must be True with decode_context_parallel_size"),
        ({}, {"num_heads": 3}, r"num_heads \(3\) counts the heads of all ranks"),
        (
            {"cache_dtype": "fp8_ds_mla"},
            {"kernels": Kernels(sparse=SparseKernels(decode=SparseKernel.FLASHMLA_KV))},
            "decode_context_parallel_size must be 1 for flashmla_kv, got 2: use triton_sparse",
        ),
    ],
)
def test_a_group_that_ranks_cannot_share_is_refused(
    spec: dict[str, Any], config: dict[str, Any], words: str
) -> None:
    parallel = ParallelConfig(decode_context_parallel_size=2)
    known = {"max_model_len": 64, "num_heads": 4, "parallel": parallel, "index_topk": 64}
    engine = EngineConfig(**{**known, **config})
    group = MLAAttentionSpec(**{"block_size": BLOCK, "dtype": DType.BFLOAT16, **spec})
    with pytest.raises(ValueError, match=words):
        SparseMLAMetadataBuilder(group, ["layers.0"], engine, "cpu")
    assert SparseMLABackend.supports_dcp()
