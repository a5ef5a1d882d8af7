"""Command lines of the benchmarks: bad input and a missing GPU or package in one line, code 2."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from attn.bench import command, kernels
from attn.bench.engine import vllm
from attn.bench.peers import dense as peers
from attn.cli.app import app

COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "kernels": kernels.main,
    "vllm": vllm.main,
    "peers": peers.main,
}


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def the_line(name: str, arguments: list[str], capsys: Any) -> str:
    """The message of a command that ends with 2; it is one line, and the only output."""
    try:
        code: Any = COMMANDS[name](arguments)
    except SystemExit as left:
        code = left.code
    said = capsys.readouterr()
    assert code == 2, said
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    return str(said.err)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("kernels", "attn bench kernels needs a GPU, and this machine has none"),
        ("peers", "compiling the peers' kernels needs a GPU, and this machine has none"),
        ("vllm", "the benchmark of whole engines needs a GPU, and this machine has none"),
    ],
)
def test_without_a_gpu_there_is_one_line(
    name: str, line: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (vllm.importlib.util, peers):
        monkeypatch.setattr(module, "find_spec", lambda name: object())
    assert the_line(name, [], capsys) == f"error: {line}\n"


def test_attn_bench_kernels_without_a_gpu_measures_and_judges_nothing() -> None:
    result = CliRunner().invoke(app, ["bench", "kernels", "--backend", "TORCH_REF"])
    assert result.exit_code == 2
    assert result.output == "error: attn bench kernels needs a GPU, and this machine has none\n"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "vllm",
            "the benchmark of whole engines needs vllm, which is not installed: pip install vllm",
        ),
        (
            "peers",
            "compiling the peers' kernels needs flashinfer, which is not installed: "
            "pip install flashinfer-python",
        ),
    ],
)
def test_without_its_package_there_is_one_line(
    name: str, line: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (vllm.importlib.util, peers):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert the_line(name, [], capsys) == f"error: {line}\n"


WRONG = {
    "kernels": {
        "--backend": ("TORCH_REFF", "did you mean 'TORCH_REF'"),
        "--table": ("blackwell", "table must be one of dense, hopper"),
        "--case": ("dec_b9", "case must match one of dec_b1_8k"),
        "--peer": ("fa9", "peer must be one of fa3"),
        "--dense-decode-kernel": ("fast", "dense_decode_kernel must be one of"),
        "--latent-decode-kernel": ("auto", "latent_decode_kernel is of table mla, got dense"),
        "--sparse-own-decode-kernel": ("fast", "sparse_own_decode_kernel must be one of"),
        "--rounds": ("0", "rounds must be positive, got 0"),
        "--reps": ("few", "argument --reps: invalid int value: 'few'"),
        "--merge": ("nowhere.json", "nowhere.json"),
        "--no-such": ("1", "unrecognized arguments: --no-such"),
    },
    "vllm": {
        "--workloads": ("train", "workload must be one of"),
        "--layers": ("0", "layers must be positive, got 0"),
        "--logprob-layers": ("0", "logprob_layers must be positive, got 0"),
        "--rounds": ("0", "rounds must be positive, got 0"),
        "--merge": ("nowhere.json", "nowhere.json"),
        "--no-such": ("1", "unrecognized arguments: --no-such"),
    },
    "peers": {
        "dec_b1_8k": ("dec_b9", "case must match one of dec_b1_8k"),
        "--no-such": ("1", "unrecognized arguments: --no-such"),
    },
}


@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name in WRONG for option in WRONG[name]]
)
def test_a_wrong_value_is_one_line(name: str, option: str, capsys: Any) -> None:
    value, words = WRONG[name][option]
    assert words in the_line(name, [option, value], capsys)


@pytest.mark.parametrize("name", ["kernels", "vllm"])
@pytest.mark.parametrize("option", ["--out", "--json"])
def test_files_are_tried_before_anything_is_measured(
    name: str, option: str, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*arguments: Any) -> None:
        raise AssertionError("measured")

    for module in (kernels, vllm):
        monkeypatch.setattr(module, "require_gpu", lambda what: None)
    monkeypatch.setattr(vllm, "require_engine", lambda: None)
    monkeypatch.setattr(kernels, "bench_kernels", measured)
    monkeypatch.setattr(vllm, "bench_engine", measured)
    closed = tmp_path / "closed.md"
    closed.touch()
    opened = Path.open

    def refusing(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == closed:
            raise PermissionError(13, "Permission denied")
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refusing)
    for path, why in (
        (tmp_path / "no" / "such" / "table.md", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (closed, "Permission denied"),
        (closed / "table.md", "Not a directory"),
    ):
        line = the_line(name, [option, str(path)], capsys)
        assert line == (
            f"error: {option} must be a file that can be written, got {str(path)!r}: {why}\n"
        )
    assert list(tmp_path.iterdir()) == [closed]


def test_a_file_that_is_tried_stays_as_it_was(tmp_path: Path) -> None:
    old, new = tmp_path / "old.md", tmp_path / "new.md"
    old.write_text("kept")
    for path in (old, new, None):
        command.check_writable("--out", path)
    assert old.read_text() == "kept"
    assert not new.exists()
