"""Which kernels round more than a careful one does, as the judge knows it.

A budget is as wide as the same maths in the precision that a kernel computes in. What that is, the
record under test must not say: a record that claimed fp8 products would be judged as if it had
them. So a record only says which kernel takes a row, and what that kernel rounds stands here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn.testing.budget import CAREFUL, Habits


@dataclass(frozen=True)
class Fp8Products:
    """What a kernel does with e4m3 beside the cache that holds it."""

    scaled_query: bool
    """The query is given as e4m3, divided by its scale; else the kernel rounds it with scale 1."""


FP8_PRODUCTS: dict[tuple[str, int], Fp8Products] = {
    ("trtllm-gen", 10): Fp8Products(scaled_query=True),
    ("fmha_v2", 9): Fp8Products(scaled_query=True),
    ("xqa", 9): Fp8Products(scaled_query=False),
}
"""By kernel and major compute capability, over an e4m3 cache; every other kernel computes in the
model's type. Among these: XQA on 12.x, which widens what it reads."""


def fp8_products(rule: Any, cache_dtype: str) -> Fp8Products | None:
    """How the kernel of a phase of TRTLLM_MHA computes over a cache; None in the model's type.

    Args:
        rule: of the record's phase.
        cache_dtype: of the case.

    Raises:
        AssertionError: the rule says otherwise.
    """
    known = FP8_PRODUCTS.get((rule.kernel.value, rule.capabilities.minimum.major))
    claimed = Fp8Products(rule.query_is_fp8) if rule.computes_fp8 else None
    if rule.takes_fp8 and claimed != known:
        raise AssertionError(f"{rule.kernel.value} is known for {known}, its rule says {claimed}")
    return known if cache_dtype.startswith("fp8") else None


def of_wrapper(choice: Any) -> Habits:
    """What a kernel of FlashInfer's wrappers rounds: fa2 sums rounded weights where its products
    are of matrices, and both kernels take a soft cap by the hardware's tanh.

    Args:
        choice: of the plan.

    Raises:
        AssertionError: the choice says otherwise.
    """
    rounds = choice.kernel.value == "fa2" and choice.use_tensor_cores
    if choice.rounds_sums != rounds:
        raise AssertionError(f"{choice} must say rounds_sums {rounds}")
    return Habits(rounds_sums=rounds, approximates_tanh=True)


def both(habits: list[Habits]) -> Habits:
    """What any of several kernels rounds that a row goes through."""
    return Habits(
        fp8_weights=any(one.fp8_weights for one in habits),
        rounds_sums=any(one.rounds_sums for one in habits),
        approximates_tanh=any(one.approximates_tanh for one in habits),
    ) if habits else CAREFUL  # fmt: skip
