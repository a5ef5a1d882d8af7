"""Launches of the small kernels of a step, by name, for GPUs that are not there.

    python -m tests.compile.step_variants --target 90 120

compiles them and prints what each compile gave, as JSON. The kernels write page tables, gather and
clear rows, quantise queries and expand latent rows. Nothing runs: launches are made on CPU tensors
and collected.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from typing import Any, Final

import torch

from attn.kernels.cache.clear import clear_call, clear_tails_call
from attn.kernels.cache.quant import quantize_rows
from attn.kernels.latent.expand import expand_call
from attn.kernels.latent.gather import pack_query_call, unpack_state_call
from attn.kernels.latent.rope_quant import rope_quantize_call
from builders.dense.dequantised import DequantisedKeys, launch_dequantised_pages
from builders.latent.prefill import PagedRows
from builders.latent.tables import BURST, launch_latent_table
from builders.launch.call import KernelCall, collected_calls
from builders.pages.lists import RequestPlaces, launch_page_list
from builders.pages.phase_tables import PhaseTable, StepRows, launch_tables
from builders.sparse.rows import RowLengths, launch_context, launch_rows
from specs.cache_write import Rotation, UnrotatedLatents
from specs.devices import ComputeCapability, GpuFacts
from specs.layouts import KVViews
from tests.compile.compile_matrix import Compiler
from tests.compile.record import Record
from tests.compile.variants import TARGETS

MOST_REQUESTS: Final = 256
"""Most requests in a step of an engine whose launches are tested."""

_TOKENS, _HEADS, _RANK, _ROPE = 4, 128, 512, 64
_E4M3 = torch.float8_e4m3fn


def step_calls(target: int, max_num_seqs: int = 8) -> dict[str, KernelCall]:
    """Launches by name: the kernel's, and the number of the launch among those of this kernel.

    Args:
        target: compute capability.
        max_num_seqs: requests that the engine may have in a step.
    """
    numbers: dict[str, Iterator[int]] = {}
    found = {}
    gpu = GpuFacts.of(ComputeCapability(major=target // 10, minor=target % 10), 100)
    for call in (*_row_calls(gpu), *_page_calls(max_num_seqs)):
        name = call.kernel.__name__
        found[f"{name} {next(numbers.setdefault(name, count(1)))}"] = call
    return found


def _row_calls(gpu: GpuFacts) -> Iterator[KernelCall]:
    """Kernels that copy, clear, quantise or expand rows of queries, keys and values."""
    hardware = gpu.converts_float8
    tokens, heads, rank = _TOKENS, _HEADS, _RANK
    bf16: Any = {"dtype": torch.bfloat16}
    nope = torch.zeros(heads, tokens, rank, **bf16).transpose(0, 1)
    rope = torch.zeros(tokens, heads, _ROPE, **bf16)
    index = torch.zeros(tokens, dtype=torch.int32)
    flags = torch.zeros(tokens, dtype=torch.bool)
    out, lse = torch.zeros(tokens, heads, rank, **bf16), torch.zeros(tokens, heads)
    packed = torch.zeros(tokens, heads, rank + _ROPE).to(_E4M3)
    yield clear_call(out, lse, flags)
    for dtype in (torch.bfloat16, _E4M3):
        pages = torch.zeros(3, 2, 64, 8, 128).to(dtype)
        yield clear_tails_call(pages[:, 0], pages[:, 1], index[None], index[:1]).call
    for given in (index, None):
        for into in (packed, packed.bfloat16()):
            yield pack_query_call(nope, rope, given, 1.0, into, hardware_e4m3=hardware)
    parts = packed[..., :rank], packed[..., rank:]
    yield pack_query_call(*parts, index, 0.5, packed.bfloat16(), hardware_e4m3=hardware)
    yield pack_query_call(
        *(packed[..., :rank].view(torch.uint8), packed[..., rank:].view(torch.uint8), index, 1.0),
        packed.view(torch.uint8),
        hardware_e4m3=hardware,
    )
    for given in (flags, None):
        yield unpack_state_call(out, lse, index, given, 0.5, out, lse)
    raw = torch.zeros(3, 64, rank + _ROPE, dtype=torch.uint8).view(_E4M3)
    cache, slots = (raw[..., :rank], raw[..., rank:]), torch.zeros(tokens, dtype=torch.int64)
    scales = torch.ones(()), torch.ones(())
    rows = torch.zeros(tokens, rank + _ROPE, **bf16)
    for is_neox in (False, True):
        for keys, views, listed in ((packed[:, 0].contiguous(), None, None), (None, cache, slots)):
            yield rope_quantize_call(
                UnrotatedLatents(nope, rope, rows[:, :rank], rows[:, rank:]),
                Rotation(slots, torch.zeros(8, _ROPE), is_neox),
                *(scales, packed, keys, views, listed),
                hardware_e4m3=hardware,
            )
    with collected_calls() as calls:
        query = torch.zeros(tokens, 32, 128, **bf16)
        quantize_rows(query, 0.5, torch.empty_like(query, dtype=_E4M3), hardware_e4m3=hardware)
    yield from calls
    starts = torch.zeros(2, dtype=torch.int32)
    paged = PagedRows(torch.zeros(1, 4, dtype=torch.int32), starts[:1], starts[:1], 64, starts)
    # Heads of DeepSeek-V3 and of GLM-5, from a cache in e4m3 and from rows of the model's type.
    for nope, size_v in ((128, 128), (192, 256)):
        into = KVViews(
            torch.zeros(64, 16, nope + _ROPE, **bf16), torch.zeros(64, 16, size_v, **bf16)
        )
        weights = torch.zeros(rank, 16, nope, **bf16), torch.zeros(rank, 16, size_v, **bf16)
        yield expand_call(*cache, *weights, into, paged=paged, scale=scales[0], gpu=gpu)
        yield expand_call(rows[:, :rank], rows[:, rank:], *weights, into, gpu=gpu)


def _page_calls(most: int) -> list[KernelCall]:
    """Kernels that write page tables and what goes with them, of two requests."""
    reqs, columns = 2, 4

    def integers(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    table, lens, starts = integers(reqs, columns), integers(reqs), integers(reqs + 1)
    decode, prefill = (PhaseTable(most, 128, 16, "cpu") for _ in range(2))
    with collected_calls() as calls:
        launch_page_list(table, lens, 16, None, most)
        places = RequestPlaces(integers(3 * reqs + 4), 1)
        for skipped in (lens, None):
            launch_page_list(table, lens, 16, skipped, most, places, starts)
        for window in (None, 128):
            step = StepRows(table, lens, starts, 1, 2)
            launch_tables(step, decode, prefill, window)
        launch_latent_table(table, starts, lens, integers(reqs, BURST), integers(reqs), 64)
        for window in (None, 128):
            keys = torch.zeros(4, 128, 8, 128, dtype=torch.bfloat16)
            dequantised = DequantisedKeys(
                keys, keys, integers(reqs, 8), integers(8), integers(1), 8
            )
            launch_dequantised_pages(starts, lens, dequantised, 4, window, most)
        rows = RowLengths(integers(64), integers(64), integers(64))
        launch_rows(starts, lens, 0, 2048, rows, most)
        launch_context(table, lens, integers(64), 64, most)
    return calls


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", type=int, nargs="+", required=True, choices=TARGETS)
    compiler, targets = Compiler(Record()), parser.parse_args().target
    found = {
        target: compiler.compile_calls(target, step_calls(target, MOST_REQUESTS))
        for target in targets
    }
    print(json.dumps(found, default=asdict))
    return 0


if __name__ == "__main__":
    sys.exit(main())
