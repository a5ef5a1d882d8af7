"""Random tensors of a replay: keys and values without pages, and queries that make faults visible.

Over a long context random queries average thousands of values, so that a missing or extra key
changes the result by less than rounding. Therefore each head of each token aims at one key. Many
aim at the edge of what the token sees: the token itself, the first key of its window, the key just
outside of it, the next token. A missing or extra key there changes the result by far more than
rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specs.model import LayerGeometry

PEAK = 6.0
"""Logit of the aimed-at key above that of an average key; exp(6) is about 400 average keys."""


@dataclass(frozen=True)
class LayerTensors:
    """Keys and values of one request in one layer, for its whole length n, without pages."""

    key: torch.Tensor
    """``[n, Hk, D]``; for MLA the latent rows ``[n, 1, L + r]``."""
    value: torch.Tensor
    """``[n, Hk, Dv]``; for MLA the first L elements of ``key``."""
    index_key: torch.Tensor | None = None
    """``[n, Di]`` keys of the indexer; None for a layer without one."""


@dataclass(frozen=True)
class TensorSource:
    """Source of tensors that depend only on the seed, the layer and the request or step."""

    seed: int
    dtype: torch.dtype
    device: torch.device

    def generator(self, *path: int) -> torch.Generator:
        """A generator seeded by the source's seed and a path of small integers."""
        number = self.seed
        for part in path:
            number = (number * 1_000_003 + part + 1) % (1 << 62)
        return torch.Generator(device=self.device).manual_seed(number)

    def normal(self, generator: torch.Generator, *shape: int) -> torch.Tensor:
        """Standard normal numbers, float32."""
        return torch.randn(shape, generator=generator, device=self.device)

    def request(
        self, layer: LayerGeometry, layer_index: int, request: int, length: int
    ) -> LayerTensors:
        """Keys and values of a request, equal in every call."""
        generator = self.generator(0, layer_index, request)
        if layer.mla is not None:
            rows = self.normal(generator, length, 1, layer.mla.latent_size).to(self.dtype)
            index_key = None
            if layer.indexer is not None:
                index_key = self.normal(generator, length, layer.indexer.index_head_dim)
                index_key = index_key.to(self.dtype)
            return LayerTensors(rows, rows[..., : layer.mla.kv_lora_rank], index_key)
        key = self.normal(generator, length, layer.num_kv_heads, layer.head_size)
        value = self.normal(generator, length, layer.num_kv_heads, layer.v_size)
        return LayerTensors(key.to(self.dtype), value.to(self.dtype))

    def queries(
        self,
        layer: LayerGeometry,
        tensors: LayerTensors,
        positions: torch.Tensor,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """Queries of one request's new tokens, each head aimed at a key.

        Args:
            layer: the layer.
            tensors: the request's keys.
            positions: ``[T]`` int64 positions of the new tokens.
            generator: generator of this step.

        Returns:
            ``[T, H, D]`` (MLA: ``[T, H, P + r]``) in the model dtype.
        """
        targets = self._targets(layer, len(tensors.key), positions, generator)
        query = 0.5 * self.normal(generator, len(positions), layer.num_heads, layer.head_size)
        if layer.mla is not None:
            # Only the rotary part aims at a key: the rest passes through the up-projections.
            key, start = tensors.key[:, 0, layer.mla.kv_lora_rank :], layer.mla.qk_nope_head_dim
            aimed = key[targets].float()
        else:
            heads = torch.arange(layer.num_heads, device=self.device) // layer.num_queries_per_kv
            aimed, start = tensors.key[targets, heads].float(), 0
        query[..., start:] += PEAK / (layer.scale * aimed.shape[-1]) * aimed
        return query.to(self.dtype)

    def _targets(
        self,
        layer: LayerGeometry,
        length: int,
        positions: torch.Tensor,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """``[T, H]`` positions of the keys that heads aim at."""
        own = positions[:, None].expand(-1, layer.num_heads)
        span = layer.sliding_window or layer.attention_chunk_size or length
        edge = own - own % span if layer.attention_chunk_size is not None else own - span + 1
        anywhere = torch.rand(own.shape, generator=generator, device=self.device)
        choices = torch.stack(
            [own, own + 1, edge, edge - 1, (anywhere * (own + 1)).long(), own - 1]
        )
        pick = torch.randint(len(choices), own.shape, generator=generator, device=self.device)
        return choices.gather(0, pick[None])[0].clamp(0, length - 1)
