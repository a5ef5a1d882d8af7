"""What README says is run here, so that it stays true."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from attn.cli.app import app
from attn.cli.explain import feature_table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
SHELL = [
    line.split("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("command", [line for line in SHELL if line.startswith("attn ")])
def test_every_attn_command_runs(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("trace.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,40,5\n"
    )
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    expected = 1 if "--corrupt" in command else 0
    if "bench kernels" in command and not torch.cuda.is_available():
        expected = 2
        assert result.stderr.endswith("needs a GPU, and this machine has none\n")
    assert result.exit_code == expected, result.output + result.stderr


def test_every_make_target_exists():
    targets = [line.split()[1] for line in SHELL if line.startswith("make ")]
    assert targets == ["run", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)


def test_the_python_example_runs_in_eight_lines():
    example, setup = PYTHON
    assert len(example.splitlines()) == 8
    names: dict = {}
    exec(setup + example, names)
    assert names["output"].shape == (25, 32, 128)
    # The first token of a prompt sees itself alone: its output is its own value.
    expected = names["value"][0].repeat_interleave(4, dim=0)
    torch.testing.assert_close(names["output"][0], expected)


def test_the_feature_table_is_what_backends_declare():
    assert f"<!-- features -->\n{feature_table()}\n<!-- /features -->" in README


def test_every_path_that_readme_names_exists():
    for path in re.findall(r"`((?:attn|builders|specs)/[\w/.<>]*)`", README):
        path = path.replace("<stem>", "torch_ref").replace("<family>", "dense")
        assert (ROOT / path).exists(), path
