"""The workspace where keys and values of a quantised cache are dequantised for a step's prefills.

The Hopper prefill kernel multiplies 16-bit elements. It can dequantise the keys of every tile, but
then all query tiles of a request dequantise the same keys. With many new tokens it is cheaper to
dequantise them once per layer, into a workspace that is a paged cache itself. Its pages follow one
another, request after request. A request's pages begin with the page of the first key that its
window leaves visible.

The host's lengths decide whether a step has a workspace and how many pages are in use, so they have
to be exact. The device writes the tables from its own lengths. The decision depends on the whole
step, so both ways must give a request the same bits: they have tiles of the same keys, and elements
of the same types.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from builders.batch import CommonAttentionMetadata
from builders.buffers import GraphBuffers
from builders.device import interprets
from builders.splitkv.record import DequantisedKeys, SplitLimits
from builders.splitkv.tiles import DenseShape
from specs.base import cdiv, power_of_two
from specs.dtypes import CacheDType

PAGE = 128
"""Tokens of a page of the workspace, so that a tile of keys is one piece of a page."""
WORKSPACE_BYTES = 256 << 20
"""Most bytes of the workspace where the engine names no bound."""
LEAST_ROWS = 1024
"""Query rows of a KV head that are multiplied by a key, on average, from which on keys are
dequantised once.

To write a dequantised key and read it again takes 0.2 ns. To dequantise it in every tile takes 40 %
of the time of its products, which is 0.3 ps for each query row."""
_TILE = 256
"""Table entries that a program of the kernel writes at most."""


def dequantised_value_type(cache_dtype: CacheDType, dtype: torch.dtype) -> torch.dtype:
    """Type of dequantised values, and of the softmax weights that multiply them.

    It is the model's type over a cache of e5m2, and fp16 over other caches. The workspace and tiles
    that dequantise their own keys have the same type, since both must give the same bits. Such a
    tile dequantises e4m3 to fp16 with one instruction. Weights are at most 1, and fp16 keeps three
    bits more of them than bf16.

    Args:
        cache_dtype: type of the cache's elements.
        dtype: type of the model's elements.
    """
    is_e5m2 = cache_dtype is CacheDType.FP8_E5M2
    return dtype if is_e5m2 else torch.float16


@dataclass(frozen=True)
class HostRows:
    """The host's numbers of a step's long requests, which the prefill kernel takes."""

    pages: int
    """Pages of the workspace that their keys fill."""
    rows_per_key: float
    """Query rows of a KV head that are multiplied by a key, on average over the keys. A window does
    not reach whole tiles of keys, of which every key is multiplied."""


class DequantisedPages:
    """The workspace of one KV cache group, and its tables, allocated once."""

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
            shape: the layers of the group.
            dtype: type of the model's elements.
            cache_dtype: type of the cache's elements.
            limits: limits of a step.
            short_query: longest query of the split-KV kernel, whose requests have no pages.
            window: visible keys of a query in every layer of the group; None for all.
            most_bytes: bound of the workspace; None for ``WORKSPACE_BYTES``.
            device: where the workspace lives.
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
        # Within a page the keys of a head are contiguous, so one request to memory fetches them.
        of_values = dequantised_value_type(cache_dtype, dtype)
        kinds = ("key", shape.head_size, dtype), ("value", shape.head_size_v, of_values)
        for name, size, kind in kinds:
            buffers.declare(name, (self.capacity, shape.num_kv_heads, PAGE, size), kind)

    def host_rows(self, query_lens: torch.Tensor, kv_lens: torch.Tensor) -> HostRows:
        """Pages that a step's long requests fill, and the query rows that their keys multiply.

        Args:
            query_lens: ``[R]`` on the host: new tokens of each request, exact.
            kv_lens: ``[R]`` on the host: KV length of each request, exact.
        """
        is_long = query_lens > self.short_query
        queries, keys = query_lens[is_long].long(), kv_lens[is_long].long()
        first, seen = torch.zeros_like(keys), keys
        if self.window is not None:
            first = (keys - queries - (self.window - 1)).clamp(min=0) // PAGE
            seen = keys.clamp(max=self.window + PAGE)
        dequantised = int((keys - first * PAGE).sum())
        pairs = int((queries * seen).sum())
        pages = int(((keys + (PAGE - 1)) // PAGE - first).sum())
        return HostRows(pages, self._group * pairs / max(dequantised, 1))

    def plan(self, batch: CommonAttentionMetadata) -> DequantisedKeys | None:
        """The workspace of a step; one launch writes its tables.

        None if a key is multiplied by fewer than ``LEAST_ROWS`` query rows, if the workspace is too
        small, or if the batch has no host lengths.

        Args:
            batch: a batch with exact lengths on the host.
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
    ) -> DequantisedKeys | None:
        """The workspace of a step with ``pages`` pages in use; None where it is too small.

        Args:
            query_start_loc: ``[R + 1]`` int32, device.
            seq_lens: ``[R]`` int32, device.
            pages: pages in use, as the host counts them.
        """
        if pages > self.capacity:
            return None
        buffers, reqs = self.buffers, len(seq_lens)
        table = buffers.view("table", reqs, buffers["table"].shape[1])
        key, value = (buffers[name].transpose(1, 2) for name in ("key", "value"))
        made = DequantisedKeys(key, value, table, buffers["sources"], buffers["total"], pages)
        launched = buffers.device.type == "cuda" or interprets()
        write = launch_dequantised_pages if launched else write_dequantised_pages
        most = self._limits.max_num_seqs
        write(query_start_loc, seq_lens, made, self.short_query, self.window, most)
        return made


def launch_dequantised_pages(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    pages: DequantisedKeys,
    short_query: int,
    window: int | None,
    max_num_seqs: int,
) -> None:
    """Write the workspace's tables by one kernel; its twin is :func:`write_dequantised_pages`."""
    from builders.launch.launcher import launcher_of
    from builders.pages.device import dequantised_pages_kernel

    reqs, width = pages.table.shape
    if reqs == 0:
        return
    launch = launcher_of(
        dequantised_pages_kernel,
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


def write_dequantised_pages(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    pages: DequantisedKeys,
    short_query: int,
    window: int | None,
    max_num_seqs: int = 0,
) -> None:
    """Write in torch where each page of the workspace comes from, and where a request's pages are.

    Args:
        query_start_loc: ``[R + 1]`` int32.
        seq_lens: ``[R]`` int32.
        pages: its ``table``, ``sources`` and ``total`` are written. Pages that would lie beyond the
            workspace are left out.
        short_query: requests with longer queries have pages.
        window: visible keys of a query; None for all.
        max_num_seqs: most requests of any step; only the kernel needs it.
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
