"""SGLang's pools and layers, driven step by step beside a float64 copy of every key and value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from attn.testing import budget, oracle

BUDGET = 3e-5
"""Largest relative error of a row of fp32; keys are rounded to the cache's type on both sides."""
MAX_LEN = 320
MODE = ForwardMode


@dataclass
class LayerSpec:
    """One layer of a model."""

    heads: tuple[int, int] = (4, 2)
    size: int = 32
    size_v: int = 32
    window: int = -1
    """SGLang's number: visible keys before the query's own; -1 for all."""
    cap: float = 0.0
    sinks: bool = False
    shares: int | None = None
    """Number of the layer whose keys this one reads."""
    scales: tuple[float, float] | None = None


@dataclass
class Request:
    """A request: its row of slots, its pages, and what its layers have cached."""

    row: int
    length: int = 0
    pages: list[int] = field(default_factory=list)
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)


class Engine:
    """A model of random layers over real pools whose unwritten memory is NaN."""

    def __init__(
        self,
        layers: Sequence[LayerSpec] = (LayerSpec(),),
        *,
        page_size: int = 16,
        cache: torch.dtype = torch.float32,
        dtype: torch.dtype = torch.float32,
        windows_apart: bool = False,
        name: str = "attn",
        seed: int = 0,
        **args: Any,
    ) -> None:
        self.specs, self.page_size, self.cache, self.dtype = list(layers), page_size, cache, dtype
        self.generator = torch.Generator().manual_seed(seed)
        first = self.specs[0]
        self.num_pages = 40 * 16 // page_size + 8
        size = self.num_pages * page_size
        self.slots = ReqToTokenPool(8, MAX_LEN, "cpu", False)
        common = {
            "page_size": page_size,
            "dtype": cache,
            "head_num": first.heads[1],
            "head_dim": first.size,
            "device": "cpu",
            "enable_memory_saver": False,
        }
        if windows_apart:
            owned = range(len(self.specs))
            self.pool = SWAKVPool(
                size=size,
                size_swa=size,
                swa_attention_layer_ids=[i for i in owned if self.specs[i].window >= 0],
                full_attention_layer_ids=[i for i in owned if self.specs[i].window < 0],
                **common,
            )
            self.mapping = torch.zeros(size + page_size + 1, dtype=torch.int64)
            self.mapping[-1] = -1
            self.pool.register_mapping(self.mapping)
            self.window_pages = (
                torch.randperm(self.num_pages, generator=self.generator) + 1
            ).tolist()
            pools = [self.pool.full_kv_pool, self.pool.swa_kv_pool]
        else:
            self.pool = MHATokenToKVPool(
                size=size, layer_num=len(self.specs), v_head_dim=first.size_v, **common
            )
            pools = [self.pool]
        for pool in pools:
            for buffer in (*pool.k_buffer, *pool.v_buffer):
                buffer.view(torch.uint8).fill_(0x7F if cache.itemsize == 1 else 0xFF)
        self.windows_apart = windows_apart
        self.free = (torch.randperm(self.num_pages, generator=self.generator) + 1).tolist()
        self.layers = [self._radix(number, spec) for number, spec in enumerate(self.specs)]
        self.sinks = [2 + self.draw(spec.heads[0]) if spec.sinks else None for spec in self.specs]
        self.runner = self._runner(args)
        self.backend = ATTENTION_BACKENDS[name](self.runner)
        self.written = torch.zeros(0)

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def _radix(self, number: int, spec: LayerSpec) -> RadixAttention:
        layer = RadixAttention(
            spec.heads[0],
            spec.size,
            spec.size**-0.5,
            spec.heads[1],
            number if spec.shares is None else spec.shares,
            logit_cap=spec.cap,
            v_head_dim=spec.size_v,
            sliding_window_size=spec.window,
        )
        if spec.scales is not None:
            layer.k_scale_float, layer.v_scale_float = spec.scales
        return layer

    def _runner(self, args: dict[str, Any]) -> SimpleNamespace:
        return runner_of(self.slots, self.pool, self.page_size, self.layers, self.dtype, args)

    def request(self) -> Request:
        (row,) = self.slots.free_slots[:1]
        self.slots.free_slots = self.slots.free_slots[1:]
        return Request(row)

    def reserve(self, request: Request, length: int) -> torch.Tensor:
        """Slots of a request's first ``length`` tokens, in pages of any order."""
        while len(request.pages) * self.page_size < length:
            page = self.free.pop()
            start = len(request.pages) * self.page_size
            own = torch.arange(page * self.page_size, (page + 1) * self.page_size)
            request.pages.append(page)
            room = self.slots.req_to_token[request.row, start : start + self.page_size]
            room.copy_(own[: len(room)])
            if self.windows_apart:
                window_page = self.window_pages.pop()
                self.mapping[own] = own - page * self.page_size + window_page * self.page_size
        return self.slots.req_to_token[request.row, :length].long()

    def forget(self, request: Request, before: int) -> None:
        """Free the window pool's pages of a request that lie before a position."""
        for page in request.pages[: before // self.page_size]:
            own = torch.arange(page * self.page_size, (page + 1) * self.page_size)
            for buffer in (*self.pool.swa_kv_pool.k_buffer, *self.pool.swa_kv_pool.v_buffer):
                buffer[self.mapping[own]] = float("nan")
            self.mapping[own] = -1

    def extend(
        self,
        requests: Sequence[Request],
        counts: Sequence[int],
        mode: Any = MODE.EXTEND,
        **more: Any,
    ) -> float:
        """A prefill, or a mixed batch; returns the largest error."""
        prefixes = [one.length for one in requests]
        lens = [one + count for one, count in zip(prefixes, counts, strict=True)]
        fields = {
            "extend_seq_lens": torch.tensor(counts, dtype=torch.int32),
            "extend_prefix_lens": torch.tensor(prefixes, dtype=torch.int32),
            "extend_seq_lens_cpu": list(counts),
            "extend_prefix_lens_cpu": prefixes,
            "extend_num_tokens": sum(counts),
        }
        error = self.step(requests, counts, mode, lens, **fields, **more)
        for one, length in zip(requests, lens, strict=True):
            one.length = length
        return error

    def decode(self, requests: Sequence[Request], **more: Any) -> float:
        lens = [one.length + 1 for one in requests]
        error = self.step(requests, [1] * len(requests), MODE.DECODE, lens, **more)
        for one in requests:
            one.length += 1
        return error

    def verify(self, requests: Sequence[Request], width: int, **more: Any) -> float:
        """Attend ``width`` drafts of each request, whose lengths do not count them."""
        lens = [one.length for one in requests]
        info = SimpleNamespace(num_tokens_per_req=width, draft_token_num=width, custom_mask=None)
        return self.step(
            requests, [width] * len(requests), MODE.TARGET_VERIFY, lens, spec_info=info, **more
        )

    def draft_extend(self, requests: Sequence[Request], width: int, **more: Any) -> float:
        """A draft model's step after a verify."""
        lens = [one.length + width for one in requests]
        info = SimpleNamespace(num_tokens_per_req=width)
        counts = [width] * len(requests)
        fields = {
            "extend_seq_lens": torch.tensor(counts, dtype=torch.int32),
            "extend_seq_lens_cpu": counts,
            "spec_info": info,
        }
        error = self.step(requests, counts, MODE.DRAFT_EXTEND_V2, lens, **fields, **more)
        for one in requests:
            one.length += width
        return error

    def batch(
        self,
        requests: Sequence[Request],
        counts: Sequence[int],
        mode: Any,
        lens: Sequence[int],
        padding: int = 0,
        **fields: Any,
    ) -> ForwardBatch:
        """SGLang's batch; ``padding`` rows of padding follow, as a graph has them."""
        slots = []
        for one, count in zip(requests, counts, strict=True):
            slots.append(self.reserve(one, one.length + count)[one.length :])
        written = torch.cat(
            [*slots, torch.zeros(padding * max(counts, default=0), dtype=torch.int64)]
        )
        rows = torch.tensor([*(one.row for one in requests), *[0] * padding])
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(rows),
            input_ids=torch.zeros(len(written), dtype=torch.int64),
            req_pool_indices=rows,
            seq_lens=torch.tensor([*lens, *[1] * padding]),
            out_cache_loc=written,
            seq_lens_sum=None,
            **fields,
        )

    def step(
        self,
        requests: Sequence[Request],
        counts: Sequence[int],
        mode: Any,
        lens: Sequence[int],
        extra_rows: int = 0,
        lse: bool = False,
        plan: bool = True,
        backend: Any = None,
        **fields: Any,
    ) -> float:
        """Run all layers and compare each with the oracle.

        ``extra_rows`` rows of padding follow the step's tokens.
        """
        batch = self.batch(requests, counts, mode, lens, **fields)
        return self.run(batch, requests, counts, extra_rows, lse, plan, backend or self.backend)

    def run(
        self,
        batch: Any,
        requests: Sequence[Request],
        counts: Sequence[int],
        extra_rows: int,
        lse: bool,
        plan: bool,
        backend: Any,
    ) -> float:
        tokens = len(batch.out_cache_loc) + extra_rows
        worst = 0.0
        with torch.no_grad(), forward_context(ForwardContext(attn_backend=backend)):
            if plan:
                backend.init_forward_metadata(batch)
            for number, layer in enumerate(self.layers):
                spec = self.specs[number]
                q = self.draw(tokens, spec.heads[0] * spec.size)
                k = self.draw(tokens, spec.heads[1], spec.size)
                v = self.draw(tokens, spec.heads[1], spec.size_v)
                given = (None, None) if spec.shares is not None else (k, v)
                kwargs: dict[str, Any] = {}
                if self.sinks[number] is not None:
                    kwargs["sinks"] = self.sinks[number]
                if lse:
                    kwargs["return_lse"] = True
                flat = (None, None) if given[0] is None else (k.flatten(1), v.flatten(1))
                result = layer(q, *flat, batch, **kwargs)
                out = result[0] if lse else result
                worst = max(
                    worst, self._error(number, out, result, q, (k, v), requests, counts, lse)
                )
        return worst

    def _error(
        self,
        number: int,
        out: torch.Tensor,
        result: Any,
        q: torch.Tensor,
        new: Any,
        requests: Sequence[Request],
        counts: Sequence[int],
        lse: bool,
    ) -> float:
        spec, start, worst = self.specs[number], 0, 0.0
        owner = number if spec.shares is None else spec.shares
        q = q.view(len(q), spec.heads[0], spec.size)
        out = out.view(len(out), spec.heads[0], spec.size_v)
        for one, count in zip(requests, counts, strict=True):
            stop = start + count
            if spec.shares is None:
                for kept, rows, place in ((one.keys, new[0], 0), (one.values, new[1], 1)):
                    stored = self.stored(rows[start:stop], spec, place)
                    old = kept.get(owner, stored[:0])[: one.length]
                    kept[owner] = torch.cat([old, stored])
            rules = oracle.Rules(
                scale=spec.size**-0.5,
                sliding_window=None if spec.window < 0 else spec.window + 1,
                logits_soft_cap=spec.cap or None,
                sinks=self.sinks[number],
            )
            wanted, wanted_lse = oracle.attention(
                q[start:stop], one.keys[owner], one.values[owner], one.length, rules
            )
            worst = max(worst, float(budget.row_errors(out[start:stop], wanted).max()))
            if lse:
                worst = max(
                    worst, float(budget.lse_errors(result[1][start:stop], wanted_lse).max())
                )
            start = stop
        return worst

    def stored(self, rows: torch.Tensor, spec: LayerSpec, place: int) -> torch.Tensor:
        """Rows as the cache holds them, in float64."""
        scale = 1.0 if spec.scales is None else spec.scales[place]
        return (rows / scale).to(self.cache).double() * scale


