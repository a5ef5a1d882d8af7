"""The examples under ``docs/examples`` run, and show what they say."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from attn.cli.app import parse_bytes
from specs.dtypes import CacheDType
from specs.hf_config import load_model_geometry
from tests.tools.packages import install

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs/examples"
README = (EXAMPLES / "README.md").read_text(encoding="utf-8")
SETTINGS = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg"}


def run(*arguments: str, path: tuple[Path, ...] = (), **settings: str) -> str:
    """What Python prints for these arguments, in a folder far from the repository."""
    found = os.pathsep.join(map(str, (*path, ROOT)))
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd="/",
        env={**os.environ, **SETTINGS, "PYTHONPATH": found, **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_in_the_table() -> None:
    listed = set(re.findall(r"^\| \[([\w.-]+)\]", README, re.MULTILINE))
    assert listed == {path.name for path in EXAMPLES.iterdir()} - {"README.md", "__pycache__"}


def test_one_layer_is_computed() -> None:
    printed = run(str(EXAMPLES / "one_layer.py"), TRITON_INTERPRET="0")
    assert printed == "TORCH_REF output [25, 32, 128]\nfirst token right: True\n"


def test_one_layer_is_twenty_lines() -> None:
    tree = ast.parse((EXAMPLES / "one_layer.py").read_text(encoding="utf-8"))
    code = [node for node in tree.body[1:] if not isinstance(node, ast.Import | ast.ImportFrom)]
    assert len(code) <= 20


def test_the_examples_are_clean_under_strict_mypy() -> None:
    examples = [str(path) for path in EXAMPLES.glob("*.py") if path.name != "vllm_offline.py"]
    place = os.pathsep.join((str(ROOT), str(EXAMPLES / "sdpa-attn")))
    done = subprocess.run(
        # Settings of the repository, as for the package itself; strict is one of them.
        [sys.executable, "-m", "mypy", *examples, str(EXAMPLES / "sdpa-attn/sdpa_attn")],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": place},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("interprets", ["0", "1"])
def test_the_plan_covers_every_key(interprets: str) -> None:
    arguments = (str(EXAMPLES / "look_into_a_plan.py"), "1100", "20")
    printed = run(*arguments, TRITON_INTERPRET=interprets)
    tile = int(re.findall(r"a tile has (\d+) keys", printed)[0])
    items = re.findall(r"request (\d+), KV length (\d+), tiles (\d+), segments", printed)
    assert items == [("0", "1100", str(-(-1100 // tile))), ("1", "20", "1")]
    groups = int(re.findall(r"^(\d+) groups", printed)[0])
    assert len(re.findall(r"^group \d+ starts", printed, re.MULTILINE)) == groups


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3"])
def test_the_bytes_are_those_of_the_specs(name: str) -> None:
    printed = run(str(EXAMPLES / "kv_budget.py"), name, "2.5")
    model = load_model_geometry(name)
    lines = re.findall(r"^(\w+) +([\d,]+) bytes a token, +([\d,]+) tokens", printed, re.MULTILINE)
    assert [line[0] for line in lines][:2] == ["auto", "fp8"]
    for dtype, said, tokens in lines:
        specs = [
            layer.kv_cache_spec(64, model.dtype, CacheDType.parse(dtype)) for layer in model.layers
        ]
        per_token = sum(spec.page_size_bytes for spec in specs) / 64
        assert int(said.replace(",", "")) == per_token
        held = int(tokens.replace(",", ""))
        assert held * per_token <= parse_bytes("2.5GiB") < (held + 64) * per_token


def test_the_outside_backend_passes_its_tests_and_is_chosen(tmp_path: Path) -> None:
    folder = EXAMPLES / "sdpa-attn"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    install(tmp_path, project["name"], project["entry-points"]["attn.backends"])
    path, settings = (tmp_path, folder), {"TRITON_INTERPRET": "0"}
    kit = ("-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder))
    printed = run(*kit, path=path, **settings)
    assert int(re.findall(r"(\d+) passed", printed)[0]) > 100
    assert not re.search(r"failed|skipped", printed)
    decided = run("-m", "attn.cli", "explain", "-d", "cpu", "-m", "qwen3-8b", path=path, **settings)
    assert "-> SDPA_ATTN" in decided
    arguments = ("-b", "SDPA_ATTN", "--layers", "1", "--requests", "2")
    assert "PASSED" in run("-m", "attn.cli", "run", *arguments, path=path, **settings)


def test_the_notebook_compares_backends_and_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SETTINGS, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}.items():
        if name != "MPLBACKEND":  # the notebook's own draws into it
            monkeypatch.setenv(name, value)
    notebook = nbformat.read(EXAMPLES / "compare_backends.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    place = {"metadata": {"path": str(EXAMPLES)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=place).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    assert "compared: TORCH_REF, SDPA_ATTN" in text
    plots = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(plots) == 2


def test_the_example_for_vllm_asks_for_what_there_is() -> None:
    """Its imports and its settings are checked inside vLLM, by ``make test-vllm``."""
    tree = ast.parse((EXAMPLES / "vllm_offline.py").read_text(encoding="utf-8"))
    assert "Needs a GPU" in (ast.get_docstring(tree) or "")
    assert "a GPU, vLLM |" in README
