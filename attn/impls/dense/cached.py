"""The base of dense impls that use the library's own cache write."""

from __future__ import annotations

from typing import Any

import torch

from attn.impls.base import AttentionLayer
from attn.impls.dense.base import DenseImpl
from attn.impls.viewed import ViewedCache
from attn.ops.cache import rope_and_write_kv, write_kv
from builders.checks.debug import debug_enabled
from builders.checks.tensors import check_given, scales_of
from builders.pages.paging import check_slots
from specs.cache_write import CacheTarget, Rotation
from specs.layouts import KVViews


class CachedImpl(DenseImpl):
    """Writes a step's keys and values in one launch, and keeps the views of its layer's cache."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See :class:`attn.impls.dense.base.DenseImpl`."""
        super().__init__(*args, **kwargs)
        self._is_cached = self.attn_type.is_cached
        # Reading the environment takes as long as handling a call's tensors, so it is read once.
        self._debugs = debug_enabled()
        self._viewed: ViewedCache[KVViews] | None = None

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Cast and write this step's keys and values in one launch; see the base class."""
        if not self._is_cached:
            return
        check_given(key=key, value=value)
        views = self._views(kv_cache, key.dtype)
        self._debug_slots(slot_mapping, views)
        write_kv(key, value, CacheTarget(views, slot_mapping, *scales_of(layer), self.cache_dtype))

    def do_rope_and_kv_cache_update(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        kv_cache: torch.Tensor,
        layer_slot_mapping: torch.Tensor,
    ) -> None:
        """Rotate query and key in place and write the cache, in one launch; see the base class."""
        check_given(query=query, key=key, value=value)
        views = self._views(kv_cache, key.dtype)
        self._debug_slots(layer_slot_mapping, views)
        rotation = Rotation(positions, cos_sin_cache, is_neox)
        target = CacheTarget(views, layer_slot_mapping, *scales_of(layer), self.cache_dtype)
        rope_and_write_kv(query, key, value, rotation, target)

    def _views(self, kv_cache: torch.Tensor, model_dtype: torch.dtype) -> KVViews:
        """Views of K and V in the cache.

        The views of the latest cache are kept while it lives, since a layer has only one cache.
        """
        viewed = self._viewed
        known = None if viewed is None else viewed.of(kv_cache, model_dtype)
        if known is not None:
            return known
        views = self._split(kv_cache, model_dtype)
        self._viewed = ViewedCache(kv_cache, model_dtype, views)
        self._viewed.pages = views.key.shape[1], views.key.dtype
        return views

    def _split(self, kv_cache: torch.Tensor, model_dtype: torch.dtype) -> KVViews:
        """Make views of K and V in a new cache; they do not keep the cache tensor alive."""
        return detached(super()._views(kv_cache, model_dtype))

    def _debug_slots(self, slot_mapping: torch.Tensor, views: KVViews) -> None:
        """When debugging, check that every slot lies in the cache."""
        if self._debugs:
            num_blocks, block_size = views.key.shape[:2]
            check_slots(slot_mapping, block_size, num_blocks)


def detached(views: KVViews) -> KVViews:
    """Detach views from their cache tensor, so that they no longer keep it alive."""
    key_scale, value_scale = (None if x is None else x.detach() for x in views[2:])
    return KVViews(views.key.detach(), views.value.detach(), key_scale, value_scale)
