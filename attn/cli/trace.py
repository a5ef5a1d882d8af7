"""Request traces to replay, read from a file or drawn from a distribution.

The file format is that of the public Azure LLM inference traces (2023 and 2024): a CSV of arrival
time, prompt length and generated length. :func:`synthetic_trace` draws from the distribution of the
Azure LLM inference trace 2023, conversation (https://github.com/Azure/AzurePublicDataset, CC-BY).
The tables below are rounded quantiles of its three columns, which are drawn independently. No rows
are copied.
"""

from __future__ import annotations

import csv
import itertools
import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Final

COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
"""Header of a trace file."""

_MAX_TOKENS: Final = 2**31 - 1
_MAX_QUOTED: Final = 80
_TIMESTAMP: Final = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})[ T]([0-9]{2}:[0-9]{2}:[0-9]{2})"
    r"(?:\.([0-9]{1,9}))?(Z|[+-][0-9]{2}:[0-9]{2})?"
)

_LEVELS: Final = (
    *(0.0, 0.01, 0.02, 0.05, 0.10, 0.15, 0.20, 0.25, 0.30, 0.35, 0.40, 0.45, 0.50),
    *(0.55, 0.60, 0.65, 0.70, 0.75, 0.80, 0.85, 0.90, 0.95, 0.98, 0.99, 0.999, 1.0),
)
_CONTEXT_TOKENS: Final = (
    *(2, 29, 91, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020),
    *(1040, 1070, 1100, 1130, 1190, 1320, 1880, 2730, 4080, 4100, 4140, 6180, 14000),
)
_GENERATED_TOKENS: Final = (
    *(7, 16, 24, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129),
    *(151, 177, 217, 384, 395, 400, 411, 424, 451, 540, 601, 954, 1000),
)
_GAP_MILLISECONDS: Final = (
    *(0.002, 0.546, 1.44, 6.32, 16.1, 26.4, 36.5, 48.3, 60.7, 73.5, 87.3, 102, 118),
    *(138, 159, 183, 214, 247, 289, 346, 421, 565, 749, 890, 1410, 4310),
)


class TraceError(ValueError):
    """A trace file cannot be read; the message names file, line, column and value."""


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace."""

    arrival: float
    """Seconds since the first request."""
    context_tokens: int
    """Prompt length, at least 1."""
    generated_tokens: int
    """Tokens to generate; the prefill yields the first, so 0 and 1 both mean prefill only."""

    def __post_init__(self) -> None:
        if not self.arrival >= 0:
            raise ValueError(f"arrival must not be negative, got {self.arrival}")
        if self.context_tokens < 1:
            raise ValueError(f"context_tokens must be positive, got {self.context_tokens}")
        if self.generated_tokens < 0:
            raise ValueError(f"generated_tokens must not be negative, got {self.generated_tokens}")

    @property
    def num_cached_tokens(self) -> int:
        """Number of KV positions ever written; the last generated token is never written."""
        return self.context_tokens + max(self.generated_tokens, 1) - 1


def read_trace(path: Path, limit: int | None) -> list[TraceRequest]:
    """Requests of a trace file, in file order; rows past ``limit`` are not looked at.

    Args:
        path: a CSV file with the header ``TIMESTAMP,ContextTokens,GeneratedTokens``.
        limit: most requests to read; None reads all.

    Raises:
        TraceError: a file that cannot be read, or a bad line.
        ValueError: a ``limit`` below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be positive or None, got {limit}")
    try:
        # utf-8-sig: spreadsheet programs put a byte order mark before the header.
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = _numbered_rows(path, file)
            _check_header(path, rows)
            requests = list(itertools.islice(_requests(path, rows), limit))
    except OSError as error:
        reason = error.strerror or str(error)
        raise TraceError(f"{path}: expected a readable trace file: {reason}") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: expected UTF-8 text: {error}") from None
    if not requests:
        raise TraceError(f"{path}: expected at least one request after the header, got none")
    return requests


def synthetic_trace(
    num_requests: int, seed: int, max_model_len: int | None = None
) -> list[TraceRequest]:
    """Requests whose lengths and gaps are distributed like the public conversation trace's.

    Args:
        num_requests: requests to draw.
        seed: the same seed gives the same requests on every machine.
        max_model_len: clip longer requests, as :func:`fit_to_limit` does; None draws them as they
            are, so that the caller can clip and count.

    Raises:
        ValueError: ``num_requests`` below 1 or ``max_model_len`` below 2.
    """
    if num_requests < 1:
        raise ValueError(f"num_requests must be positive, got {num_requests}")
    random = Random(seed)
    arrival = 0.0
    requests = []
    for index in range(num_requests):
        gap = _draw(_GAP_MILLISECONDS, random) / 1000
        arrival += gap if index else 0.0
        context = round(_draw(_CONTEXT_TOKENS, random))
        requests.append(TraceRequest(arrival, context, round(_draw(_GENERATED_TOKENS, random))))
    return requests if max_model_len is None else fit_to_limit(requests, max_model_len)[0]


