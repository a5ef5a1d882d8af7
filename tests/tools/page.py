"""A page whose Python blocks run in order, in one namespace, and print what the page shows.

    python -m tests.tools.page docs/life-of-a-step.md            compares, fails where they differ
    python -m tests.tools.page docs/life-of-a-step.md --write    puts what is printed on the page

A block of ``text`` right behind a block of ``python`` is what that one prints. A block without one
prints nothing. Kernels run in Triton's interpreter on CPU tensors, on a machine with a GPU too.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

_BLOCK = re.compile(
    r"^```python\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE
)


def printed_by(text: str) -> list[str]:
    """What each Python block of a page prints when all run in order.

    Args:
        text: the page, in Markdown.

    Raises:
        Exception: whatever a block raises, with the block's line on the page in its traceback.
    """
    names: dict[str, object] = {"__name__": "page"}
    found = []
    for block in _BLOCK.finditer(text):
        # Lines are counted as on the page.
        lines = text[: block.start(1)].count("\n")
        code = compile("\n" * lines + block[1], "page", "exec")
        with redirect_stdout(io.StringIO()) as out:
            exec(code, names)
        found.append(out.getvalue())
    return found


def shown_by(text: str) -> list[str]:
    """What a page says that each of its Python blocks prints; empty without a block of text."""
    return [block[2] or "" for block in _BLOCK.finditer(text)]


def written(text: str, printed: list[str]) -> str:
    """The page with what its blocks print.

    Args:
        text: the page.
        printed: of each Python block, as :func:`printed_by` gives it.
    """
    outputs = iter(printed)

    def block(match: re.Match[str]) -> str:
        output = next(outputs)
        code = f"```python\n{match[1]}```"
        return f"{code}\n\n```text\n{output}```" if output else code

    return _BLOCK.sub(block, text)


def differences(text: str) -> list[str]:
    """A message for each Python block that does not print what the page shows."""
    pairs = zip(_BLOCK.finditer(text), shown_by(text), printed_by(text), strict=True)
    return [
        f"line {text[: block.start()].count(chr(10)) + 1} shows\n{shown}and prints\n{printed}"
        for block, shown, printed in pairs
        if shown != printed
    ]


def main() -> int:
    """Compare a page, or write it; 1 where a block does not print what the page shows."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.page")
    parser.add_argument("page", type=Path)
    parser.add_argument("--write", action="store_true", help="put what is printed on the page")
    asked = parser.parse_args()
    # Triton reads it when the page first imports it.
    os.environ["TRITON_INTERPRET"] = "1"
    text = asked.page.read_text(encoding="utf-8")
    if asked.write:
        asked.page.write_text(written(text, printed_by(text)), encoding="utf-8")
        return 0
    found = differences(text)
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
