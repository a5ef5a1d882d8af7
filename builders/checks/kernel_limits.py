"""Head sizes, types and block sizes that the library's own kernels over keys and values take.

Attention and cache writes have the same limits, so that a cache that is written is also read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specs.dtypes import CacheDType

HEAD_SIZES = range(32, 513, 8)
"""Head sizes that the kernels take."""
BLOCK_MULTIPLE = 16
"""Block sizes are multiples of this."""
MODEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CACHE_DTYPES = (
    CacheDType.AUTO,
    CacheDType.FLOAT16,
    CacheDType.BFLOAT16,
    CacheDType.FP8,
    CacheDType.FP8_E4M3,
    CacheDType.FP8_E5M2,
    CacheDType.INT4_PER_TOKEN_HEAD,
    CacheDType.INT8_PER_TOKEN_HEAD,
    CacheDType.FP8_PER_TOKEN_HEAD,
)


def check_head_sizes(head_size: int, head_size_v: int) -> None:
    """Both head sizes are such that the kernels take them.

    Raises:
        ValueError: one is not.
    """
    for name, size in (("head_size", head_size), ("head_size_v", head_size_v)):
        if size not in HEAD_SIZES:
            raise ValueError(
                f"{name} must be a multiple of {HEAD_SIZES.step} from {HEAD_SIZES.start} to "
                f"{HEAD_SIZES.stop - 1}, got {size}"
            )


def check_dtypes(
    model: torch.dtype | None, cache: CacheDType, served: Sequence[CacheDType] = CACHE_DTYPES
) -> None:
    """Model and KV cache dtype are such that the kernels take them; None where not known yet.

    Args:
        model: dtype.
        cache: dtype.
        served: of caches.

    Raises:
        ValueError: one is not.
    """
    if model is not None and model not in MODEL_DTYPES:
        names = ", ".join(str(dtype) for dtype in MODEL_DTYPES)
        raise ValueError(f"model dtype must be one of {names}, got {model}")
    if cache not in served:
        names = ", ".join(dtype.value for dtype in served)
        raise ValueError(f"kv_cache_dtype must be one of {names}, got {cache.value!r}")
