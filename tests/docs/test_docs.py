"""Pages of ``docs`` print what they show, and name files that exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import page

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "docs").rglob("*.md")
    if page.shown_by(path.read_text())
)


def test_there_are_pages_that_run():
    assert "docs/life-of-a-step.md" in PAGES


@pytest.mark.parametrize("name", PAGES)
def test_a_page_prints_what_it_shows(name):
    # A process of its own: it interprets kernels, whatever the tests do here.
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.page", name],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", PAGES)
def test_every_path_that_a_page_names_exists(name):
    text = (ROOT / name).read_text()
    for path in re.findall(r"`((?:attn|builders|specs|tests|docs)/[\w/.]*)`", text):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (ROOT / name).parent.joinpath(link).exists(), link


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
        ("2 now", "3 now", 18),
        ("\n```text\n2 now\n```\n", "", 18),
        ("a = 1\n", "a = 3\n", 3),
        # What is far from the code is not its output.
        ("```\n\n```text\n1\n", "```\n\nWords.\n\n```text\n1\n", 3),
    ],
)
def test_what_a_page_does_not_print_is_found(shown, instead, line):
    changed = SMALL.replace(shown, instead)
    assert changed != SMALL
    assert page.differences(changed)[0].startswith(f"line {line} shows\n")
    assert page.differences(page.written(changed, page.printed_by(changed))) == []


def test_a_block_that_fails_is_named_by_its_line():
    with pytest.raises(ZeroDivisionError) as failed:
        page.printed_by(SMALL.replace("a += 1", "a /= 0"))
    assert failed.traceback[-1].lineno + 1 == 15
