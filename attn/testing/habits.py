"""Which kernels round more than a careful kernel does, as the judge knows it.

A budget (``attn.testing.budget``) is as wide as the error of the same maths in the precision in
which a kernel computes. The record under test must not say what that precision is: a record that
claimed fp8 products would be judged as if it had them. So a record only says which kernel computes
a row, and this module says what that kernel rounds. A kernel that is not listed here is judged as a
careful one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn.testing.budget import Habits


@dataclass(frozen=True)
class Fp8Products:
    """A kernel that multiplies e4m3 numbers, queries and weights, beside an fp8 cache."""

    scaled_query: bool
    """True: the query comes as e4m3, divided by its scale. False: the kernel rounds it itself, with
    scale 1."""


FP8_PRODUCTS: dict[tuple[str, int], Fp8Products] = {
    ("trtllm-gen", 10): Fp8Products(scaled_query=True),
    ("fmha_v2", 9): Fp8Products(scaled_query=True),
    ("xqa", 9): Fp8Products(scaled_query=False),
}
"""Kernels of TRTLLM_MHA that multiply e4m3 numbers over an fp8 cache, by name and major compute
capability. Every other kernel computes in the model's dtype; XQA on capability 12 is one of them,
since it dequantises what it reads."""


def fp8_products(rule: Any, cache_dtype: str) -> Fp8Products | None:
    """What the kernel of TRTLLM_MHA's decodes or prefills rounds; None: it computes in the model's
    dtype.

    Args:
        rule: of the record's decodes or prefills; names the kernel.
        cache_dtype: of the case.

    Raises:
        AssertionError: the rule says of its kernel something else than this module.
    """
    known = FP8_PRODUCTS.get((rule.kernel.value, rule.capabilities.minimum.major))
    claimed = Fp8Products(rule.query_is_fp8) if rule.computes_fp8 else None
    if rule.takes_fp8 and claimed != known:
        raise AssertionError(f"{rule.kernel.value} is known for {known}, its rule says {claimed}")
    return known if cache_dtype.startswith("fp8") else None


def of_wrapper(choice: Any) -> Habits:
    """What a kernel of FlashInfer's wrappers rounds.

    The kernel fa2 sums rounded weights where it uses tensor cores. All of them apply a soft cap by
    the hardware's approximate tanh.

    Args:
        choice: of the plan; names the kernel.

    Raises:
        AssertionError: the choice says of its kernel something else than this module.
    """
    rounds = choice.kernel.value == "fa2" and choice.use_tensor_cores
    if choice.rounds_sums != rounds:
        raise AssertionError(f"{choice} must say rounds_sums {rounds}")
    return Habits(rounds_sums=rounds, approximates_tanh=True)


def both(habits: list[Habits]) -> Habits:
    """What at least one of several kernels rounds, where a row goes through all of them."""
    return Habits(
        fp8_weights=any(one.fp8_weights for one in habits),
        rounds_sums=any(one.rounds_sums for one in habits),
        approximates_tanh=any(one.approximates_tanh for one in habits),
        key_scale=max((one.key_scale for one in habits), default=0.0),
    )
