"""Backends of other packages: found by entry points, at look-up, and never in the others' way."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attn import outside
from attn.cli.app import app
from attn.errors import BackendPackageError, UnknownBackendError, UnsupportedError
from attn.registry import ROWS, AttentionBackendEnum, BackendRegistry, BackendRow, register_backend
from attn.selector import Verdict, explain, import_problem, ranked, select
from specs.attention import AttentionSelectorConfig
from specs.devices import KNOWN_DEVICES, DeviceKind
from specs.dtypes import DType
from tests.tools.packages import backend_module, install, row_module, unread

ROOT = Path(__file__).parents[2]
CPU = KNOWN_DEVICES["cpu"]
DENSE = AttentionSelectorConfig(head_size=64, dtype=DType.BFLOAT16)
OWN = [row.name for row in ROWS]
Install = Callable[..., None]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs packages for this test, in which the registry has read no entry points yet."""
    monkeypatch.syspath_prepend(tmp_path)

    def add(*args: Any, **kwargs: Any) -> None:
        install(tmp_path, *args, **kwargs)
        AttentionBackendEnum._has_read = False

    with unread(tmp_path):
        yield add


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, logger="attn.registry")
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_backend_of_another_package_is_registered_with_its_rank(installed: Install) -> None:
    installed("outer-attn", {"OUTER": "outer:ROW"}, {"outer.py": backend_module("OUTER")})
    member = AttentionBackendEnum["outer"]
    assert (member.name, member.package) == ("OUTER", "package outer-attn 1.0")
    assert member.is_third_party
    assert [row.name for row in AttentionBackendEnum] == [*OWN, "OUTER"]
    assert len(AttentionBackendEnum) == len(OWN) + 1
    assert ranked(DeviceKind.CPU)[:2] == ("OUTER", "TORCH_REF")
    assert "OUTER" not in ranked(DeviceKind.SM90)
    assert select(DENSE, CPU).get_name() == "OUTER"
    assert select(DENSE, CPU, "TORCH_REF").get_name() == "TORCH_REF"
    report = explain(DENSE, CPU)
    assert report.candidates[0].verdict is Verdict.CHOSEN
    assert report.candidates[0].reasons == ("best-ranked on cpu that serves it (rank 1)",)
    gpu = {item.name: item for item in explain(DENSE, KNOWN_DEVICES["h200"]).candidates}
    assert gpu["OUTER"].reasons == ("chosen only by name",)


def test_ranks_order_backends_among_the_librarys(installed: Install) -> None:
    ranks = {"A_TWO": 2, "B_ONE": 1, "C_TWO": 2, "D_LAST": 99}
    for name, rank in ranks.items():
        source = row_module(name, ranks={"cpu": rank, "sm90": rank})
        installed(name.lower(), {name: f"{name.lower()}:ROW"}, {f"{name.lower()}.py": source})
    first, second, third = OWN[-3:]
    names = ("B_ONE", first, "A_TWO", "C_TWO", second, third, "D_LAST")
    assert ranked(DeviceKind.CPU) == names
    assert ranked(DeviceKind.SM90)[:2] == ("B_ONE", "TRITON_ATTN")
    assert "B_ONE" not in ranked(DeviceKind.SM100)


def test_the_command_shows_and_runs_it(installed: Install) -> None:
    installed("outer-attn", {"OUTER": "outer:ROW"}, {"outer.py": backend_module("OUTER")})
    runner = CliRunner()
    listed = runner.invoke(app, ["backends"])
    assert listed.exit_code == 0
    assert "OUTER: from package outer-attn 1.0\n" in listed.stdout
    decided = runner.invoke(app, ["explain", "-d", "cpu", "--json"])
    assert json.loads(decided.stdout)[0]["chosen"] == "OUTER"
    arguments = ["run", "-b", "outer", "--layers", "1", "--requests", "2", "--check-rows", "1"]
    ran = runner.invoke(app, arguments)
    assert ran.exit_code == 0, ran.output + ran.stderr
    assert "OUTER" in ran.output
    assert "OUTER" not in runner.invoke(app, ["backends", "--markdown"]).stdout


# -- Broken packages.

