"""Traces: bad lines are refused by name, synthetic ones have the public trace's shape."""

import contextlib
import csv
import itertools
import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn.cli.trace import (
    TraceError,
    TraceRequest,
    fit_to_limit,
    read_trace,
    synthetic_trace,
)

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
FIRST = "2023-11-16 18:15:46.6805900,374,44"
SECOND = "2023-11-16 18:15:50.9951690,396,109"
PUBLIC_TRACE = Path(__file__).parents[3] / "shared" / "data" / "azure_llm_2023_conv.csv"


def write(directory: Path, *lines: str, end: str = "\n") -> Path:
    path = directory / "trace.csv"
    path.write_bytes("".join(line + end for line in lines).encode())
    return path


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_of_the_public_trace_are_read_with_either_line_end(tmp_path: Path, end: str) -> None:
    requests = read_trace(write(tmp_path, HEADER, FIRST, SECOND, end=end), None)
    assert requests == [TraceRequest(0.0, 374, 44), TraceRequest(4.314579, 396, 109)]


def test_all_seven_digits_of_a_timestamp_count(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER, "2023-11-16 18:15:46.0000001,1,0", "2023-11-16 18:15:46.9,1,0")
    assert read_trace(path, None)[1].arrival == 0.8999999


def test_timestamps_of_the_2024_traces_with_a_zone_are_read(tmp_path: Path) -> None:
    lines = ("2024-05-10 00:00:00.009930+00:00,5,1", "2024-05-10T01:00:00.509930+01:00,6,0")
    assert read_trace(write(tmp_path, HEADER, *lines), None)[1] == TraceRequest(0.5, 6, 0)


def test_a_byte_order_mark_and_blank_lines_at_the_end_are_accepted(tmp_path: Path) -> None:
    path = write(tmp_path, "\ufeff" + HEADER, FIRST, "", "  ", "")
    assert len(read_trace(path, None)) == 1


def test_equal_timestamps_are_accepted(tmp_path: Path) -> None:
    assert len(read_trace(write(tmp_path, HEADER, FIRST, FIRST), None)) == 2


def test_rows_past_the_limit_are_not_looked_at(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER, FIRST, SECOND, "nonsense")
    assert len(read_trace(path, 2)) == 2
    with pytest.raises(TraceError, match=r"trace\.csv:4:"):
        read_trace(path, 3)


@pytest.mark.parametrize(
    ("line", "column", "expected", "value"),
    [
        ("2023-11-16 18:15:50.0,5", "GeneratedTokens", "3 columns", "got 2"),
        ("2023-11-16 18:15:50.0", "ContextTokens", "3 columns", "got 1"),
        ("2023-11-16 18:15:50.0,5,6,7", "4", "3 columns", "'7'"),
        ("2023-11-16 18:15:50.0,five,6", "ContextTokens", "an integer", "'five'"),
        ("2023-11-16 18:15:50.0,5,6.0", "GeneratedTokens", "an integer", "'6.0'"),
        ("2023-11-16 18:15:50.0,1_000,6", "ContextTokens", "an integer", "'1_000'"),
        ("2023-11-16 18:15:50.0,٣,6", "ContextTokens", "an integer", "'٣'"),
        ("2023-11-16 18:15:50.0,,6", "ContextTokens", "an integer", "''"),
        ("2023-11-16 18:15:50.0,5,-6", "GeneratedTokens", "an integer from 0", "'-6'"),
        ("2023-11-16 18:15:50.0,-5,6", "ContextTokens", "an integer from 1", "'-5'"),
        ("2023-11-16 18:15:50.0,0,6", "ContextTokens", "an integer from 1", "'0'"),
        ("2023-11-16 18:15:50.0,2147483648,6", "ContextTokens", "to 2147483647", "'2147483648'"),
        (f"2023-11-16 18:15:50.0,{'9' * 5000},6", "ContextTokens", "to 2147483647", "9..."),
        ("yesterday,5,6", "TIMESTAMP", "a timestamp like", "'yesterday'"),
        ("2023-13-16 18:15:50.0,5,6", "TIMESTAMP", "month must be", "'2023-13-16 18:15:50.0'"),
        ("1700158546.68,5,6", "TIMESTAMP", "a timestamp like", "'1700158546.68'"),
        ("2023-11-16 18:15:46.6805899,5,6", "TIMESTAMP", "not before", "'2023-11-16 18:15:46"),
        (",,", "TIMESTAMP", "a timestamp like", "''"),
    ],
)
def test_a_bad_line_names_file_line_column_expectation_and_value(
    tmp_path: Path, line: str, column: str, expected: str, value: str
) -> None:
    path = write(tmp_path, HEADER, FIRST, line, SECOND)
    with pytest.raises(TraceError) as caught:
        read_trace(path, None)
    message = str(caught.value)
    assert message.startswith(f"{path}:3: column {column}: expected ")
    assert expected in message
    assert value in message
    assert len(message) < len(str(path)) + 250


