"""``attn run``: serve a trace's continuous batch through one backend triple per kind of layer.

The replay runs attention alone and is no engine: tensors are random, and arrival times only give
the order of requests.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from attn.backends.base import AttentionBackend
from attn.bench.results.origin import command_line, versions
from attn.cli.blocks import BlockAllocator
from attn.cli.check import Verdict, judge
from attn.cli.corrupt import applies_to, corrupt_backend
from attn.cli.faults import Fault
from attn.cli.kernels import backend_asked_for
from attn.cli.layers import LayerSetup, ReplayLayer, Row, StepInputs, index_spec, make_layer
from attn.cli.report import LayerGroupReport, Place, RunReport, StepRecord
from attn.cli.scheduler import KVBudgetError, Scheduler, StepPlan
from attn.cli.tensors import TensorSource
from attn.cli.trace import TraceRequest
from attn.errors import UnsupportedError
from attn.selector import SelectionReport, chosen_backend, explain, is_withheld
from attn.selector import Verdict as Choice
from builders.base import AttentionMetadataBuilder
from builders.batch import CommonAttentionMetadata
from builders.sparse.indexer import IndexerMetadataBuilder
from specs.devices import Device
from specs.dtypes import CacheDType, KVQuantMode
from specs.engine import EngineConfig, Kernels, ParallelConfig, SpeculativeConfig
from specs.kv_cache import AnyKVCacheSpec
from specs.layouts import LatentKVLayout
from specs.model import LayerGeometry, LayerKind, ModelGeometry
from specs.rows import INDEXER_PAGE
from specs.sentinels import NULL_BLOCK_ID


@dataclass(frozen=True)
class RunSettings:
    """Settings of a replay."""

    model: ModelGeometry
    """Geometry of the layers to run, as one rank sees them."""
    device: Device
    backend: str | None = None
    """Registry name of the backend of every layer; None means the automatic choice."""
    kv_cache_dtype: CacheDType = CacheDType.AUTO
    block_size: int | None = None
    """Tokens per block; None means the backend's preferred size."""
    tensor_parallel_size: int = 1
    """Tensor-parallel ranks; the replay runs one of them."""
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    kv_memory_bytes: int | None = None
    """Bytes of the KV cache of all layers; None means as many as the ``max_num_seqs`` longest
    requests need."""
    check_rows: int = 4
    """Number of tokens per step that are checked, in one layer of each group."""
    seed: int = 0
    fault: Fault | None = None
    kernels: Kernels = field(default_factory=Kernels)
    """Kernels by name. A field that was set asks for a backend that reads it."""
    num_speculative_tokens: int = 0
    """Draft tokens that a decode verifies."""


@dataclass
class _Group:
    """A group of equal layers, which share a spec, a backend, a builder and block tables."""

    geometry: LayerGeometry
    indices: tuple[int, ...]
    spec: AnyKVCacheSpec
    backend: type[AttentionBackend]
    decision: SelectionReport
    num_blocks: int = 0
    """Blocks of the group's caches, the null block included."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the group, the indexer's pages included."""
        page = self.spec.page_size_bytes
        if self.geometry.indexer is not None:
            page += index_spec(self.geometry, self.spec).page_size_bytes
        return len(self.indices) * page


def choose_groups(settings: RunSettings) -> list[_Group]:
    """Choose the backend and spec of every kind of layer.

    Raises:
        UnsupportedError: no backend, or not the backend asked for, serves a kind of layer.
        ValueError: a block size or fault does not apply to the model.
    """
    model = settings.model
    if any(layer.kind is LayerKind.ENCODER_ONLY for layer in model.layers):
        raise UnsupportedError(
            f"attn run replays decoders; {model.name} cannot be run:",
            ["encoder-only layers cache nothing and generate nothing"],
        )
    if any(layer.shares_kv for layer in model.layers):
        raise UnsupportedError(
            f"attn run cannot replay {model.name}; fewer --layers may leave these out:",
            ["layers that attend another layer's cache are not replayed"],
        )
    engine = EngineConfig(max_model_len=model.max_position_embeddings, kernels=settings.kernels)
    groups = []
    for geometry, indices in model.groups():
        request = geometry.selector_config(
            model.dtype, settings.kv_cache_dtype, settings.block_size, engine
        )
        asked = backend_asked_for(settings.kernels, geometry, settings.backend, model.name)
        # A replay that checks a model is worth running at reference speed too; it says so.
        decision = explain(request, settings.device, asked, allow_reference=True)
        backend = chosen_backend(decision)
        block_size = settings.block_size or backend.get_preferred_block_size()
        if geometry.indexer is not None and block_size != INDEXER_PAGE:
            raise UnsupportedError(
                f"block_size {block_size} cannot serve {model.name}:",
                [f"the indexer's planar pages hold {INDEXER_PAGE} tokens"],
            )
        spec = geometry.kv_cache_spec(block_size, model.dtype, settings.kv_cache_dtype)
        groups.append(_Group(geometry, indices, spec, backend, decision))
    if settings.fault is not None:
        _spoil(groups, settings.fault, model.name)
    return groups


