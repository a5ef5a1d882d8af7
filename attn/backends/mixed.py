"""A backend made of two others: one takes the decodes, the other takes every other request."""

from __future__ import annotations

import math
from typing import Any

from attn.backends.base import AttentionBackend
from attn.errors import UnsupportedError
from attn.impls.dense.mixed import MixedImpl
from builders.mixed import MixedMetadataBuilder
from specs.attention import (
    AttentionCGSupport,
    AttentionSelectorConfig,
    BackendCapabilities,
    ComputeCapabilityRange,
    HeadSizes,
    MultipleOf,
)
from specs.layouts import KVPacking

PHASES = ("prefill", "decode")
_EITHER = ("needs_host_lengths", "clears_tails")
_NEITHER = ("device_cpu_query_lens_mismatch", "dcp", "pcp", "batch_invariance")
"""Capabilities that no mix has: requests are split by the host's lengths, and the split, which
decides a row's kernel, depends on the batch."""


def mix(
    name: str, prefill: type[AttentionBackend], decode: type[AttentionBackend]
) -> type[AttentionBackend]:
    """Make the backend ``name`` from the prefill phase of one backend and the decode of another.

    Raises:
        UnsupportedError: the two cannot share a KV cache, or one lacks its phase; the error holds
            every reason.
    """
    own = [one.for_phase(phase) for phase, one in zip(PHASES, (prefill, decode), strict=True)]
    reasons = [
        f"{one.get_name()} has no {phase} phase of its own"
        for phase, one, found in zip(PHASES, (prefill, decode), own, strict=True)
        if found is None
    ]
    if prefill.get_name() == decode.get_name():
        reasons.append(f"both phases are {prefill.get_name()}'s: name that backend")
    reasons += _disagreements(prefill, decode)
    phases = [one for one in own if one is not None]
    if reasons or len(phases) != len(PHASES):
        raise UnsupportedError(
            f"backend {name} cannot take prefill of {prefill.get_name()} and decode of "
            f"{decode.get_name()}:",
            reasons,
        )
    first, second = phases
    common = _common(name, first, second)
    fields = {"prefill_cls": first.get_builder_cls(), "decode_cls": second.get_builder_cls()}
    builder_cls: Any = type(f"{name}MetadataBuilder", (MixedMetadataBuilder,), fields)
    impls = {"prefill_cls": first.get_impl_cls(), "decode_cls": second.get_impl_cls()}
    impl_cls: Any = type(f"{name}Impl", (MixedImpl,), impls)

    class Mixed(MixedBackend):
        """The mix of the two backends that :func:`mix` was given."""

        capabilities = common
        members = (first, second)

        @staticmethod
        def get_name() -> str:
            """Name of the backend in the registry."""
            return name

        @staticmethod
        def get_impl_cls() -> type[MixedImpl]:
            """The impl that calls the impls of both backends."""
            return impl_cls  # type: ignore[no-any-return]

        @staticmethod
        def get_builder_cls() -> type[MixedMetadataBuilder]:
            """The builder that calls the builders of both backends."""
            return builder_cls  # type: ignore[no-any-return]

    return Mixed


