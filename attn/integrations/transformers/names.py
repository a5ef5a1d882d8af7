"""The name of our implementation; the module imports nothing."""

from __future__ import annotations

from typing import Final

NAME: Final = "attn"
"""The name that models are loaded with: ``attn_implementation="attn"``."""
