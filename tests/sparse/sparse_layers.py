"""A sparse layer with its indexer at work: steps over requests that keep their caches.

Unused slots hold NaN, tables hold wild blocks, and lists hold what a step before left there. Index
queries and keys are small integers: logits are then exact, whatever the order of their sums, and
full of ties, so lists are compared entry by entry. Expected states come from
``attn.testing.oracle``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attn.impls.base import LayerScales
from attn.impls.sparse.indexer import IndexInputs, SparseIndexer
from attn.ops.mla import mla_attention
from attn.reference.mla import absorb_query, project_latent_output
from attn.registry import AttentionBackendEnum
from attn.testing import oracle, stored_rows
from attn.testing.batches import POISON_BYTE, WILD_BLOCK
from attn.testing.budget import budget, low_precision, lse_budget, lse_errors, row_errors
from builders.batch import CommonAttentionMetadata
from builders.drafts.advance import advance
from builders.drafts.multi_step import MultiStepDraft
from builders.sparse.indexer import IndexerMetadata, IndexerMetadataBuilder
from builders.sparse.record import SparseMLAMetadata
from specs.dtypes import DType
from specs.engine import EngineConfig, Kernels, SparseKernels, SpeculativeConfig
from specs.kv_cache import IndexerSpec, MLAAttentionSpec
from specs.rows import LatentFormat, cache_dtype_of
from specs.sparse_mla import SparseKernel
from tests.tools.interpreter import in_torch

BLOCK = 64
K_SCALE = 0.25
TRIED_ROWS = 64
"""Most rows of a part that are computed in low precision, one by one, to know the budget."""
NAMES = {
    LatentFormat.BF16: "auto",
    LatentFormat.FP8_NOPE_FP8_ROPE: "fp8_e4m3",
    LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE: "fp8_ds_mla",
}
STATIC = ("query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu_upper_bound",
          "block_table_tensor", "slot_mapping")  # fmt: skip
"""Tensors of a batch that a captured step reads, and what builds in place read on the host."""
Part = tuple[int, int, int]
"""A part of a step: request, cached tokens, new tokens."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer, and of its cache."""

    num_heads: int = 4
    rank: int = 512
    rope: int = 64
    nope: int = 32
    v: int = 16
    topk: int = 24
    index_heads: int = 2
    index_dim: int = 32
    requests: int = 4
    longest: int = 256
    most_tokens: int = 160
    drafts: int = 3
    dtype: DType = DType.BFLOAT16


@dataclass(eq=False)
class Step:
    """The inputs of one step."""

    parts: Sequence[Part]
    batch: CommonAttentionMetadata
    query: Tensor
    """Queries ``[T, H, P + r]``."""
    new: Tensor
    """New latent rows ``[T, L + r]``."""
    index_query: Tensor
    index_key: Tensor
    weights: Tensor
    lists: list[Tensor] = field(default_factory=list)
    """The oracle's lists ``[new, topk]`` of each part: rising positions, then -1."""