def test_a_blank_line_between_requests_is_an_error_at_that_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace\.csv:3: column TIMESTAMP: .*blank line"):
        read_trace(write(tmp_path, HEADER, FIRST, "", SECOND), None)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), "expected the header .*, got an empty file"),
        (("", ""), "expected the header .*, got an empty file"),
        ((FIRST, SECOND), r":1: column TIMESTAMP: expected the header .*, got '2023-11-16 18"),
        (("TIMESTAMP,GeneratedTokens,ContextTokens",), ":1: column ContextTokens: .*'GeneratedTok"),
        (("TIMESTAMP,ContextTokens",), ":1: column GeneratedTokens: .* got nothing"),
        ((HEADER + ",Model",), ":1: column 4: expected 3 columns, got 4"),
        ((HEADER,), "expected at least one request after the header, got none"),
        ((HEADER, '"2023-11-16'), ":2: expected a CSV line"),
    ],
)
def test_a_file_without_header_or_requests_is_refused(
    tmp_path: Path, lines: tuple[str, ...], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path, *lines), None)


def test_a_file_that_cannot_be_read_is_a_trace_error_with_its_name(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.csv", tmp_path):
        with pytest.raises(TraceError, match=re.escape(str(path))):
            read_trace(path, None)
    path = tmp_path / "binary.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="expected UTF-8 text"):
        read_trace(path, None)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(tmp_path: Path, limit: int) -> None:
    with pytest.raises(ValueError, match=f"limit must be positive or None, got {limit}"):
        read_trace(write(tmp_path, HEADER, FIRST), limit)


@given(st.text(max_size=200), st.integers(0, 2))
@settings(deadline=None)
def test_any_text_is_read_or_refused_as_a_trace_error(
    tmp_path_factory: pytest.TempPathFactory, text: str, num_good: int
) -> None:
    path = tmp_path_factory.mktemp("any") / "trace.csv"
    good = [HEADER, FIRST][:num_good]
    path.write_bytes("\n".join([*good, text]).encode("utf-8", "surrogatepass"))
    # Any other error would fail the test.
    with contextlib.suppress(TraceError):
        assert read_trace(path, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1.0, 1, 1), "arrival must not be negative, got -1.0"),
        ((math.nan, 1, 1), "arrival must not be negative, got nan"),
        ((0.0, 0, 1), "context_tokens must be positive, got 0"),
        ((0.0, 1, -1), "generated_tokens must not be negative, got -1"),
    ],
)
def test_a_request_refuses_lengths_that_cannot_be(
    arguments: tuple[float, int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TraceRequest(*arguments)


@pytest.mark.parametrize(("generated", "cached"), [(0, 10), (1, 10), (2, 11), (5, 14)])
def test_the_last_generated_token_is_never_cached(generated: int, cached: int) -> None:
    assert TraceRequest(0.0, 10, generated).num_cached_tokens == cached


def test_long_requests_lose_prompt_first_and_then_generation() -> None:
    lengths = [(10, 6), (10, 7), (15, 9), (16, 0), (16, 1), (40, 0), (40, 50), (1, 90)]
    fitted, num_clipped = fit_to_limit([TraceRequest(1.0, *pair) for pair in lengths], 16)
    clipped = [(request.context_tokens, request.generated_tokens) for request in fitted]
    assert clipped == [(10, 6), (10, 6), (15, 1), (16, 0), (15, 1), (15, 0), (15, 1), (1, 15)]
    assert num_clipped == 6
    assert {request.arrival for request in fitted} == {1.0}


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), max_size=20), st.integers(2, 60))
def test_fitted_requests_fit_and_the_others_are_untouched(
    lengths: list[tuple[int, int]], limit: int
) -> None:
    requests = [TraceRequest(float(index), *pair) for index, pair in enumerate(lengths)]
    fitted, num_clipped = fit_to_limit(requests, limit)
    assert all(r.context_tokens + r.generated_tokens <= limit for r in fitted)
    assert sum(old != new for old, new in zip(requests, fitted, strict=True)) == num_clipped
    assert fit_to_limit(fitted, limit) == (fitted, 0)


