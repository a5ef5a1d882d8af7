"""The conformance test of the backends that ``--attn-backend`` names: ``attn.testing.plugin``."""

from __future__ import annotations

from typing import Any


def test_conformance(attn_case: Any) -> None:
    """The backend keeps the promises of its interface in this case."""
    attn_case.check()
