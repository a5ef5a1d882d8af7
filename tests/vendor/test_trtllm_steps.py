"""Draft steps, ragged verifies and block pools of window layers of TRTLLM_MHA, against the oracle.

The calls are emulated without a GPU; on a GPU they are real, in graphs too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from attn.backends.trtllm_mha import TrtllmMhaBackend
from attn.impls.base import LayerScales
from attn.impls.vendor.trtllm_mha import TrtllmMhaImpl
from attn.registry import AttentionBackendEnum
from attn.testing import oracle
from attn.testing.budget import low_precision_attention
from attn.testing.cases import device_for
from attn.testing.oracle import Rules
from builders.batch import CommonAttentionMetadata
from builders.vendor.trtllm_mha import TrtllmMhaMetadataBuilder
from specs.devices import KNOWN_DEVICES
from specs.dtypes import DType
from specs.engine import EngineConfig, SpeculativeConfig
from specs.kv_cache import FullAttentionSpec, SlidingWindowSpec
from tests.emulators.trtllm_emulator import NEW, OLD, emulated

P, HEADS, KV_HEADS, SIZE, BLOCKS = 16, 8, 2, 64, 160
SCALE = SIZE**-0.5
WINDOW = 20
CONFIG = EngineConfig(
    max_model_len=512,
    max_num_seqs=8,
    max_num_batched_tokens=128,
    num_heads=HEADS,
    speculative=SpeculativeConfig(num_speculative_tokens=3),
)
WHERE = [
    pytest.param("h200", OLD, id="h200-old"),
    pytest.param("h200", NEW, id="h200-new"),
    pytest.param("b200", NEW, id="b200-new"),
    pytest.param("cuda", "", id="cuda", marks=pytest.mark.gpu),
]


@contextmanager
def device_of(name: str, version: str) -> Iterator[torch.device]:
    """The CPU with an emulated FlashInfer, or the GPU with its own."""
    if name == "cuda":
        if device_for(AttentionBackendEnum["TRTLLM_MHA"]) is None:
            pytest.skip(TrtllmMhaBackend.unavailable_reason() or "no kernel for this GPU")
        yield torch.device("cuda")
        return
    with emulated(KNOWN_DEVICES[name], version):
        yield torch.device("cpu")


class Layer:
    """A layer over a cache whose blocks all hold random rows."""

    def __init__(self, device: torch.device, window: int | None, seed: int = 0) -> None:
        self.device, self.window = device, window
        self.generator = torch.Generator().manual_seed(seed)
        sizes: dict[str, Any] = {
            "block_size": P,
            "dtype": DType.BFLOAT16,
            "num_kv_heads": KV_HEADS,
            "head_size": SIZE,
        }
        self.spec: FullAttentionSpec | SlidingWindowSpec = FullAttentionSpec(**sizes)
        if window is not None:
            self.spec = SlidingWindowSpec(**sizes, sliding_window=window)
        shape = BLOCKS, 2, P, KV_HEADS, SIZE
        self.cache = self.random(*shape)
        self.impl = TrtllmMhaImpl(HEADS, SIZE, SCALE, KV_HEADS, None, window)
        self.scales = LayerScales.of(device=device)

    def random(self, *shape: int) -> torch.Tensor:
        rows = 2 * torch.randn(shape, generator=self.generator)
        return rows.to(torch.bfloat16).to(self.device)

    def builder(self) -> TrtllmMhaMetadataBuilder:
        return TrtllmMhaMetadataBuilder(self.spec, ["layers.0"], CONFIG, self.device)

    def batch(
        self, query_lens: list[int], seq_lens: list[int], seed: int = 0
    ) -> CommonAttentionMetadata:
        generator = torch.Generator().manual_seed(seed)
        blocks = 1 + torch.randperm(BLOCKS - 1, generator=generator, dtype=torch.int32)
        width = (BLOCKS - 1) // len(seq_lens)
        table = blocks[: len(seq_lens) * width].view(len(seq_lens), width).to(self.device)
        return CommonAttentionMetadata.from_lengths(query_lens, seq_lens, table, P)

    def attend(self, query: torch.Tensor, record: Any, output: torch.Tensor) -> None:
        self.impl.forward(self.scales, query, None, None, self.cache, record, output)

    def judge(
        self,
        output: torch.Tensor,
        query: torch.Tensor,
        table: torch.Tensor,
        starts: list[int],
        lens: list[int],
    ) -> None:
        """Check errors against twice the error of the same maths in bf16; rows without keys are
        zeros.
        """
        cache, query, output = self.cache.cpu(), query.cpu(), output.cpu().double()
        rules = Rules(SCALE, sliding_window=self.window)
        for row, length in enumerate(lens):
            rows = slice(starts[row], starts[row + 1])
            if length == 0:
                assert not output[rows].any()
                continue
            pages = table[row, : -(-length // P)].long().cpu()
            key, value = (cache[pages, side].flatten(0, 1)[:length] for side in (0, 1))
            first = length - (rows.stop - rows.start)
            exact, _ = oracle.attention(query[rows], key, value, first, rules)
            low, _ = low_precision_attention(query[rows], key, value, first, rules, torch.bfloat16)
            errors = [(one.double() - exact).norm(dim=-1) for one in (output[rows], low)]
            # The output's rounding loses half a unit whatever the kernel does.
            band = exact.norm(dim=-1) * torch.finfo(torch.bfloat16).eps / 2
            assert bool((errors[0] <= 2 * (errors[1] + band)).all()), errors


DRAFTED = ([3, 1, 0, 2], [40, 510, 0, 33])
"""After two steps one request reaches the model's maximum length; one request is padding."""


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize(("name", "version"), WHERE)
def test_draft_steps_attend_to_what_was_drafted(
    name: str, version: str, window: int | None
) -> None:
    with device_of(name, version) as device:
        layer = Layer(device, window)
        batch = layer.batch(*DRAFTED)
        steps = layer.builder().build_draft_steps(batch, 3)
        for step, record in enumerate(steps):
            query = layer.random(4, HEADS, SIZE)
            output = torch.empty_like(query)
            layer.attend(query, record, output)
            lens = [length + step + 1 for length in DRAFTED[1]]
            room = batch.block_table_tensor.shape[1] * P
            lens = [n if n <= min(room, 512) and n > step + 1 else 0 for n in lens]
            assert record.seq_lens.tolist() == lens
            layer.judge(output, query, batch.block_table_tensor, [0, 1, 2, 3, 4], lens)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_graph_of_draft_steps_follows_their_rebuild(window: int | None) -> None:
    with device_of("cuda", "") as device:
        layer, lens = Layer(device, window), ([1, 1, 1], [100, 37, 16])
        builder = layer.builder()
        query = layer.random(3, HEADS, SIZE)
        outputs = [torch.empty_like(query) for _ in range(3)]
        steps = builder.build_draft_steps(layer.batch(*lens), 3)

        def attend() -> None:
            for record, output in zip(steps, outputs, strict=True):
                layer.attend(query, record, output)

        attend()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend()
        other = [1, 1, 1], [5, 200, 81]
        batch = layer.batch(*other, seed=1)
        builder.build_draft_steps(batch, 3)
        graph.replay()
        for step, output in enumerate(outputs):
            own = [length + step + 1 for length in other[1]]
            layer.judge(output, query, batch.block_table_tensor, [0, 1, 2, 3], own)


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("lens", [[4, 4, 4], [1, 4, 2], [2, 0, 3, 1], [1, 4, 30], [3, 3]])
@pytest.mark.parametrize(("name", "version"), WHERE)
def test_verifies_of_any_lengths_attend_to_their_own(
    name: str, version: str, lens: list[int], window: int | None
) -> None:
    with device_of(name, version) as device:
        layer = Layer(device, window)
        seq_lens = [50 + 7 * row + length if length else 0 for row, length in enumerate(lens)]
        batch = layer.batch(lens, seq_lens)
        query = layer.random(sum(lens), HEADS, SIZE)
        output = torch.empty_like(query)
        layer.attend(query, layer.builder().build(0, batch), output)
        starts = [sum(lens[:row]) for row in range(len(lens) + 1)]
        layer.judge(output, query, batch.block_table_tensor, starts, seq_lens)


