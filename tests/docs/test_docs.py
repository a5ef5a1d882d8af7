"""Pages of ``docs``, and the README: what they show runs, what they name is there."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attn.cli.app import app
from attn.integrations.vllm import settings
from docs.tools import blocks
from specs.engine import DecodeKernel, PrefillKernel
from tests.tools import page

ROOT = Path(__file__).parents[2]
TEXTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    # Packages among the examples have tests of their own.
    if path.parent.parent.name != "examples"
}


def has_its_own_test(name: str) -> bool:
    """A page like ``cli-reports.md`` whose blocks ``test_cli_reports.py`` runs in their order."""
    test = f"test_{Path(name).stem.replace('-', '_')}.py"
    return any((ROOT / folder / test).exists() for folder in ("tests/docs", "tests/outside"))


RUN_HERE = {name: text for name, text in TEXTS.items() if not has_its_own_test(name)}
RUN = [name for name, text in RUN_HERE.items() if page.shown_by(text)]
FENCED = re.compile(
    r"^(?:<!-- needs: ([^\n]+) -->\n)?```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
NEEDS = {"gpu", "vllm", "sglang", "transformers", "installing", "writing"}
"""What a block that is not run here can need."""
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
WITH_COMMITS = ("docs/benchmarks/", "docs/notebook/")
"""Where commits are named: results, and the notebook."""


def commands() -> list[tuple[str, int]]:
    """Every command that pages show and do not mark, once, with its exit code."""
    found = {}
    for text in RUN_HERE.values():
        for needs, language, body in FENCED.findall(text):
            if language == "sh" and not needs:
                for line in body.splitlines():
                    command, _, comment = line.partition("#")
                    code = re.search(r"exit code (\d)", comment)
                    found[command.strip()] = int(code[1]) if code else 0
    return sorted(found.items())


def test_there_are_pages_and_commands_that_run():
    assert {"README.md", "docs/life-of-a-step.md", "docs/python.md"} <= set(RUN)
    assert len(commands()) > 10


@pytest.mark.parametrize("name", RUN_HERE)
def test_every_block_is_run_or_says_what_it_needs(name):
    # An odd mark at the start of a line would end one block too many.
    assert len(re.findall(r"^```", TEXTS[name], re.MULTILINE)) == 2 * len(
        FENCED.findall(TEXTS[name])
    )
    for needs, language, body in FENCED.findall(TEXTS[name]):
        assert language in ("python", "sh", "text"), body
        assert set(filter(None, needs.split(", "))) <= NEEDS, needs
    assert not re.search(r"^    (attn|pip|make|python|vllm) ", TEXTS[name], re.MULTILINE)


@cache
def failures() -> dict[str, list[str]]:
    """What is wrong with every page that runs, from one process for all of them."""
    # A process of its own: it interprets kernels, whatever the tests do here.
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.page", "--json", *RUN],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", RUN)
def test_a_page_prints_what_it_shows(name):
    assert failures()[name] == []


@pytest.mark.parametrize(("command", "code"), commands(), ids=[line for line, _ in commands()])
def test_a_command_runs(command, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("docs").symlink_to(ROOT / "docs")
    Path("trace.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,40,5\n"
    )
    words = shlex.split(command)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", MAKEFILE, re.MULTILINE)
    elif words[:2] == ["python", "-m"]:
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        done = subprocess.run(
            [sys.executable, *words[1:]], capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == code, done.stderr
    else:
        assert words[0] == "attn", f"{command} must say what it needs"
        result = CliRunner().invoke(app, words[1:])
        assert result.exit_code == code, result.output + result.stderr


@pytest.mark.parametrize("name", TEXTS)
def test_every_path_and_link_leads_somewhere(name):
    text = re.sub(r"^```.*?^```$", "", TEXTS[name], flags=re.DOTALL | re.MULTILINE)
    if not name.startswith(WITH_COMMITS):
        for path in re.findall(r"`((?:attn|builders|specs|tests|docs)/[\w/.<>]*)`", text):
            path = path.replace("<stem>", "torch_ref").replace("<family>", "dense")
            assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", text):
        assert (ROOT / name).parent.joinpath(link).exists(), link


@pytest.mark.parametrize("name", [name for name in TEXTS if not name.startswith(WITH_COMMITS)])
def test_a_page_names_no_commit(name):
    found = re.findall(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b", TEXTS[name])
    assert found == []


@pytest.mark.parametrize("name", TEXTS)
def test_parts_that_follow_from_the_code_are_current(name):
    filled = blocks.filled(TEXTS[name], empty_too=False)
    assert TEXTS[name] == filled, f"python -m docs.tools.blocks {name}"


@pytest.mark.parametrize("name", TEXTS)
def test_variables_that_a_page_names_exist(name):
    known = set(re.findall(r"ATTN_[A-Z0-9_]*[A-Z]", blocks.environment()))
    assert set(re.findall(r"\bATTN_[A-Z0-9_]*[A-Z]\b", TEXTS[name])) <= known


def test_the_guide_has_every_variable_of_the_plugin():
    table = TEXTS["docs/vllm.md"].split("## Every variable")[1].split("## ")[0]
    named = re.findall(r"^\| `([A-Z0-9_]+)`", table, re.MULTILINE)
    assert set(settings.VARIABLES) < set(named)
    for kernel in (*PrefillKernel, *DecodeKernel):
        assert f"`{kernel.value}`" in table


@cache
def spoken() -> str:
    """Every string of the code, f-strings in their parts, one per line."""
    found = []
    for path in [*ROOT.glob("attn/**/*.py"), *ROOT.glob("builders/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(" ".join(re.sub(r"%s|%d", "…", node.value).split()))
    return "\n".join(found)


MESSAGES = re.findall(r"^### `([^\n]+)`$", TEXTS["docs/troubleshooting.md"], re.MULTILINE)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_under_troubleshooting_is_one_of_ours(message):
    for part in re.split(r"…|`[^`]*`", message):
        assert part.strip(" ,:;.") in spoken()


# -- The tool that runs pages.

SMALL = """# Page

```python
a = 1
print(a)
```

```text
1
```

Words.

```python
a += 1
```

<!-- needs: gpu -->
```python
a = "never run"
```

```python
print(a, "now")
```

```text
2 now
```
"""


def test_blocks_run_in_order_in_one_namespace():
    assert page.printed_by(SMALL) == page.shown_by(SMALL) == ["1\n", "", "2 now\n"]
    assert page.differences(SMALL) == []
    assert page.written(SMALL, page.printed_by(SMALL)) == SMALL


@pytest.mark.parametrize(
    ("shown", "instead", "line"),
    [
        ("2 now", "3 now", 23),
        ("\n```text\n2 now\n```\n", "", 23),
        ("a = 1\n", "a = 3\n", 3),
        # What is far from the code is not its output.
        ("```\n\n```text\n1\n", "```\n\nWords.\n\n```text\n1\n", 3),
    ],
)
def test_what_a_page_does_not_print_is_found(shown, instead, line):
    changed = SMALL.replace(shown, instead)
    assert changed != SMALL
    assert page.failures(changed)[0].startswith(f"line {line} shows\n")
    assert page.differences(page.written(changed, page.printed_by(changed))) == []


def test_a_block_that_fails_is_named_by_its_line():
    failing = SMALL.replace("a += 1", "a /= 0")
    with pytest.raises(ZeroDivisionError) as failed:
        page.printed_by(failing)
    assert failed.traceback[-1].lineno + 1 == 15
    assert page.failures(failing) == ["line 15 raises ZeroDivisionError: division by zero"]
