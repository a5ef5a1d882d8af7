"""A prompt that a batch-invariant engine computes in chunks of any size, alone or among others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from attn.backends.triton_attn import TritonAttentionBackend
from attn.testing.batches import Layer
from builders.batch import CommonAttentionMetadata
from specs.dtypes import CacheDType, DType
from specs.engine import DecodeKernel, EngineConfig, Kernels, PrefillKernel, SpeculativeConfig
from specs.kv_cache import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec

BLOCK = 16
DRAFTS = 3
Rows = tuple[Tensor, Tensor]
"""Outputs and LSE of some tokens."""


@dataclass(frozen=True)
class Setup:
    """A layer, and how many of a request's tokens are keys and queries."""

    heads: tuple[int, int, int] = (4, 1, 64)
    """Query heads, KV heads and head size."""
    dtype: DType = DType.BFLOAT16
    cache_dtype: CacheDType = CacheDType.AUTO
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    head_scales: bool = False
    """A cache of fp8 has a scale for each head; otherwise one for all."""
    keys: int = 9000
    """Keys of the request, its queries' own included."""
    queries: int = 600
    """Its last tokens, whose results are compared."""
    max_len: int = 32768
    beside: int = 64
    """Most tokens of other requests in a step."""
    prefill: PrefillKernel = PrefillKernel.AUTO
    """The engine's choice of the kernel for prompts."""
    decode: DecodeKernel = DecodeKernel.AUTO
    """The engine's choice of the kernel for decodes."""


class Prompt:
    """One request whose keys are in a cache, and the results of any run of its last tokens."""

    def __init__(self, setup: Setup, device: torch.device, seed: int = 0) -> None:
        self.setup, self.device = setup, device
        self.generator = torch.Generator(device).manual_seed(seed)
        heads, kv_heads, size = setup.heads
        blocks = -(-setup.keys // BLOCK) + 8
        fields: dict[str, Any] = {
            "block_size": BLOCK,
            "num_kv_heads": kv_heads,
            "head_size": size,
            "dtype": setup.dtype,
            "cache_dtype": setup.cache_dtype,
        }
        self.spec: Any = FullAttentionSpec(**fields)
        if setup.window is not None:
            self.spec = SlidingWindowSpec(**fields, sliding_window=setup.window)
        if setup.chunk is not None:
            self.spec = ChunkedLocalAttentionSpec(**fields, attention_chunk_size=setup.chunk)
        self.config = EngineConfig(
            max_model_len=setup.max_len,
            max_num_seqs=16,
            max_num_batched_tokens=max(setup.queries + setup.beside, 128),
            num_heads=heads,
            speculative=SpeculativeConfig(num_speculative_tokens=DRAFTS),
            batch_invariant=True,
            kernels=Kernels.own(setup.prefill, setup.decode),
        )
        one = torch.ones((), device=device)
        # No powers of two, which would round nothing.
        scale = one if setup.cache_dtype is CacheDType.AUTO else 0.03 * one
        if setup.head_scales:
            scale = torch.linspace(0.02, 0.05, kv_heads, device=device)
        self.layer = Layer(one, scale, 1.7 * scale)
        self.impl: Any = TritonAttentionBackend.get_impl_cls()(
            heads,
            size,
            size**-0.5,
            kv_heads,
            [0.02 * (head + 1) for head in range(heads)] if setup.alibi else None,
            setup.window,
            setup.cache_dtype.value,
            setup.soft_cap,
            sinks=torch.linspace(-1, 3, heads, device=device) if setup.sinks else None,
            attention_chunk_size=setup.chunk,
        )
        self.cache = self.spec.layout().allocate(blocks, device, fill_byte=255)
        shuffled = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1
        self.table = shuffled.int().to(device)[None]
        slots = (self.table[0, :, None].long() * BLOCK + torch.arange(BLOCK, device=device)).ravel()
        shape = (setup.keys, kv_heads, size)
        self.impl.do_kv_cache_update(
            self.layer, self._normal(*shape), self._normal(*shape), self.cache, slots[: setup.keys]
        )
        # The softmax is far from flat, so that a lost or doubled key shows.
        self.query = self._normal(setup.queries, heads, size) * 3
        builder: Any = TritonAttentionBackend.get_builder_cls()
        self.builder = builder(self.spec, ["layers.0"], self.config, device)

    def _normal(self, *shape: int) -> Tensor:
        rows = torch.randn(*shape, generator=self.generator, device=self.device)
        return rows.to(self.setup.dtype.torch)

    def rows(self, start: int, stop: int, beside: tuple[tuple[int, int], ...] = ()) -> Rows:
        """Results of the queries from ``start`` to ``stop``, computed in one step.

        Args:
            start: first query, counted from the request's first.
            stop: the query after the last.
            beside: query and KV lengths of requests that the step computes too, ahead of this one.
        """
        lens = [*(query for query, _ in beside), stop - start]
        seen = [*(keys for _, keys in beside), self.setup.keys - self.setup.queries + stop]
        other = self._normal(sum(lens[:-1]), *self.query.shape[1:])
        query = torch.cat([other, self.query[start:stop]])
        table = self.table.expand(len(lens), -1).contiguous()
        batch = CommonAttentionMetadata.from_lengths(lens, seen, table, BLOCK)
        # In fp32: rounded to 16 bits, most outputs of other fp32 bits would be the same.
        output = torch.full(query.shape, -7.0, device=self.device)
        lse = torch.full(query.shape[:2], -7.0, device=self.device)
        self.impl.forward(
            self.layer, query, None, None, self.cache, self.builder.build(0, batch), output,
            output_lse=lse,
        )  # fmt: skip
        return output[len(other) :], lse[len(other) :]

    def in_chunks(self, size: int, start: int = 0, stop: int | None = None) -> Rows:
        """Results of the queries from ``start`` to ``stop``, ``size`` of them to a step."""
        stop = self.setup.queries if stop is None else stop
        parts = [self.rows(at, min(at + size, stop)) for at in range(start, stop, size)]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def differing(one: Rows, other: Rows) -> int:
    """Rows (token and head) whose output or LSE has other bits; -1 if any number is NaN."""
    if any(bool(rows.isnan().any()) for rows in (*one, *other)):
        return -1
    outputs = (one[0] != other[0]).any(-1)
    return int((outputs | (one[1] != other[1])).sum())


@contextmanager
def products_in_order() -> Iterator[None]:
    """Let Triton's interpreter add the terms of a product one after the other.

    The library behind numpy adds them in an order that depends on the number of rows. On a GPU that
    a kernel may rely on, the order does not depend on it.
    """
    from triton.runtime import interpreter

    def create_dot(self: Any, left: Any, right: Any, total: Any, *_: Any) -> Any:
        a, b = left.data.astype(np.float32), right.data.astype(np.float32)
        result = total.data.astype(np.float32)
        for k in range(a.shape[-1]):
            result = result + a[..., :, k, None] * b[..., k, None, :]
        return interpreter.TensorHandle(result, total.dtype.scalar)

    with mock.patch.object(interpreter.InterpreterBuilder, "create_dot", create_dot):
        yield
