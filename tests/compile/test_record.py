"""A compile is left out where its facts are known, and only there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from triton.compiler import compiler

from tests.compile import record
from tests.compile.record import PARTS, Record, RecordedError, is_of_day, readers_hash

KEY = "0000000a" + "f" * 56
OTHER = "0000000b" + "f" * 56
TODAY = int(KEY[:8], 16) % PARTS


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(record.FOLDER, raising=False)
    monkeypatch.setattr(compiler, "get_cache_manager", lambda key: f"manager of {key}")
    written = tmp_path / "record.json"
    facts = {f"facts {KEY}": {"registers": 7}}
    written.write_text(json.dumps({"readers": readers_hash(), "facts": facts}))
    return written


def opened(path: Path | None, key: str, kind: str = "facts", day: int = TODAY + 1) -> object:
    with Record(path, day).watching(kind):
        return compiler.get_cache_manager(key)


def test_a_known_compile_ends_before_it_begins(path: Path) -> None:
    with pytest.raises(RecordedError) as known:
        opened(path, KEY)
    assert known.value.facts == {"registers": 7}
    assert compiler.get_cache_manager(KEY) == f"manager of {KEY}"


def test_everything_else_compiles(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert opened(path, OTHER) == f"manager of {OTHER}"
    assert opened(path, KEY, kind="shared") == f"manager of {KEY}"
    assert opened(None, KEY) == f"manager of {KEY}"
    assert opened(path.with_name("none.json"), KEY) == f"manager of {KEY}"
    # Facts that other code read from a compile may be wrong.
    monkeypatch.setattr(record, "readers_hash", lambda: "other")
    assert opened(path, KEY) == f"manager of {KEY}"


def test_each_day_another_part_is_compiled_again(path: Path) -> None:
    assert opened(path, KEY, day=TODAY) == f"manager of {KEY}"
    assert sum(is_of_day(KEY, day) for day in range(PARTS)) == 1


def test_a_compile_that_differs_from_the_record_is_told(path: Path) -> None:
    kept = Record(path, TODAY)
    kept.note("facts", KEY, {"registers": 7})
    kept.note("facts", OTHER, {"registers": 9})
    with pytest.raises(ValueError, match="the record says"):
        kept.note("facts", KEY, {"registers": 8})


def test_all_that_was_asked_for_is_written(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(record.FOLDER, str(tmp_path))
    at_end: list[Any] = []
    monkeypatch.setattr(record.atexit, "register", lambda *call: at_end.append(call))
    kept = Record(path, TODAY + 1)
    with pytest.raises(RecordedError), kept.watching("facts"):
        compiler.get_cache_manager(KEY)
    kept.note("facts", OTHER, {"registers": 9})
    ((write, folder),) = at_end
    write(folder)
    (written,) = (one for one in tmp_path.glob("*.json") if one != path)
    assert json.loads(written.read_text()) == {
        f"facts {KEY}": {"registers": 7},
        f"facts {OTHER}": {"registers": 9},
    }


def test_every_test_file_that_compiles_is_named() -> None:
    folder = record.ROOT / "tests"
    compiling = [
        str(found.relative_to(record.ROOT))
        for found in sorted(folder.rglob("test_*.py"))
        if found != Path(__file__)
        and ("facts_of(" in (text := found.read_text()) or 'printed_by("' in text)
    ]
    assert set(record.TESTS) == set(compiling)
