"""The small kernels of steps compile for GPUs that are not there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton

from attn.kernels.cache.clear import clear_call, clear_tails_call
from attn.kernels.latent.expand import expand_call
from attn.kernels.latent.gather import pack_query_call, unpack_state_call
from attn.kernels.latent.rope_quant import rope_quantize_call
from builders.latent.prefill import PagedRows
from builders.latent.tables import BURST
from builders.launch.call import KernelCall
from builders.pages import device as page_kernels
from tests.compile.compile_matrix import _Device, limit_of

T, H, RANK, ROPE = 4, 128, 512, 64
E4M3 = torch.float8_e4m3fn
TARGETS = (80, 86, 90, 100, 120)


def calls(target: int) -> Iterator[KernelCall]:
    hardware = target >= 89
    bf16: Any = {"dtype": torch.bfloat16}
    nope, rope = torch.zeros(H, T, RANK, **bf16).transpose(0, 1), torch.zeros(T, H, ROPE, **bf16)
    index, flags = torch.zeros(T, dtype=torch.int32), torch.zeros(T, dtype=torch.bool)
    out, lse = torch.zeros(T, H, RANK, **bf16), torch.zeros(T, H)
    packed = torch.zeros(T, H, RANK + ROPE).to(E4M3)
    yield clear_call(out, lse, flags)
    for dtype in (torch.bfloat16, E4M3):
        pages = torch.zeros(3, 2, 64, 8, 128).to(dtype)
        yield clear_tails_call(pages[:, 0], pages[:, 1], index[None], index[:1]).record
    for given in (index, None):
        for into in (packed, packed.bfloat16()):
            yield pack_query_call(nope, rope, given, 1.0, into, hardware_e4m3=hardware)
    parts = packed[..., :RANK], packed[..., RANK:]
    yield pack_query_call(*parts, index, 0.5, packed.bfloat16(), hardware_e4m3=hardware)
    yield pack_query_call(
        *(packed[..., :RANK].view(torch.uint8), packed[..., RANK:].view(torch.uint8), index, 1.0),
        packed.view(torch.uint8),
        hardware_e4m3=hardware,
    )
    for given in (flags, None):
        yield unpack_state_call(out, lse, index, given, 0.5, out, lse)
    raw = torch.zeros(3, 64, RANK + ROPE, dtype=torch.uint8).view(E4M3)
    cache, slots = (raw[..., :RANK], raw[..., RANK:]), torch.zeros(T, dtype=torch.int64)
    scales = torch.ones(()), torch.ones(())
    rows = torch.zeros(T, RANK + ROPE, **bf16)
    for is_neox in (False, True):
        for keys, views, listed in ((packed[:, 0].contiguous(), None, None), (None, cache, slots)):
            yield rope_quantize_call(
                *(nope, rope, rows[:, :RANK], rows[:, RANK:], slots, torch.zeros(8, ROPE)),
                *(is_neox, scales, packed, keys, views, listed),
                hardware_e4m3=hardware,
            )
    starts = torch.zeros(2, dtype=torch.int32)
    paged = PagedRows(torch.zeros(1, 4, dtype=torch.int32), starts[:1], starts[:1], 64, starts)
    keys, values = torch.zeros(64, 16, 192, **bf16), torch.zeros(64, 16, 128, **bf16)
    weights = torch.zeros(RANK, 16, 128, **bf16)
    yield expand_call(
        *(*cache, weights, weights, keys, values),
        paged=paged,
        scale=scales[0],
        hardware_e4m3=hardware,
    )
    table = torch.zeros(2, 4, dtype=torch.int32)
    arguments = {
        "block_table_ptr": table,
        "query_lens_ptr": starts,
        "seq_lens_ptr": starts,
        "pages_ptr": torch.zeros(2, BURST, dtype=torch.int32),
        "kv_lens_ptr": starts,
        "table_width": 4,
        "width": BURST,
        "fill": 1,
        "table_stride": 4,
        "PAGE_SIZE": 64,
        "BURST": BURST,
    }
    yield KernelCall(page_kernels.latent_table_kernel, (2, 1), arguments, num_warps=4)


def compile_all(targets: Iterable[int]) -> None:
    """Every launch for every target, in a process where kernels are not interpreted."""
    for target in targets:
        triton.runtime.driver.set_active(_Device(target))
        for call in calls(target):
            made = call.kernel.warmup(grid=call.grid, **call.arguments, **call.options)
            if made.metadata.target.arch != target:
                raise RuntimeError(f"compiled for {made.metadata.target}, not {target}")
            if made.metadata.shared > limit_of(target):
                raise RuntimeError(f"{made.metadata.shared} bytes of shared memory on {target}")


def test_they_compile_and_fit(tmp_path: Path) -> None:
    code = f"from {__name__} import compile_all; compile_all({TARGETS})"
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **settings},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