@pytest.mark.parametrize(("name", "version"), WHERE)
def test_window_layers_read_and_write_a_pool_of_their_own(name: str, version: str) -> None:
    with device_of(name, version) as device:
        layer = Layer(device, WINDOW)
        batch = layer.batch([1, 1, 30], [100, 47, 30])
        pool = torch.randperm(BLOCKS - 1, generator=layer.generator).int() + 1
        pool = torch.cat([torch.zeros(1, dtype=torch.int32), pool]).to(device)
        own_table = pool[batch.block_table_tensor.long()]
        # The engine has released the blocks before the window.
        pool[batch.block_table_tensor[0, :4].long()] = 0
        builder = layer.builder()
        builder.use_pool(pool)
        record = builder.build(0, batch)
        key, value = (layer.random(32, KV_HEADS, SIZE) for _ in range(2))
        layer.impl.do_kv_cache_update(layer.scales, key, value, layer.cache, record.slot_mapping)
        last = layer.cache[own_table[0, 99 // P].long(), 0, 99 % P]
        assert torch.equal(last, key[0])
        query = layer.random(32, HEADS, SIZE)
        output = torch.empty_like(query)
        layer.attend(query, record, output)
        layer.judge(output, query, own_table, [0, 1, 2, 32], [100, 47, 30])


def test_a_shifted_table_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge of this file tells right from wrong."""
    from builders.vendor import trtllm_mha

    fill: Callable[..., None] = trtllm_mha.fill_tables

    def shifted(step: Any, decode: Any, prefill: Any, window: Any) -> None:
        fill(step, decode, prefill, window)
        decode.pages.copy_(decode.pages.roll(1, 1))

    monkeypatch.setattr(trtllm_mha, "fill_tables", shifted)
    with pytest.raises(AssertionError):
        test_verifies_of_any_lengths_attend_to_their_own("h200", NEW, [4, 4, 4], None)
