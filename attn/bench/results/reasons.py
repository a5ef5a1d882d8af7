"""Descriptions of errors for tables."""

from __future__ import annotations

import re

_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[\w.+-]+/)+")


def describe(error: BaseException) -> str:
    """Type and first line of an error, and the first ``error:`` line of a compiler below it.

    An absolute path is cut to the file's name, since its folders are those of one machine.
    """
    lines = _FOLDERS.sub("", str(error)).strip().splitlines()
    if not lines:
        return type(error).__name__
    complaints = (re.search(r"\berror: .*", line) for line in lines[1:])
    complaint = next((f" {found[0][:200]}" for found in complaints if found), "")
    return f"{type(error).__name__}: {lines[0][:200]}{complaint}"
