"""Calls of the attention function with random tensors, and the oracle's answer to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from attn.integrations.transformers import attention
from attn.testing import oracle


@dataclass
class Trial:
    """One call of ``generate``'s kind: B rows of S queries over S_k keys."""

    name: str
    lens: tuple[int, ...] = (9, 30, 17)
    """Keys of each row that are no padding; the queries are the last of them."""
    new: int = 30
    heads: tuple[int, int] = (4, 2)
    sizes: tuple[int, int] = (32, 32)
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    is_left_padded: bool = True
    is_cross: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows, keys = len(self.lens), max(self.lens)
        generator = torch.Generator().manual_seed(len(self.name) + sum(self.lens))

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        size, size_v = self.sizes
        # Scores of a few units, so that each key matters.
        self.query = 2 * draw(rows, self.heads[0], self.new, size)
        self.key = draw(rows, self.heads[1], keys, size)
        self.value = draw(rows, self.heads[1], keys, size_v)
        self.sinks = 2 + draw(self.heads[0]) if self.has_sinks else None
        place = torch.arange(keys)[None]
        length = torch.tensor(self.lens)[:, None]
        kept = place >= keys - length if self.is_left_padded else place < length
        self.mask = None if bool(kept.all()) else kept
        # What is masked must not matter, whatever it is.
        hidden = ~kept[:, None, :, None]
        self.key = self.key.masked_fill(hidden, float("nan"))
        self.value = self.value.masked_fill(hidden, float("nan"))

    def run(self) -> torch.Tensor:
        """``[B, S, H, Dv]`` by the attention function."""
        module = torch.nn.Module()
        module.layer_idx = 0  # type: ignore[assignment]
        module.is_causal = self.causal  # type: ignore[assignment]
        output, weights = attention.attend(
            module,
            self.query,
            self.key,
            self.value,
            self.mask,
            scaling=self.sizes[0] ** -0.5,
            sliding_window=self.window,
            softcap=self.soft_cap,
            s_aux=self.sinks,
            dropout=0.0,
            **self.arguments,
        )
        assert weights is None
        return output

    def error(self) -> float:
        """The largest error of an element of a row that is no padding, against float64."""
        output, worst = self.run(), 0.0
        keys = self.key.shape[2]
        for row, length in enumerate(self.lens):
            first = keys - length if self.is_left_padded else 0
            key, value = (
                tensor[row, :, first : first + length].transpose(0, 1)
                for tensor in (self.key, self.value)
            )
            query = self.query[row].transpose(0, 1)
            place = 0
            if not self.is_cross:
                # Queries of padding are left out.
                start = max(0, first - (keys - self.new))
                stop = min(self.new, first + length - (keys - self.new))
                query, output_row = query[start:stop], output[row, start:stop]
                place = length - (stop - start) if self.is_left_padded else 0
            else:
                output_row = output[row]
            rules = oracle.Rules(
                self.sizes[0] ** -0.5,
                causal=self.causal,
                sliding_window=self.window,
                logits_soft_cap=self.soft_cap,
                sinks=self.sinks,
            )
            expected, _ = oracle.attention(query, key, value, place, rules)
            worst = max(worst, float((output_row - expected).abs().nan_to_num(1e9).max()))
        return worst


TRIALS = [
    Trial("prefill"),
    Trial("prefill_without_padding", lens=(30, 30)),
    Trial("decode", new=1),
    Trial("chunk", new=7),
    Trial("window", window=8),
    Trial("decode_window", new=1, window=8),
    Trial("sinks", has_sinks=True),
    Trial("sinks_window", has_sinks=True, window=5, new=3),
    Trial("soft_cap", soft_cap=3.0),
    Trial("other_value_size", sizes=(48, 32), heads=(4, 4)),
    Trial("multi_query", heads=(6, 1)),
    Trial("encoder", causal=False, lens=(30, 30)),
    Trial("encoder_padding", causal=False, is_left_padded=False),
    Trial("encoder_window", causal=False, is_left_padded=False, window=6),
    Trial("cross", causal=False, is_left_padded=False, is_cross=True, new=5),
    Trial("cross_longer", causal=False, is_left_padded=False, is_cross=True, new=40),
]
BUDGET = 2e-5
"""fp32 sums of a few dozen terms of a few units, against float64."""
