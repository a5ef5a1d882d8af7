"""Judging one token's attention in float64, on the unpaged tensors that the replay kept.

The module follows the definition of attention and shares no code with ``attn.reference``, which it
judges too. The budget of an error is twice the error of the same formulas in the model's precision,
over keys and values rounded as the cache rounds them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from specs.dtypes import CacheDType, DType
from specs.model import LayerGeometry

Stored = Callable[[torch.Tensor], torch.Tensor]
"""A function from keys or values to their values as read from the cache: float32, same shape."""


@dataclass(frozen=True)
class TokenCheck:
    """One token of one layer: its query, its visible keys and values, and the cache's rounding."""

    query: torch.Tensor
    """``[H, D]`` in the model dtype."""
    key: torch.Tensor
    """``[S, Hk, D]`` of the visible positions, in the model dtype."""
    value: torch.Tensor
    """``[S, Hk, Dv]`` of the visible positions, in the model dtype."""
    distance: torch.Tensor
    """``[S]``: key position minus query position."""
    scale: float
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    """``[H]`` sink logits; None without sinks."""
    alibi_slopes: torch.Tensor | None = None
    """``[H]`` slopes; None without ALiBi."""
    stored_key: torch.Tensor | None = None
    """``key`` as it is read from the cache, float32; None when the cache rounds nothing."""
    stored_value: torch.Tensor | None = None
    read_query: torch.Tensor | None = None
    """``query`` as rounded by a kernel that computes in fp8, float32; such a kernel rounds weights
    to fp8 too. None for a kernel that does not."""
    project: torch.Tensor | None = None
    """``[Dv, H, V]`` projection of latent outputs to values (W_UV); None in dense layers."""


@dataclass(frozen=True)
class Verdict:
    """Error of a checked token, and its budget."""

    error: float
    """Largest over heads of |actual - exact| / |exact| (L2); infinite for NaN."""
    budget: float

    @property
    def ratio(self) -> float:
        """Error over budget; above 1 fails."""
        return self.error / self.budget


def visible_positions(layer: LayerGeometry, position: int) -> tuple[int, int]:
    """First and last position, both included, that a decoder token sees."""
    if layer.sliding_window is not None:
        return max(0, position - layer.sliding_window + 1), position
    if layer.attention_chunk_size is not None:
        return position - position % layer.attention_chunk_size, position
    return 0, position


def judge(actual: torch.Tensor, check: TokenCheck) -> Verdict:
    """Compare one token's output with float64.

    Args:
        actual: ``[H, Dv]`` (``[H, V]`` with a projection) in the model dtype.
        check: the token.
    """
    exact = _attend(check, torch.float64, low_precision=None)
    rounded = _attend(check, torch.float32, low_precision=actual.dtype)
    # Storing the output rounds it by up to half a unit in the last place, in every kernel.
    band = torch.finfo(actual.dtype).eps / 2 + _score_rounding(check)
    return Verdict(_error(actual, exact), 2 * (_error(rounded, exact) + band))


def _score_rounding(check: TokenCheck) -> float:
    """Relative error of a weight because its score sums D products in float32, in any order.

    A score is off by about ``sqrt(D) * u * sum(|q_i k_i|)``, u half of float32's epsilon (Higham
    and Mary, 2019, "A new approach to probabilistic rounding error analysis"), and a weight is the
    exponential of a score. In a 16-bit model other errors are much larger; in a 32-bit model there
    is no other.
    """
    num_kv_heads = check.key.shape[1]
    grouped = check.query.double().abs().view(num_kv_heads, -1, check.query.shape[-1])
    sizes = torch.einsum("kgd,skd->kgs", grouped, check.key.double().abs()) * check.scale
    unit = torch.finfo(torch.float32).eps / 2
    return float(check.query.shape[-1] ** 0.5 * unit * sizes.max())


def _error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    gap = (actual.double() - exact).norm(dim=-1)
    size = exact.norm(dim=-1)
    error = torch.where(gap == 0, 0.0, gap / size).max()
    return float(error) if bool(torch.isfinite(error)) else float("inf")