def reference_notes(groups: Sequence[_Group], device: Device) -> list[str]:
    """A line for each kind of layer that gets a reference backend on a GPU by automatic choice."""
    return [
        f"{group.geometry.label}: no kernel for {device.name} serves these layers; "
        f"{group.decision.chosen} does, in plain torch"
        for group in groups
        if group.decision.asked_for is None and is_withheld(str(group.decision.chosen), device.kind)
    ]


def _spoil(groups: list[_Group], fault: Fault, model: str) -> None:
    hit = False
    for group in groups:
        scaled = group.spec.kv_quant_mode is KVQuantMode.FP8_PER_TENSOR
        if applies_to(fault, group.geometry, scaled):
            group.backend, hit = corrupt_backend(group.backend, fault), True
    if not hit:
        raise ValueError(f"corrupt {fault.value!r} has nothing to break in {model}")


def size_groups(
    groups: Sequence[_Group], settings: RunSettings, requests: Sequence[TraceRequest]
) -> None:
    """Divide the KV budget over the groups in proportion to the blocks that requests need.

    Raises:
        KVBudgetError: the budget exceeds the free memory, or does not hold a block of every group
            in addition to its null block.
    """
    inflight = settings.max_num_batched_tokens
    lengths = sorted((request.num_cached_tokens for request in requests), reverse=True)
    largest = lengths[: settings.max_num_seqs]
    blocks = [sum(group.spec.num_blocks_for(n, inflight) for n in largest) for group in groups]
    demand = sum(n * group.block_bytes for n, group in zip(blocks, groups, strict=True))
    budget = settings.kv_memory_bytes
    memory = available_memory(settings.device)
    if (demand if budget is None else budget) > memory:
        raise KVBudgetError(
            f"kv_memory must fit into the {memory} bytes that are free on {settings.device.name}, "
            f"got {demand if budget is None else budget}"
        )
    for group, needed in zip(groups, blocks, strict=True):
        if budget is None:
            group.num_blocks = needed + 1
            continue
        page = group.block_bytes
        group.num_blocks = budget * needed // demand
        if group.num_blocks < 2:
            raise KVBudgetError(
                f"a KV budget smaller than one request: {budget} bytes leave {group.num_blocks} "
                f"blocks of {page} bytes for {group.geometry.kind.value} layers, expected 2 or more"
            )


