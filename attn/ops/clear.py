"""What kernels read or leave where there is nothing, made neutral.

Attention states of rows without keys: zero, and a log-sum-exp of -inf. Slots behind the last key of
a request: zero, for kernels that multiply what they hold by a weight of zero, and zero times NaN is
NaN.
"""

from __future__ import annotations

import torch

from attn.ops.dispatch import has_kernel
from specs.sentinels import NULL_BLOCK_ID


def clear_rows(out: torch.Tensor, lse: torch.Tensor, flags: torch.Tensor) -> None:
    """Make rows neutral; one launch, which leaves all others alone.

    Args:
        out: ``[T, H, D]``, dense, written.
        lse: ``[T, H]`` fp32, dense, written.
        flags: ``[<= T]`` bool: which; rows beyond are left alone.
    """
    if len(flags) == 0:
        return
    if not has_kernel(out):
        out[: len(flags)].masked_fill_(flags[:, None, None], 0)
        lse[: len(flags)].masked_fill_(flags[:, None], float("-inf"))
        return
    from attn.kernels.cache.clear import clear_call
    from builders.launch.launcher import launch

    launch(clear_call(out, lse, flags))


def clear_tails(
    key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor, kv_lens: torch.Tensor
) -> None:
    """Zero the slots behind each request's last key, in the page of that key; one launch.

    No token lives there: a request's last page is its own, and the next tokens are still to come.

    Args:
        key: ``[N, P, Hk, D]`` pages of 8-bit or 16-bit elements, the last axis dense, written.
        value: ``[N, P, Hk, D]`` likewise.
        pages: ``[R, max_pages]`` int32, the last axis dense; block 0 is left alone.
        kv_lens: ``[R]`` int32, in tokens of those pages.
    """
    if len(kv_lens) == 0:
        return
    if has_kernel(key):
        from attn.kernels.cache.clear import clear_tails_call

        clear_tails_call(key, value, pages, kv_lens).launch()
        return
    page_size = key.shape[1]
    for row, kv_len in zip(pages.tolist(), kv_lens.tolist(), strict=True):
        first = kv_len % page_size
        if first and row[kv_len // page_size] != NULL_BLOCK_ID:
            for rows in (key, value):
                rows.view(torch.int16)[row[kv_len // page_size], first:] = 0
