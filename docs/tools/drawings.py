"""The drawings of the documentation, as SVG.

    python -m docs.tools.drawings        writes docs/images/*.svg

Byte drawings come from the specs, so they show what the code lays out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from attn.bench.results.chart import cases_of, chart, write
from specs.dtypes import CacheDType, DType
from specs.layouts import DenseKVLayout, KVOrder, KVPacking, LatentKVLayout
from specs.rows import INDEXER_PAGE, LatentFormat, RowFormat, dense_row_format

ROOT: Final = Path(__file__).resolve().parents[2]
IMAGES: Final = ROOT / "docs/images"
INK: Final = "#1d2433"
BLUE: Final = "#2a62c9"
LINE: Final = "#6d7686"
FILLS: Final = {
    "data": "#cfe0fb",
    "rope": "#d3efdc",
    "scale": "#fbd8b4",
    "k": "#cfe0fb",
    "v": "#e3d7f7",
    "plain": "#f2f4f8",
    "none": "#ffffff",
}
PROGRAMS: Final = ("#8fb4f2", "#f2b880", "#93d2a8", "#d7a9e3")
WIDE: Final = 62
"""Width of a field that has room for its name and type."""
SEGMENT: Final = 512
"""Keys between positions where a short row may be cut, as the life of a step has them."""


def _canvas(width: float, height: float) -> tuple[Figure, Any]:
    """A figure whose units are hundredths of an inch, from the top left corner."""
    figure = Figure(figsize=(width / 100, height / 100))
    axes: Any = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    return figure, axes


def _box(axes: Any, at: Sequence[float], fill: str, text: str = "", size: float = 8.5) -> None:
    x, y, width, height = at
    axes.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor=LINE, linewidth=0.8))
    if text:
        _text(axes, x + width / 2, y + height / 2, text, size=size, align="center")


def _text(axes: Any, x: float, y: float, text: str, **how: Any) -> None:
    axes.text(
        x,
        y,
        text,
        fontsize=how.get("size", 8.5),
        color=how.get("color", INK),
        weight=how.get("weight", "normal"),
        ha=how.get("align", "left"),
        va="center",
        linespacing=1.35,
    )


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color=LINE, linewidth=1.1)
    )


def architecture() -> Figure:
    """From the engine's batch to the kernel, with what happens once and what happens per layer."""
    figure, axes = _canvas(720, 322)
    for x, title in ((14, "engine"), (140, "once per step"), (500, "once per layer")):
        _text(axes, x, 14, title, color=BLUE, weight="bold", size=9)
    _box(axes, (14, 30, 100, 96), FILLS["plain"])
    _text(axes, 22, 78, "Batch\nquery lengths\nKV lengths\nblock table", size=8)
    _box(axes, (140, 30, 140, 96), FILLS["data"])
    _text(axes, 148, 78, "Builder\nchecks limits,\nchooses kernels,\nplans on the device", size=8)
    _box(axes, (306, 30, 168, 96), FILLS["data"])
    _text(
        axes,
        314,
        78,
        "Record\nwork items, tiles, table\nin buffers that a CUDA\ngraph finds in place",
        size=8,
    )
    _box(axes, (500, 30, 206, 96), FILLS["rope"])
    _text(
        axes,
        508,
        78,
        "Impl.forward(query, cache,\nrecord) writes the output\n"
        "launcher → one kernel:\nportable or Hopper",
        size=8,
    )
    for x in (114, 280, 474):
        _arrow(axes, (x, 78), (x + 26, 78))
    _text(axes, 14, 168, "once per engine", color=BLUE, weight="bold", size=9)
    _box(axes, (14, 184, 100, 62), FILLS["plain"])
    _text(axes, 22, 215, "Layer's spec\nEngineConfig\ndevice", size=8)
    _box(axes, (140, 184, 166, 62), FILLS["scale"])
    _text(axes, 148, 215, "Selector\na verdict and reasons\nfor every backend", size=8)
    _box(axes, (332, 184, 374, 62), FILLS["scale"])
    _text(
        axes,
        340,
        215,
        "Backend\na catalogue entry that names a cache layout,\na builder class and an impl class",
        size=8,
    )
    _arrow(axes, (114, 215), (140, 215))
    _arrow(axes, (306, 215), (332, 215))
    _arrow(axes, (400, 184), (240, 126))
    _arrow(axes, (600, 184), (600, 126))
    _text(axes, 14, 288, "families", color=BLUE, weight="bold", size=9)
    families = (
        "dense: MHA, GQA",
        "latent: MLA",
        "sparse: MLA over lists",
        "vendor: FlashInfer, TRT-LLM",
    )
    for x, width, name in zip((86, 210, 310, 456), (116, 92, 138, 190), families, strict=True):
        _box(axes, (x, 270, width, 36), FILLS["plain"], name, 8)
    return figure


