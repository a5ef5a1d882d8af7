"""Multi-head latent attention: absorption, absorbed decode, expanded prefill, top-k sparse.

For head h, with latent c and rotary key p of a token: ``K = [c @ W_UK[:, h], p]`` and
``V = c @ W_UV[:, h]``. Absorption moves the query into latent space (``q_nope @ W_UK[:, h].T``), so
that one latent row serves as key and value of all heads (DeepSeek-V2, section 2.1).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from attn.reference.dense import AttentionRules, attend

ReadRows = Callable[[torch.Tensor], torch.Tensor]
"""A function from ``[S]`` positions of one request to their latent rows ``[S, L + r]``."""


def split_kv_b_proj(
    weight: torch.Tensor, num_heads: int, qk_nope_head_dim: int, v_head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``W_UK [L, H, P]`` and ``W_UV [L, H, V]`` from ``kv_b_proj.weight [H * (P + V), L]``.

    Raises:
        ValueError: a weight of another shape.
    """
    width = num_heads * (qk_nope_head_dim + v_head_dim)
    if weight.dim() != 2 or weight.shape[0] != width:
        raise ValueError(
            f"kv_b_proj.weight must be [{width}, kv_lora_rank] for {num_heads} heads of "
            f"{qk_nope_head_dim} + {v_head_dim}, got {tuple(weight.shape)}"
        )
    per_head = weight.T.reshape(weight.shape[1], num_heads, qk_nope_head_dim + v_head_dim)
    return per_head[..., :qk_nope_head_dim], per_head[..., qk_nope_head_dim:]


def absorb_query(q_nope: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
    """Move queries ``[T, H, P]`` into latent space: ``[T, H, L]`` in the queries' type."""
    return torch.einsum("thp,lhp->thl", q_nope, w_uk.to(q_nope.dtype))


def project_latent_output(latent: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    """Project latent outputs ``[T, H, L]`` to values ``[T, H, V]``."""
    return torch.einsum("thl,lhv->thv", latent, w_uv.to(latent.dtype))


def expand_latent(
    rows: torch.Tensor, w_uk: torch.Tensor, w_uv: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-head keys and values of latent rows.

    Args:
        rows: ``[S, L + r]``.
        w_uk: ``[L, H, P]``.
        w_uv: ``[L, H, V]``.

    Returns:
        ``[S, H, P + r]`` and ``[S, H, V]``.
    """
    kv_c, k_pe = rows[:, : w_uk.shape[0]], rows[:, w_uk.shape[0] :]
    k_nope = torch.einsum("sl,lhp->shp", kv_c, w_uk.to(rows.dtype))
    value = torch.einsum("sl,lhv->shv", kv_c, w_uv.to(rows.dtype))
    heads = k_nope.shape[1]
    return torch.cat([k_nope, k_pe[:, None, :].expand(-1, heads, -1)], dim=-1), value


def read_as_mqa(rows: torch.Tensor, kv_lora_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of latent rows ``[S, L + r]`` as key ``[S, 1, L + r]`` and value ``[S, 1, L]``."""
    return rows[:, None, :], rows[:, None, :kv_lora_rank]


def attend_topk(
    query: torch.Tensor,
    topk: torch.Tensor,
    read_rows: ReadRows,
    kv_lora_rank: int,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query over the positions listed for it; a duplicate counts twice.

    Args:
        query: ``[T, H, L + r]`` absorbed, float32 or float64.
        topk: ``[T, K]`` integer positions; negative entries are skipped.
        read_rows: returns the latent rows ``[S, L + r]`` of ``[S]`` positions.
        kv_lora_rank: L.
        scale: multiplies q.k.
        sinks: ``[H]`` logits added to the softmax denominator and to the LSE.

    Returns:
        ``[T, H, L]`` and LSE ``[T, H]``; zero and -inf for a query with an empty list.
    """
    rules = AttentionRules(scale=scale, causal=False, sinks=sinks)
    outs, lses = [], []
    for row, listed in zip(query, topk, strict=True):
        key, value = read_as_mqa(read_rows(listed[listed >= 0].long()), kv_lora_rank)
        positions = torch.zeros(len(key), dtype=torch.int64, device=query.device)
        out, lse = attend(row[None], key, value, positions[:1], positions, rules)
        outs.append(out)
        lses.append(lse)
    if not outs:
        empty = query.new_zeros((0, query.shape[1], kv_lora_rank))
        return empty, query.new_zeros((0, query.shape[1]))
    return torch.cat(outs), torch.cat(lses)
