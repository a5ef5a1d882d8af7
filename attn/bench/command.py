"""What the command lines of the benchmarks share: errors in one line, files tried before the work.

Needs nothing beyond the library itself.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final, NoReturn

import torch

from attn.errors import MissingDependencyError, one_line

USAGE_ERROR: Final = 2
"""Exit code of a command that was asked for what it cannot do."""


class Parser(argparse.ArgumentParser):
    """Says in one line what was wrong with a command line."""

    def error(self, message: str) -> NoReturn:
        """Print the line and leave."""
        self.exit(USAGE_ERROR, f"error: {message}\n")


USER_ERRORS: Final = (ValueError, MissingDependencyError, OSError)
"""What a user of a command can cause."""


def usage_error(error: Exception) -> int:
    """Print the error's one line; the exit code."""
    print(f"error: {one_line(error)}", file=sys.stderr)
    return USAGE_ERROR


def require_gpu(command: str) -> None:
    """Refuse to go on without a GPU.

    Args:
        command: what needs it.

    Raises:
        ValueError: this machine has none.
    """
    if not torch.cuda.is_available():
        raise ValueError(f"{command} needs a GPU, and this machine has none")


def check_writable(option: str, path: Path | None) -> None:
    """Try a file that results are to be written to; an hour's work must not end at a bad path.

    Args:
        option: what named it.
        path: the file, which is left as it is; None is no file.

    Raises:
        ValueError: it is a folder, lies in no folder, or cannot be written.
    """
    if path is None:
        return
    is_new = not path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise ValueError(
            f"{option} must be a file that can be written, got {str(path)!r}: {error.strerror}"
        ) from None
    if is_new:
        path.unlink()
