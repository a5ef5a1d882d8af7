"""Quantised keys and values widened once per layer, for all tiles of a step's prefills.

The prefill kernel for Hopper reads elements of the model's 16 bits. Every tile of queries that
converts keys of its own converts the same ones as every other tile of the request: with many new
tokens it is cheaper to write them out once, into a workspace that is a paged cache itself. Its
pages follow one another, request after request, and begin with the first key that a window leaves.

What is widened, and whether, follows from the host's lengths, which have to be exact for it; the
tables are written on the device from the device's lengths. It depends on the whole step, so both
ways have to give a request the same bits: tiles of the same keys, and elements of the same types.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from builders.batch import CommonAttentionMetadata
from builders.buffers import GraphBuffers
from builders.device import interprets
from builders.splitkv.record import SplitLimits, WidenedKeys
from builders.splitkv.tiles import DenseShape, power_of_two
from specs.base import cdiv
from specs.dtypes import CacheDType

PAGE = 128
"""Tokens of a page of the workspace: a tile of keys is one piece of it."""
WORKSPACE_BYTES = 256 << 20
"""Most bytes of the workspace where the engine names no bound."""
LEAST_ROWS = 1024
"""Query rows of a KV head that a key meets, on average, for it to be widened. To write it and read
it again takes 0.2 ns; to convert it anew in every tile takes 40 % of the time of its products,
0.3 ps for each row."""
_TILE = 256


def widened_value_type(cache_dtype: CacheDType, dtype: torch.dtype) -> torch.dtype:
    """Of values, and of the weights they are multiplied by, over a quantised cache: fp16 of e4m3.

    For the workspace, and for tiles that convert their own: both have to give the same bits. The
    latter have e4m3 as fp16 in one instruction; weights are at most 1, and fp16 rounds them to
    three bits more than bf16 does.

    Args:
        cache_dtype: of the cache.
        dtype: of the model.
    """
    is_e5m2 = cache_dtype is CacheDType.FP8_E5M2
    return dtype if is_e5m2 else torch.float16


@dataclass(frozen=True)
class HostRows:
    """What the host knows of a step's long rows."""

    pages: int
    """Of the workspace that they fill."""
    rows_per_key: float
    """Query rows of a KV head that see a key, on average over the keys."""


