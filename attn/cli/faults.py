"""Names of the deliberate faults that ``attn run --corrupt`` runs with."""

from __future__ import annotations

from enum import StrEnum, unique


@unique
class Fault(StrEnum):
    """A fault to run with."""

    WINDOW_OFF_BY_ONE = "window-off-by-one"
    """The sliding window is a key too long in dense layers, a key too short in latent layers."""
    DROPPED_SINK = "dropped-sink"
    """The sink logit is left out of the softmax denominator."""
    WRONG_SOFT_CAP = "wrong-soft-cap"
    """Scores are capped at twice the cap."""
    SHIFTED_ALIBI = "shifted-alibi"
    """Each head gets its neighbour's slope."""
    WRONG_CHUNK = "wrong-chunk"
    """Chunks of chunked local attention are twice as long."""
    WRONG_SCALE = "wrong-scale"
    """The softmax scale is 10 % too large."""
    WRONG_KV_SCALE = "wrong-kv-scale"
    """A quantised cache is read with a scale 10 % too large."""
    WRONG_SLOT = "wrong-slot"
    """Every row is written one slot further."""
    LOST_WRITE = "lost-write"
    """The last new token of the batch is not written."""
    SWAPPED_KV = "swapped-kv"
    """Keys are stored as values and values as keys."""
    PERMUTED_BLOCK_TABLE = "permuted-block-table"
    """A request's first and last block are exchanged in its block table."""
    UNMASKED_TAIL = "unmasked-tail"
    """One key past the sequence's end is read."""
    WRONG_GROUP = "wrong-group"
    """Query heads are assigned to KV heads round-robin instead of in groups of neighbours."""
    ZEROS = "zeros"
    """The output is all zeros."""
    STALE_OUTPUT = "stale-output"
    """The output of the previous call is returned."""