def available_memory(device: Device) -> int:
    """Free bytes of this machine's GPU, or of its host memory for the CPU."""
    if device.torch_type == "cuda":
        return torch.cuda.mem_get_info()[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Replay:
    """A replay with its scheduler, groups and layers."""

    def __init__(self, settings: RunSettings, requests: Sequence[TraceRequest]) -> None:
        """
        Args:
            settings: settings of the replay.
            requests: requests in arrival order, none longer than the model allows.

        Raises:
            UnsupportedError: no backend serves a layer.
            KVBudgetError: the cache cannot hold a request.
        """
        if not requests:
            raise ValueError("requests must hold at least one request, got none")
        self.settings = settings
        self.requests = requests
        self.groups = choose_groups(settings)
        size_groups(self.groups, settings, requests)
        self.device = torch.device(settings.device.torch_type)
        self.allocators = [
            BlockAllocator(group.num_blocks, group.spec.block_size, group.spec, seed=settings.seed)
            for group in self.groups
        ]
        self.scheduler = Scheduler(
            *(requests, self.allocators, settings.max_num_seqs, settings.max_num_batched_tokens),
            settings.num_speculative_tokens,
        )
        dtype = settings.model.dtype.torch
        self.source = TensorSource(settings.seed, dtype, self.device)
        drafts, speculative = settings.num_speculative_tokens, None
        if drafts:
            speculative = SpeculativeConfig(num_speculative_tokens=drafts)
        engine = EngineConfig(
            max_model_len=settings.model.max_position_embeddings,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            parallel=ParallelConfig(tensor_parallel_size=settings.tensor_parallel_size),
            kernels=settings.kernels,
            speculative=speculative,
        )
        self.builders: list[AttentionMetadataBuilder[Any]] = []
        self.index_builders: list[IndexerMetadataBuilder | None] = []
        self.layers: list[list[ReplayLayer]] = []
        for group in self.groups:
            names = [f"layers.{index}" for index in group.indices]
            builder = group.backend.get_builder_cls()
            indexer = group.geometry.indexer
            own = engine.replace(
                num_heads=group.geometry.num_heads,
                logits_soft_cap=group.geometry.logits_soft_cap,
                has_sinks=group.geometry.has_sinks,
                softmax_scale=group.geometry.scale,
                index_topk=group.geometry.index_topk,
            )
            self.builders.append(builder(group.spec, names, own, self.device))
            index_builder = None
            if indexer is not None:
                pages = index_spec(group.geometry, group.spec)
                index_builder = IndexerMetadataBuilder(pages, names, own, self.device)
            self.index_builders.append(index_builder)
            self.layers.append([self._make_layer(group, index) for index in group.indices])
        self.lengths = [request.num_cached_tokens for request in requests]
        self.steps: list[StepRecord] = []
        self.interrupted = False

    def _make_layer(self, group: _Group, index: int) -> ReplayLayer:
        """Make a layer of a group; earlier groups hold the layers that may make its lists."""
        made_by = self.settings.model.list_maker(index)
        made = {layer.index: layer for layers in self.layers for layer in layers}
        setup = LayerSetup(
            geometry=group.geometry,
            index=index,
            spec=group.spec,
            backend=group.backend,
            num_blocks=group.num_blocks,
            source=self.source,
        )
        return make_layer(setup, None if made_by is None else made[made_by])

    def run(self, on_step: Callable[[StepRecord], None]) -> None:
        """Serve every request; Ctrl-C stops the replay after the last complete step."""
        try:
            while (plan := self.scheduler.schedule()) is not None:
                record = self._step(plan)
                self.steps.append(record)
                self._commit(plan)
                on_step(record)
        except KeyboardInterrupt:
            self.interrupted = True

    def _commit(self, plan: StepPlan) -> None:
        self.scheduler.commit(plan)
        tables = self.allocators[0].tables
        gone = {row.request_id for row in plan.rows if row.request_id not in tables}
        for layers in self.layers:
            for layer in layers:
                layer.forget(gone)

    def _step(self, plan: StepPlan) -> StepRecord:
        rows = self._rows(plan)
        verdicts: list[tuple[Verdict, Place]] = []
        build_seconds = forward_seconds = 0.0
        for group, builder in enumerate(self.builders):
            batch = self._batch(plan, group)
            begin = self._clock()
            metadata = builder.build(0, batch)
            index_builder = self.index_builders[group]
            index = None if index_builder is None else index_builder.build(0, batch)
            build_seconds += self._clock() - begin
            # One layer of each group is judged per step; steps take turns over the layers.
            judged = len(self.steps) % len(self.layers[group])
            for number, layer in enumerate(self.layers[group]):
                inputs = layer.inputs(rows, self.lengths, len(self.steps))
                inputs.index_metadata = index
                output = self._poisoned_output(layer, plan.num_tokens)
                begin = self._clock()
                layer.run(inputs, metadata, output)
                forward_seconds += self._clock() - begin
                if number == judged:
                    verdicts += self._judge(layer, inputs, output)
        nothing = Verdict(0.0, 1.0), None
        worst, place = max(verdicts, key=lambda found: found[0].ratio, default=nothing)
        return StepRecord(
            step=len(self.steps),
            num_decodes=plan.num_decodes,
            num_prefills=plan.num_prefills,
            decode_tokens=plan.num_decode_tokens,
            prefill_tokens=plan.num_prefill_tokens,
            build_seconds=build_seconds,
            forward_seconds=forward_seconds,
            blocks_in_use=self.scheduler.blocks_in_use,
            worst_error=max((verdict.error for verdict, _ in verdicts), default=0.0),
            worst_error_ratio=worst.ratio,
            worst_place=place,
            num_checked_rows=len(verdicts),
            num_preemptions=plan.num_preemptions,
        )

    def _poisoned_output(self, layer: ReplayLayer, num_tokens: int) -> torch.Tensor:
        shape = (num_tokens, layer.geometry.num_heads * layer.output_size)
        return torch.full(shape, float("nan"), dtype=self.source.dtype, device=self.device)

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _rows(self, plan: StepPlan) -> list[Row]:
        ends = torch.tensor([0] + [row.num_new_tokens for row in plan.rows]).cumsum(0).tolist()
        return [
            Row(
                row.request_id,
                slice(start, stop),
                torch.arange(row.context_len, row.seq_len, device=self.device),
            )
            for row, (start, stop) in zip(plan.rows, pairwise(ends), strict=True)
        ]

    def _batch(self, plan: StepPlan, group: int) -> CommonAttentionMetadata:
        """The step's batch, as an engine's runner passes it to a builder."""
        allocator, block_size = self.allocators[group], self.groups[group].spec.block_size
        tables = [allocator.tables[row.request_id] for row in plan.rows]
        width = max(len(table) for table in tables)
        table = torch.tensor(
            [entries + [NULL_BLOCK_ID] * (width - len(entries)) for entries in tables],
            dtype=torch.int32,
        ).to(self.device)
        batch = CommonAttentionMetadata.from_lengths(
            [row.num_new_tokens for row in plan.rows],
            [row.seq_len for row in plan.rows],
            table,
            block_size,
        )
        prefilling = torch.tensor([row.is_prefilling for row in plan.rows])
        return batch.replace(is_prefilling=prefilling)

    def _judge(
        self, layer: ReplayLayer, inputs: StepInputs, output: torch.Tensor
    ) -> list[tuple[Verdict, Place]]:
        """Verdicts on random tokens; one of them is of the longest query if that is a prefill."""
        generator = torch.Generator().manual_seed(self.settings.seed * 7919 + len(self.steps))
        count = self.settings.check_rows
        picks = [
            int(pick) for pick in torch.randint(len(inputs.rows), (count,), generator=generator)
        ]
        lengths = [row.tokens.stop - row.tokens.start for row in inputs.rows]
        if count and max(lengths) > 1:
            picks[0] = lengths.index(max(lengths))
        verdicts = []
        heads = output.view(len(output), layer.geometry.num_heads, -1)
        for pick in picks:
            offset = int(torch.randint(lengths[pick], (1,), generator=generator))
            actual = heads[inputs.rows[pick].tokens][offset]
            place = Place(
                layer=layer.index,
                group=layer.geometry.label,
                request=inputs.rows[pick].request_id,
                position=int(inputs.rows[pick].positions[offset]),
            )
            verdicts.append((judge(actual, layer.token_check(inputs, pick, offset)), place))
        return verdicts

    def report(
        self, settings: dict[str, Any], clipped: int, words: Sequence[str] | None = None
    ) -> RunReport:
        """The report of the steps so far.

        Args:
            settings: settings of the command line, as they were given.
            clipped: number of requests that were cut to the model's longest sequence.
            words: the command's arguments; None means those of this process.
        """
        return RunReport(
            command=command_line(words),
            model=self.settings.model.name,
            device=self.settings.device.name,
            layer_groups=tuple(self._group_report(group) for group in self.groups),
            settings=settings,
            steps=tuple(self.steps),
            num_requests=len(self.requests),
            finished_requests=self.scheduler.finished,
            clipped_requests=clipped,
            seed=self.settings.seed,
            interrupted=self.interrupted,
            versions=versions(),
        )

    def _group_report(self, group: _Group) -> LayerGroupReport:
        layout = group.backend.kv_cache_layout(group.spec)
        shape = "x".join(str(extent) for extent in layout.logical_shape(group.num_blocks))
        if isinstance(layout, LatentKVLayout):
            form = f"latent {layout.format.value}"
        else:
            form = f"{layout.packing.value} {layout.order.value}"
        return LayerGroupReport(
            name=group.geometry.label,
            backend=str(group.decision.chosen),
            passed_over=tuple(_passed_over(group.decision)),
            num_layers=len(group.indices),
            num_heads=group.geometry.num_heads,
            num_kv_heads=group.geometry.num_kv_heads,
            kv_layout=f"{form}, {shape} {layout.storage_dtype.value}",
            kv_bytes=group.block_bytes * group.num_blocks,
            num_blocks=group.num_blocks - 1,
        )


def _passed_over(decision: SelectionReport) -> list[str]:
    """Reasons against each better-ranked backend; after an explicit choice a note of that."""
    lines = []
    for candidate in decision.candidates:
        if candidate.verdict is Choice.CHOSEN:
            break
        lines.append(f"{candidate.name}: {', '.join(candidate.reasons)}")
    return lines