BROKEN = {
    "does not import": (
        "import no_such_module_at_all\n",
        "cannot be imported: No module named 'no_such_module_at_all'",
    ),
    "has no such module": (None, "cannot be imported: No module named 'broken'"),
    "fails while it is imported": ("1 / 0\n", "cannot be imported: ZeroDivisionError: division by"),
    "ends the process": ("raise SystemExit\n", "cannot be imported: SystemExit"),
    "has no such name": (
        "",
        "cannot be imported: AttributeError: module 'broken' has no attribute 'ROW'",
    ),
    "gives no row": ("ROW = 7\n", "the entry point must lead to a BackendRow, got 7"),
    "gives another name": (
        row_module("OTHER"),
        "the entry point's name must be the row's, 'OTHER'",
    ),
    "ranks an unknown device": (
        row_module("BROKEN", ranks={"sm91": 1}),
        "rank for unknown kind of device 'sm91' (did you mean 'sm90'?); expected one of cpu, sm80,",
    ),
    "ranks by a word": (
        row_module("BROKEN", ranks={"cpu": "first"}),
        "rank for cpu must be an integer from 1, got 'first'",
    ),
    "ranks below 1": (
        row_module("BROKEN", ranks={"cpu": 0}),
        "rank for cpu must be an integer from 1, got 0",
    ),
    "has a path without a class": (
        row_module("BROKEN", "broken"),
        "backend path must be 'package.module:Class', got 'broken'",
    ),
    "takes an alias of ours": (
        row_module("BROKEN", aliases=("NSA",)),
        "backend name 'NSA' is registered already",
    ),
}


@pytest.mark.parametrize("problem", BROKEN)
def test_a_broken_package_is_one_line_and_the_others_go_on(
    problem: str, installed: Install, logged: Callable[[], list[str]]
) -> None:
    source, text = BROKEN[problem]
    modules = {} if source is None else {"broken.py": source}
    installed("broken-attn", {"BROKEN": "broken:ROW"}, modules)
    installed("outer-attn", {"OUTER": "outer:ROW"}, {"outer.py": backend_module("OUTER")})
    assert [row.name for row in AttentionBackendEnum] == [*OWN, "OUTER"]
    (line,) = logged()
    assert line.startswith(f"package broken-attn 1.0, backend BROKEN: {text}")
    assert "\n" not in line
    # It is said once.
    assert "NOTHING" not in AttentionBackendEnum
    assert len(logged()) == 1
    assert select(DENSE, CPU).get_name() == "OUTER"
    for ask in (
        lambda: AttentionBackendEnum["broken"],
        lambda: explain(DENSE, CPU, "BROKEN"),
        lambda: select(DENSE, CPU, "BROKEN"),
    ):
        with pytest.raises(BackendPackageError) as caught:
            ask()
        assert str(caught.value) == line
    asked = CliRunner().invoke(app, ["run", "-b", "BROKEN"])
    assert asked.exit_code == 2
    assert asked.stderr == f"error: {line}\n"


def test_asking_for_a_broken_one_says_its_line_only_once(
    installed: Install, logged: Callable[[], list[str]]
) -> None:
    installed("broken-attn", {"BROKEN": "broken:ROW", "WORSE": "worse:ROW"})
    with pytest.raises(BackendPackageError, match="broken-attn"):
        AttentionBackendEnum["BROKEN"]
    (line,) = logged()
    assert "backend WORSE" in line
    assert list(AttentionBackendEnum.broken) == ["BROKEN", "WORSE"]


def test_a_name_that_exists_stays_what_it_is(
    installed: Install, logged: Callable[[], list[str]]
) -> None:
    installed("b-attn", {"OUTER": "b_outer:ROW"}, {"b_outer.py": row_module("OUTER")})
    installed("a-attn", {"OUTER": "outer:ROW"}, {"outer.py": backend_module("OUTER")})
    source = row_module("torch_ref")
    installed("thief", {"torch_ref": "thief:ROW"}, {"thief.py": source})
    assert AttentionBackendEnum["OUTER"].package == "package a-attn 1.0"
    assert AttentionBackendEnum["TORCH_REF"].row in ROWS
    assert logged() == [
        "package b-attn 1.0, backend OUTER: backend name 'OUTER' is registered already",
        "package thief 1.0, backend torch_ref: backend name 'torch_ref' is registered already",
    ]


def test_a_name_that_no_backend_may_have_can_be_asked_for(installed: Install) -> None:
    source = row_module("my-attn")
    installed("my-attn", {"my-attn": "my_attn:ROW"}, {"my_attn.py": source})
    with pytest.raises(BackendPackageError, match="must be an identifier, got 'my-attn'"):
        AttentionBackendEnum["my-attn"]
    with pytest.raises(UnknownBackendError):
        AttentionBackendEnum["my_attn"]