def split_kv() -> Figure:
    """Two decodes, cut in three shares: the example of the life of a step."""
    figure, axes = _canvas(720, 250)
    scale = 520 / 1100
    left = 130
    _text(axes, 14, 16, "Keys of a decode are shared between programs", weight="bold", size=9.5)
    for y, name, length in ((50, "request 0", 1100), (110, "request 1", 20)):
        _text(axes, 14, y + 14, f"{name}\n{length} keys")
        for index, start in enumerate(range(0, length, SEGMENT)):
            end = min(start + SEGMENT, length)
            program = index if name == "request 0" else 2
            at = (left + start * scale, y, (end - start) * scale, 28)
            label = f"group {program}" if end - start > 100 else ""
            _box(axes, at, PROGRAMS[program], label)
            _text(axes, left + start * scale, y + 38, str(start), size=7, align="center")
    _text(axes, left + 1100 * scale + 8, 64, "group 2", size=8)
    _text(axes, left + 20 * scale + 8, 124, "group 2 takes the short request as well", size=8)
    _box(axes, (130, 178, 210, 50), FILLS["plain"])
    _text(axes, 140, 203, "each segment leaves a state:\nmaximum, sum, weighted values", size=8)
    _box(axes, (372, 178, 180, 50), FILLS["plain"])
    _text(axes, 382, 203, "the last program to arrive\nfolds the states in order", size=8)
    _box(axes, (584, 178, 100, 50), FILLS["rope"], "output row", 8)
    _arrow(axes, (340, 203), (372, 203))
    _arrow(axes, (552, 203), (584, 203))
    return figure


def cuts_by_position() -> Figure:
    """One request in two batches: cuts by the batch move, cuts by position do not."""
    figure, axes = _canvas(720, 330)
    scale, left = 500 / 2048, 170

    def row(y: float, name: str, cuts: Sequence[int], colours: Sequence[int]) -> None:
        _text(axes, 14, y + 13, name)
        ends = [*cuts[1:], 2048]
        for start, end, colour in zip(cuts, ends, colours, strict=True):
            _box(axes, (left + start * scale, y, (end - start) * scale, 26), PROGRAMS[colour])
            _text(axes, left + start * scale, y + 36, str(start), size=7, align="center")

    _text(axes, 14, 16, "Cuts that balance the batch", weight="bold", size=9.5)
    row(34, "the request alone", (0, 683, 1366), (0, 1, 2))
    row(88, "among others", (0, 1024), (0, 1))
    _text(
        axes,
        left,
        144,
        "Partial sums are of other keys, so they round differently: other bits.",
        size=8.5,
    )
    _text(axes, 14, 180, "Cuts by position (this library)", weight="bold", size=9.5)
    row(198, "the request alone", (0, 512, 1024, 1536), (0, 1, 2, 3))
    row(252, "among others", (0, 512, 1024, 1536), (0, 0, 1, 1))
    _text(
        axes,
        left,
        308,
        "One state per segment, folded in order. Who computes it does not matter: same bits.",
        size=8.5,
    )
    return figure


