"""The benchmark cases of latent attention, over whole contexts and over top-k lists."""

from __future__ import annotations

from typing import Any, Final

from attn.bench.cases.case import (
    CaseKind,
    KernelCase,
    PeerBound,
    Target,
    make_case,
    make_decode,
    zipf_lens,
)
from specs.dtypes import CacheDType

MLA_PEERS: Final = ("fa3", "flashmla", "flashinfer_mla", "vllm_triton_mla")
"""Kernels of other projects that the latent table compares with. ``fa3`` serves the expanded case
too, the others serve absorbed decode alone."""


def _latent(
    name: str,
    heads: int,
    *requests: tuple[int, int],
    drafts: int = 0,
    target: Target | None = None,
    min_plain_rate: float | None = None,
    **fields: object,
) -> KernelCase:
    """Absorbed decode or verify over rows of 512 + 64; ``requests`` are (count, KV length)."""
    judged = Target(
        max_ratio_to_best=1.0,
        max_graph_ratio_to_best=1.0,
        against=MLA_PEERS,
        # FlashAttention-3 takes no fp8 cache.
        host_at_most=None if "kv_cache_dtype" in fields else "fa3",
        min_plain_rate=min_plain_rate,
    )
    case = make_decode(name, (heads, 1, 576), requests, drafts=drafts, rope_size=64, block_size=64)
    return case.replace(target=target or judged, **fields)


_FP8_LATENT: Final = Target(
    no_slower_than="mla_h16_b128_4k",
    min_speedup=1.6,
    max_ratio_to_best=1.0,
    max_graph_ratio_to_best=1.0,
    against=MLA_PEERS,
)
_FP8_QUERIES: Final[dict[str, Any]] = {
    "kv_cache_dtype": CacheDType.FP8_E4M3,
    "fp8_queries": True,
}
MILLION: Final = 1 << 20
"""Tokens of the longest context."""
_RAGGED: Final = [(1, length) for length in zipf_lens(64, 128, 32768)]
MLA_CASES: Final[tuple[KernelCase, ...]] = (
    _latent("mla_h128_b1_8k", 128, (1, 8192)),
    _latent("mla_h128_b32_4k", 128, (32, 4096)),
    _latent("mla_h128_b128_4k", 128, (128, 4096), min_plain_rate=250),
    _latent("mla_h16_b32_8k", 16, (32, 8192)),
    _latent("mla_h16_b128_4k", 16, (128, 4096), min_plain_rate=3200),
    _latent("mla_h128_q2_b64_4k", 128, (64, 4096), drafts=1),
    _latent("mla_h64_b64_8k", 64, (64, 8192)),
    _latent("mla_h16_b64_zipf", 16, *_RAGGED),
    _latent("mla_h128_b64_zipf", 128, *_RAGGED),
    _latent("mla_h16_q4_b64_4k", 16, (64, 4096), drafts=3),
    _latent(
        "mla_fp8_h16_b128_4k",
        16,
        (128, 4096),
        target=_FP8_LATENT,
        kv_cache_dtype=CacheDType.FP8_E4M3,
    ),
    _latent("mla_fp8_h128_b32_4k", 128, (32, 4096), kv_cache_dtype=CacheDType.FP8_E4M3),
    _latent("mla_fp8q_h128_b1_8k", 128, (1, 8192), **_FP8_QUERIES),
    _latent("mla_fp8q_h128_b32_4k", 128, (32, 4096), **_FP8_QUERIES),
    _latent("mla_fp8q_h128_b128_4k", 128, (128, 4096), **_FP8_QUERIES),
    _latent("mla_fp8q_h64_b64_8k", 64, (64, 8192), **_FP8_QUERIES),
    _latent("mla_h12_b64_4k", 12, (64, 4096)),
    _latent("mla_h24_b64_4k", 24, (64, 4096)),
    _latent("mla_h96_b64_4k", 96, (64, 4096)),
    _latent("mla_h16_q8_b32_4k", 16, (32, 4096), drafts=7),
    _latent("mla_h128_q4_b32_4k", 128, (32, 4096), drafts=3),
    _latent("mla_p16_h16_b32_8k", 16, (32, 8192), block_size=16),
    _latent("mla_p32_h128_b32_4k", 128, (32, 4096), block_size=32),
    _latent("mla_p128_h128_b32_4k", 128, (32, 4096), block_size=128),
    _latent("mla_h16_b1_1m", 16, (1, MILLION)),
    _latent("mla_h128_b1_1m", 128, (1, MILLION)),
    make_case(
        "ragged_mla_pre_1x8k",
        CaseKind.PREFILL,
        (128, 128, 192),
        [(1, 8192, 8192)],
        rope_size=64,
        target=Target(max_ratio_to_best=1.0, against=("fa3",), min_plain_rate=380),
    ),
)
"""The cases of the latent table; unless their name says another size, pages have 64 tokens, the
only size that FlashMLA takes."""

ROPE_CASE: Final = "mla_rope_h128_t128"
"""Name of a case whose tokens are rotated and written, but not attended."""
LATENT_VENDOR_CASES: Final = (
    *(
        case.replace(target=Target())
        for case in MLA_CASES
        if case.name in ("mla_h128_b128_4k", "mla_h16_b128_4k", "mla_fp8_h16_b128_4k")
    ),
    _latent(ROPE_CASE, 128, (128, 64), target=Target(), kv_cache_dtype=CacheDType.FP8_E4M3),
)
"""The cases of the table of backends over FlashInfer's latent kernels; see
:mod:`attn.bench.results.tables.flashinfer_mla`."""

