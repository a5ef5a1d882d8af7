"""A record cannot dequantise the budget that it is judged by."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from attn.testing.budget import CAREFUL, Habits
from attn.testing.habits import both, fp8_products, of_wrapper
from builders.vendor.flashinfer_parts.choice import KernelChoice, WrapperKernel
from builders.vendor.trtllm_parts.mha_choice import RULES, KernelRule


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.kernel.value}-{rule.phase.value}")
def test_rules_claim_what_their_kernels_are_known_for(rule: KernelRule) -> None:
    products = fp8_products(rule, "fp8")
    assert (products is not None) == (rule.computes_fp8 and rule.takes_fp8)
    assert fp8_products(rule, "auto") is None


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.kernel.value}-{rule.phase.value}")
def test_a_rule_that_claims_otherwise_is_an_error(rule: KernelRule) -> None:
    if not rule.takes_fp8:
        assert fp8_products(rule, "fp8") is None
        return
    for lie in (
        replace(rule, computes_fp8=not rule.computes_fp8),
        replace(rule, computes_fp8=True, query_is_fp8=not rule.query_is_fp8),
    ):
        with pytest.raises(AssertionError, match="is known for"):
            fp8_products(lie, "fp8")


def test_wrappers_round_what_their_kernel_does() -> None:
    fa2, fa3 = (KernelChoice(kernel, True, "the test's") for kernel in WrapperKernel)
    assert of_wrapper(fa2) == Habits(rounds_sums=True, approximates_tanh=True)
    assert of_wrapper(replace(fa2, use_tensor_cores=False)) == Habits(approximates_tanh=True)
    assert of_wrapper(fa3) == Habits(approximates_tanh=True)
    lie = SimpleNamespace(kernel=WrapperKernel.FA3, use_tensor_cores=True, rounds_sums=True)
    with pytest.raises(AssertionError, match="must say rounds_sums False"):
        of_wrapper(lie)


def test_a_row_of_several_kernels_has_the_habits_of_all() -> None:
    assert both([]) == CAREFUL
    parts = [Habits(rounds_sums=True), Habits(fp8_weights=True, key_scale=0.5)]
    assert both(parts) == Habits(fp8_weights=True, rounds_sums=True, key_scale=0.5)