def _rows(rows: Sequence[tuple[str, RowFormat]], title: str) -> Figure:
    """Rows of a cache, one bar each, drawn to one scale with every field's first byte."""
    figure, axes = _canvas(720, 40 + 78 * len(rows))
    _text(axes, 14, 16, title, weight="bold", size=9.5)
    widest = max(row.nbytes for _, row in rows)
    for index, (name, row) in enumerate(rows):
        y = 56 + 78 * index
        _text(axes, 14, y - 14, f"{name}: {row.nbytes} bytes", size=8.5, color=BLUE)
        # A field of a few bytes still has to be seen.
        widths = [max(field.nbytes * 620 / widest, 26) for field in row.fields]
        x = 14.0
        for field, width in zip(row.fields, widths, strict=True):
            fill = FILLS["rope"] if field.name == "rope" else FILLS[_kind(field.name)]
            label = f"{field.name}\n{field.count} x {_short(field.dtype)}"
            _box(axes, (x, y, width, 30), fill, label if width > WIDE else "", 7)
            if width <= WIDE:
                _text(axes, x + width / 2, y + 15, _letters(field.name), size=6.5, align="center")
            _text(axes, x, y + 38, str(field.offset), size=7, align="center")
            x += width
        _text(axes, x, y + 38, str(row.nbytes), size=7, align="center")
        small = [
            f"{_letters(field.name)} = {field.name}, {field.count} x {_short(field.dtype)}"
            for field, width in zip(row.fields, widths, strict=True)
            if width <= WIDE
        ]
        if small:
            _text(axes, 700, y - 14, "; ".join(small), size=7, align="right")
    return figure


def _letters(field: str) -> str:
    """``ks`` of ``k_scale``, ``s`` of ``scale``."""
    return "".join(word[0] for word in field.split("_"))


def _kind(field: str) -> str:
    if "scale" in field:
        return "scale"
    return field if field in ("k", "v") else "data"


def _short(dtype: DType) -> str:
    names = {DType.BFLOAT16: "bf16", DType.FLOAT8_E4M3FN: "e4m3", DType.FLOAT32: "fp32"}
    return names.get(dtype, dtype.value)


def latent_rows() -> Figure:
    """Rows of a latent cache: one per token, shared by all heads."""
    formats = [item for item in LatentFormat if item is not LatentFormat.INDEXER_FP8]
    rows = [(item.value, item.row()) for item in formats]
    return _rows(rows, "Latent cache: one row per token, shared by all heads")


def dense_rows() -> Figure:
    """Rows of a dense cache at head size 128: one per token and KV head."""
    dtypes = (
        CacheDType.AUTO,
        CacheDType.FP8_E4M3,
        CacheDType.INT8_PER_TOKEN_HEAD,
        CacheDType.INT4_PER_TOKEN_HEAD,
    )
    rows = [
        (
            "bf16" if dtype is CacheDType.AUTO else dtype.value,
            dense_row_format(128, 128, dtype, DType.BFLOAT16),
        )
        for dtype in dtypes
    ]
    return _rows(rows, "Dense cache, head size 128: one row per token and KV head")


def indexer_page() -> Figure:
    """A page of the indexer's cache: all data, then all scales."""
    layout = LatentKVLayout(
        block_size=INDEXER_PAGE, format=LatentFormat.INDEXER_FP8, kv_lora_rank=128
    )
    row = layout.row
    figure, axes = _canvas(720, 130)
    data = INDEXER_PAGE * row["data"].nbytes
    _text(
        axes,
        14,
        16,
        f"Indexer page: {INDEXER_PAGE} tokens, {layout.page_size_bytes} bytes, planar",
        weight="bold",
        size=9.5,
    )
    for index, (x, width) in enumerate(((14, 110), (124, 110), (344, 110))):
        token = (0, 1, INDEXER_PAGE - 1)[index]
        _box(axes, (x, 44, width, 34), FILLS["data"], f"token {token}\n128 x e4m3", 7.5)
    _text(axes, 289, 61, "...", align="center")
    _box(axes, (454, 44, 56, 34), FILLS["scale"], "scale 0", 7)
    _box(axes, (510, 44, 56, 34), FILLS["scale"], "scale 1", 7)
    _text(axes, 592, 61, "...", align="center")
    _box(axes, (618, 44, 64, 34), FILLS["scale"], f"scale {INDEXER_PAGE - 1}", 7)
    for x, byte in (
        (14, 0),
        (124, 128),
        (454, data),
        (510, data + 4),
        (682, layout.page_size_bytes),
    ):
        _text(axes, x, 90, str(byte), size=7, align="center")
    return figure


