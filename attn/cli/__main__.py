"""Entry point of the ``attn`` command; it names the extra to install where that is missing."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    try:
        from attn.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "matplotlib", "click"):
            raise
        print(
            f"error: the attn command needs {error.name}: pip install 'attn-backends[cli]'",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    app()


if __name__ == "__main__":
    main()
