"""The merge operation against the oracle, by kernel and reference; no other row is touched."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from attn.ops import merge as operations
from attn.ops.merge import merge_states
from attn.reference import merge as reference
from attn.reference.quant import saturate
from attn.testing import oracle
from attn.testing.batches import is_poison, poisoned
from attn.testing.budget import budget, lse_budget, lse_errors, row_errors

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MODEL = [torch.float16, torch.bfloat16, torch.float32]
OUTPUT_SCALE = 1 / 32


@dataclass(frozen=True)
class Shape:
    """The shapes and types of the states that are merged."""

    states: int = 2
    tokens: int = 5
    heads: int = 3
    size: int = 64
    dtype: torch.dtype = torch.float32
    padding: int = 2
    """Rows past ``num_tokens``, poisoned."""

    def rows(self, seed: int, spread: float = 3.0) -> tuple[Tensor, Tensor]:
        """``[N, T + padding, H, size]`` and ``[N, T + padding, H]`` on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.states, self.tokens, self.heads)
        outs = torch.randn(*shape, self.size, generator=generator).to(self.dtype)
        lses = spread * torch.randn(*shape, generator=generator)
        padding = (self.states, self.padding, self.heads)
        cpu = torch.device("cpu")
        return (
            torch.cat([outs, poisoned(*padding, self.size, dtype=self.dtype, device=cpu)], 1),
            torch.cat([lses, poisoned(*padding, dtype=torch.float32, device=cpu)], 1),
        )


def merged(shape: Shape, outs: Tensor, lses: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The operation's output and LSE, padding rows included, on the CPU."""
    rows = (shape.tokens + shape.padding, shape.heads)
    dtype = torch.float8_e4m3fn if "output_scale" in options else shape.dtype
    output = poisoned(*rows, shape.size, dtype=dtype, device=DEVICE)
    lse = poisoned(*rows, dtype=torch.float32, device=DEVICE)
    options.setdefault("num_tokens", shape.tokens)
    merge_states(outs.to(DEVICE), lses.to(DEVICE), output, output_lse=lse, **options)
    assert is_poison(output[options["num_tokens"] :])
    assert is_poison(lse[options["num_tokens"] :])
    return output.cpu(), lse.cpu()


def check(shape: Shape, outs: Tensor, lses: Tensor) -> None:
    """Check that output and LSE are within the error budget around the oracle's."""
    output, lse = merged(shape, outs, lses)
    real = slice(0, shape.tokens)
    empty = (lses[:, real] == -math.inf)[..., None]
    clean = outs[:, real].masked_fill(empty, 0)
    expected = oracle.merge(list(zip(clean, lses[:, real], strict=True)))
    low, low_lse = reference.merge_states(list(zip(clean.float(), lses[:, real], strict=True)))
    limit = budget(expected[0], low.to(shape.dtype), shape.dtype)
    assert row_errors(output[real], expected[0]).max() <= limit
    assert lse_errors(lse[real], expected[1]).max() <= lse_budget(expected[1], low_lse)


@pytest.mark.parametrize("dtype", MODEL)
@pytest.mark.parametrize("states", [1, 2, 3, 7])
def test_merge_matches_the_oracle(dtype: torch.dtype, states: int) -> None:
    shape = Shape(states, dtype=dtype)
    check(shape, *shape.rows(states))


@pytest.mark.parametrize("size", [8, 40, 128, 200, 512])
def test_every_head_size_is_merged(size: int) -> None:
    shape = Shape(size=size, tokens=9)
    check(shape, *shape.rows(size))


@pytest.mark.parametrize("spread", [0.1, 500.0])
def test_states_of_like_and_of_unlike_weight(spread: float) -> None:
    shape = Shape(3)
    check(shape, *shape.rows(0, spread))


@pytest.mark.parametrize("dtype", MODEL)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 7.0])
def test_an_empty_state_changes_no_bit(dtype: torch.dtype, garbage: float) -> None:
    shape = Shape(3, dtype=dtype)
    outs, lses = shape.rows(4)
    outs[1], lses[1] = garbage, -math.inf
    outs[2], lses[2] = garbage, -math.inf
    output, lse = merged(shape, outs, lses)
    assert torch.equal(output[: shape.tokens], outs[0, : shape.tokens])
    assert torch.equal(lse[: shape.tokens], lses[0, : shape.tokens])


def test_rows_are_empty_in_different_states() -> None:
    shape = Shape(2, dtype=torch.float16)
    outs, lses = shape.rows(5)
    empty = torch.rand(2, shape.tokens + shape.padding, shape.heads) < 0.5
    check(shape, outs.masked_fill(empty[..., None], math.nan), lses.masked_fill(empty, -math.inf))


def test_only_empty_states_merge_to_zero_and_minus_infinity() -> None:
    shape = Shape(2)
    outs, lses = shape.rows(6)
    output, lse = merged(shape, outs.fill_(math.nan), lses.fill_(-math.inf))
    assert bool((output[: shape.tokens] == 0).all())
    assert bool((lse[: shape.tokens] == -math.inf).all())


def test_a_broken_state_is_not_hidden() -> None:
    shape = Shape(2)
    outs, lses = shape.rows(7)
    lses[0, 1, 1] = math.nan
    output, lse = merged(shape, outs, lses)
    assert bool(output[1, 1].isnan().all())
    assert bool(lse[1, 1].isnan())
    assert bool(output[0].isfinite().all())


