"""Views of a layer's cache, which an impl keeps from one forward to the next."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

import torch

Views = TypeVar("Views")


class ViewedCache(Generic[Views]):
    """Views of a cache tensor, dropped when the engine drops the tensor."""

    def __init__(self, kv_cache: torch.Tensor, model_dtype: torch.dtype, views: Views) -> None:
        """
        Args:
            kv_cache: the engine's cache tensor.
            model_dtype: the model dtype that the views were made for.
            views: views of ``kv_cache``, detached from it.
        """
        self.views: Views | None = views
        self.made: Any = None
        """What a forward prepared from the views, kept with them."""
        self.pages: tuple[int, torch.dtype] | None = None
        """Tokens of a block and type of the elements, where the impl checks them at each step."""
        self.model_dtype = model_dtype
        self.address = kv_cache.data_ptr()
        self.kv_cache = weakref.ref(kv_cache, self._forget)

    def of(self, kv_cache: torch.Tensor, model_dtype: torch.dtype) -> Views | None:
        """The views, if they are of this cache and for this model dtype."""
        if (
            self.kv_cache() is kv_cache
            and self.model_dtype is model_dtype
            and self.address == kv_cache.data_ptr()
        ):
            return self.views
        return None

    def _forget(self, _: object) -> None:
        self.views = self.made = None
