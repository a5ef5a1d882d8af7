"""Windows, chunks and ranges that are cut to 32 bits mask the same keys as before."""

from __future__ import annotations

from itertools import product

import pytest

from specs.base import SpecError
from specs.engine import EngineConfig, ParallelConfig
from specs.positions import MOST_POSITIONS, cut_chunks, cut_range, cut_window

MOST_INT32 = 2**31 - 1
LENGTHS = (1, 2, 16, 17, 2**30 - 1, 2**30, 2**31 - 1, 2**31, 2**63)
POSITIONS = (0, 1, 15, 16, 17, 2**20, 2**29 + 3, 2**30 - 2, 2**30 - 1)


def fits(*numbers: int) -> bool:
    return all(-(2**31) <= number <= MOST_INT32 for number in numbers)


@pytest.mark.parametrize("window", LENGTHS)
def test_a_window_sees_what_it_saw_and_its_sums_fit(window: int) -> None:
    cut = cut_window(window)
    assert cut is not None
    for query, key in product(POSITIONS, POSITIONS):
        assert (query - key < cut) == (query - key < window)
        assert fits(query + cut, query - cut, query - cut + 1, key - query)
    assert cut == min(window, MOST_POSITIONS)


@pytest.mark.parametrize("size", LENGTHS)
@pytest.mark.parametrize("lookback", [0, *LENGTHS])
def test_chunks_see_what_they_saw_and_their_products_fit(size: int, lookback: int) -> None:
    cut, back = cut_chunks(size, lookback)
    assert cut is not None
    for query, key in product(POSITIONS, POSITIONS):
        seen = query // size - key // size <= lookback
        assert (query // cut - key // cut <= back) == seen
        first = max(0, (query // cut - back) * cut)
        assert first == max(0, (query // size - lookback) * size)
        assert fits((query // cut - back) * cut)


@pytest.mark.parametrize("low", [-(2**40), -1, 0, 5, *LENGTHS])
@pytest.mark.parametrize("high", [-(2**40), -1, 0, 5, *LENGTHS])
def test_a_range_joins_the_keys_that_it_did(low: int, high: int) -> None:
    first, last = cut_range(low, high)
    assert fits(first, last + 1)
    for query, key in product(POSITIONS, POSITIONS):
        if query == key:
            # Every query sees its own key without a range.
            continue
        joined = low < high and low <= query <= high and low <= key <= high
        assert (first < last and first <= query <= last and first <= key <= last) == joined


def test_no_window_and_no_chunks_stay_none() -> None:
    assert cut_window(None) is None
    assert cut_chunks(None, 3) == (None, 3)


def test_what_is_not_positive_is_refused_with_the_value() -> None:
    for window in (0, -1):
        with pytest.raises(ValueError, match=f"window must be positive or None, got {window}"):
            cut_window(window)
        with pytest.raises(ValueError, match=f"size must be positive or None, got {window}"):
            cut_chunks(window, 0)
    with pytest.raises(ValueError, match="lookback must not be negative, got -1"):
        cut_chunks(16, -1)


@pytest.mark.parametrize("name", ["max_model_len", "max_num_batched_tokens"])
def test_an_engine_has_no_longer_requests_and_steps_than_positions(name: str) -> None:
    limits = {"max_model_len": 64, name: MOST_POSITIONS}
    assert getattr(EngineConfig(**limits), name) == MOST_POSITIONS
    with pytest.raises(SpecError, match=f"{name}(.|\n)*less than or equal to 1073741824"):
        EngineConfig(**{**limits, name: MOST_POSITIONS + 1})


def test_a_turn_of_all_ranks_is_no_longer_than_positions() -> None:
    turn = {"decode_context_parallel_size": 4, "dcp_interleave": MOST_POSITIONS // 4}
    assert ParallelConfig(**turn).dcp_interleave == MOST_POSITIONS // 4
    with pytest.raises(SpecError, match=r"dcp_interleave \(268435457\) times"):
        ParallelConfig(**{**turn, "dcp_interleave": MOST_POSITIONS // 4 + 1})
