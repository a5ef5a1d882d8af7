"""The benchmark cases of latent attention, over whole contexts and over top-k lists."""

from __future__ import annotations

from typing import Final

from attn.bench.cases.case import CaseKind, KernelCase, Target, make_case, make_decode, zipf_lens
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
        min_plain_rate=min_plain_rate,
    )
    case = make_decode(name, (heads, 1, 576), requests, drafts=drafts, rope_size=64, block_size=64)
    return case.replace(target=target or judged, **fields)


_FP8_LATENT: Final = Target(no_slower_than="mla_h16_b128_4k", min_speedup=1.6)
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
    make_case(
        "ragged_mla_pre_1x8k",
        CaseKind.PREFILL,
        (128, 128, 192),
        [(1, 8192, 8192)],
        rope_size=64,
        target=Target(max_ratio_to_best=1.0, against=("fa3",), min_plain_rate=380),
    ),
)
"""The cases of the latent table; pages have 64 tokens, the only size that FlashMLA takes."""

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


def _sparse(name: str, heads: int, rows: int, cache: str, prefills: bool = False) -> KernelCase:
    """``rows`` decodes, or ``rows`` new tokens of one request, with lists of 2048 entries."""
    requests = [(1, rows, SPARSE_CONTEXT)] if prefills else [(rows, 1, SPARSE_CONTEXT)]
    kind = CaseKind.PREFILL if prefills else CaseKind.DECODE
    latent = {"rope_size": 64, "block_size": 64, "topk": 2048, "kv_cache_dtype": cache}
    return make_case(name, kind, (heads, 1, 576), requests, **latent)


SPARSE_CASES: Final = (
    _sparse("dec_656_h128_b128", 128, 128, "fp8_ds_mla"),
    _sparse("dec_656_h128_b80", 128, 80, "fp8_ds_mla"),
    _sparse("dec_656_h64_b128", 64, 128, "fp8_ds_mla"),
    _sparse("dec_656_h16_b128", 16, 128, "fp8_ds_mla"),
    _sparse("dec_656_h8_b128", 8, 128, "fp8_ds_mla"),
    _sparse("dec_656_h16_b32", 16, 32, "fp8_ds_mla"),
    _sparse("dec_656_h16_b1", 16, 1, "fp8_ds_mla"),
    _sparse("dec_656_h128_b1", 128, 1, "fp8_ds_mla"),
    _sparse("dec_576_h16_b128", 16, 128, "fp8_e4m3"),
    _sparse("dec_bf16_h16_b128", 16, 128, "auto"),
    _sparse("dec_bf16_h16_b1", 16, 1, "auto"),
    _sparse("pre_bf16_h128_4k", 128, 4096, "auto", prefills=True),
    _sparse("pre_bf16_h16_4k", 16, 4096, "auto", prefills=True),
    _sparse("pre_656_h128_4k", 128, 4096, "fp8_ds_mla", prefills=True),
    _sparse(CONVERSION_CASE, 1, 64, "fp8_e4m3"),
    _sparse(INDEX_CASE, 64, 64, "fp8_e4m3"),
)
"""The cases of the table of sparse attention; see :mod:`attn.bench.results.tables.sparse`."""