def test_a_limit_without_room_for_a_generated_token_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_model_len must be at least 2 .*, got 1"):
        fit_to_limit([TraceRequest(0.0, 1, 1)], 1)


def test_a_synthetic_trace_depends_on_its_seed_alone() -> None:
    trace = synthetic_trace(50, seed=3)
    assert trace == synthetic_trace(50, seed=3)
    assert trace[:20] == synthetic_trace(20, seed=3)
    assert trace != synthetic_trace(50, seed=4)


def test_a_synthetic_trace_starts_at_zero_and_keeps_its_order() -> None:
    arrivals = [request.arrival for request in synthetic_trace(200, seed=0)]
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)


def test_a_synthetic_trace_is_clipped_on_request() -> None:
    trace = synthetic_trace(300, seed=0, max_model_len=512)
    assert trace == fit_to_limit(synthetic_trace(300, seed=0), 512)[0]
    assert max(r.context_tokens + r.generated_tokens for r in trace) == 512


def test_a_synthetic_trace_without_requests_is_refused() -> None:
    with pytest.raises(ValueError, match="num_requests must be positive, got 0"):
        synthetic_trace(0, seed=0)


def columns_of(requests: list[TraceRequest]) -> list[list[float]]:
    arrivals = [request.arrival for request in requests]
    return [
        sorted(float(request.context_tokens) for request in requests),
        sorted(float(request.generated_tokens) for request in requests),
        sorted(after - before for before, after in itertools.pairwise(arrivals)),
    ]


def quantile(values: list[float], level: float) -> float:
    """Value at a level of sorted values, the level clipped to [0, 1]."""
    return values[round(min(max(level, 0.0), 1.0) * (len(values) - 1))]


@pytest.mark.skipif(not PUBLIC_TRACE.exists(), reason="the public trace is not on this machine")
def test_a_synthetic_trace_has_the_quantiles_of_the_public_one() -> None:
    num_samples = 20_000
    # Dvoretzky-Kiefer-Wolfowitz: no level of the sample is farther off than this, but for one
    # seed in 1e6. The tables are rounded to 3 digits, hence the half unit of the third digit.
    band = math.sqrt(math.log(2 / 1e-6) / (2 * num_samples))
    rounding = 0.005
    public = columns_of(read_trace(PUBLIC_TRACE, None))
    drawn = columns_of(synthetic_trace(num_samples, seed=0))
    for expected, sample in zip(public, drawn, strict=True):
        for level in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99):
            low = quantile(expected, level - band) * (1 - rounding)
            high = quantile(expected, level + band) * (1 + rounding)
            assert low <= quantile(sample, level) <= high


@pytest.mark.skipif(not PUBLIC_TRACE.exists(), reason="the public trace is not on this machine")
def test_the_public_trace_is_read_whole() -> None:
    with PUBLIC_TRACE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    requests = read_trace(PUBLIC_TRACE, None)
    assert [str(r.context_tokens) for r in requests] == [row["ContextTokens"] for row in rows]
    assert [str(r.generated_tokens) for r in requests] == [row["GeneratedTokens"] for row in rows]