CONVERSION_CASE: Final = "convert_576_656"
"""Name of a case that converts a whole cache and attends nothing."""
INDEX_CASE: Final = "index_b64_32k"
"""Name of a case that computes the indexer's logits and attends nothing."""
SPARSE_CONTEXT: Final = 32768


SPARSE_PEERS: Final = ("fa3", "flashmla")
"""Kernels of other projects that the table of sparse attention compares with."""
TOPK: Final = 2048
_FORMATS: Final = {"656": "fp8_ds_mla", "576": "fp8_e4m3", "bf16": "auto"}
"""Types of the KV cache by the name of its rows."""
_FEW_HEADS: Final = (PeerBound(peer="flashmla", max_ratio=0.5),)
"""Bound where FlashMLA computes 64 heads for 16."""


def _sparse(
    name: str,
    heads: int,
    requests: tuple[int, int, int] = (1, 1, SPARSE_CONTEXT),
    **bounds: Any,
) -> KernelCase:
    """Attention over lists of 2048 entries.

    Args:
        name: begins with the kind of the step and the name of the rows, such as ``dec_656_``.
        heads: query heads.
        requests: number of requests, new tokens and KV length of each.
        bounds: fields of the target besides the bounds by the fastest peer.
    """
    kind, rows = name.split("_")[:2]
    kinds = {"dec": CaseKind.DECODE, "ver": CaseKind.VERIFY, "pre": CaseKind.PREFILL}
    # No peer reads rows of 576 bytes.
    level: dict[str, Any] = {} if rows == "576" else {"max_ratio_to_best": 1.0}
    if level and kind != "pre":
        level["max_graph_ratio_to_best"] = 1.0
    if rows == "bf16":
        level["host_at_most"] = "fa3"
    return make_case(
        *(name, kinds[kind], (heads, 1, 576), [requests]),
        rope_size=64,
        block_size=64,
        topk=TOPK,
        kv_cache_dtype=_FORMATS[rows],
        num_speculative_tokens=requests[1] - 1 if kind == "ver" else 0,
        target=Target(**level, against=SPARSE_PEERS, **bounds),
    )


def _cache(name: str, heads: int) -> KernelCase:
    """64 requests whose whole caches are read."""
    latent = {"rope_size": 64, "block_size": 64, "topk": TOPK, "kv_cache_dtype": "fp8_e4m3"}
    return make_case(name, CaseKind.DECODE, (heads, 1, 576), [(64, 1, SPARSE_CONTEXT)], **latent)


SPARSE_CASES: Final = (
    _sparse("dec_656_h128_b128", 128, (128, 1, SPARSE_CONTEXT), min_plain_rate=250),
    _sparse("dec_656_h128_b80", 128, (80, 1, SPARSE_CONTEXT)),
    _sparse("dec_656_h64_b128", 64, (128, 1, SPARSE_CONTEXT)),
    _sparse("dec_656_h16_b128", 16, (128, 1, SPARSE_CONTEXT), max_ratios=_FEW_HEADS),
    _sparse("dec_656_h8_b128", 8, (128, 1, SPARSE_CONTEXT), max_ratios=_FEW_HEADS),
    _sparse("dec_656_h16_b64_8k", 16, (64, 1, 8192)),
    _sparse("dec_656_h16_b32", 16, (32, 1, SPARSE_CONTEXT)),
    _sparse("dec_656_h16_b16", 16, (16, 1, SPARSE_CONTEXT)),
    _sparse("dec_656_h16_b8", 16, (8, 1, SPARSE_CONTEXT)),
    _sparse("dec_656_h16_b4", 16, (4, 1, SPARSE_CONTEXT)),
    _sparse("dec_656_h16_b1", 16, max_graph_us=12.0),
    _sparse("dec_656_h128_b1", 128),
    _sparse("ver_656_h16_q4_b16", 16, (16, 4, SPARSE_CONTEXT)),
    _sparse("dec_656_h12_b64_8k", 12, (64, 1, 8192)),
    _sparse("dec_656_h24_b64_8k", 24, (64, 1, 8192)),
    _sparse("dec_656_h96_b64_8k", 96, (64, 1, 8192)),
    _sparse("dec_576_h16_b128", 16, (128, 1, SPARSE_CONTEXT)),
    _sparse("dec_576_h16_b64_8k", 16, (64, 1, 8192)),
    _sparse("dec_576_h16_b8", 16, (8, 1, SPARSE_CONTEXT)),
    _sparse("dec_bf16_h16_b128", 16, (128, 1, SPARSE_CONTEXT)),
    _sparse("dec_bf16_h16_b64_8k", 16, (64, 1, 8192)),
    _sparse("dec_bf16_h16_b8", 16, (8, 1, SPARSE_CONTEXT)),
    _sparse("dec_bf16_h16_b1", 16),
    _sparse("pre_bf16_h128_4k", 128, (1, 4096, SPARSE_CONTEXT), min_plain_rate=350),
    _sparse("pre_bf16_h16_4k", 16, (1, 4096, SPARSE_CONTEXT), max_ratios=_FEW_HEADS),
    _sparse("pre_656_h128_4k", 128, (1, 4096, SPARSE_CONTEXT)),
    _sparse("pre_656_h16_2k", 16, (1, 2048, SPARSE_CONTEXT)),
    _sparse("pre_576_h16_2k", 16, (1, 2048, SPARSE_CONTEXT)),
    _sparse("pre_bf16_h16_2k", 16, (1, 2048, SPARSE_CONTEXT)),
    _cache(CONVERSION_CASE, 1),
    _cache(INDEX_CASE, 64),
)
"""The cases of the table of sparse attention; see :mod:`attn.bench.measure.sparse` and
:mod:`attn.bench.results.tables.sparse`."""
