"""vLLM's MLA layer of a sparse model with our backend in it, against the definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.vllm.sparse.sparse_runner import (
    NARROW,
    TOPK,
    WIDE,
    Sequences,
    Sizes,
    SparseRunner,
    expected_dense,
    expected_rows,
)

MIX = ((1, 30, 4, 1, 20), (40, 30, 52, 1, 85))
"""A decode, a prompt, a prompt's next chunk, a decode of a first token, a chunk over a block."""


KINDS: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "bf16": (NARROW, {}),
    "fp16": (Sizes(heads=3), {"dtype": "float16"}),
    "fp8": (NARROW, {"cache_dtype": "fp8"}),
    "block scales": (WIDE, {"cache_dtype": "fp8_ds_mla"}),
    "blocks of 128": (NARROW, {"block_size": 128}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_sparse_layer_runs_on_ours_and_is_right(
    runner_of: Callable[..., SparseRunner], kind: str
) -> None:
    sizes, settings = KINDS[kind]
    runner = runner_of(sizes, **settings)
    assert type(runner.layer.impl).__module__ == "attn.integrations.vllm.members"
    sequences, table = Sequences.random(MIX[1], sizes, runner.dtype), runner.table
    before = [length - count for count, length in zip(*MIX, strict=True)]
    cache_dtype = settings.get("cache_dtype", "auto")

    def check(rows: list[int], query_lens: list[int], seq_lens: list[int]) -> None:
        runner.table, chosen = table[rows], sequences.take(rows)
        output = runner.attend(chosen, query_lens, seq_lens)
        answer = expected_rows(chosen, sizes, query_lens, seq_lens, cache_dtype)
        answer.assert_is(output)

    # Cached tokens first come as prompts; then comes a mix with decodes first, as vLLM orders them.
    rows = [row for row, length in enumerate(before) if length]
    check(rows, [before[row] for row in rows], [before[row] for row in rows])
    rows = sorted(range(len(before)), key=lambda row: MIX[0][row] > 1)
    check(rows, [MIX[0][row] for row in rows], [MIX[1][row] for row in rows])


@pytest.mark.parametrize("kind", KINDS)
def test_short_prompts_attend_every_token_and_read_no_list(
    runner_of: Callable[..., SparseRunner], kind: str
) -> None:
    sizes, settings = KINDS[kind]
    runner = runner_of(sizes, **settings)
    cache_dtype = settings.get("cache_dtype", "auto")
    lens = (TOPK, 9, TOPK, 40)
    sequences, table = Sequences.random(lens, sizes, runner.dtype), runner.table

    def run(rows: list[int], query_lens: list[int], seq_lens: list[int], decodes: int) -> None:
        runner.table, chosen = table[rows], sequences.take(rows)
        lists = chosen.of_step(query_lens, seq_lens)[: sum(query_lens[:decodes])]
        runner.indexer.fill(lists)
        batch = runner.batch(query_lens, seq_lens)
        record = runner.builder.build(0, batch)
        prompts = sum(query_lens[decodes:])
        assert (record.prefill is not None) == (prompts > 0)
        output = runner.forward(record, chosen.tokens(), query_lens, seq_lens, batch)
        parts = (slice(0, decodes), expected_rows), (slice(decodes, None), expected_dense)
        for part, answer in parts:
            if not query_lens[part]:
                continue
            some = Sequences(chosen.requests[part], chosen.lists[part])
            first = sum(query_lens[: part.start])
            rows_of = output[first : first + sum(query_lens[part])]
            answer(some, sizes, query_lens[part], seq_lens[part], cache_dtype).assert_is(rows_of)

    run([0, 1], [11, 9], [11, 9], 0)
    # A long prompt beside it sends a short prompt to the lists.
    runner.table, chosen = table[[3, 2]], sequences.take([3, 2])
    output = runner.attend(chosen, [39, 4], [39, 4])
    expected_rows(chosen, sizes, [39, 4], [39, 4], cache_dtype).assert_is(output)
    # A decode, a chunk with cached tokens before it, and one more.
    run([3, 0, 2], [1, 5, 12], [40, 16, 16], 1)
