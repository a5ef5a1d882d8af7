"""``python -m attn.bench.sparse_mla``: sparse latent attention and its indexer, beside FlashMLA.

Prints a table in Markdown. Calls take turns, each with a cold L2 cache; graphs are replayed back to
back. FlashMLA's kernels, as vLLM ships them, have at least 64 heads: fewer are padded.
"""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch

from attn.bench.timing import graph_times_us, make_clock, time_interleaved
from attn.ops.indexer import paged_index_logits, ragged_index_logits, select_topk
from attn.ops.sparse_mla import sparse_mla, tile_for, workspace_for
from attn.reference import sparse_mla as reference
from builders.sparse_tiles import IndexTile, SparseTile
from specs.base import cdiv
from specs.dtypes import DType
from specs.layouts import latent_views
from specs.rows import INDEXER_PAGE, LatentFormat

FLASHMLA: Final = "vllm.third_party.flashmla.flash_mla_interface"
RANK, ROPE, PAGE = 512, 64, 64
SCALE: Final = 192**-0.5
BLOCK_SCALED: Final = LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE
JUDGED: Final = 3
"""Rows that are compared with the definition in float64."""
FEW: Final[dict[str, dict[str, Any]]] = {
    "ids by the compiler": {"carries_ids": False, "holds_next": False},
    "64 keys": {"kv_tile": 64},
    "2 stages": {"num_stages": 2},
    "swapped": {"kv_tile": 64, "swapped": True, "carries_ids": False, "holds_next": False},
    "split": {"span": 1},
    "segments of 256": {"segment": 256},
    "segments of 512": {"segment": 512},
}
MANY: Final[dict[str, dict[str, Any]]] = {
    "all scores in all groups": {"hides_scores": False},
    "32 keys": {"kv_tile": 32},
    "32 keys, 5 stages": {"kv_tile": 32, "num_stages": 5},
    "ids carried": {"carries_ids": True, "num_stages": 2},
    "ids carried, 32 keys": {"carries_ids": True, "kv_tile": 32},
}

Call = Callable[[], object]


@dataclass(frozen=True)
class SparseBench:
    """One row of the table."""

    name: str
    layout: LatentFormat
    num_heads: int
    rows: int
    requests: int
    """Caches that the rows are spread over: as many for decode, one for prefill."""
    context: int = 32768
    topk: int = 2048


CASES: Final = (
    SparseBench("dec_656_h128_b128", BLOCK_SCALED, 128, 128, 128),
    SparseBench("dec_656_h64_b128", BLOCK_SCALED, 64, 128, 128),
    SparseBench("dec_656_h16_b128", BLOCK_SCALED, 16, 128, 128),
    SparseBench("dec_656_h16_b32", BLOCK_SCALED, 16, 32, 32),
    SparseBench("dec_656_h8_b128", BLOCK_SCALED, 8, 128, 128),
    SparseBench("dec_656_h16_b1", BLOCK_SCALED, 16, 1, 1),
    SparseBench("dec_656_h128_b1", BLOCK_SCALED, 128, 1, 1),
    SparseBench("dec_bf16_h16_b1", LatentFormat.BF16, 16, 1, 1),
    SparseBench("dec_bf16_h16_b128", LatentFormat.BF16, 16, 128, 64),
    SparseBench("dec_576_h16_b128", LatentFormat.FP8_NOPE_FP8_ROPE, 16, 128, 128),
    SparseBench("pre_bf16_h128_4k", LatentFormat.BF16, 128, 4096, 1),
    SparseBench("pre_bf16_h16_4k", LatentFormat.BF16, 16, 4096, 1),
    SparseBench("pre_656_h128_4k", BLOCK_SCALED, 128, 4096, 1),
)


