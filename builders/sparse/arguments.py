"""Arguments in groups, as operations, kernels and reference of sparse attention take them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from builders.splitkv.stripe import Stripe
from specs.rows import INDEXER_PAGE, LatentFormat


class TopkLists(NamedTuple):
    """The positions that the indexer listed for each of T rows, in the row's request."""

    ids: torch.Tensor
    """``[T, topk]`` int32 positions, -1 for none; dense rows."""
    visible_lens: torch.Tensor
    """``[T]`` int32 keys that each row sees."""
    reqs: torch.Tensor
    """``[T]`` int32 request of each row."""
    stripe: Stripe | None = None
    """Under DCP, the keys that this rank keeps, while positions and ``visible_lens`` count those of
    all ranks. None where the rank has all keys."""
    hastens: bool = False
    """The next kernel reads the entries that a launch makes of the lists, and waits for that by
    itself: on Hopper it may start early (programmatic dependent launch). The library's own kernels
    do; a vendor's may not."""


class JointLists(NamedTuple):
    """The lists of every few neighbouring tokens, joined: each listed row is an entry once.

    The highest bits of an entry, one for each of the tokens, say which of them list the row; the
    other bits are the row's number ``block * P + offset``.
    """

    tokens: int
    """Tokens whose lists are joined: 2, 4 or 8."""
    entries: torch.Tensor
    """``[G, tokens * topk]`` int32 for G groups of tokens; entries past a count mean nothing."""
    counts: torch.Tensor
    """``[G]`` int32, entries of each list."""
    marks: torch.Tensor
    """``[programs, window // 4]`` int32, zero between launches: a byte for each position of a
    window, in which a program notes which tokens list it."""


class ListedRows(NamedTuple):
    """The rows of a latent cache that each of T query rows lists; a duplicate counts twice."""

    kv_cache: torch.Tensor
    """``[N, P, row]`` of the layout; compact rows are one block ``[1, S, row]``."""
    layout: LatentFormat
    """Row format of the cache."""
    indices: torch.Tensor
    """``[T, topk]`` int32, ``block * P + offset``; -1 for no row, at any place. Where a launch has
    a tile of several tokens, these are entries of :class:`JointLists` instead, with their
    counts."""
    topk_lens: torch.Tensor | None = None
    """``[T]`` int32, entries of each list to read; None reads all."""
    k_scale: torch.Tensor | None = None
    """fp32 scalar of ``FP8_NOPE_FP8_ROPE`` rows: real = stored * scale."""


class RequestPages(NamedTuple):
    """The pages of the request that each of T rows belongs to."""

    block_table: torch.Tensor
    """``[R, blocks]`` int32; entries past a row's last position are not read."""
    requests: torch.Tensor | None = None
    """``[T]`` int32 row of ``block_table`` for each row; None where row t has table row t."""
    block_size: int = INDEXER_PAGE
    """Tokens per block of ``block_table``."""


class IndexerKeys(NamedTuple):
    """Keys of the indexer: elements and scales, in pages or one behind another."""

    data: torch.Tensor
    """``[N, 64, Di]`` or ``[S, Di]``: e4m3 elements, or their uint8 patterns."""
    scale: torch.Tensor
    """``[N, 64, 1]`` or ``[S]`` fp32: the scale of each key."""
