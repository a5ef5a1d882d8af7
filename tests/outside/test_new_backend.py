"""``attn new-backend`` writes a package that works: attn finds it, and it passes the kit."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

import attn
from attn.cli.app import app
from attn.cli.new_backend import Family, Names, content_of
from tests.tools.packages import install

ROOT = Path(__file__).parents[2]


def run(*arguments: str, path: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python where ``path`` stands for the folder that pip installs into."""
    settings = {
        "PYTHONPATH": f"{path}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        # A new user's kernels are not interpreted, and there may be no GPU.
        "TRITON_INTERPRET": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@pytest.mark.parametrize(
    ("family", "chosen"),
    # Half a minute of cases would show no more for the second family.
    [("dense", ""), ("latent", "mixed or attn_finds or keyless or padding or verify")],
)
def test_a_new_package_passes_the_kit_and_is_seen(family: str, chosen: str, tmp_path: Path) -> None:
    arguments = ["new-backend", "outer-attn", "--dir", str(tmp_path), "--family", family]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output + done.stderr
    folder = tmp_path / "outer-attn"
    assert f"wrote {folder}: 12 files\n" in done.stdout
    # What pip does: the modules are where they are found, and the metadata beside them.
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    install(folder, project["name"], project["entry-points"]["attn.backends"])
    kit = run(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen), path=folder, cwd=folder
    )
    assert kit.returncode == 0, kit.stdout + kit.stderr
    assert int(kit.stdout.split()[-4]) > 10, kit.stdout
    listed = run("-m", "attn.cli", "backends", path=folder, cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert "OUTER_ATTN: from package outer-attn 1.0\n" in listed.stdout
    assert listed.stderr == ""


@pytest.mark.parametrize("family", Family)
def test_what_is_written_is_in_order(family: Family, tmp_path: Path) -> None:
    written = content_of(Names.of("OUTER_ATTN"), family)
    for path, text in written.items():
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        assert "$" not in text
    for command in (("check", "--select", "B,E,F,I,N,PT,RUF,SIM,UP,W"), ("format", "--check")):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--isolated", "--line-length", "100", "."],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    project = tomllib.loads(written["pyproject.toml"])["project"]
    assert project["dependencies"] == [f"attn-backends>={attn.__version__}"]
    # The stem rule: one stem, three files.
    parts = [path for path in written if path.endswith("/outer_attn.py")]
    assert parts == [
        f"outer_attn/{part}/outer_attn.py" for part in ("backends", "builders", "impls")
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("9lives", "name must be letters, digits, - and _, such as MY_ATTN, got '9lives'"),
        ("ätt", "name must be letters"),
        ("a/b", "name must be letters"),
        ("class", "name must be letters"),
        ("torch", "name 'torch' is taken: there is a Python module 'torch'"),
        ("specs", "name 'specs' is taken: there is a Python module 'specs'"),
        ("triton-attn", "name 'triton-attn' is taken: attn has a backend TRITON_ATTN"),
        ("nsa", "name 'nsa' is taken: attn has a backend NSA"),
    ],
)
def test_a_name_that_cannot_be_used_is_one_line(name: str, message: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["new-backend", name, "--dir", str(tmp_path)])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {message}")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "outer-attn"
    folder.mkdir()
    (folder / "work.txt").write_text("mine")
    done = CliRunner().invoke(app, ["new-backend", "outer_attn", "--dir", str(tmp_path)])
    assert (done.exit_code, done.stderr) == (2, f"error: folder {folder} is there already\n")
    assert [path.name for path in folder.iterdir()] == ["work.txt"]


def test_a_parent_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, ["new-backend", "outer_attn", "--dir", str(tmp_path / "file")])
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert str(tmp_path / "file") in done.stderr


def test_names_follow_from_one() -> None:
    for spelling in ("my-fast_attn", "MY_FAST_ATTN", "my_fast_attn"):
        names = Names.of(spelling)
        assert (names.backend, names.project, names.cls, names.stem) == (
            "MY_FAST_ATTN",
            "my-fast-attn",
            "MyFastAttn",
            "my_fast_attn",
        )
