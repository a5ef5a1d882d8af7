"""The portable latent decode kernel at an engine's sizes, against float64 on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn.backends.triton_mla import TritonMLABackend
from attn.testing.batches import WILD_BLOCK, Layer
from builders.batch import CommonAttentionMetadata
from specs.attention import AttentionType
from specs.base import cdiv
from specs.dtypes import CacheDType, DType
from specs.engine import DecodeKernel, EngineConfig, Kernels, SpeculativeConfig
from specs.kv_cache import MLAAttentionSpec

DEVICE = torch.device("cuda")
BLOCK, RANK, WIDTH = 64, 512, 576
SCALE = 192**-0.5
UNIFORM = [4096] * 128
"""Lengths with one program per row, and more segments of a row than a program holds at a time."""
RAGGED = [1, 63, 4097, 9000, 2048, 2049, 20_000, *range(100, 6000, 117)]
FEW = [40_000, 512]
"""Lengths with rows that are cut between programs; the long row has several segment groups."""

pytestmark = pytest.mark.gpu


def error_of(found: Tensor, wanted: Tensor) -> float:
    """The largest relative error over rows ``[H, L]``, by the norm of each row."""
    norms = wanted.norm(dim=-1)
    return float(((found.double() - wanted).norm(dim=-1) / norms).max())


class Serving:
    """A layer over a permuted table; its cache has random rows, and poison in unused slots."""

    def __init__(
        self,
        heads: int,
        lens: list[int],
        query_len: int = 1,
        dtype: DType = DType.BFLOAT16,
        cache_dtype: CacheDType = CacheDType.AUTO,
        device: torch.device = DEVICE,
    ) -> None:
        self.lens, self.query_len, self.dtype = lens, query_len, dtype.torch
        generator = torch.Generator(device).manual_seed(0)
        spec = MLAAttentionSpec(block_size=BLOCK, dtype=dtype, cache_dtype=cache_dtype)
        counts = [cdiv(length, BLOCK) for length in lens]
        blocks = 1 + torch.randperm(sum(counts) + 3, device=device, generator=generator)
        self.pages = list(blocks[: sum(counts)].split(counts))
        table = torch.full((len(lens), max(counts)), WILD_BLOCK, dtype=torch.int32, device=device)
        for row, pages in zip(table, self.pages, strict=True):
            row[: len(pages)] = pages
        self.cache = spec.layout().allocate(int(blocks.max()) + 1, device, fill_byte=0xFF)
        one = torch.ones((), device=device)
        self.layer = Layer(one, one / 32 if cache_dtype.is_quantized else one, one)
        self.impl: Any = TritonMLABackend.get_impl_cls()(
            *(heads, WIDTH, SCALE, 1, None, None, cache_dtype.value, None),
            *(AttentionType.DECODER.value, None),
            q_lora_rank=None,
            kv_lora_rank=RANK,
            qk_nope_head_dim=128,
            qk_rope_head_dim=WIDTH - RANK,
            qk_head_dim=192,
            v_head_dim=128,
            kv_b_proj=None,
        )
        self.rows: list[Tensor] = []
        for length, pages in zip(lens, self.pages, strict=True):
            rows = torch.randn(length, WIDTH, device=device, generator=generator).to(self.dtype)
            slots = (pages[:, None] * BLOCK + torch.arange(BLOCK, device=device)).flatten()[:length]
            self.impl.do_kv_cache_update(
                rows[:, :RANK],
                rows[:, None, RANK:],
                self.cache,
                slots,
                cache_dtype.value,
                self.layer._k_scale,
            )
            if cache_dtype.is_quantized:
                scaled = rows.float() / self.layer._k_scale
                rows = scaled.to(torch.float8_e4m3fn).float() * self.layer._k_scale
            self.rows.append(rows)
        tokens = len(lens) * query_len
        self.query = torch.randn(tokens, heads, WIDTH, device=device, generator=generator)
        self.query = self.query.to(self.dtype)
        config = EngineConfig(
            max_model_len=131072,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            num_heads=heads,
            speculative=SpeculativeConfig(num_speculative_tokens=query_len - 1)
            if query_len > 1
            else None,
            kernels=Kernels.own(decode=DecodeKernel.TRITON),
        )
        self.builder = TritonMLABackend.get_builder_cls()(spec, ["layers.0"], config, device)
        batch = CommonAttentionMetadata.from_lengths([query_len] * len(lens), lens, table, BLOCK)
        self.record: Any = self.builder.build(0, batch)
        for scratch in (self.record.decode.split.states, self.record.decode.split.sums):
            scratch.fill_(float("nan"))

    def attend(self) -> tuple[Tensor, Tensor]:
        """Run the decode kernel; the results are output ``[T, H, L]`` and LSE ``[T, H]``."""
        query = (self.query[..., :RANK], self.query[..., RANK:])
        found: tuple[Tensor, Tensor] = self.impl.forward_mqa(
            query, self.cache, self.record, self.layer
        )
        return found

    def check(self, found: Tensor, lse: Tensor) -> None:
        """Check every row: its error is at most twice what rounding weights and result costs."""
        assert bool(torch.isfinite(found).all())
        errors, budgets = [], []
        for request, (length, rows) in enumerate(zip(self.lens, self.rows, strict=True)):
            exact = rows.double()
            for index in range(self.query_len):
                seen = exact[: length - self.query_len + 1 + index]
                token = request * self.query_len + index
                scores = self.query[token].double() @ seen.T * SCALE
                values = seen[:, :RANK]
                wanted = scores.softmax(-1) @ values
                weights = (scores - scores.amax(-1, keepdim=True)).exp()
                rounded = weights.to(self.dtype).double() @ values
                rounded = (rounded / weights.sum(-1, keepdim=True)).to(self.dtype)
                errors.append(error_of(found[token], wanted))
                budgets.append(error_of(rounded, wanted))
                torch.testing.assert_close(
                    lse[token].double(), scores.logsumexp(-1), rtol=0, atol=1e-4
                )
        assert max(errors) <= 2 * max(budgets), (max(errors), max(budgets))


@pytest.mark.parametrize("cache_dtype", [CacheDType.AUTO, CacheDType.FP8_E4M3], ids=str)
@pytest.mark.parametrize("lens", [UNIFORM, RAGGED, FEW], ids=["uniform", "ragged", "few"])
@pytest.mark.parametrize(("heads", "query_len"), [(16, 1), (64, 1), (128, 1), (16, 4)])
def test_long_rows_are_right_launch_after_launch(
    heads: int, query_len: int, lens: list[int], cache_dtype: CacheDType
) -> None:
    lens = [max(length, query_len) for length in lens]
    serving = Serving(heads, lens, query_len, cache_dtype=cache_dtype)
    first, lse = serving.attend()
    serving.check(first, lse)
    for _ in range(20):
        again, other = serving.attend()
        assert torch.equal(again, first)
        assert torch.equal(other, lse)
    assert not bool(serving.record.decode.split.counters.any())
