"""Parts that the benchmarks' command lines share: one-line errors, checks of files before the work.

The module needs nothing beyond the library itself.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final, NoReturn

import torch

from attn.errors import MissingDependencyError, one_line

USAGE_ERROR: Final = 2
"""Exit code of a command that refuses its arguments."""


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the line and exit."""
        self.exit(USAGE_ERROR, f"error: {message}\n")


USER_ERRORS: Final = (ValueError, MissingDependencyError, OSError)
"""Errors that a user of a command can cause."""


def usage_error(error: Exception) -> int:
    """Print an error in one line and return the exit code."""
    print(f"error: {one_line(error)}", file=sys.stderr)
    return USAGE_ERROR


def require_gpu(command: str) -> None:
    """Refuse to go on without a GPU.

    Args:
        command: name of the command that needs a GPU, for the message.

    Raises:
        ValueError: this machine has no GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError(f"{command} needs a GPU, and this machine has none")


def check_writable(option: str, path: Path | None) -> None:
    """Check before the work that results can be written to a file.

    Args:
        option: name of the option that gave the path, for the message.
        path: the file, which stays unchanged; None for no file.

    Raises:
        ValueError: the path is a folder, lies in no folder, or cannot be written.
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
