"""The commands that ``docs/cli-reports.md`` shows run as it says."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from attn.bench.results.report import load_results
from attn.cli.app import app
from attn.cli.pages.output import load_report
from specs.base import SpecError
from tests.bench.test_bench_pages import results

PAGE = Path(__file__).parents[2] / "docs" / "cli-reports.md"


def shown() -> list[tuple[str, str]]:
    """Each command of the page's blocks, and the remark behind it."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    parts = [line.partition("#") for line in lines]
    return [(command.strip(), remark.strip()) for command, _, remark in parts]


def test_every_command_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new.json").write_text(results().model_dump_json())
    ran = 0
    for command, remark in shown():
        program, *words = shlex.split(command)
        assert program == "attn"
        if remark == "needs a GPU":
            # The options at least are there: the command comes to the point where it needs a GPU.
            monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        result: Any = CliRunner().invoke(app, words)
        code = {"exit code 1": 1, "needs a GPU": 2}.get(remark, 0)
        assert result.exit_code == code, (command, result.output)
        if remark == "needs a GPU":
            assert "needs a GPU, and this machine has none" in result.stderr
        ran += 1
    assert ran >= 7
    assert load_report(tmp_path / "before" / "report.json").passed
    for name in ("run.html", "bench.html"):
        assert "<svg" in (tmp_path / name).read_text()
    with pytest.raises(SpecError, match=r"run\.html"):
        load_results(tmp_path / "run.html")
