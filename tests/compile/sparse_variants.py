"""Launches of sparse latent attention and its indexer that are compiled for GPUs not there.

    python -m tests.compile.sparse_variants --target 90 120

prints what each compile gave, as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from typing import Final

import torch

from attn.bench.results.tables.sparse import FEW, MANY
from attn.kernels.sparse.indexer.launch import (
    gather_keys_call,
    paged_logits_call,
    ragged_logits_call,
    write_keys_call,
)
from attn.kernels.sparse.indexer.ranks import pack_candidates_call, spread_candidates_call
from attn.kernels.sparse.indexer.select_launch import select_topk_calls
from attn.kernels.sparse.launcher import sparse_calls
from attn.kernels.sparse.layer import SparseLayer, SparseTensors
from attn.kernels.sparse.topk_transform import topk_transform_call
from builders.launch.call import KernelCall
from builders.sparse.arguments import IndexerKeys, RequestPages, TopkLists
from builders.sparse.hopper_tiles import index_tile_of
from builders.sparse.tiles import IndexTile, SparseShape, SparseTile, sparse_tile
from builders.splitkv.stripe import Stripe
from specs.devices import KNOWN_DEVICES, DeviceKind
from specs.dtypes import DType
from specs.rows import LatentFormat
from tests.compile.compile_matrix import Compiler
from tests.compile.record import Record
from tests.compile.variants import TARGETS

MULTIPROCESSORS: Final = 132
TOPK: Final = 2048
STRIPE: Final = Stripe(8, 3, 16)
SHORT: Final = {
    LatentFormat.BF16: "bf16",
    LatentFormat.FP8_NOPE_FP8_ROPE: "576",
    LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE: "656",
}


def calls_of(
    layout: LatentFormat,
    heads: int,
    rows: int,
    kind_of: str,
    dtype: torch.dtype = torch.bfloat16,
    sinks: bool = False,
    **changes: object,
) -> tuple[SparseTile, tuple[KernelCall, ...]]:
    """The tile that a device is given, changed, and its launches."""
    size = torch.empty((), dtype=dtype).element_size()
    shape = SparseShape(heads, TOPK, layout, size)
    kind = KNOWN_DEVICES[kind_of].kind
    tile = replace(sparse_tile(shape, kind, MULTIPROCESSORS, rows), **changes)  # type: ignore[arg-type]
    width = layout.row(512, 64, DType.parse(dtype)).nbytes
    query = torch.empty(rows, heads, 576, dtype=dtype)
    tensors = SparseTensors(
        query[..., :512],
        query[..., 512:],
        torch.empty(4, 64, width, dtype=torch.uint8),
        torch.empty(rows, TOPK, dtype=torch.int32),
        torch.empty(rows, dtype=torch.int32),
        torch.empty(rows, heads, 512, dtype=dtype),
        torch.empty(rows, heads),
        torch.ones(()),
        torch.empty(heads) if sinks else None,
        *(torch.empty(count) for count in tile.state_floats(rows, heads, TOPK)),
    )
    layer = SparseLayer(heads, 0.1, layout)
    capability = KNOWN_DEVICES[kind_of].compute_capability
    hardware = capability is not None and capability.to_int() >= 89
    return tile, sparse_calls(layer, tile, tensors, hardware_e4m3=hardware)


def index_calls(dtype: torch.dtype, tile: IndexTile, hardware: bool) -> dict[str, KernelCall]:
    """All launches of the indexer."""
    rows, e4m3 = 64, torch.float8_e4m3fn
    cache = torch.empty(4, 64, 132, dtype=torch.uint8)
    query, weights = torch.empty(rows, 64, 128).to(dtype), torch.empty(rows, 64)
    table = torch.empty(rows, 512, dtype=torch.int32)
    lens = torch.empty(rows, dtype=torch.int32)
    logits = torch.empty(rows, 4096)
    keys, scales = torch.empty(4096, 128).to(e4m3), torch.empty(4096)
    ragged = (query, weights, IndexerKeys(keys, scales), lens, lens, logits, tile)
    listed = (lens, torch.empty(rows, TOPK).int(), None)
    candidates, selection = select_topk_calls(
        torch.empty(rows, 32768), *listed, RequestPages(table), None, tile
    )
    return {
        "paged logits": paged_logits_call(
            query, weights, cache, RequestPages(table), lens, logits, tile, hardware_e4m3=hardware
        ),
        "ragged logits": ragged_logits_call(*ragged, hardware_e4m3=hardware),
        "selection": select_topk_calls(logits, *listed, RequestPages(table), None, tile)[0],
        "selection of odd rows": select_topk_calls(logits[:, 1:], *listed, None, None, tile)[0],
        "selection of long rows": select_topk_calls(
            torch.empty(rows, 8192), *listed, None, None, tile
        )[0],
        "candidates of segments": candidates,
        "selection of candidates": selection,
        "keys": write_keys_call(
            torch.empty(rows, 128).bfloat16(),
            cache,
            torch.empty(rows).long(),
            hardware_e4m3=hardware,
        ),
        "gathered keys": gather_keys_call(cache, lens, keys[:rows], scales[:rows]),
        "candidates of a rank": pack_candidates_call(
            logits, torch.empty(rows, TOPK).int(), STRIPE, torch.empty(2, rows, TOPK).int()
        ),
        "candidates of all ranks": spread_candidates_call(
            torch.empty(STRIPE.size, 2, rows, TOPK).int(), logits
        ),
        "entries of a rank": topk_transform_call(
            TopkLists(torch.empty(rows, TOPK).int(), lens, lens, STRIPE),
            *("paged", torch.empty(rows, TOPK).int(), table, 64, None, None, None),
        ),
    }


def chosen(target: int) -> dict[str, KernelCall]:
    """The launches with the tiles that a device is given."""
    device, found = TARGETS[target], {}
    for layout, short in SHORT.items():
        for heads in (8, 20, 128):
            for rows in (1, 4096):
                _, calls = calls_of(layout, heads, rows, device)
                found[f"{short} {heads} heads {rows} rows"] = calls[0]
                if len(calls) > 1:
                    found[f"fold of {short} {heads} heads"] = calls[1]
    for dtype in (torch.float16, torch.float32):
        for layout, short in SHORT.items():
            _, calls = calls_of(layout, 16, 4096, device, dtype, sinks=True)
            found[f"{short} 16 heads 4096 rows sinks {dtype}"] = calls[0]
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("bf16", torch.bfloat16)):
        for what, call in index_calls(dtype, IndexTile(), target >= 89).items():
            found[f"{what} {name}"] = call
    if target == 90:
        tile = index_tile_of(DeviceKind.SM90, DType.FLOAT8_E4M3FN, 64, 128)
        calls = index_calls(torch.float8_e4m3fn, tile, hardware=True)
        for what in ("paged logits", "ragged logits"):
            found[f"{what} e4m3 hopper"] = calls[what]
    return found


def alternatives(target: int) -> dict[str, KernelCall]:
    """The launches with other tiles, to be measured on Hopper."""
    if target != 90:
        return {}
    device, found = TARGETS[target], {}
    for layout, short in SHORT.items():
        for heads, changed, steps in ((16, FEW, (1, 128)), (128, MANY, (4096,))):
            for name, changes in changed.items():
                for rows in steps:
                    _, calls = calls_of(layout, heads, rows, device, **changes)
                    found[f"{short} {heads} heads {rows} rows {name}"] = calls[0]
    tile = IndexTile(fp8_products=True)
    for what, call in index_calls(torch.float8_e4m3fn, tile, True).items():
        found[f"{what} fp8 products"] = call
    return found


def tested(target: int) -> dict[str, KernelCall]:
    """The launches that every run of the tests compiles, of all that a device is given."""
    kept = ("8 heads 4096 rows", "128 heads", "logits e4m3", "selection e4m3", "keys e4m3")
    if target != 90:
        kept = ("656 8 heads 4096 rows", "bf16 8 heads 4096 rows", "logits e4m3", "selection e4m3")
    kept += ("of long rows e4m3", "of segments e4m3", "of candidates e4m3")
    kept += ("of a rank e4m3", "of all ranks e4m3")
    return {name: call for name, call in chosen(target).items() if any(k in name for k in kept)}


SETS: Final = {"chosen": chosen, "alternatives": alternatives, "tested": tested}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", type=int, nargs="+", required=True, choices=TARGETS)
    parser.add_argument("--set", choices=SETS, default="chosen")
    given = parser.parse_args()
    compiler = Compiler(Record() if given.set == "tested" else None)
    calls_for = SETS[given.set]
    found = {target: compiler.compile_calls(target, calls_for(target)) for target in given.target}
    print(json.dumps(found, default=asdict))
    return 0


if __name__ == "__main__":
    sys.exit(main())
