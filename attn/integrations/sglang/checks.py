"""What the plugin does not serve: refused when SGLang makes the backend, with what to set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attn.integrations.sglang.compat import Facts

PAGE_SIZES = (16, 32, 64, 128)
CHAINS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "FROZEN_KV_MTP")
"""Speculations whose drafts are a chain where each step keeps one candidate."""
DENSE_POOLS = ("MHATokenToKVPool", "SWAKVPool", "HybridLinearKVPool")
LATENT_POOLS = ("MLATokenToKVPool", "HybridLinearKVPool")


def check(facts: Facts, layers: Iterable[Any], pools: tuple[str, ...]) -> None:
    """Refuse an engine or a model that is not served.

    Args:
        facts: of the engine.
        layers: the model's ``RadixAttention`` layers.
        pools: names of the classes of caches that are served.

    Raises:
        ValueError: with every reason.
    """
    reasons = [*_of_engine(facts, pools), *sorted({line for one in layers for line in _of(one)})]
    if reasons:
        lines = "\n".join(f"  - {reason}" for reason in reasons)
        raise ValueError(f"attention backend 'attn' cannot serve this engine:\n{lines}")


def _of_engine(facts: Facts, pools: tuple[str, ...]) -> Iterable[str]:
    if facts.page_size not in PAGE_SIZES:
        sizes = ", ".join(map(str, PAGE_SIZES))
        yield f"pages have {facts.page_size} tokens: set --page-size to one of {sizes}"
    if facts.is_unified:
        yield "slots of the unified pool are virtual: leave --enable-unified-memory out"
    elif facts.pool not in pools:
        yield (
            f"the cache is a {facts.pool}, served are {', '.join(pools)}: set --kv-cache-dtype to "
            "auto, bf16, fp8_e4m3 or fp8_e5m2"
        )
    if facts.dcp_size > 1:
        yield f"decode context parallelism ({facts.dcp_size} ranks): set --dcp-size 1"
    if facts.is_sparse:
        yield "layers attend lists of tokens (DSA): set --attention-backend dsa"
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


def _of(layer: Any) -> Iterable[str]:
    kind = getattr(layer.attn_type, "value", layer.attn_type)
    if kind != "decoder":
        yield f"layers attend in both directions ({kind}): set --attention-backend triton"
    if layer.is_cross_attention:
        yield "layers have cross attention: set --attention-backend triton"
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        yield f"scores are capped by {layer.logit_capping_method}: set --attention-backend triton"
    if layer.pos_encoding_mode != "NONE":
        yield f"layers rotate keys as {layer.pos_encoding_mode}: set --attention-backend triton"
    if getattr(layer, "xai_temperature_len", -1) > 0:
        yield "layers scale scores by position: set --attention-backend triton"


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
