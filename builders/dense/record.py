"""What a step of dense attention is, for TRITON_ATTN's kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from builders.base import AttentionMetadata
from builders.splitkv.record import PrefillPlan, SplitPlan
from builders.splitkv.stripe import Stripe


class AloneStep(NamedTuple):
    """What the only launch of a layer depends on of a step, and is given of it."""

    likeness: tuple[Any, ...]
    """Everything but lengths and addresses."""
    least: int
    """Rows that there must be of query and output."""
    is_prefill: bool
    prefill: PrefillPlan | None
    programs: int
    """Of the split-KV kernel."""
    given: tuple[Any, ...]
    """Addresses of that kernel's plan, or of the lengths."""


class ReadStep(NamedTuple):
    """What launches of all layers depend on of a step, read once for them all."""

    likeness: tuple[Any, ...]
    """Everything but lengths, addresses and the plans."""
    likeness_of_prefill: tuple[Any, ...]
    """Further types and places, of prefills."""
    table: tuple[int, int]
    """Entries from one row of the block table to the next, and its address."""
    lengths: tuple[int, int, int]
    """Addresses of ``query_start_loc`` and ``seq_lens``, and the number of requests."""
    is_plain: bool
    """Nothing but these differs from step to step: launches are made again with other values."""
    alone: AloneStep | None
    """Of plain steps with rows of one kind, and no common prefix."""


@dataclass
class TritonAttentionMetadata(AttentionMetadata):
    """A step of dense attention, for the split-KV kernel and the prefill kernel."""

    num_actual_tokens: int
    num_reqs: int
    query_start_loc: torch.Tensor
    """``[R + 1]`` int32, device."""
    seq_lens: torch.Tensor
    """``[R]`` int32, device: KV lengths (cross attention: the encoder's)."""
    block_table: torch.Tensor
    """``[R, max_blocks]`` int32, device."""
    split: SplitPlan | None
    """Rows with few query tokens; None where the host knows of none, and for encoders."""
    prefill: PrefillPlan | None
    """Rows with many; None where the host knows that there are none."""
    causal: bool | torch.Tensor = True
    """One flag, or ``[R]`` per request on the device."""
    first_positions: torch.Tensor | None = None
    """``[R]`` int32, device: where each request's first query stands, counted from its first key,
    of rows of the plain prefill kernel; None where the last keys are the queries' own."""
    mm_ranges: torch.Tensor | None = None
    """``[R, max_ranges, 2]`` int32, device: inclusive, attended in both directions; zeros pad."""
    rswa_prefix_lens: torch.Tensor | None = None
    """``[R]`` int32, device."""
    rswa_window: int | None = None
    stripe: Stripe | None = None
    """Decode context parallelism: the cache holds this rank's keys; lengths are the requests'."""
    shared: SharedPrefix | None = None
    """The batch's common prefix, computed once for all requests; None without one."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign, and forget what was read before."""
        self.__dict__.pop("read", None)
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        """What copies have: their tensors may lie elsewhere."""
        return {name: value for name, value in vars(self).items() if name != "read"}

    @cached_property
    def read(self) -> ReadStep:
        """Of what is assigned now; none of these tensors moves."""
        causal, table, starts, lens = (
            self.causal,
            self.block_table,
            self.query_start_loc,
            self.seq_lens,
        )
        has_ranges, has_prefixes = self.mm_ranges is not None, self.rswa_prefix_lens is not None
        is_one = isinstance(causal, bool)
        likeness = (
            table.dtype,
            table.is_cuda,
            # Forms are checked for it, once each.
            table.stride()[1],
            causal if is_one else None,
            has_ranges,
            self.rswa_window if has_prefixes else None,
            self.stripe,
            # Caches of every kind are compared with the step before a first launch.
            self.block_size,
            self.cache_dtype,
        )
        of_prefill = (starts.dtype, starts.is_cuda, lens.dtype, lens.is_cuda)
        lengths = (starts.data_ptr(), lens.data_ptr(), self.num_reqs)
        is_plain = is_one and not (has_ranges or has_prefixes) and self.first_positions is None
        alone, least, (split, prefill) = None, self.num_actual_tokens, (self.split, self.prefill)
        if is_plain and self.shared is None:
            if prefill is None and split is not None:
                programs, given = split.groups * split.heads, split.pointers.given
                kind: tuple[Any, ...] = (likeness, split.likeness)
                alone = AloneStep(kind, least, False, None, programs, given)
            elif prefill is not None and split is None:
                kind = (likeness, prefill.likeness, of_prefill)
                alone = AloneStep(kind, least, True, prefill, 0, lengths)
        return ReadStep(
            likeness=likeness,
            likeness_of_prefill=of_prefill,
            table=(table.stride()[0], table.data_ptr()),
            lengths=lengths,
            is_plain=is_plain,
            alone=alone,
        )


@dataclass
class SharedPrefix:
    """Cascade attention: the prefix once for all requests, then what is each request's own.

    An alternative to the record that it belongs to, for layers whose mask is plain causality:
    positions count from the end of the prefix in both, and the prefix is seen whole.
    """

    length: int
    """Tokens of the prefix, a multiple of the block size."""
    prefix: TritonAttentionMetadata
    """All tokens as one request over the prefix, not causal."""
    own: TritonAttentionMetadata
    """The batch over every request's keys after the prefix."""
    outputs: torch.Tensor
    """``[2, T, H, Dv]`` fp32 scratch: prefix part, own part."""
    lses: torch.Tensor
    """``[2, T, H]`` fp32 scratch, likewise."""