def _attend(
    check: TokenCheck, dtype: torch.dtype, low_precision: torch.dtype | None
) -> torch.Tensor:
    """Attention of one token; with ``low_precision``, rounded wherever a kernel rounds."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x if low_precision is None else x.to(low_precision).to(dtype)

    key, value = check.key, check.value
    if low_precision is not None:
        key = key if check.stored_key is None else check.stored_key
        value = value if check.stored_value is None else check.stored_value
    query, is_fp8 = check.query, False
    if low_precision is not None and check.read_query is not None:
        query, is_fp8 = check.read_query, True
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    # [H, D] -> [Hk, G, D]: head h uses KV head h // G.
    num_heads, num_kv_heads = query.shape[0], key.shape[1]
    grouped = query.view(num_kv_heads, num_heads // num_kv_heads, -1)
    scores = torch.einsum("kgd,skd->kgs", grouped, key).flatten(0, 1) * check.scale
    if check.soft_cap is not None:
        scores = check.soft_cap * torch.tanh(scores / check.soft_cap)
    if check.alibi_slopes is not None:
        scores = scores + check.alibi_slopes.to(dtype)[:, None] * check.distance.to(dtype)
    logits = scores
    if check.sinks is not None:
        logits = torch.cat([scores, check.sinks.to(dtype)[:, None]], dim=1)
    weights = torch.exp(scores - logits.amax(1, keepdim=True))
    total = torch.exp(logits - logits.amax(1, keepdim=True)).sum(1, keepdim=True)
    if is_fp8:
        # Kernels scale weights so that a weight of 1 becomes the largest number of e4m3.
        weights = (_E4M3.round(weights.double() * _E4M3.largest) / _E4M3.largest).to(dtype)
    weights = rounded(weights)
    shares = weights.view(*grouped.shape[:2], -1)
    out = rounded(torch.einsum("kgs,skd->kgd", shares, value).flatten(0, 1) / total)
    if check.project is not None:
        out = rounded(torch.einsum("hl,lhv->hv", out, check.project.to(dtype)))
    return out


def better_than_listed(
    query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, listed: torch.Tensor
) -> int | None:
    """An unlisted position with a larger logit than a listed one, beyond rounding; None if none.

    Args:
        query: ``[Hi, Di]`` indexer query of one token.
        weights: ``[Hi]`` head weights.
        keys: ``[S, Di]`` indexer keys of the visible positions, before quantisation.
        listed: positions that the indexer listed.
    """
    left = torch.ones(len(keys), dtype=torch.bool, device=keys.device)
    left[listed] = False
    if not bool(left.any()):
        return None
    query, weights, stored = query.double(), weights.double(), _index_rounding(keys)
    logits = (query @ stored.T).relu().T @ weights
    # A generous bound on the error of the kernel's fp32 sums in any order.
    slack = _INDEX_SLACK * ((query.abs() @ stored.abs().T).T @ weights.abs()).max()
    best = torch.where(left, logits, float("-inf")).argmax()
    return int(best) if bool(logits[best] > logits[listed].min() + slack) else None


_INDEX_SLACK = 2.0**-18


def _index_rounding(keys: torch.Tensor) -> torch.Tensor:
    """``[S, Di]`` keys as read from the indexer's cache, in float64."""
    keys = keys.double()
    absmax = keys.abs().amax(-1, keepdim=True)
    step = torch.exp2(torch.ceil(torch.log2(absmax / _E4M3.largest)))
    return _E4M3.round(keys / step) * step


def dense_cache_rounding(cache_dtype: CacheDType, scale: torch.Tensor) -> Stored | None:
    """The rounding of ``[S, Hk, D]`` keys or values by a dense cache; None if it rounds nothing."""
    if cache_dtype is CacheDType.AUTO:
        return None
    if not cache_dtype.is_quantized:
        return lambda x: x.to(cache_dtype.element(DType.BFLOAT16).torch).float()
    grid = _GRIDS[cache_dtype]
    if cache_dtype.quant_mode.is_per_token_head:

        def per_token_head(x: torch.Tensor) -> torch.Tensor:
            x = x.double()
            step = (x.abs().amax(-1, keepdim=True) / grid.largest).clamp(min=1e-6)
            return (grid.round(x / step) * step).float()

        return per_token_head
    return lambda x: (grid.round(x.double() / scale.double()) * scale.double()).float()


def fp8_query(query: torch.Tensor, scale: float) -> torch.Tensor:
    """A query as rounded by a kernel that computes in fp8: float32 of the same shape."""
    return (_E4M3.round(query.double() / scale) * scale).float()


def latent_cache_rounding(
    cache_dtype: CacheDType, scale: torch.Tensor, kv_lora_rank: int
) -> Stored | None:
    """The rounding of ``[S, L + r]`` rows by a latent cache; None if it rounds nothing."""
    if cache_dtype is not CacheDType.FP8_DS_MLA:
        return dense_cache_rounding(cache_dtype, scale)

    def blocks(x: torch.Tensor) -> torch.Tensor:
        nope = x[:, :kv_lora_rank].double().view(len(x), -1, 128)
        absmax = nope.abs().amax(-1, keepdim=True)
        step = torch.exp2(torch.ceil(torch.log2(absmax / _E4M3.largest)))
        nope = (_E4M3.round(nope / step) * step).flatten(1).float()
        return torch.cat([nope, x[:, kv_lora_rank:].bfloat16().float()], dim=-1)

    return blocks


@dataclass(frozen=True)
class _Grid:
    """The values of a narrow type, defined by its bits, so that a check does not rely on casts."""

    largest: float
    mantissa_bits: int | None = None
    """Explicit bits of a float's mantissa; None for integers."""
    smallest_exponent: int = 0

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """Nearest values of the grid, saturated; float64."""
        step = torch.ones_like(x)
        if self.mantissa_bits is not None:
            exponent = torch.frexp(x).exponent - 1
            exponent = exponent.clamp(min=self.smallest_exponent) - self.mantissa_bits
            step = torch.ldexp(step, exponent)
        return ((x / step).round() * step).clamp(-self.largest, self.largest)


_E4M3 = _Grid(448.0, mantissa_bits=3, smallest_exponent=-6)
_GRIDS = {
    CacheDType.FP8: _E4M3,
    CacheDType.FP8_E4M3: _E4M3,
    CacheDType.FP8_E5M2: _Grid(57344.0, mantissa_bits=2, smallest_exponent=-14),
    CacheDType.FP8_PER_TOKEN_HEAD: _E4M3,
    CacheDType.INT8_PER_TOKEN_HEAD: _Grid(127.0),
    CacheDType.INT4_PER_TOKEN_HEAD: _Grid(7.0),
}
