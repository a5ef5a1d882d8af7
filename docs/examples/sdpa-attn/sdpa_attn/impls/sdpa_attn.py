"""The impl of SDPA_ATTN: attention of one layer by ``scaled_dot_product_attention``."""

from __future__ import annotations

import torch
from attn.impls.base import AttentionLayer
from attn.impls.dense.cached import CachedImpl
from torch.nn.functional import scaled_dot_product_attention

from sdpa_attn.builders.sdpa_attn import SdpaAttnMetadata


class SdpaAttnImpl(CachedImpl):
    """Computes one request after the other; the base class writes the cache."""

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: SdpaAttnMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
        *,
        output_lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention of this step's tokens, see the base class."""
        given = (output_scale, output_block_scale, output_lse)
        if any(tensor is not None for tensor in given):
            raise NotImplementedError("SDPA_ATTN writes neither quantised outputs nor log-sum-exps")
        if attn_metadata is None:  # a profiling call
            return output.zero_()
        step, views, rows = attn_metadata, self._views(kv_cache, query.dtype), self._by_head(output)
        block_size = views.key.shape[1]
        step.check_cache(block_size, views.key.dtype)
        for request, num_keys in enumerate(step.kv_lens):
            start, stop = step.query_starts[request], step.query_starts[request + 1]
            if start == stop:  # a padding request
                continue
            # Blocks behind the window of every query may belong to another request by now.
            position = torch.arange(num_keys - (stop - start), num_keys, device=query.device)
            first = 0
            if self.sliding_window is not None:
                first = max(0, int(position[0]) - self.sliding_window + 1)
            keys = torch.arange(first, num_keys, device=query.device)
            blocks = step.block_table[request][keys // block_size].long()
            is_seen = keys <= position[:, None]
            if self.sliding_window is not None:
                is_seen &= keys > position[:, None] - self.sliding_window
            out = scaled_dot_product_attention(
                # Torch wants heads first.
                query[start:stop].transpose(0, 1),
                views.key[blocks, keys % block_size].transpose(0, 1),
                views.value[blocks, keys % block_size].transpose(0, 1),
                attn_mask=is_seen,
                scale=self.scale,
                enable_gqa=True,
            )
            # A token without a key has output 0, where some of torch's kernels give NaN.
            has_keys = is_seen.any(-1)[:, None, None]
            rows[start:stop] = out.transpose(0, 1).where(has_keys, 0)
        return output
