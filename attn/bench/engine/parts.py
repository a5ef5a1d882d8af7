"""Which part of an engine's step a GPU kernel belongs to, told by its name."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from enum import StrEnum, unique
from typing import Final

from pydantic import Field

from specs.base import Spec


@unique
class PartName(StrEnum):
    """Parts of a step."""

    ATTENTION = "attention"
    INDEXER = "indexer"
    OTHER = "other"


_INDEXER: Final = re.compile(
    r"mqa_logits|paged_logits_kernel|ragged_logits_kernel|select_topk_kernel"
    r"|select_candidates_kernel|write_keys_kernel"
    r"|gather_keys_kernel|indexer|top_?k_?per_?row|persistent_topk|cooperative_topk|filtered_?topk"
    r"|context_slots_kernel|build_prefill_chunk_metadata",
    re.IGNORECASE,
)
"""Kernels of the indexer: scores, lists, and the cache of its keys."""
_ATTENTION: Final = re.compile(
    # Ours.
    r"\bdecode_kernel|prefill_kernel|hopper_decode|hopper_prefill|mla_decode_kernel|hopper_mla"
    r"|hopper_sparse|hopper_narrow_sparse|sparse_mla|fold_cuts|fold_states|write_kv_kernel"
    r"|latent_convert|topk_transform|join_lists|rope_quantize|expand_kernel|merge_kernel|\bplan_kernel"
    r"|page_list_kernel|latent_table_kernel|sparse_rows_kernel|clear_kernel|quantize_rows"
    r"|pack_query_kernel|unpack_state_kernel|dequantised?_"
    # vLLM's.
    r"|flash|fmha|splitkv|mla_metadata|sparse_attn|kernel_unified_attention|reduce_segments"
    r"|_kernel_stage|_fwd_kernel|_fwd_grouped|reshape_and_cache|concat_and_cache|merge_attn_states"
    r"|gather_and_maybe_dequant|cp_gather|convert_req_index|prepare_varlen_num_blocks"
    r"|mask_empty_context|decode_att|sm90::(fwd|decode)|concat_?mla_?q",
    re.IGNORECASE,
)
"""Kernels of attention: its cache's, its lists' and its plan's are among them. Products with a
layer's weights are not, since all backends do the same ones by the same libraries. Nor are copies
and fills by kernels of torch: their names do not tell whom they serve."""


def part_of(kernel: str) -> PartName:
    """The part that a kernel belongs to."""
    if _INDEXER.search(kernel):
        return PartName.INDEXER
    return PartName.ATTENTION if _ATTENTION.search(kernel) else PartName.OTHER


class KernelTime(Spec):
    """Launches of the kernels of one name."""

    name: str
    count: int = Field(ge=1)
    us: float = Field(ge=0)
    """Microseconds of all launches together, see :func:`own_times`."""


Launch = tuple[str, float, float]
"""Name of a kernel, copy or fill, and the microseconds at which it starts and ends."""


def own_times(launches: Iterable[Launch]) -> Iterator[tuple[str, float]]:
    """Name and own microseconds of each launch on a GPU: the time in which no earlier launch ran.

    A kernel that is launched ahead, by programmatic dependent launch, starts while the kernel
    before it runs, and waits for it: the duration of the later contains that of the earlier. The
    own times of all launches add up to the time in which the GPU was busy.
    """
    busy_until = float("-inf")
    for name, start, end in sorted(launches, key=lambda launch: launch[1:]):
        yield name, max(end - max(start, busy_until), 0.0)
        busy_until = max(busy_until, end)


def kernel_times(launches: Iterable[Launch]) -> tuple[KernelTime, ...]:
    """Add up the own times of launches by name, the longest first."""
    counts: dict[str, int] = defaultdict(int)
    times: dict[str, float] = defaultdict(float)
    for name, us in own_times(launches):
        counts[name] += 1
        times[name] += us
    found = [KernelTime(name=name, count=counts[name], us=times[name]) for name in times]
    return tuple(sorted(found, key=lambda item: (-item.us, item.name)))


def time_of(kernels: Iterable[KernelTime], part: PartName) -> float:
    """Microseconds of a part."""
    return sum(item.us for item in kernels if part_of(item.name) is part)