def fit_to_limit(
    requests: Sequence[TraceRequest], max_model_len: int
) -> tuple[list[TraceRequest], int]:
    """Clip requests that are longer than a model allows.

    A request is too long when prompt and generated tokens together exceed ``max_model_len``. Its
    prompt is cut to ``max_model_len - 1`` first, then what it generates to what is left.

    Args:
        requests: any requests.
        max_model_len: longest sequence, in tokens; at least 2.

    Returns:
        The requests in the same order, and how many were clipped.
    """
    if max_model_len < 2:
        raise ValueError(
            f"max_model_len must be at least 2 (one prompt token and one generated), "
            f"got {max_model_len}"
        )
    fitted = []
    num_clipped = 0
    for request in requests:
        if request.context_tokens + request.generated_tokens > max_model_len:
            context = min(request.context_tokens, max_model_len - 1)
            generated = min(request.generated_tokens, max_model_len - context)
            request = replace(request, context_tokens=context, generated_tokens=generated)
            num_clipped += 1
        fitted.append(request)
    return fitted, num_clipped


def _draw(quantiles: Sequence[float], random: Random) -> float:
    """One sample by inverting a quantile table, log-linear between its entries."""
    level = random.random()
    upper = min(bisect_right(_LEVELS, level), len(_LEVELS) - 1)
    low, high = _LEVELS[upper - 1], _LEVELS[upper]
    share = (level - low) / (high - low)
    return math.exp(
        (1 - share) * math.log(quantiles[upper - 1]) + share * math.log(quantiles[upper])
    )


Row = tuple[int, list[str]]
"""Line number of a row's start, counted from 1, and its fields."""


def _numbered_rows(path: Path, file: Iterator[str]) -> Iterator[Row]:
    """Rows that are not blank; blank lines may only end the file."""
    reader = csv.reader(file, strict=True)
    blank: int | None = None
    while True:
        line = reader.line_num + 1
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise TraceError(f"{path}:{line}: expected a CSV line: {error}") from None
        if fields is None:
            return
        if len(fields) <= 1 and not any(field.strip() for field in fields):
            blank = line if blank is None else blank
            continue
        if blank is not None:
            raise TraceError(
                f"{path}:{blank}: column {COLUMNS[0]}: expected a timestamp, got a blank line"
            )
        yield line, fields


def _check_header(path: Path, rows: Iterator[Row]) -> None:
    expected = ",".join(COLUMNS)
    first = next(rows, None)
    if first is None:
        raise TraceError(f"{path}: expected the header {expected!r}, got an empty file")
    line, fields = first
    for index, name in enumerate(COLUMNS):
        came = fields[index] if index < len(fields) else None
        if came != name:
            got = "nothing" if came is None else _quote(came)
            raise TraceError(
                f"{path}:{line}: column {name}: expected the header {expected!r}, got {got}"
            )
    _check_width(path, line, fields)


def _requests(path: Path, rows: Iterator[Row]) -> Iterator[TraceRequest]:
    first: int | None = None
    previous = 0
    for line, fields in rows:
        _check_width(path, line, fields)
        nanoseconds = _parse_timestamp(path, line, fields[0])
        if first is None:
            first = previous = nanoseconds
        if nanoseconds < previous:
            late = (previous - nanoseconds) / 1e9
            raise _bad(
                path, line, 0, f"a time not before the line above ({late:g} s earlier)", fields[0]
            )
        previous = nanoseconds
        context = _parse_count(path, line, 1, fields[1], minimum=1)
        generated = _parse_count(path, line, 2, fields[2], minimum=0)
        yield TraceRequest((nanoseconds - first) / 1e9, context, generated)


def _check_width(path: Path, line: int, fields: list[str]) -> None:
    width = len(COLUMNS)
    if len(fields) < width:
        raise TraceError(
            f"{path}:{line}: column {COLUMNS[len(fields)]}: expected {width} columns, "
            f"got {len(fields)}: {_quote(','.join(fields))}"
        )
    if len(fields) > width:
        raise TraceError(
            f"{path}:{line}: column {width + 1}: expected {width} columns, "
            f"got {len(fields)}, the first extra one {_quote(fields[width])}"
        )


def _parse_timestamp(path: Path, line: int, text: str) -> int:
    """Nanoseconds since 1970; a time without a zone counts as UTC.

    By hand because ``datetime`` drops what comes after the sixth fractional digit.
    """
    match = _TIMESTAMP.fullmatch(text.strip())
    expectation = "a timestamp like 2023-11-16 18:15:46.6805900"
    if match is None:
        raise _bad(path, line, 0, expectation, text)
    date, clock, fraction, zone = match.groups()
    try:
        moment = datetime.fromisoformat(f"{date} {clock}{zone or ''}")
    except ValueError as error:
        raise _bad(path, line, 0, f"{expectation} ({error})", text) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    seconds = since.days * 86_400 + since.seconds
    return seconds * 10**9 + int((fraction or "0").ljust(9, "0"))


def _parse_count(path: Path, line: int, column: int, text: str, minimum: int) -> int:
    # int() alone would also take "1_000", " +5 " and digits of other scripts.
    if not re.fullmatch(r"[0-9]{1,10}", text) or not minimum <= int(text) <= _MAX_TOKENS:
        raise _bad(path, line, column, f"an integer from {minimum} to {_MAX_TOKENS}", text)
    return int(text)


def _bad(path: Path, line: int, column: int, expectation: str, value: str) -> TraceError:
    return TraceError(
        f"{path}:{line}: column {COLUMNS[column]}: expected {expectation}, got {_quote(value)}"
    )


def _quote(value: str) -> str:
    quoted = repr(value)
    return quoted if len(quoted) <= _MAX_QUOTED else f"{quoted[: _MAX_QUOTED - 3]}..."