class Content:
    """Random tensors of a case."""

    def __init__(self, case: SparseBench, device: torch.device) -> None:
        self.case = case
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, generator=generator)

        dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
        blocks = case.requests * cdiv(case.context, PAGE)
        row = case.layout.row(RANK, ROPE, DType.parse(dtype))
        self.cache = torch.empty(blocks, PAGE, row.nbytes, dtype=torch.uint8, device=device)
        for name, view in latent_views(self.cache, row).items():
            for start in range(0, len(view), 4096):
                part = view[start : start + 4096]
                values = normal(*part.shape)
                part.copy_(torch.exp2(values.round()) if name == "scale" else values)
        self.query = (3 * normal(case.rows, case.num_heads, RANK + ROPE)).to(dtype)
        own = torch.arange(case.rows, device=device) * case.requests // case.rows
        at = [
            torch.randperm(case.context, device=device, generator=generator)[: case.topk]
            for _ in range(case.rows)
        ]
        self.indices = (torch.stack(at) + (own * case.context)[:, None]).int()
        self.lens = torch.full((case.rows,), self.indices.shape[1], device=device).int()
        self.k_scale = torch.ones((), device=device)

    @property
    def flops(self) -> float:
        """Of both products."""
        listed = self.indices.numel()
        return 2.0 * listed * self.case.num_heads * (2 * RANK + ROPE)

    @property
    def nbytes(self) -> float:
        """Of the listed rows, each read once for its query."""
        return float(self.indices.numel()) * self.cache.shape[2]


def ours(content: Content, tile: SparseTile) -> tuple[Call, torch.Tensor]:
    """A call with everything prepared, and where it writes."""
    case, query = content.case, content.query
    out = torch.empty_like(query[..., :RANK], memory_format=torch.contiguous_format)
    lse = torch.empty(query.shape[:2], device=query.device)
    scratch = workspace_for(tile, case.rows, case.num_heads, case.topk, RANK, query.device)

    def call() -> None:
        sparse_mla(
            *(query[..., :RANK], query[..., RANK:], content.cache, content.indices, content.lens),
            *(case.layout, SCALE, out, lse),
            k_scale=content.k_scale,
            tile=tile,
            workspace=scratch,
        )

    return call, out


def flashmla(content: Content) -> tuple[Call, list[torch.Tensor]] | str:
    """FlashMLA's call, its result's place, or why there is none."""
    case = content.case
    try:
        module: Any = importlib.import_module(FLASHMLA)
    except (ImportError, AttributeError, OSError) as error:
        return f"not importable: {error}"
    heads = 64 if case.num_heads <= 64 else 128
    query = content.query.new_zeros(case.rows, heads, RANK + ROPE)
    query[:, : case.num_heads] = content.query
    results: list[torch.Tensor] = []
    if case.layout is LatentFormat.BF16:
        rows = content.cache.view(content.query.dtype).view(-1, 1, RANK + ROPE)

        def prefill() -> None:
            out = module.flash_mla_sparse_fwd(query, rows, content.indices[:, None], SCALE)[0]
            results[:] = [out[:, : case.num_heads]]

        return prefill, results
    if case.layout is not BLOCK_SCALED:
        return "reads no rows of this layout"
    schedule = module.get_mla_metadata()[0]
    cache = content.cache.view(torch.float8_e4m3fn)[:, :, None]

    def decode() -> None:
        out, _ = module.flash_mla_with_kvcache(
            *(query[:, None], cache, None, None, RANK, schedule),
            softmax_scale=SCALE,
            is_fp8_kvcache=True,
            indices=content.indices[:, None],
        )
        results[:] = [out[:, 0, : case.num_heads]]

    return decode, results


