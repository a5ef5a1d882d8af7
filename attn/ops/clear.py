"""Neutral values for rows without keys and for cache slots without tokens.

The attention state of a row without keys becomes zero, with a log-sum-exp of -inf. The slots behind
a request's last key become zero for kernels that multiply their content by a weight of zero: a NaN
there would reach the output, as zero times NaN is NaN.
"""

from __future__ import annotations

import torch

from attn.ops.dispatch import has_kernel
from specs.sentinels import NULL_BLOCK_ID


def clear_rows(out: torch.Tensor, lse: torch.Tensor, flags: torch.Tensor) -> None:
    """Set flagged rows to zero and their log-sum-exp to -inf; one launch.

    Args:
        out: ``[T, H, D]``, dense, written in flagged rows.
        lse: ``[T, H]`` fp32, dense, written in flagged rows.
        flags: ``[<= T]`` bool; rows past its end stay unchanged.
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

    Those slots hold no token: no other request shares a request's last page, and the request's next
    tokens are not written yet.

    Args:
        key: ``[N, P, Hk, D]`` pages of 8-bit or 16-bit elements, the last axis dense, written.
        value: ``[N, P, Hk, D]`` pages of 8-bit or 16-bit elements, the last axis dense, written.
        pages: ``[R, max_pages]`` int32, the last axis dense; block 0 stays unchanged.
        kv_lens: ``[R]`` int32, tokens in the request's pages.
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
