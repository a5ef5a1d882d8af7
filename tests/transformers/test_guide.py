"""What the guide shows runs as it stands, with a model that the test makes."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attn.cli.app import app

ROOT = Path(__file__).parents[2]
GUIDES = [ROOT / "docs" / "transformers.md", ROOT / "docs" / "cli.md"]
SHOWN = re.compile(r"^<!-- needs: transformers -->\n```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def folder_of_the_guide(saved_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my-model").symlink_to(saved_model)


def blocks(language):
    found = [block for guide in GUIDES for block in SHOWN.findall(guide.read_text())]
    return [body for kind, body in found if kind == language]


def test_python_runs(capsys):
    namespace = {}
    for body in blocks("python"):
        exec(compile(body, "docs/transformers.md", "exec"), namespace)
    out = capsys.readouterr().out
    assert "Once upon a time" in out
    assert re.search(r"^req_1 .", out, re.MULTILINE)


def test_commands_run():
    commands = [line for body in blocks("sh") for line in body.splitlines()]
    assert len(commands) >= 3
    for command in commands:
        words = shlex.split(command)
        assert words[0] == "attn"
        result = CliRunner().invoke(app, words[1:])
        assert result.exit_code == 0, result.output + result.stderr
    assert Path("report/generate.svg").exists()
