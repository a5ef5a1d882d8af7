"""The differences between Transformers 5.17 and 5.24; no other module depends on versions.

In both, continuous batching packs a step into one row and keeps keys and values in pages of its
own. In 5.17 the attention function updates that cache; in 5.24 the model's layer does, before it
calls the function. :func:`packed_step` gives both as one :class:`PackedStep`.

Continuous batching takes its fast roads (a block table for decodes, CUDA graphs, steps prepared
ahead) for implementations whose name says "flash" and 2 or 3, and from 5.24 on it refuses other
names. So a manager that gets a model with our name switches it to :data:`CONTINUOUS`, and back when
it stops.
"""

from __future__ import annotations

import functools
import inspect
import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import transformers
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from attn.integrations.transformers.names import NAME

FIRST: Final = (5, 17)
LAST: Final = (5, 24)
"""First and last version of Transformers that the integration serves; it is tested with both."""

CONTINUOUS: Final = f"{NAME}_flash3"
"""The name of a model's implementation while a continuous batch runs."""

PREFIXED: Final = f"paged|{NAME}"
"""The name that continuous batching of 5.17 makes of ours for a model that it switches itself."""

NAMES: Final = (NAME, CONTINUOUS, PREFIXED)

_update_of_layers = PagedAttentionCache.update
_switch_of_manager = ContinuousBatchingManager.switch_to_cb_friendly_attn

LAYERS_UPDATE: Final = "kwargs" in inspect.signature(_update_of_layers).parameters
"""True in 5.24, where a model's layer updates the cache; False in 5.17, where the attention
function does."""

_views: weakref.WeakKeyDictionary[Any, dict[int, tuple[torch.Tensor, torch.Tensor]]] = (
    weakref.WeakKeyDictionary()
)
"""Views of each layer's pages, by cache: kernels keep what they made for a view."""


def check_version() -> None:
    """Refuse a version that is not served.

    Raises:
        ValueError: the version is outside of :data:`FIRST` to :data:`LAST`.
    """
    found = re.match(r"(\d+)\.(\d+)", transformers.__version__)
    if found is None or not FIRST <= (int(found[1]), int(found[2])) <= LAST:
        raise ValueError(
            f"attn serves Transformers {FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}, this is "
            f"{transformers.__version__}"
        )


def register_functions(attend: Any, mask: Any) -> None:
    """Register an attention function under every name of ours, and a mask function under the first.

    A name without a mask function has no mask, as packed steps want it.

    Args:
        attend: called by a model's layers.
        mask: called once for each step and kind of layer.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # A graph of torch.compile ends at each layer's attention, as at Transformers' paged kernels.
    attend = torch.compiler.disable(attend)  # type: ignore[no-untyped-call]
    for name in NAMES:
        ALL_ATTENTION_FUNCTIONS.register(name, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask)


def serve_continuous_batching() -> None:
    """Let continuous batching take a model that has our name; calling it again changes nothing."""
    ContinuousBatchingManager.switch_to_cb_friendly_attn = _switch
    if LAYERS_UPDATE:
        PagedAttentionCache.update = _update


@functools.wraps(_switch_of_manager)
def _switch(manager: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Switch a model of ours to :data:`CONTINUOUS`; any other model is Transformers' own matter.

    Raises:
        NotImplementedError: the model's keys do not fit Transformers' paged cache.
    """
    current = model.config._attn_implementation
    if current not in NAMES:
        _switch_of_manager(manager, model, *args, **kwargs)
        return
    _check_cached_heads(model)
    _preload()
    if current != CONTINUOUS:
        for config in _configs(model):
            if config._attn_implementation == current:
                config._attn_implementation_internal = CONTINUOUS
        manager._original_attn_impl = current


