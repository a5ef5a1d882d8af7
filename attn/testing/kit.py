"""The conformance test of whichever backends the command line names.

    pytest -p attn.testing.plugin --pyargs attn.testing.kit --attn-backend NAME
"""

from __future__ import annotations

from typing import Any


def test_conformance(attn_case: Any) -> None:
    """The backend keeps the promises of its interface in this case."""
    attn_case.check()
