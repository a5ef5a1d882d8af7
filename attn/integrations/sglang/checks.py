"""What the plugin does not serve: refused when SGLang makes the backend, with what to set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attn.integrations.sglang.compat import Facts
from specs.rows import LatentFormat

PAGE_SIZES = (16, 32, 64, 128)
CHAINS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "FROZEN_KV_MTP")
"""Speculations whose drafts are a chain where each step keeps one candidate."""
DENSE_POOLS = ("MHATokenToKVPool", "SWAKVPool", "HybridLinearKVPool")
LATENT_POOLS = ("MLATokenToKVPool", "HybridLinearKVPool")
SPARSE_POOLS = ("DSATokenToKVPool",)


def check(facts: Facts, layers: Iterable[Any], pools: tuple[str, ...]) -> None:
    """Refuse an engine or a model that is not served.

    Args:
        facts: of the engine.
        layers: the model's ``RadixAttention`` layers.
        pools: names of the classes of caches that are served.

    Raises:
        ValueError: with every reason.
    """
    served = {"decoder", "decoder_bidirectional"} if facts.has_causal_decoders else {"decoder"}
    of_layers = {line for one in layers for line in _of(one, served)}
    reasons = [*_of_engine(facts, pools), *sorted(of_layers)]
    if reasons:
        lines = "\n".join(f"  - {reason}" for reason in reasons)
        raise ValueError(f"attention backend 'attn' cannot serve this engine:\n{lines}")


def _of_engine(facts: Facts, pools: tuple[str, ...]) -> Iterable[str]:
    if facts.page_size not in PAGE_SIZES:
        sizes = ", ".join(map(str, PAGE_SIZES))
        yield f"pages have {facts.page_size} tokens: set --page-size to one of {sizes}"
    if facts.is_unified:
        yield "slots of the unified pool are virtual: leave --enable-unified-memory out"
    elif facts.is_sparse and pools != SPARSE_POOLS:
        yield (
            "layers attend lists of tokens (DSA), which SGLang serves by one name alone: set "
            "--attention-backend attn for prefill, decode and drafts, or leave it out"
        )
    elif facts.pool not in pools:
        yield (
            f"the cache is a {facts.pool}, served are {', '.join(pools)}: set --kv-cache-dtype to "
            "auto, bf16, fp8_e4m3 or fp8_e5m2"
        )
    if facts.dcp_size > 1:
        yield f"decode context parallelism ({facts.dcp_size} ranks): set --dcp-size 1"
    if facts.pooled_keys > 1:
        yield f"an index key stands for {facts.pooled_keys} tokens: leave --attention-backend out"
    if facts.has_learned_sinks:
        yield "sparse layers have sinks: leave --attention-backend out"
    if facts.is_encoder_decoder:
        yield "encoder-decoder models have cross attention: set --attention-backend triton"
    if facts.draft_topk > 1:
        yield (
            f"drafts are trees of {facts.draft_topk} candidates, which need a mask: set "
            "--speculative-eagle-topk 1"
        )
    elif facts.algorithm is not None and facts.algorithm.upper() not in CHAINS:
        yield (
            f"{facts.algorithm} verifies with a mask: set --speculative-algorithm to one of "
            f"{', '.join(CHAINS)}"
        )


def _of(layer: Any, served: set[str]) -> Iterable[str]:
    kind = getattr(layer.attn_type, "value", layer.attn_type)
    if kind not in served:
        yield f"layers attend in both directions ({kind}): set --attention-backend triton"
    if layer.is_cross_attention:
        yield "layers have cross attention: set --attention-backend triton"
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        yield f"scores are capped by {layer.logit_capping_method}: set --attention-backend triton"
    if layer.pos_encoding_mode != "NONE":
        yield f"layers rotate keys as {layer.pos_encoding_mode}: set --attention-backend triton"
    if getattr(layer, "xai_temperature_len", -1) > 0:
        yield "layers scale scores by position: set --attention-backend triton"


def layout_of(pool: Any, rank: int, rope_size: int) -> LatentFormat:
    """The format of the rows of a pool of sparse latent layers.

    Args:
        pool: SGLang's ``DSATokenToKVPool``.
        rank: L.
        rope_size: r.

    Raises:
        ValueError: rows of another format.
    """
    scaled = LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE
    width, size = pool.kv_cache_dim, pool.dtype.itemsize
    if size > 1 and width == rank + rope_size:
        return LatentFormat.BF16
    if size == 1 and width == scaled.row(rank, rope_size).nbytes:
        return scaled
    raise ValueError(
        f"attention backend 'attn' cannot serve this engine:\n  - rows of the cache have {width} "
        f"elements of {pool.dtype}: set --kv-cache-dtype to bfloat16 or fp8_e4m3, and leave "
        "--dsa-prefill-backend and --dsa-decode-backend out"
    )


def refuse_arguments(kwargs: dict[str, Any]) -> None:
    """Refuse what a model's layer asks for by an argument that no kernel here reads.

    Raises:
        NotImplementedError: an argument that is not None; the message names it.
    """
    given = [name for name, value in kwargs.items() if value is not None and value is not False]
    if given:
        raise NotImplementedError(
            f"attention backend 'attn' does not serve {', '.join(sorted(given))}: set "
            "--attention-backend triton"
        )