def block_orders() -> Figure:
    """A block of two tokens and two KV heads, in memory order, by layout."""
    figure, axes = _canvas(720, 290)
    _text(
        axes,
        14,
        16,
        "One block of two tokens (t) and two KV heads (h), in the order of memory",
        weight="bold",
        size=9.5,
    )
    kinds = list(product((KVPacking.SPLIT, KVPacking.PACKED), (KVOrder.NHD, KVOrder.HND)))
    for index, (packing, order) in enumerate(kinds):
        y = 40 + 60 * index
        layout = DenseKVLayout(
            block_size=2, num_kv_heads=2, head_size=8, packing=packing, order=order
        )
        _text(axes, 14, y + 17, f"{packing.value}, {order.value}")
        cells = _in_memory(layout)
        width = 590 / (len(cells) if packing is KVPacking.SPLIT else 2 * len(cells))
        x = 110.0
        for name in cells:
            for side in name.split("|"):
                _box(axes, (x, y, width, 34), FILLS[side[0].lower()], side, 8)
                x += width
    return figure


def _in_memory(layout: DenseKVLayout) -> list[str]:
    """Names of a block's rows, sorted by their place in memory; packed rows have K and V."""
    strides = layout.strides(1)
    places: dict[int, str] = {}
    for token, head in product(range(2), range(2)):
        if layout.packing is KVPacking.PACKED:
            place = head * strides[1] + token * strides[2]
            places[place] = f"K t{token} h{head}|V t{token} h{head}"
            continue
        for side, name in enumerate("KV"):
            place = side * strides[1] + token * strides[2] + head * strides[3]
            places[place] = f"{name} t{token} h{head}"
    return [places[place] for place in sorted(places)]


def history() -> Figure:
    """Times of dense cases with portable kernels and, later, with Hopper kernels."""
    portable, hopper = (
        {case.name: case for case in cases_of(_page(name))}
        for name in ("h200_triton_attn", "h200_hopper")
    )
    names = [name for name in portable if name in hopper]
    figure = Figure(figsize=(7.2, 0.9 + 0.26 * len(names)), layout="constrained")
    axes: Any = figure.subplots()
    ratios = [hopper[name].alone / portable[name].alone for name in names]
    axes.barh(names, [1] * len(names), 0.7, color=PROGRAMS[0], alpha=0.35, label="portable")
    axes.barh(names, ratios, 0.7, color=BLUE, label="Hopper")
    for place, ratio in enumerate(ratios):
        axes.text(1.02, place, f"{ratio:.2f}", va="center", fontsize=8)
    axes.set_title("Time of dense kernels on an H200, portable = 1", loc="left", fontsize=10)
    axes.set_xlim(0, 1.12)
    axes.invert_yaxis()
    axes.tick_params(labelsize=8, length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.04), ncols=2, frameon=False)
    return figure


def _page(name: str) -> str:
    return (ROOT / f"docs/benchmarks/{name}.md").read_text(encoding="utf-8")


def _table(name: str) -> Callable[[], Figure]:
    return lambda: chart([_page(name)])


DRAWINGS: Final[dict[str, Callable[[], Figure]]] = {
    "architecture": architecture,
    "split-kv": split_kv,
    "cuts-by-position": cuts_by_position,
    "latent-rows": latent_rows,
    "dense-rows": dense_rows,
    "indexer-page": indexer_page,
    "block-orders": block_orders,
    "history": history,
    "kernels": _table("h200_hopper"),
    "vllm": _table("h200_vllm"),
}
"""Every picture of ``docs/images``, by the name of its file."""


def main() -> None:
    """Write all of them."""
    for name, draw in DRAWINGS.items():
        write(draw(), IMAGES / f"{name}.svg")


if __name__ == "__main__":
    main()