def _check_cached_heads(model: Any) -> None:
    """Refuse a model whose layers have other heads than Transformers' paged cache.

    That cache has one head size for keys and values of all layers. Latent attention (DeepSeek)
    expands its keys to another one, and fails there with every implementation.

    Raises:
        NotImplementedError: latent attention, or layers of several head sizes.
    """
    layers = [module for module in model.modules() if hasattr(module, "layer_idx")]
    sizes = {size for layer in layers if isinstance(size := getattr(layer, "head_dim", None), int)}
    why = None
    if getattr(model.config.get_text_config(), "kv_lora_rank", None):
        why = "latent attention has two"
    elif len(sizes) > 1:
        why = f"this model has {' and '.join(map(str, sorted(sizes)))}"
    if why is not None:
        raise NotImplementedError(
            f"continuous batching of Transformers does not serve {type(model).__name__}: its cache "
            f"has one head size for keys and values of all layers, and {why}; use generate()"
        )


def _preload() -> None:
    """Tell Transformers that the flash kernels for our name are loaded: it asks before it offers
    block tables. Our function never calls what stands there.
    """
    flash_utils._loaded_implementation = CONTINUOUS
    flash_utils._flash_fn = flash_utils._flash_varlen_fn = _not_called
    flash_utils._flash_with_kvcache_fn = _not_called
    flash_utils._process_flash_kwargs_fn = flash_utils._process_with_kvcache_kwargs_fn = dict


def _not_called(*args: Any, block_table: Any = None, **kwargs: Any) -> Any:
    raise RuntimeError(f"{CONTINUOUS!r} computes attention by its registered function")


def _configs(model: Any) -> Iterator[Any]:
    """The configuration of a model, and those of its parts."""
    seen: dict[int, Any] = {}
    pending = [module.config for module in model.modules() if hasattr(module, "config")]
    while pending:
        config = pending.pop()
        if id(config) in seen or not hasattr(config, "_attn_implementation_internal"):
            continue
        seen[id(config)] = config
        pending += [getattr(config, key) for key in getattr(config, "sub_configs", ())]
    yield from seen.values()


@dataclass(frozen=True)
class PackedStep:
    """One step of continuous batching, as one layer sees it: R requests in one packed row."""

    query_start_loc: torch.Tensor
    """``[R + 1]`` int32, device: first query token of each request. Every layer of the step gets
    this same object."""
    key_start_loc: torch.Tensor
    """``[R + 1]`` int32, device: the same for the keys, past and new."""
    max_query_len: int
    max_seq_len: int
    """Host bounds on the lengths; 1 where there is a block table."""
    pool: int = 0
    """Number of the layer's group of pages: layers of a group have the same slots."""
    pages: tuple[torch.Tensor, torch.Tensor] | None = None
    """``[N, P, Hk, D]`` keys and values of the layer, which still lack the step's own; None where
    the call's keys and values are all that there is to attend."""
    block_table: torch.Tensor | None = None
    """``[R, max_blocks]`` int32 pages of each request; None where ``slots`` tell them."""
    slots: torch.Tensor | None = None
    """``[T]`` int64 slots of the new tokens."""
    all_slots: torch.Tensor | None = None
    """int64 slots of all keys, request after request."""


def packed_step(
    module: Any, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]
) -> tuple[PackedStep | None, torch.Tensor, torch.Tensor]:
    """The packed step of a call, and its keys and values ``[1, Hk, T, D]``.

    They are the call's own, or, for layers with a window, those of the window before them too.

    Args:
        module: the attention layer.
        key: the call's keys.
        value: the call's values.
        kwargs: the call's other arguments.

    Returns:
        None for a call that is not packed, and keys and values.

    Raises:
        NotImplementedError: a call that is not packed while a continuous batch has the model.
    """
    starts = kwargs.get("cu_seq_lens_q")
    if starts is None:
        _check_masked(module)
        return None, key, value
    cache = kwargs.get("cache")
    if not LAYERS_UPDATE and isinstance(cache, PagedAttentionCache):
        return _step_to_update(cache, module.layer_idx, key, value, kwargs)
    key_starts = kwargs["cu_seq_lens_k"]
    # Whoever packs rows without bounds has a request of all tokens at most.
    most = key.shape[2]
    bounds = kwargs.get("max_length_q") or most, kwargs.get("max_length_k") or most
    if "k_cache" not in kwargs:
        return PackedStep(starts, key_starts, *bounds), key, value
    table = kwargs.get("block_table")
    slots = None if table is not None else kwargs["write_index"]
    read = None if table is not None else kwargs["read_index"]
    step = PackedStep(
        starts,
        key_starts,
        *bounds,
        pages=(kwargs["k_cache"], kwargs["v_cache"]),
        block_table=table,
        slots=slots,
        all_slots=slots if read is None or not read.numel() else read,
    )
    return step, key, value


