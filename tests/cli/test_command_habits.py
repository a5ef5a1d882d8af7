"""Habits of the command line: version, completion, help, progress, threads."""

import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

import attn
from attn.cli.app import app
from attn.cli.terminal import progress, threads
from attn.cli.terminal.options import CACHE_DTYPES, Group
from attn.selector import served_cache_dtypes
from specs.devices import KNOWN_DEVICES
from tests.cli.test_bad_input import commands

COMMANDS = [[], ["bench"], *(name.split() for name, _ in commands())]
HEAVY = ("torch", "numpy", "triton", "flashinfer", "matplotlib", "vllm")
MOST_SECONDS = 3.0
"""CPU seconds of a help at most, on a busy machine; an idle one takes a tenth."""

HELP_OF_ALL = f"""
import io, json, sys, time
from contextlib import redirect_stdout
from attn.cli.app import app
times = []
for words in {COMMANDS!r}:
    begin = time.process_time()
    with redirect_stdout(io.StringIO()) as out:
        try:
            app([*words, "--help"])
        except SystemExit as stop:
            assert not stop.code, stop.code
    assert "Usage" in out.getvalue()
    times.append(time.process_time() - begin)
print(json.dumps([sorted(name for name in sys.modules if "." not in name), max(times)]))
"""


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})


# -- Help.


def test_help_loads_no_torch_and_is_fast() -> None:
    begin = time.process_time()
    done = subprocess.run(
        [sys.executable, "-c", HELP_OF_ALL], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded, slowest = json.loads(done.stdout)
    assert {"attn", "specs", "typer"} <= set(loaded)
    assert set(loaded) & set(HEAVY) == set()
    assert slowest < MOST_SECONDS
    assert time.process_time() - begin < MOST_SECONDS


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_no_name_is_cut_at_80_columns(words: list[str]) -> None:
    text = invoke(*words, "--help").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    command: Any = typer.main.get_command(app)
    for word in words:
        command = command.commands[word]
    for option in command.params:
        assert all(name in text for name in option.opts)


def test_long_commands_have_their_options_in_groups() -> None:
    for name, command in commands():
        if len(command.params) < 6:
            continue
        for option in command.params:
            if option.name != "help":
                assert option.rich_help_panel in list(Group), (name, option.name)


def test_the_help_names_the_cache_dtypes_that_are_served() -> None:
    assert served_cache_dtypes() == CACHE_DTYPES


# -- Version and completion.


def test_the_version_is_printed() -> None:
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.stdout == f"attn-backends {attn.__version__}\n"


def test_a_shell_can_complete_commands() -> None:
    environment = {"_ATTN_COMPLETE": "complete_bash", "COMP_WORDS": "attn do", "COMP_CWORD": "1"}
    result = CliRunner().invoke(app, [], env=environment, prog_name="attn")
    assert result.stdout.split() == ["doctor"]
    assert "--show-completion" in invoke("--help").stdout


# -- Progress.


def test_a_line_of_progress_is_printed_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    with progress.progress(console, "attention", "tokens") as update:
        update(1000, 4000)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    with progress.progress(console, "attention", "tokens") as update:
        time.sleep(0.01)
        update(1000, 4000)
    line = capsys.readouterr().err
    assert line.startswith("attention: 1,000 of 4,000 tokens, 0 s, ")
    assert line.endswith(" tokens/s\n")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""


def test_a_terminal_gets_a_bar_and_no_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with progress.progress(console, "attention", "tokens") as update:
        update(1000, 4000)
    assert capsys.readouterr().err == ""
    assert isinstance(console.file, io.StringIO)
    assert "attention" in console.file.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_silent_benchmark_gives_signs_of_life(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.02)
    logged: list[str] = []
    with progress.Heartbeat(logged.append, is_terminal) as log:
        log("dec_b1_8k: a decode\n")
        time.sleep(0.2)
    error = capsys.readouterr().err
    assert logged == ["dec_b1_8k: a decode\n"]
    assert ("still after 'dec_b1_8k: a decode', for 0 s" in error) != is_terminal
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


# -- Threads.


@pytest.mark.parametrize(
    ("cores", "busy", "limit", "count"),
    [(2, 9.9, 2, 1), (2, 0.1, 2, 1), (2, 0.0, 2, 2), (16, 3.5, 16, 8), (16, 13.0, 16, 3)],
)
def test_a_run_takes_the_threads_that_idle_cores_allow(
    monkeypatch: pytest.MonkeyPatch, cores: int, busy: float, limit: int, count: int
) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: float(cores))
    monkeypatch.setattr(threads, "busy_cores", lambda: busy)
    monkeypatch.setattr(torch, "get_num_threads", lambda: limit)
    chosen = threads.choose_threads(None)
    assert chosen.count == count
    assert f"{busy:.1f} busy" in str(chosen)


def test_a_user_names_the_threads() -> None:
    assert threads.choose_threads(64).count == 64
    before = torch.get_num_threads()
    try:
        assert threads.use_threads(1, KNOWN_DEVICES["h200"]) == threads.Threads(1, "--threads")
        assert torch.get_num_threads() == 1
        assert threads.use_threads(None, KNOWN_DEVICES["h200"]) is None
    finally:
        torch.set_num_threads(before)


def test_a_quota_limits_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(threads, "_QUOTA_V2", quota)
    monkeypatch.setattr(threads, "_QUOTA_V1", (tmp_path / "a", tmp_path / "b"))
    whole = threads.usable_cores()
    quota.write_text("max 100000\n")
    assert threads.usable_cores() == whole
    quota.write_text("50000 100000\n")
    assert threads.usable_cores() == 0.5
    (tmp_path / "a").write_text("25000\n")
    (tmp_path / "b").write_text("100000\n")
    quota.unlink()
    assert threads.usable_cores() == 0.25