def error_of(content: Content, out: torch.Tensor) -> float:
    """Largest relative error of a head of some rows."""
    case, some = content.case, slice(0, JUDGED)
    query = content.query[some].double()
    # A reference in float64 must not take the cache's rows for float64 too.
    fields = [
        reference.read_listed(
            *(content.cache, ids.long(), case.layout, RANK, ROPE, content.k_scale),
            *(content.query.dtype, torch.float64),
        )
        for ids in content.indices[some]
    ]
    worst = 0.0
    for row, (one, keys) in enumerate(zip(query, fields, strict=True)):
        wanted = (one @ keys.T * SCALE).softmax(-1) @ keys[:, :RANK]
        errors = (out[row].double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        worst = max(worst, float(errors.max()))
    return worst


def measure(case: SparseBench, device: torch.device, all_tiles: bool, rounds: int) -> list[str]:
    """Lines of the table."""
    content = Content(case, device)
    usual = tile_for(content.query[..., :RANK], content.indices, case.layout)
    tiles = {"ours": usual}
    if all_tiles:
        for name, changes in (FEW if usual.folds else MANY).items():
            if not (changes.get("swapped") and case.layout is not LatentFormat.BF16):
                tiles[f"ours, {name}"] = replace(usual, **changes)
    calls: dict[str, Call] = {}
    errors: dict[str, str] = {}
    for name, tile in tiles.items():
        call, out = ours(content, tile)
        call()
        errors[name], calls[name] = f"{error_of(content, out):.1e}", call
    lines = []
    peer = flashmla(content)
    if isinstance(peer, str):
        lines.append(f"| {case.name} | FlashMLA | {peer} | | | | |")
    else:
        try:
            peer[0]()
            errors["FlashMLA"] = f"{error_of(content, peer[1][0]):.1e}"
            calls["FlashMLA"] = peer[0]
        except (RuntimeError, AssertionError) as error:
            lines.append(f"| {case.name} | FlashMLA | {str(error).splitlines()[0]} | | | | |")
    times = time_interleaved(calls, make_clock(device, 30), rounds, 30)
    graphs = graph_times_us(calls, device, rounds) or {}
    for name, timing in times.items():
        seconds = timing.median_us * 1e-6
        replay = graphs[name].median_us if name in graphs else math.nan
        lines.append(
            f"| {case.name} | {name} | {timing.median_us:.1f} | {replay:.1f} | "
            f"{content.flops / seconds / 1e12:.0f} | {content.nbytes / seconds / 1e9:.0f} | "
            f"{errors[name]} |"
        )
    return lines


def measure_indexer(device: torch.device, rows: int, context: int, rounds: int) -> list[str]:
    """Lines of the indexer: logits over pages and over compact rows, and the selection."""
    blocks = rows * cdiv(context, INDEXER_PAGE)
    row = LatentFormat.INDEXER_FP8.row(128)
    cache = torch.empty(blocks, INDEXER_PAGE, row.nbytes, dtype=torch.uint8, device=device)
    for name, view in latent_views(cache, row).items():
        for start in range(0, len(view), 4096):
            part = view[start : start + 4096]
            part.copy_(torch.ones_like(part) if name == "scale" else torch.randn_like(part.float()))
    table = torch.randperm(blocks, device=device).view(rows, -1).int()
    query = torch.randn(rows, 64, 128, device=device).to(torch.float8_e4m3fn)
    weights = torch.randn(rows, 64, device=device)
    lens = torch.full((rows,), context, device=device).int()
    logits = torch.zeros(rows, context, device=device)
    listed = torch.zeros(rows, min(2048, context), device=device).int()
    data = torch.randn(context, 128, device=device).to(torch.float8_e4m3fn)
    scale, starts = torch.ones(context, device=device), torch.zeros_like(lens)
    tiles = {
        "": IndexTile(),
        ", fp8 products": IndexTile(fp8_products=True),
        ", 8 warps": IndexTile(num_warps=8),
        ", 8 steps": IndexTile(steps=8),
        ", 16 steps of 64 keys": IndexTile(pages=1, steps=16, num_stages=4),
    }
    calls: dict[str, Call] = {}
    for name, tile in tiles.items():
        calls[f"logits{name}"] = partial(
            paged_index_logits, query, weights, cache, table, None, lens, logits, tile
        )
    ragged = (query, weights, data, scale, starts, lens, logits)
    calls["ragged logits"] = partial(ragged_index_logits, *ragged)
    for select in (2048, 4096, 8192):
        tile = IndexTile(select=select)
        calls[f"selection, {select} at a time"] = partial(
            select_topk, logits, lens, listed, tile=tile
        )
    times = time_interleaved(calls, make_clock(device, 30), rounds, 30)
    flops, nbytes = 2.0 * rows * context * 64 * 128, float(cache.numel())
    title, lines = f"index_{rows}x{context}", []
    for name, timing in times.items():
        seconds = timing.median_us * 1e-6
        speed = f"{flops / seconds / 1e12:.0f}" if "logits" in name else "-"
        read = {"l": nbytes, "r": float(data.numel())}.get(name[0], float(logits.nbytes))
        lines.append(
            f"| {title} | {name} | {timing.median_us:.1f} | | {speed} | "
            f"{read / seconds / 1e9:.0f} | |"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="parts of cases' names")
    parser.add_argument("--all-tiles", action="store_true", help="alternatives too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="sizes that any device has room for")
    given = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print("| case | kernel | us | us in a graph | TFLOP/s | GB/s | error |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for case in CASES:
        if given.only and not any(part in case.name for part in given.only):
            continue
        if given.small:
            case = replace(case, rows=min(case.rows, 3), requests=1, context=256, topk=128)
        for line in measure(case, device, given.all_tiles, given.rounds):
            print(line, flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if not given.only or "index" in given.only:
        sizes = (2, 128) if given.small else (64, 32768)
        for line in measure_indexer(device, *sizes, given.rounds):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