@pytest.mark.parametrize("dtype", MODEL)
def test_fp8_output_is_scaled_and_saturates(dtype: torch.dtype) -> None:
    shape = Shape(dtype=dtype)
    outs, lses = shape.rows(8)
    outs[:, 0, 0, 0] = 1000.0
    scale = torch.tensor([OUTPUT_SCALE], device=DEVICE)
    output, _ = merged(shape, outs, lses, output_scale=scale)
    real = slice(0, shape.tokens)
    states = list(zip(outs[:, real].float(), lses[:, real], strict=True))
    expected = saturate(reference.merge_states(states)[0] / OUTPUT_SCALE, torch.float8_e4m3fn)
    codes, wanted = (x.contiguous().view(torch.uint8).int() for x in (output[real], expected))
    # On the border between two codes, the last bit of fp32 decides.
    assert (codes - wanted).abs().max() <= 1
    assert (codes != wanted).float().mean() < 0.01
    assert float(output[0, 0, 0]) == torch.finfo(torch.float8_e4m3fn).max


def test_strides_are_the_callers() -> None:
    shape = Shape(padding=0)
    outs, lses = shape.rows(9)
    wide = torch.full((shape.heads, 2, shape.tokens, shape.size + 24), math.nan)
    strided = wide.permute(1, 2, 0, 3)[..., 8 : 8 + shape.size]
    strided.copy_(outs)
    turned = lses.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    expected, expected_lse = merged(shape, outs, lses)
    target = poisoned(shape.heads, shape.tokens, shape.size, dtype=shape.dtype, device=DEVICE)
    target_lse = poisoned(shape.heads, shape.tokens, dtype=torch.float32, device=DEVICE)
    merge_states(
        wide.to(DEVICE).permute(1, 2, 0, 3)[..., 8 : 8 + shape.size],
        turned.to(DEVICE),
        target.transpose(0, 1),
        output_lse=target_lse.T,
    )
    assert torch.equal(target.transpose(0, 1).cpu(), expected)
    assert torch.equal(target_lse.T.cpu(), expected_lse)


def test_rows_past_num_tokens_are_neither_read_nor_written() -> None:
    shape = Shape()
    outs, lses = shape.rows(10)
    whole, _ = merged(shape, outs, lses)
    part, _ = merged(shape, outs, lses, num_tokens=3)
    assert torch.equal(part[:3], whole[:3])
    nothing, _ = merged(shape, outs, lses, num_tokens=0)
    assert is_poison(nothing)


def test_the_reference_serves_where_no_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(dtype=torch.float16)
    outs, lses = shape.rows(11)
    scale = torch.tensor(OUTPUT_SCALE, device=DEVICE)
    kernel = [merged(shape, outs, lses), merged(shape, outs, lses, output_scale=scale)]
    monkeypatch.setattr(operations, "has_kernel", lambda rows: False)
    check(shape, outs, lses)
    plain = [merged(shape, outs, lses), merged(shape, outs, lses, output_scale=scale)]
    for (one, _), (other, _) in zip(kernel, plain, strict=True):
        near = (one.float() - other.float()).abs() <= one.float().abs() * 2**-3
        assert bool(near[: shape.tokens].all())


def test_float64_is_merged_in_float64() -> None:
    shape = Shape(dtype=torch.float64, padding=0)
    outs, lses = shape.rows(12)
    output = torch.empty(outs.shape[1:], dtype=torch.float64)
    merge_states(outs, lses.double(), output)
    expected, _ = oracle.merge(list(zip(outs, lses, strict=True)))
    assert (output - expected).abs().max() < 1e-12


GOOD: dict[str, Any] = {
    "outs": torch.zeros(2, 4, 3, 8),
    "lses": torch.zeros(2, 4, 3),
    "output": torch.zeros(4, 3, 8),
}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"outs": torch.zeros(4, 3, 8)}, "outs"),
        ({"outs": torch.zeros(0, 4, 3, 8)}, "outs"),
        ({"outs": torch.zeros(2, 4, 8, 3).transpose(2, 3)}, "outs must be contiguous"),
        ({"lses": torch.zeros(2, 3, 4)}, "lses"),
        ({"lses": torch.zeros(2, 4, 3, dtype=torch.float16)}, "lses"),
        ({"output": torch.zeros(4, 3, 16)}, "output"),
        ({"output": torch.zeros(4, 3, 16)[..., ::2]}, "output must be contiguous"),
        ({"num_tokens": 5}, "num_tokens"),
        ({"num_tokens": -1}, "num_tokens"),
        ({"output_lse": torch.zeros(3, 3)}, "output_lse"),
        ({"output_lse": torch.zeros(4, 3, dtype=torch.float64)}, "output_lse"),
        ({"output_scale": torch.ones(())}, "output_scale"),
        ({"output": torch.zeros(4, 3, 8).to(torch.float8_e4m3fn)}, "output_scale"),
        (
            {
                "output": torch.zeros(4, 3, 8).to(torch.float8_e4m3fn),
                "output_scale": torch.ones(3),
            },
            "output_scale",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], names: str) -> None:
    arguments = {**GOOD, **changes}
    with pytest.raises(ValueError, match=names):
        merge_states(**arguments)
