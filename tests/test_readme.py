"""README files are run or looked up here, so that they stay true."""

import ast
import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from attn.cli.app import app
from attn.cli.explain import feature_table
from tests.tools import house

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


# -- The tables of kernels and of builders.

KERNELS = (ROOT / "attn/kernels/README.md").read_text()
BUILDERS = (ROOT / "builders/README.md").read_text()
CALLED_BY_CONSTEXPR = {"decode_e5m2_float32"}
"""Device functions that no other function names, and that are no kernels: tables hold them."""
LAUNCHED = {
    name: path
    for name, path in house.launched_kernels(house.modules_of(ROOT, "builders", "attn")).items()
    if name not in CALLED_BY_CONSTEXPR
}


def table_under(text: str, first_column: str) -> list[list[str]]:
    """The cells of the table of a page whose first column has that heading."""
    lines = text[text.index(f"| {first_column} |") :].split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    assert {len(row) for row in rows} == {len(rows[0])}
    return rows[2:]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def names_in(path: str) -> set[str]:
    """Functions and classes at the top of a file."""
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_every_kernel_is_in_the_table_with_its_file():
    rows = [(*quoted(row[0]), *quoted(row[1])) for row in table_under(KERNELS, "kernel")]
    assert len(rows) == len(dict(rows))
    assert dict(rows) == LAUNCHED


@pytest.mark.parametrize("row", table_under(KERNELS, "kernel"), ids=lambda row: row[0].strip("`"))
def test_a_kernels_twin_and_tests_exist(row):
    _, _, _, gpus, _, twin, tests = row
    assert gpus in ("all", "NVIDIA", "Hopper", "Hopper (plain Triton)")
    twins = re.findall(r"`(\w+)` in `([\w/.]+)`", twin)
    assert twins
    for name, path in twins:
        assert name in names_in(path)
    (path,) = quoted(tests)
    assert "def test_" in (ROOT / path).read_text()


def test_every_builder_is_in_the_table_with_its_record():
    rows = table_under(BUILDERS, "family")
    paths = [quoted(row[1])[0] for row in rows]
    modules = house.modules_of(ROOT, "builders")
    builders = {
        module.path
        for module in modules
        if any(name.endswith("MetadataBuilder") for name in names_in(module.path))
    }
    # The base class makes no record.
    assert sorted(paths) == sorted(builders - {"builders/base.py"})
    classes = {name for module in modules for name in names_in(module.path)}
    for family, path, record, kernels in rows:
        assert path == "`builders/mixed.py`" or f"/{family}/" in path
        assert set(quoted(record)) <= classes
        # The builder makes it: it says so where it says what it is.
        assert f"MetadataBuilder[{quoted(record)[0]}]" in (ROOT / quoted(path)[0]).read_text()
        assert set(quoted(kernels)) <= set(LAUNCHED)


def test_every_folder_of_builders_is_in_the_table():
    folders = {
        path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("builders/*/__init__.py")
    }
    assert {quoted(row[0])[0] for row in table_under(BUILDERS, "folder")} == folders


@pytest.mark.parametrize("page", ["attn/kernels/README.md", "builders/README.md"])
def test_every_path_that_a_table_names_exists(page):
    text = (ROOT / page).read_text()
    for path in re.findall(r"`((?:attn|builders|specs|tests|docs)/[\w/.]*)`", text):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / page).parent.joinpath(link).exists(), link
