"""What dense and latent triples say to vLLM alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attn.integrations.vllm import compat, settings
from specs.kv_cache import AnyKVCacheSpec


class CommonBackend:
    """What any backend says to vLLM otherwise than to us."""

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[Any]:
        """Kernel block sizes, in vLLM's terms."""
        ours: Any = super()
        return [compat.block_size_of(size) for size in ours.get_supported_kernel_block_sizes()]

    @classmethod
    def check_block_size(cls, block_size: int) -> None:
        """Refuse a block size that no kernel takes.

        Raises:
            ValueError: it is one.
        """
        if not cls.supports_block_size(block_size):  # type: ignore[attr-defined]
            sizes = cls.get_supported_kernel_block_sizes()
            raise ValueError(f"block_size must be supported ({sizes}), got {block_size}")

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """Every reason why not; each says what the backend does take, where that is a list."""
        ours: Any = super()
        reasons: list[str] = ours.validate_configuration(*args, **kwargs)
        explained = [_explained(cls, reason) for reason in reasons]
        explained += settings.kernel_reasons(kwargs.get("device_capability"))
        if ours.capabilities.needs_host_lengths and compat.has_inexact_lengths():
            explained.append(
                "asynchronous scheduling of drafts not supported (plans are made on the host)"
            )
        # Asked last, as it may import packages.
        unavailable = None if explained else ours.unavailable_reason()
        return explained if unavailable is None else [unavailable]


def _explained(backend: Any, reason: str) -> str:
    """A reason with what would be served."""
    capabilities = backend.capabilities
    served = {
        "head_size not supported": capabilities.head_sizes,
        "dtype not supported": ", ".join(dtype.value for dtype in capabilities.dtypes),
        "kv_cache_dtype not supported": ", ".join(backend.supported_kv_cache_dtypes),
        "block_size not supported": ", ".join(str(size) for size in capabilities.block_sizes),
        "compute capability not supported": ", ".join(k.value for k in capabilities.device_kinds),
    }.get(reason)
    return reason if served is None else f"{reason} (served: {served})"


def served_line(label: str, spec: AnyKVCacheSpec, heads: int, layer_names: Sequence[str]) -> str:
    """The line at start-up that says what a group of layers got."""
    mask = {
        "sliding_window": getattr(spec, "sliding_window", None),
        "chunk": getattr(spec, "attention_chunk_size", None),
    }
    masks = "".join(f", {label} {size}" for label, size in mask.items() if size is not None)
    return (
        f"{label} serves {len(layer_names)} layers ({layer_names[0]}, ...): {spec.kind}, {heads} "
        f"query and {spec.num_kv_heads} KV heads of {spec.head_size}, "  # type: ignore[union-attr]
        f"{spec.dtype.value} over {spec.cache_dtype.value} KV in blocks of {spec.block_size}{masks}"
    )
