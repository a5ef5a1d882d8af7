"""Sentinel values, each with one name in the whole library."""

from typing import Final

PAD_SLOT_ID: Final = -1
"""Slot of a padding token: a cache write skips it."""

NULL_BLOCK_ID: Final = 0
"""Physical block 0 is reserved: block tables point at it where no live data is."""
