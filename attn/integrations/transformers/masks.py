"""The mask of a step of ``generate``: None, or the tokens that are no padding."""

from __future__ import annotations

from typing import Any

import torch


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask that Transformers hands to every layer; the signature is that of its mask functions.

    Causality and windows are the layers' own, so that only padding is left to tell.

    Args:
        batch_size: B.
        q_length: new tokens of each row.
        kv_length: keys of each row.
        q_offset: position of the first new token.
        kv_offset: position of the first key.
        mask_function: Transformers' rule by positions; it is not evaluated.
        attention_mask: ``[B, positions]`` bool, True for a token that is no padding; or None.
        **kwargs: what other masks read; ``allow_is_causal_skip`` or ``allow_is_bidirectional_skip``
            is False where a model asks for more than causality, window and padding.

    Returns:
        ``[B, kv_length]`` bool, or None where no token is padding.

    Raises:
        NotImplementedError: a static cache, chunked attention, or a mask of the model's own.
    """
    if isinstance(q_offset, torch.Tensor):
        raise NotImplementedError(
            "attn_implementation 'attn' does not serve a static cache: leave cache_implementation "
            "at its default, which grows"
        )
    skip = kwargs.get("allow_is_bidirectional_skip", kwargs.get("allow_is_causal_skip", True))
    if not skip:
        raise NotImplementedError(
            "attn_implementation 'attn' serves causal, sliding-window, bidirectional and padding "
            "masks, and this model asks for another one (packed sequences, blocks, or its own): "
            "take attn_implementation 'sdpa'"
        )
    chunk = getattr(kwargs.get("config"), "attention_chunk_size", None)
    if chunk is not None and kv_length + kv_offset > chunk:
        raise NotImplementedError(
            f"attn_implementation 'attn' does not serve chunked attention beyond the first "
            f"attention_chunk_size ({chunk}) tokens, got {kv_length + kv_offset}: take "
            "attn_implementation 'sdpa'"
        )
    if attention_mask is None:
        return None
    # A sliding cache has dropped the positions before its first key.
    kept = attention_mask[:, -kv_length:]
    return None if bool(kept.all()) else kept