class SparseLayer:
    """Builder, record and impl, their indexer, both caches, and random requests."""

    def __init__(
        self,
        layout: LatentFormat,
        device: str = "cpu",
        prefill: SparseKernel = SparseKernel.TRITON_SPARSE,
        decode: SparseKernel = SparseKernel.TRITON_SPARSE,
        sizes: Sizes = Sizes(),
        **settings: Any,
    ) -> None:
        """Refusals of the builder reach the caller."""
        self.layout, self.device, self.sizes = layout, torch.device(device), sizes
        self.random = torch.Generator().manual_seed(7)
        backend = AttentionBackendEnum["SPARSE_MLA"].get_class()
        self.cache_dtype = cache_dtype_of(layout)
        self.spec = MLAAttentionSpec(
            block_size=BLOCK,
            dtype=sizes.dtype,
            cache_dtype=self.cache_dtype,
            kv_lora_rank=sizes.rank,
            qk_rope_head_dim=sizes.rope,
            topk=sizes.topk,
        )
        self.config = EngineConfig(
            max_model_len=sizes.longest,
            max_num_seqs=sizes.requests,
            max_num_batched_tokens=sizes.most_tokens,
            num_heads=sizes.num_heads,
            softmax_scale=self.scale,
            index_topk=sizes.topk,
            speculative=SpeculativeConfig(num_speculative_tokens=sizes.drafts),
            kernels=Kernels(sparse=SparseKernels(prefill=prefill, decode=decode)),
        ).replace(**settings)
        self.builder: Any = backend.get_builder_cls()(self.spec, ["0"], self.config, self.device)
        index_spec = IndexerSpec(dtype=sizes.dtype, index_head_dim=sizes.index_dim)
        self.index_builder = IndexerMetadataBuilder(index_spec, ["0"], self.config, self.device)
        per = sizes.longest // BLOCK
        ids = 1 + torch.randperm(sizes.requests * per, generator=self.random).int()
        self.table = torch.full((sizes.requests, per + 1), WILD_BLOCK // BLOCK, dtype=torch.int32)
        self.table[:, :per] = ids.view(-1, per)
        blocks = len(ids) + 1
        self.cache = self.spec.layout().allocate(blocks, self.device, POISON_BYTE)
        self.index_cache = index_spec.layout().allocate(blocks, self.device, POISON_BYTE)
        shape = (sizes.requests, sizes.longest)
        self.keys = self.normal(*shape, sizes.rank + sizes.rope)
        self.index_keys = self.integers(-4, 5, *shape, sizes.index_dim)
        lists = torch.full((sizes.most_tokens, sizes.topk), WILD_BLOCK, dtype=torch.int32)
        self.indexer = SparseIndexer(lists.to(self.device))
        self.scales = LayerScales.of(device=self.device)
        self.scales._k_scale = torch.tensor(K_SCALE, device=self.device)
        self.impl: Any = self._impl(backend)
        self._attend, self.impl.forward_mqa = self.impl.forward_mqa, self._attend_and_keep
        self.state: tuple[Tensor, Tensor] | None = None
        """What the last forward's ``forward_mqa`` returned."""

    def _impl(self, backend: Any) -> Any:
        sizes = self.sizes
        weight = self.normal(sizes.num_heads * (sizes.nope + sizes.v), sizes.rank)
        impl = backend.get_impl_cls()(
            *(sizes.num_heads, sizes.rank + sizes.rope, self.scale, 1, None, None),
            self.cache_dtype.value,
            kv_lora_rank=sizes.rank,
            qk_nope_head_dim=sizes.nope,
            qk_rope_head_dim=sizes.rope,
            qk_head_dim=sizes.nope + sizes.rope,
            v_head_dim=sizes.v,
            kv_b_proj=SimpleNamespace(weight=(weight * sizes.rank**-0.5).to(self.device)),
            indexer=self.indexer,
        )
        impl.process_weights_after_loading(sizes.dtype.torch)
        return impl

    def _attend_and_keep(self, *given: Any) -> tuple[Tensor, Tensor]:
        self.state = self._attend(*given)
        return self.state

    @property
    def scale(self) -> float:
        return float((self.sizes.nope + self.sizes.rope) ** -0.5)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random).to(self.sizes.dtype.torch)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        found = torch.randint(low, high, shape, generator=self.random)
        return found.to(self.sizes.dtype.torch)

    def step(self, parts: Sequence[Part], padding: int = 0) -> Step:
        """The inputs of a step; ``padding`` adds so many tokens that belong to no request."""
        sizes, reqs = self.sizes, [req for req, _, _ in parts]
        batch = CommonAttentionMetadata.from_lengths(
            [new for _, _, new in parts],
            [done + new for _, done, new in parts],
            self.table[reqs].to(self.device),
            BLOCK,
        )
        tokens = batch.num_actual_tokens
        if padding:
            gone = torch.full((padding,), -1, dtype=torch.int64, device=self.device)
            slots = torch.cat([batch.slot_mapping, gone])
            batch = batch.replace(slot_mapping=slots, num_actual_tokens=tokens + padding)
        rows = tokens + padding

        def new(kept: Tensor) -> Tensor:
            own = [kept[req, done : done + count] for req, done, count in parts]
            return torch.cat([*own, kept.new_zeros(padding, kept.shape[-1])]).to(self.device)

        step = Step(
            parts,
            batch,
            self.normal(rows, sizes.num_heads, sizes.nope + sizes.rope).to(self.device),
            new(self.keys),
            self.integers(-2, 3, rows, sizes.index_heads, sizes.index_dim).to(self.device),
            new(self.index_keys),
            self.integers(1, 4, rows, sizes.index_heads).float().to(self.device),
        )
        at = 0
        for req, done, count in parts:
            own = slice(at, at + count)
            keys = self.index_keys[req, : done + count].to(self.device)
            query, weights = step.index_query[own], step.weights[own]
            lists = oracle.index_topk(query, keys, weights, done, sizes.topk)
            lists = lists.where(lists >= 0, 2**30).sort(-1).values
            step.lists.append(lists.where(lists < 2**30, -1))
            at += count
        return step

    def records(self, step: Step) -> tuple[SparseMLAMetadata, IndexerMetadata]:
        return self.builder.build(0, step.batch), self.index_builder.build(0, step.batch)

    def forward(
        self, step: Step, records: tuple[SparseMLAMetadata, IndexerMetadata], output: Tensor
    ) -> None:
        """Run the whole layer, from projections to values."""
        record, index = records
        rank = self.sizes.rank
        inputs = IndexInputs(
            step.index_query, step.index_key, step.weights, self.index_cache, index
        )
        kv_c, k_pe = step.new[:, :rank], step.new[:, rank:]
        name, scale = self.cache_dtype.value, self.scales._k_scale
        self.impl.do_kv_cache_update(kv_c, k_pe, self.cache, record.slot_mapping, name, scale)
        mla_attention(
            *(self.impl, self.scales, step.query, kv_c, k_pe, self.cache, record, output), inputs
        )

    def fill(self) -> None:
        """Cache every token of every request; without a GPU, by torch."""
        with in_torch() if self.device.type == "cpu" else nullcontext():
            self._fill()

    def _fill(self) -> None:
        page = self.table[:, : self.sizes.longest // BLOCK].long()
        slots = (page[..., None] * BLOCK + torch.arange(BLOCK)).flatten().to(self.device)
        rows = self.keys.flatten(0, 1).to(self.device)
        parts = rows[:, : self.sizes.rank], rows[:, self.sizes.rank :]
        name, scale = self.cache_dtype.value, self.scales._k_scale
        self.impl.do_kv_cache_update(*parts, self.cache, slots, name, scale)
        keys = self.index_keys.flatten(0, 1).to(self.device)
        self.indexer.do_kv_cache_update(keys, self.index_cache, slots)

    def capture(self, step: Step) -> Captured:
        """Capture a step of this size and padding, to be replayed with other inputs."""
        return Captured(self, step)

    def blank(self, step: Step) -> Tensor:
        width = self.sizes.num_heads * self.sizes.v
        shape = (len(step.query), width)
        return torch.full(shape, float("nan"), dtype=self.sizes.dtype.torch, device=self.device)

    def run(self, step: Step) -> Tensor:
        """Build the records and run the layer."""
        output = self.blank(step)
        self.forward(step, self.records(step), output)
        return output

    def absorbed(self, step: Step) -> Tensor:
        """Absorbed queries ``[T, H, L + r]``."""
        nope = self.sizes.nope
        absorbed = absorb_query(step.query[..., :nope], self.impl.W_UK)
        return torch.cat([absorbed, step.query[..., nope:]], -1)

    def latents(self, step: Step, query: Tensor) -> tuple[Tensor, Tensor]:
        """States of absorbed queries over the lists that the indexer wrote."""
        record = self.builder.build(0, step.batch)
        latent, lse = self._attend(query, self.cache, record, self.scales)
        return latent, lse

    def check(self, step: Step, output: Tensor) -> None:
        """Check the last forward.

        Its lists are the oracle's, its states are the oracle's within their budget, and its output
        is made of its states.
        """
        sizes, record = self.sizes, self.builder.build(0, step.batch)
        count = record.num_actual_tokens
        if not count:
            return
        assert self.state is not None
        latent, lse = self.state
        query = self.absorbed(step)
        values = project_latent_output(latent, self.impl.W_UV).flatten(1)
        assert torch.equal(output[:count], values[:count])
        at, states, lows, tried = 0, [], [], []
        for (req, done, new), lists in zip(step.parts, step.lists, strict=True):
            own = slice(at, at + new)
            assert torch.equal(self.indexer.topk_indices_buffer[own], lists)
            is_prefill = record.decode is None or at >= record.decode.num_rows
            rows = record.prefill_rows if is_prefill else record.decode
            assert rows is not None
            real = self._real(req, done + new, rows.plan.reads)
            one = query[own].double()
            keys = real[:, : sizes.rank], real[:, sizes.rank :]
            states.append(
                oracle.sparse_mla(
                    one[..., : sizes.rank], one[..., sizes.rank :], *keys, lists, self.scale
                )
            )
            for t in torch.linspace(0, new - 1, min(new, TRIED_ROWS)).long().tolist():
                lows.append(self._low(one[t : t + 1], real[lists[t][lists[t] >= 0].long()]))
                tried.append(at + t)
            at += new
        if not states:
            return
        wanted, wanted_lse = (torch.cat([state[side] for state in states]) for side in (0, 1))
        low, low_lse = (torch.cat([state[side] for state in lows]) for side in (0, 1))
        limit = budget(wanted[tried], low, sizes.dtype.torch)
        lse_limit = lse_budget(wanted_lse[tried], low_lse)
        assert float(row_errors(latent[:at], wanted).max()) <= limit
        assert float(lse_errors(lse[:at], wanted_lse).max()) <= lse_limit

    def _real(self, req: int, count: int, reads: LatentFormat) -> Tensor:
        """Rows as the kernel is given them, in float64."""
        scaled = LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE
        # Rows are read as exactly as they are stored, except where they are block-scaled for a
        # kernel.
        name = NAMES[
            scaled if self.layout is LatentFormat.BF16 and reads is scaled else self.layout
        ]
        rows, scale = self.keys[req, :count], torch.tensor(K_SCALE)
        rows = stored_rows.quantized_latent(rows, name, scale, self.sizes.rank)
        return rows.to(self.device).double()

    def _low(self, query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        rules = oracle.Rules(scale=self.scale, causal=False)
        keys = rows[:, None]
        values = keys[..., : self.sizes.rank]
        return low_precision(query, keys, values, 0, rules, self.sizes.dtype.torch)


class Captured:
    """The whole layer in one CUDA graph; without a GPU, called over the captured records."""

    def __init__(self, layer: SparseLayer, step: Step) -> None:
        self.layer = layer
        own = {name: getattr(step.batch, name).clone() for name in STATIC}
        tensors = ("query", "new", "index_query", "index_key", "weights")
        given = {name: getattr(step, name).clone() for name in tensors}
        self.step = replace(step, batch=step.batch.replace(**own), **given)
        # The captured batch writes nothing to the cache: its slots are -1.
        self.step.batch.slot_mapping.fill_(-1)
        self.records = (
            layer.builder.build_for_cudagraph_capture(self.step.batch),
            layer.index_builder.build_for_cudagraph_capture(self.step.batch),
        )
        self.output = layer.blank(step)
        self.graph: Any = None
        self.call()
        if layer.device.type == "cuda":
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.call()
        # Keep the tensors of the captured forward: a replay writes them.
        self.state = layer.state

    def call(self) -> None:
        self.layer.forward(self.step, self.records, self.output)

    def replay(self, step: Step) -> Tensor:
        """Replay with another step of the same size, in the captured step's tensors."""
        layer, static = self.layer, self.step
        for name in STATIC:
            getattr(static.batch, name).copy_(getattr(step.batch, name))
        for name in ("query", "new", "index_query", "index_key", "weights"):
            getattr(static, name).copy_(getattr(step, name))
        batch = static.batch.replace(
            max_query_len=step.batch.max_query_len, max_seq_len=step.batch.max_seq_len
        )
        layer.builder.build(0, batch)
        layer.index_builder.build(0, batch)
        self.output.fill_(float("nan"))
        layer.indexer.topk_indices_buffer.fill_(WILD_BLOCK)
        if self.graph is None:
            self.call()
        else:
            self.graph.replay()
            torch.cuda.synchronize()
            layer.state = self.state
        return self.output.clone()


class Drafts:
    """Consecutive draft steps of the layer and its indexer, in one CUDA graph where there is a GPU.

    Drafted tokens are random like all others. The test is that a replay over another verified batch
    gives what steps give that are built one by one.
    """

    def __init__(self, layer: SparseLayer, num_steps: int) -> None:
        self.layer, self.num_steps = layer, num_steps
        builders = (layer.builder, layer.index_builder)
        self.drafts = [MultiStepDraft(builder, num_steps) for builder in builders]
        # A graph reads this tensor at a fixed address.
        self.table = layer.table.to(layer.device)
        every = [(req, 0, 1) for req in range(layer.sizes.requests)]
        self.steps = [layer.step(every) for _ in range(num_steps)]
        self.graph: Any = None

    def verified(self, lens: Sequence[int]) -> CommonAttentionMetadata:
        """A batch that verifies every request; a request without tokens has no query."""
        most = self.layer.sizes.drafts + 1
        new = [min(most, length) for length in lens]
        return CommonAttentionMetadata.from_lengths(new, list(lens), self.table, BLOCK)

    def begin(self, batch: CommonAttentionMetadata, rejected: Tensor) -> Any:
        return tuple(draft.begin(batch, rejected) for draft in self.drafts)

    def loop(self, records: Any) -> list[tuple[Tensor, Tensor]]:
        """Run all draft steps and return their outputs and lists."""
        found = []
        for at, step in enumerate(self.steps):
            if at:
                records = tuple(draft.next() for draft in self.drafts)
            found.append(self._forward(step, records))
        return found

    def _forward(self, step: Step, records: Any) -> tuple[Tensor, Tensor]:
        output = self.layer.blank(step)
        self.layer.forward(step, records, output)
        return output, self.layer.indexer.topk_indices_buffer[: len(output)].clone()

    def one_by_one(
        self, batch: CommonAttentionMetadata, rejected: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """The drafts' outputs and states, with a record built anew for each draft."""
        layer, found = self.layer, []
        for at, step in enumerate(self.steps):
            batch = advance(batch, BLOCK, layer.sizes.longest, None if at else rejected)
            builders = (layer.builder, layer.index_builder)
            records = tuple(builder.build_for_drafting(batch, at) for builder in builders)
            found.append(self._forward(step, records))
        return found

    def check(self, lens: Sequence[Sequence[int]]) -> None:
        """Replay over verified batches of these lengths; the first one is captured."""
        layer = self.layer
        rejected = torch.zeros(layer.sizes.requests, dtype=torch.int32, device=layer.device)
        batch = self.verified(lens[0])
        captured = self.loop(self.begin(batch, rejected))
        records = self.begin(batch, rejected)
        if layer.device.type == "cuda":
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                captured = self.loop(records)
        for place, chosen in enumerate(lens):
            batch = self.verified(chosen)
            refused = (torch.arange(len(chosen)) + place) % (layer.sizes.drafts + 1)
            refused = torch.minimum(refused, torch.tensor(chosen) - 1).clamp(min=0)
            refused = refused.int().to(layer.device)
            records = self.begin(batch, refused)
            if self.graph is None:
                captured = self.loop(records)
            else:
                self.graph.replay()
                torch.cuda.synchronize()
            wanted = self.one_by_one(batch, refused)
            live = [req for req, length in enumerate(chosen) if length]
            for (output, lists), (one, own) in zip(captured, wanted, strict=True):
                assert torch.equal(lists[live], own[live])
                assert torch.equal(output[live], one[live])
                assert bool(output[live].isfinite().all())