def _check_masked(module: Any) -> None:
    """Refuse a call that is not packed under a name without a mask function.

    Raises:
        NotImplementedError: the model is in a continuous batch, or was given a name for one.
    """
    name = module.config._attn_implementation if hasattr(module, "config") else NAME
    if name != NAME and name in NAMES:
        raise NotImplementedError(
            f"attn_implementation {name!r} is for continuous batching, which packs its steps: stop "
            f"the continuous batch first, or load the model with {NAME!r}"
        )


def _update(
    cache: Any,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    layer_idx: int,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hand a layer's pages to our function, which writes and reads them, and copies none.

    Layers with a window, whose pages are a ring, and other implementations keep Transformers' own
    update.
    """
    allocator = cache.layer_to_allocator[layer_idx]
    if (
        cache.config._attn_implementation != CONTINUOUS
        or kwargs.get("block_table") is not None
        or not allocator.supports_block_table
        or not serves_pages(allocator.tokens_per_page)
    ):
        keys: tuple[torch.Tensor, torch.Tensor] = _update_of_layers(
            cache, key_states, value_states, layer_idx, kwargs
        )
        return keys
    kwargs["cu_seq_lens_k"] = kwargs["cu_seq_lens_k"][allocator.layer_type]
    kwargs["max_length_k"] = kwargs["max_length_k"][allocator.layer_type]
    kwargs["k_cache"], kwargs["v_cache"] = allocator.get_cache_for_block_table(layer_idx)
    for name in ("read_index", "write_index"):
        kwargs[name] = kwargs[name][allocator.index]
    return key_states, value_states


def _step_to_update(
    cache: Any, layer: int, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]
) -> tuple[PackedStep, torch.Tensor, torch.Tensor]:
    """The packed step of 5.17, whose cache this call has to update."""
    window = cache.sliding_windows[layer]
    kind = "full_attention" if window == 1 else "sliding_attention"
    key_starts, longest = kwargs["cu_seq_lens_k"], kwargs["max_seqlen_k"]
    if isinstance(key_starts, dict):
        key_starts, longest = key_starts[kind], longest[kind]
    pool, _ = cache.layer_index_to_group_indices[layer]
    table = kwargs["block_table"]
    lengths = kwargs["cu_seq_lens_q"], key_starts, kwargs["max_seqlen_q"], longest
    if table is None and (window != 1 or not serves_pages(cache.block_size)):
        indices = {name: kwargs[name] for name in ("read_index", "write_index")}
        rows = cache.update(key, value, layer, **indices)
        key, value = (tensor.transpose(0, 1)[None] for tensor in rows)
        return PackedStep(*lengths, pool), key, value
    pages = _pages(cache, layer)
    if table is not None:
        return PackedStep(*lengths, pool, pages, block_table=table[pool]), key, value
    slots, read = kwargs["write_index"][pool], kwargs["read_index"][pool]
    every = read if read.numel() else slots
    return PackedStep(*lengths, pool, pages, slots=slots, all_slots=every), key, value


def _pages(cache: Any, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``[N, P, Hk, D]`` views of a layer's pages; the same objects in every step."""
    views = _views.setdefault(cache, {})
    if layer not in views:
        _, place = cache.layer_index_to_group_indices[layer]
        shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
        views[layer] = (
            cache.key_cache[place].view(shape),
            cache.value_cache[place].view(shape),
        )
    return views[layer]


def serves_pages(tokens: int) -> bool:
    """Whether our kernels read pages of so many tokens."""
    from builders.checks.kernel_limits import BLOCK_MULTIPLE

    return tokens % BLOCK_MULTIPLE == 0
