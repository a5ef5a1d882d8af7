"""The parts of the vLLM adapter that dense and latent triples share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attn.integrations.vllm import compat, settings
from specs.attention import AttentionSelectorConfig
from specs.kv_cache import AnyKVCacheSpec


class CommonBackend:
    """Methods of every backend that differ for vLLM."""

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[Any]:
        """Kernel block sizes, in vLLM's terms."""
        ours: Any = super()
        return [compat.block_size_of(size) for size in ours.get_supported_kernel_block_sizes()]

    @classmethod
    def check_block_size(cls, block_size: int) -> None:
        """Refuse a block size that no kernel takes.

        Raises:
            ValueError: no kernel takes this block size.
        """
        if not cls.supports_block_size(block_size):  # type: ignore[attr-defined]
            sizes = cls.get_supported_kernel_block_sizes()
            raise ValueError(f"block_size must be supported ({sizes}), got {block_size}")

    @classmethod
    def outside(cls, what: str, value: object, served: object) -> str:
        """The reason against a value outside a limit, in vLLM's words plus the served values."""
        words = f"{what} {value}" if what == "attention type" else what
        return _Reason(f"{words} not supported", f" (got {value}, served: {served})")

    @classmethod
    def validate(cls, config: AttentionSelectorConfig, device_capability: Any) -> list[str]:
        """Every reason why not, those of the plugin's settings included."""
        ours: Any = super()
        reasons: list[str] = ours.validate(config, device_capability)
        reasons += settings.kernel_reasons(device_capability)
        if ours.capabilities.needs_host_lengths and compat.has_inexact_lengths():
            reasons.append(
                "asynchronous scheduling of drafts not supported (plans are made on the host)"
            )
        # Checked last, because the check may import packages.
        unavailable = None if reasons else ours.unavailable_reason()
        return reasons if unavailable is None else [unavailable]


class _Reason(str):
    """A reason with details behind vLLM's words, which compares equal to those words alone.

    vLLM compares reasons with its own words. Where the block size is the only reason against a
    better-ranked backend, vLLM warns that ``--block-size`` precluded it. On ROCm, where the KV
    cache dtype is the only reason against a layer, vLLM takes another backend.
    """

    words: str

    def __new__(cls, words: str, details: str) -> _Reason:
        made = super().__new__(cls, words + details)
        made.words = words
        return made

    def __eq__(self, other: object) -> bool:
        return other == self.words or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def served_line(
    label: str,
    spec: AnyKVCacheSpec,
    heads: int,
    layer_names: Sequence[str],
    kernels: Mapping[str, str] | None = None,
) -> str:
    """The log line at start-up: backend, cache and kernels of a group of layers.

    Args:
        label: our backend's name and vLLM's.
        spec: our spec of the group's cache.
        heads: query heads of this rank.
        layer_names: layers of the group.
        kernels: the builder's ``phase_kernels``.
    """
    mask = {
        "sliding_window": getattr(spec, "sliding_window", None),
        "chunk": getattr(spec, "attention_chunk_size", None),
    }
    masks = "".join(f", {name} {size}" for name, size in mask.items() if size is not None)
    named = ", ".join(f"{phase}: {kernel}" for phase, kernel in (kernels or {}).items())
    return (
        f"{label} serves {len(layer_names)} layers ({layer_names[0]}, ...): {spec.kind}, {heads} "
        f"query and {spec.num_kv_heads} KV heads of {spec.head_size}, "  # type: ignore[union-attr]
        f"{spec.dtype.value} over {spec.cache_dtype.value} KV in blocks of {spec.block_size}{masks}"
        + (f"; {named}" if named else "")
    )