class WidenedPages:
    """The workspace of one KV cache group, and its tables."""

    def __init__(
        self,
        shape: DenseShape,
        dtype: torch.dtype,
        cache_dtype: CacheDType,
        limits: SplitLimits,
        short_query: int,
        window: int | None,
        most_bytes: int | None,
        device: torch.device,
    ) -> None:
        """
        Args:
            shape: the layers.
            dtype: of the model.
            cache_dtype: of the cache.
            limits: of a step.
            short_query: longest query of the split-KV kernel, whose rows are not widened.
            window: visible keys of a query in every layer of the group; None for all.
            most_bytes: bound of the workspace; None leaves it open.
            device: where it lives.
        """
        self.short_query, self.window, self._limits = short_query, window, limits
        self._group = shape.group
        width = cdiv(limits.max_kv_len, PAGE)
        sizes = shape.head_size + shape.head_size_v
        page_bytes = PAGE * shape.num_kv_heads * sizes * shape.itemsize
        most = WORKSPACE_BYTES if most_bytes is None else most_bytes
        self.capacity = min(most // page_bytes, limits.max_num_seqs * width)
        """Pages of the workspace."""
        buffers = self.buffers = GraphBuffers(device)
        reqs, int32 = limits.max_num_seqs, torch.int32
        buffers.declare("table", (reqs, width), int32)
        buffers.declare("sources", (self.capacity, 3), int32)
        buffers.declare("total", (1,), int32)
        # A head's keys of a page are one piece, which one request to memory fetches.
        of_values = widened_value_type(cache_dtype, dtype)
        kinds = ("key", shape.head_size, dtype), ("value", shape.head_size_v, of_values)
        for name, size, kind in kinds:
            buffers.declare(name, (self.capacity, shape.num_kv_heads, PAGE, size), kind)

    def host_rows(self, query_lens: torch.Tensor, kv_lens: torch.Tensor) -> HostRows:
        """Pages and use of a step's long rows.

        Args:
            query_lens: ``[R]`` on the host, exact.
            kv_lens: likewise.
        """
        is_long = query_lens > self.short_query
        queries, keys = query_lens[is_long].long(), kv_lens[is_long].long()
        first, seen = torch.zeros_like(keys), keys
        if self.window is not None:
            first = (keys - queries - (self.window - 1)).clamp(min=0) // PAGE
            seen = keys.clamp(max=self.window)
        widened = int((keys - first * PAGE).sum())
        pairs = int((queries * seen).sum())
        pages = int(((keys + (PAGE - 1)) // PAGE - first).sum())
        return HostRows(pages, self._group * pairs / max(widened, 1))

    def plan(self, batch: CommonAttentionMetadata) -> WidenedKeys | None:
        """The step's pages, their tables written by one launch; None where it is not worth it, the
        workspace is too small, or the host has no lengths.

        Args:
            batch: whose lengths on the host are exact.
        """
        reqs, lens = batch.num_reqs, batch.seq_lens_cpu_upper_bound
        if lens is None or self.capacity == 0:
            return None
        rows = self.host_rows(batch.query_start_loc_cpu.diff()[:reqs], lens[:reqs])
        if rows.pages == 0 or rows.rows_per_key < LEAST_ROWS:
            return None
        starts, seq_lens = batch.query_start_loc[: reqs + 1], batch.seq_lens[:reqs]
        return self.of(starts, seq_lens, rows.pages)

    def of(
        self, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, pages: int
    ) -> WidenedKeys | None:
        """The pages of such a step; None where the workspace is too small.

        Args:
            query_start_loc: ``[R + 1]`` int32, device.
            seq_lens: ``[R]`` int32, device.
            pages: of the workspace, as the host counts them.
        """
        if pages > self.capacity:
            return None
        buffers, reqs = self.buffers, len(seq_lens)
        table = buffers.view("table", reqs, buffers["table"].shape[1])
        key, value = (buffers[name].transpose(1, 2) for name in ("key", "value"))
        made = WidenedKeys(key, value, table, buffers["sources"], buffers["total"], pages)
        launched = buffers.device.type == "cuda" or interprets()
        write = launch_widened_pages if launched else write_widened_pages
        most = self._limits.max_num_seqs
        write(query_start_loc, seq_lens, made, self.short_query, self.window, most)
        return made


def launch_widened_pages(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    pages: WidenedKeys,
    short_query: int,
    window: int | None,
    max_num_seqs: int,
) -> None:
    """:func:`write_widened_pages` by one kernel."""
    from builders.launch.launcher import launcher_of
    from builders.pages.device import widened_pages_kernel

    reqs, width = pages.table.shape
    if reqs == 0:
        return
    launch = launcher_of(
        widened_pages_kernel,
        PAGE_SIZE=PAGE,
        WINDOW=window is not None,
        REQS=power_of_two(max_num_seqs),
        TILE=_TILE,
    )
    launch(
        (reqs, cdiv(width, _TILE)),
        query_start_loc,
        seq_lens,
        pages.table,
        pages.sources,
        pages.total,
        reqs,
        short_query,
        window or 0,
        width,
        len(pages.sources),
    )


def write_widened_pages(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    pages: WidenedKeys,
    short_query: int,
    window: int | None,
    max_num_seqs: int = 0,
) -> None:
    """Where each page of the workspace comes from, and where each request's pages are.

    Args:
        query_start_loc: ``[R + 1]`` int32.
        seq_lens: ``[R]`` int32.
        pages: whose ``table``, ``sources`` and ``total`` are written. Of pages beyond the
            workspace nothing is written.
        short_query: requests with longer queries are widened.
        window: visible keys of a query; None for all.
        max_num_seqs: most requests of any step.
    """
    starts, place = query_start_loc.tolist(), 0
    width, capacity = pages.table.shape[1], len(pages.sources)
    for req, kv_len in enumerate(seq_lens.tolist()):
        count = starts[req + 1] - starts[req]
        if count <= short_query:
            continue
        seen = 0 if window is None else max(kv_len - count - (window - 1), 0)
        for page in range(seen // PAGE, min(cdiv(kv_len, PAGE), width)):
            if place < capacity:
                pages.table[req, page] = place
                pages.sources[place] = torch.tensor([req, page, seen], dtype=torch.int32)
            place += 1
    pages.total.fill_(min(place, capacity))