def runner_of(
    slots: Any,
    pool: Any,
    page_size: int,
    layers: Sequence[Any],
    dtype: torch.dtype,
    args: dict[str, Any],
    use_mla: bool = False,
    **model: Any,
) -> SimpleNamespace:
    """What the plugin reads of SGLang's ``ModelRunner``."""
    defaults = {
        "speculative_num_draft_tokens": None,
        "speculative_algorithm": None,
        "speculative_eagle_topk": None,
        "speculative_attention_mode": "prefill",
        "chunked_prefill_size": 128,
        "max_prefill_tokens": 128,
        "enable_deterministic_inference": False,
        "dcp_size": 1,
        "enable_unified_memory": False,
        "attention_backend": "attn",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
    }
    config = SimpleNamespace(is_encoder_decoder=False, hf_text_config=SimpleNamespace(), **model)
    given = {**defaults, **args}
    config.is_encoder_decoder = given.pop("is_encoder_decoder", False)
    return SimpleNamespace(
        server_args=SimpleNamespace(**given),
        model_config=config,
        req_to_token_pool=slots,
        token_to_kv_pool=pool,
        page_size=page_size,
        device="cpu",
        dtype=dtype,
        model=torch.nn.ModuleList(layers),
        use_mla_backend=use_mla,
        draft_attention_backend=None,
    )