class MixedBackend(AttentionBackend):
    """Base of the mixed backends: a layer is served where the backends of both phases serve it."""

    members: tuple[type[AttentionBackend], type[AttentionBackend]]

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Why one of the two cannot run on this machine."""
        found = (one.unavailable_reason() for one in cls.members)
        return next((reason for reason in found if reason is not None), None)

    @classmethod
    def combination_reason(
        cls, config: AttentionSelectorConfig, device_capability: Any
    ) -> str | None:
        """The reasons of both, each with its phase."""
        found = [
            f"{phase} by {one.get_name()}: {reason}"
            for phase, one in zip(PHASES, cls.members, strict=True)
            if (reason := one.combination_reason(config, device_capability)) is not None
        ]
        return "; ".join(found) or None

    @classmethod
    def layout_reason(
        cls, packing: KVPacking, is_padded: bool, device_capability: Any
    ) -> str | None:
        """The reasons of both backends, since both read the cache."""
        found = (one.layout_reason(packing, is_padded, device_capability) for one in cls.members)
        return next((reason for reason in found if reason is not None), None)

    @classmethod
    def device_notes(cls, device_capability: Any) -> list[str]:
        """Which backend has each phase, and the notes of both."""
        notes = []
        for phase, one in zip(PHASES, cls.members, strict=True):
            notes.append(f"{phase} rows by {one.get_name()}")
            notes += one.device_notes(device_capability)
        return notes


def _disagreements(prefill: type[AttentionBackend], decode: type[AttentionBackend]) -> list[str]:
    """Why the two backends cannot read one cache."""
    names = f"{prefill.get_name()} and {decode.get_name()}"
    ours, theirs = prefill.capabilities, decode.capabilities
    if ours.is_mla or theirs.is_mla:
        kinds = ["latent" if one.is_mla else "dense" for one in (ours, theirs)]
        return [f"only dense backends mix, {names} have {kinds[0]} and {kinds[1]} KV caches"]
    reasons = []
    for include_layers in (False, True):
        orders = [one.get_kv_cache_stride_order(include_layers) for one in (prefill, decode)]
        if orders[0] != orders[1]:
            reasons.append(f"KV cache strides of {names} differ: {orders[0]} and {orders[1]}")
    shapes = [one.get_kv_cache_shape(2, 16, 2, 64, "auto") for one in (prefill, decode)]
    if shapes[0] != shapes[1]:
        reasons.append(f"KV cache shapes of {names} differ: {shapes[0]} and {shapes[1]}")
    if prefill.forward_includes_kv_cache_update or decode.forward_includes_kv_cache_update:
        reasons.append(f"{names} must leave the cache write to the caller")
    for what, one, other in (
        ("KV cache dtypes", _names(ours.kv_cache_dtypes), _names(theirs.kv_cache_dtypes)),
        ("device kinds", _names(ours.device_kinds), _names(theirs.device_kinds)),
    ):
        if not set(one) & set(other):
            reasons.append(f"{what} of {names} have nothing in common: {one} and {other}")
    if not _blocks(prefill, decode):
        sizes = [", ".join(map(str, item.block_sizes)) for item in (ours, theirs)]
        reasons.append(f"block sizes of {names} have nothing in common: {sizes[0]} and {sizes[1]}")
    return reasons


def _names(values: tuple[Any, ...]) -> list[str]:
    return [value.value for value in values]


def _common(
    name: str, one: type[AttentionBackend], other: type[AttentionBackend]
) -> BackendCapabilities:
    """The capabilities that both backends declare."""
    ours, theirs = one.capabilities, other.capabilities
    values: dict[str, Any] = {}
    for field, info in BackendCapabilities.model_fields.items():
        pair = getattr(ours, field), getattr(theirs, field)
        if isinstance(pair[0], bool) and info.annotation is bool:
            values[field] = pair[0] or pair[1] if field in _EITHER else pair[0] and pair[1]
            values[field] = values[field] and field not in _NEITHER
        elif field in ("dtypes", "kv_cache_dtypes", "device_kinds", "attn_types"):
            values[field] = tuple(item for item in pair[0] if item in pair[1])
    values["cudagraph_support"] = min(
        ours.cudagraph_support, theirs.cudagraph_support, AttentionCGSupport.UNIFORM_BATCH
    )
    values["block_sizes"] = tuple(_blocks(one, other))
    values["head_sizes"] = _heads(ours.head_sizes, theirs.head_sizes)
    values["compute_capabilities"] = _ranges(ours.compute_capabilities, theirs.compute_capabilities)
    missing = [
        field
        for field in ("dtypes", "kv_cache_dtypes", "device_kinds", "attn_types")
        if not values[field]
    ]
    if missing:
        raise UnsupportedError(
            f"backend {name} of {one.get_name()} and {other.get_name()} serves nothing:",
            [f"{field} have nothing in common" for field in missing],
        )
    return BackendCapabilities(**values)


def _blocks(one: type[AttentionBackend], other: type[AttentionBackend]) -> list[int | MultipleOf]:
    """Kernel block sizes that both backends take."""
    found: list[int | MultipleOf] = []
    for first in one.capabilities.block_sizes:
        for second in other.capabilities.block_sizes:
            bases = [size if isinstance(size, int) else size.base for size in (first, second)]
            if isinstance(first, MultipleOf) and isinstance(second, MultipleOf):
                found.append(MultipleOf(base=math.lcm(*bases)))
            elif isinstance(first, MultipleOf) and bases[1] % bases[0] == 0:
                found.append(bases[1])
            elif first == second or (isinstance(second, MultipleOf) and bases[0] % bases[1] == 0):
                found.append(bases[0])
    return found


def _heads(one: HeadSizes, other: HeadSizes) -> HeadSizes:
    if one.values or other.values:
        listed, rule = (one, other) if one.values else (other, one)
        return HeadSizes(values=tuple(size for size in listed.values if size in rule))
    tops = [top for top in (one.maximum, other.maximum) if top is not None]
    return HeadSizes(
        multiple_of=math.lcm(one.multiple_of, other.multiple_of),
        minimum=max(one.minimum, other.minimum),
        maximum=min(tops, default=None),
    )


def _ranges(
    one: tuple[ComputeCapabilityRange, ...], other: tuple[ComputeCapabilityRange, ...]
) -> tuple[ComputeCapabilityRange, ...]:
    """Compute capabilities of both backends; an empty tuple means all."""
    if not one or not other:
        return one or other
    found = []
    for first in one:
        for second in other:
            low = max(first.minimum, second.minimum)
            tops = [top for top in (first.maximum, second.maximum) if top is not None]
            high = min(tops, default=None)
            if high is None or low <= high:
                found.append(ComputeCapabilityRange(minimum=low, maximum=high))
    return tuple(found)
