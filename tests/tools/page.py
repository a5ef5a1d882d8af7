"""Pages whose Python blocks run in order, one namespace for each page, and print what it shows.

    python -m tests.tools.page docs/life-of-a-step.md            compares, fails where they differ
    python -m tests.tools.page docs/life-of-a-step.md --write    puts what is printed on the page

A block of ``text`` right behind a block of ``python`` is what that one prints. A block without one
prints nothing. Kernels run in Triton's interpreter on CPU tensors, on a machine with a GPU too. A
block behind a line such as ``<!-- needs: gpu, vllm -->`` is left out.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

_BLOCK = re.compile(
    r"^(<!-- needs: [^\n]+ -->\n)?```python\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)


def _blocks(text: str) -> Iterator[re.Match[str]]:
    """The blocks that run here: code in the second group, what it prints in the third."""
    return (block for block in _BLOCK.finditer(text) if not block[1])


def printed_by(text: str) -> list[str]:
    """What each Python block of a page prints when all run in order.

    Args:
        text: the page, in Markdown.

    Raises:
        Exception: whatever a block raises, with the block's line on the page in its traceback.
    """
    names: dict[str, object] = {"__name__": "page"}
    found = []
    for block in _blocks(text):
        # Lines are counted as on the page.
        lines = text[: block.start(2)].count("\n")
        code = compile("\n" * lines + block[2], "page", "exec")
        with redirect_stdout(io.StringIO()) as out:
            exec(code, names)
        found.append(out.getvalue())
    return found


def shown_by(text: str) -> list[str]:
    """What a page says that each of its Python blocks prints; empty without a block of text."""
    return [block[3] or "" for block in _blocks(text)]


def written(text: str, printed: list[str]) -> str:
    """The page with what its blocks print.

    Args:
        text: the page.
        printed: of each Python block, as :func:`printed_by` gives it.
    """
    outputs = iter(printed)

    def block(match: re.Match[str]) -> str:
        if match[1]:
            return match[0]
        output = next(outputs)
        code = f"```python\n{match[2]}```"
        return f"{code}\n\n```text\n{output}```" if output else code

    return _BLOCK.sub(block, text)


def differences(text: str) -> list[str]:
    """A message for each Python block that does not print what the page shows."""
    pairs = zip(_blocks(text), shown_by(text), printed_by(text), strict=True)
    return [
        f"line {text[: block.start()].count(chr(10)) + 1} shows\n{shown}and prints\n{printed}"
        for block, shown, printed in pairs
        if shown != printed
    ]


def failures(text: str) -> list[str]:
    """What is wrong with a page: its differences, or the error that one of its blocks raises."""
    try:
        return differences(text)
    except Exception as error:
        frame, line = error.__traceback__, 0
        while frame is not None:
            if frame.tb_frame.f_code.co_filename == "page":
                line = frame.tb_lineno
            frame = frame.tb_next
        return [f"line {line} raises {type(error).__name__}: {error}"]


def main() -> int:
    """Compare pages, or write them; 1 where a block does not print what its page shows."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.page")
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="put what is printed on the pages")
    parser.add_argument("--json", action="store_true", help="print what is wrong, by page")
    asked = parser.parse_args()
    # Triton reads it when a page first imports it.
    os.environ["TRITON_INTERPRET"] = "1"
    texts = {path: path.read_text(encoding="utf-8") for path in asked.pages}
    if asked.write:
        for path, text in texts.items():
            path.write_text(written(text, printed_by(text)), encoding="utf-8")
        return 0
    found = {path.as_posix(): failures(text) for path, text in texts.items()}
    if asked.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{path}, {line}" for path, lines in found.items() for line in lines))
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