def test_a_class_that_does_not_import_is_a_reason_that_names_the_package(
    installed: Install,
) -> None:
    source = row_module("OUTER", "outer.missing:Backend", ranks={"cpu": 1})
    installed("outer-attn", {"OUTER": "outer:ROW"}, {"outer.py": source})
    problem = import_problem(AttentionBackendEnum["OUTER"])
    assert problem is not None
    assert problem.startswith("cannot be imported (package outer-attn 1.0): No module named")
    assert select(DENSE, CPU).get_name() == "TORCH_REF"
    with pytest.raises(UnsupportedError) as caught:
        select(DENSE, CPU, "OUTER")
    assert caught.value.reasons == [problem]
    assert f"OUTER: {problem}\n" in CliRunner().invoke(app, ["backends"]).stdout


def test_a_package_that_needs_a_missing_module_says_which(installed: Install) -> None:
    source = row_module("OUTER", requires=("no_such_module_7",))
    installed("outer-attn", {"OUTER": "outer:ROW"}, {"outer.py": source})
    assert AttentionBackendEnum["OUTER"].missing() == ["no_such_module_7"]


# -- When entry points are read.


def test_the_librarys_own_names_read_no_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    def offers(group: str) -> list[object]:
        raise AssertionError("entry points were read")

    monkeypatch.setattr(outside, "offers", offers)
    monkeypatch.setattr(AttentionBackendEnum, "_has_read", False)
    for name in (*OWN, "NSA", "triton_attn"):
        assert name in AttentionBackendEnum
        assert AttentionBackendEnum[name].name in OWN
    with pytest.raises(AssertionError, match="were read"):
        _ = AttentionBackendEnum["ANOTHER"]


def test_entry_points_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[str] = []
    monkeypatch.setattr(outside, "offers", lambda group: groups.append(group) or [])
    registry = BackendRegistry("some.group")
    assert "X" not in registry
    assert (len(registry), list(registry), registry.broken) == (0, [], {})
    with suppress(UnknownBackendError):
        registry["X"]
    assert groups == ["some.group"]
    assert "X" not in BackendRegistry()
    assert groups == ["some.group"]


def test_a_package_may_look_up_and_register_while_it_is_imported(installed: Install) -> None:
    source = (
        "from attn.registry import AttentionBackendEnum, register_backend\n"
        "assert 'INNER' not in AttentionBackendEnum\n"
        "assert len(AttentionBackendEnum) > 0\n"
        "register_backend('INNER', 'attn.backends.torch_ref:TorchRefBackend')\n"
    ) + backend_module("OUTER")
    installed("outer-attn", {"OUTER": "outer:ROW"}, {"outer.py": source})
    assert {"OUTER", "INNER"} <= {row.name for row in AttentionBackendEnum}
    assert AttentionBackendEnum["INNER"].package is None


def test_a_backend_of_a_package_can_be_replaced_by_a_call(installed: Install) -> None:
    installed("outer-attn", {"OUTER": "outer:ROW"}, {"outer.py": backend_module("OUTER")})
    register_backend("OUTER", "attn.backends.torch_ref:TorchRefBackend")
    assert AttentionBackendEnum["OUTER"].is_overridden()
    assert select(DENSE, CPU).get_name() == "TORCH_REF"


def test_ranks_of_a_row_are_checked_for_calls_too() -> None:
    registry = BackendRegistry()
    with pytest.raises(ValueError, match="unknown kind of device 'gpu'"):
        registry.add(BackendRow("X", "a.b:C", ranks={"gpu": 1}))
    assert hash(BackendRow("X", "a.b:C", ranks={"cpu": 1})) == hash(BackendRow("X", "a.b:C"))


def test_importing_attn_and_its_command_reads_no_other_package(tmp_path: Path) -> None:
    """In a process of its own; the same process then finds the backend."""
    install(tmp_path, "outer-attn", {"OUTER": "outer:ROW"}, {"outer.py": backend_module("OUTER")})
    code = (
        "import sys\n"
        f"sys.path[:0] = [{str(tmp_path)!r}]\n"
        "import attn, attn.cli.app\n"
        "assert not attn.AttentionBackendEnum._has_read\n"
        "attn.get_attn_backend\n"
        "assert 'outer' not in sys.modules\n"
        "assert attn.AttentionBackendEnum['OUTER'].package == 'package outer-attn 1.0'\n"
        "assert 'outer' in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
