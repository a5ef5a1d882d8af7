"""vLLM's selection of a backend for sparse layers: what ours takes, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import mla_attention
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.worker.utils import select_common_block_size

from attn.integrations.vllm import compat, members
from tests.vllm.sparse.sparse_runner import NARROW, WIDE, Lists, Projection

SERVED: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp16": {"dtype": torch.float16},
    "bf16 by name": {"kv_cache_dtype": "bfloat16"},
    "576 bytes": {"kv_cache_dtype": "fp8"},
    "576 bytes by the other name": {"kv_cache_dtype": "fp8_e4m3"},
    "656 bytes": {"kv_cache_dtype": "fp8_ds_mla"},
    "narrow rows": {"head_size": 96},
}
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "dense layers": ({"use_mla": False, "use_sparse": False}, ["non-MLA", "non-sparse"]),
    "latent layers": ({"use_sparse": False}, ["non-sparse not supported"]),
    "e5m2": ({"kv_cache_dtype": "fp8_e5m2"}, ["kv_cache_dtype", "got fp8_e5m2", "fp8_ds_mla"]),
    "nvfp4": ({"kv_cache_dtype": "nvfp4"}, ["kv_cache_dtype", "got nvfp4"]),
    "another float": ({"kv_cache_dtype": "float16"}, ["float16"]),
    "no rotary part": ({"head_size": 512 + 16}, ["head_size not supported (got 528"]),
    "block scales of narrow rows": (
        {"head_size": 320, "kv_cache_dtype": "fp8_ds_mla"},
        ["fp8_ds_mla of head_size 320 not supported (served: 576)"],
    ),
    "sinks": ({"has_sink": True}, ["attention sinks not supported"]),
}


def asked(**changes: Any) -> dict[str, Any]:
    """What vLLM's layer asks of the selector."""
    layer = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto"}
    return {**layer, "use_mla": True, "use_sparse": True, **changes}


@pytest.fixture
def ours(plugin: Any, cuda: Any) -> Iterator[Any]:
    """Our sparse class, registered as ``CUSTOM``."""
    path = members.path_of(members.CUSTOM, "SPARSE_MLA")
    register_backend(AttentionBackendEnum.CUSTOM, path)
    yield AttentionBackendEnum.CUSTOM.get_class()
    AttentionBackendEnum.CUSTOM.clear_override()
    selector._cached_get_attn_backend.cache_clear()


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_the_selector_picks_ours(
    ours: Any, cuda: Any, make_config: Callable[..., Any], name: str, capability: tuple[int, int]
) -> None:
    cuda(*capability)
    with set_current_vllm_config(make_config(block_size=64)):
        assert get_attn_backend(**asked(**SERVED[name])) is ours
    assert ours.get_name() == "CUSTOM"


@pytest.mark.parametrize("name", REFUSED)
def test_the_selector_refuses_with_our_reasons(
    ours: Any, make_config: Callable[..., Any], name: str
) -> None:
    changes, words = REFUSED[name]
    with (
        set_current_vllm_config(make_config(block_size=64)),
        pytest.raises(ValueError, match="CUSTOM is not valid") as caught,
    ):
        get_attn_backend(**asked(**changes))
    assert all(word in str(caught.value) for word in words)


def many_heads(config: Any) -> None:
    config.model_config.get_num_attention_heads = lambda _: 192


def heads_of_all_ranks(config: Any) -> None:
    config.model_config.get_num_attention_heads = lambda _: 96
    config.parallel_config.decode_context_parallel_size = 2


def small_blocks(config: Any) -> None:
    config.cache_config.block_size = 32
    config.cache_config.user_specified_block_size = True


def no_rotary_part(config: Any) -> None:
    text_config = config.model_config.hf_text_config
    text_config.kv_lora_rank, text_config.qk_rope_head_dim = 576, 0


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (no_rotary_part, "qk_rope_head_dim must be a power of two from 32 on, got 0"),
        (many_heads, "192 query heads per rank not supported .served: 1 to 128"),
        (heads_of_all_ranks, "192 query heads per rank not supported .served: 1 to 128"),
        (small_blocks, "block_size not supported .got 32, served: any multiple of 64"),
    ],
)
def test_what_an_engine_cannot_have_is_refused_before_there_are_weights(
    ours: Any,
    make_config: Callable[..., Any],
    prepare: Callable[[Any], None],
    words: str,
) -> None:
    config = make_config(block_size=64)
    prepare(config)
    with set_current_vllm_config(config), pytest.raises(ValueError, match=words):
        get_attn_backend(**asked())


def test_hisparse_is_refused(ours: Any, make_config: Callable[..., Any]) -> None:
    config = make_config(block_size=64)
    if not hasattr(config.attention_config, "hisparse_config"):
        pytest.skip("this vLLM has no HiSparse")
    config.attention_config.hisparse_config = object()
    with set_current_vllm_config(config), pytest.raises(ValueError, match="HiSparse"):
        get_attn_backend(**asked())


@pytest.mark.parametrize("name", [*SERVED, *REFUSED])
def test_vllms_own_validation_finds_nothing_more(ours: Any, name: str) -> None:
    changes = SERVED[name] if name in SERVED else REFUSED[name][0]
    others = {
        "block_size": None,
        "has_sink": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "attn_type": AttentionType.DECODER,
        "device_capability": DeviceCapability(9, 0),
    }
    wanted = {**others, **asked(**changes)}
    mine = ours.validate_configuration(**wanted)
    theirs = AttentionBackend.validate_configuration.__func__(ours, **wanted)
    assert all(any(one == other for one in mine) for other in theirs)
    assert bool(mine) == (name in REFUSED)


def test_blocks_are_shared_with_an_indexer(ours: Any) -> None:
    class OfTheIndexer(AttentionBackend):
        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
            return [64]

    (size,) = ours.get_supported_kernel_block_sizes()
    assert isinstance(size, MultipleOf)
    assert size.base == 64
    assert select_common_block_size(64, [ours, OfTheIndexer]) == 64
    assert select_common_block_size(128, [ours, OfTheIndexer]) == 64
    assert select_common_block_size(128, [ours]) == 128
    assert ours.get_preferred_block_size(16) == 64


def test_caches_have_the_rows_that_vllm_sizes_pages_for(ours: Any) -> None:
    if not compat.BACKENDS_SHAPE_CACHES:
        pytest.skip("this vLLM shapes caches itself")
    assert ours.get_kv_cache_shape(5, 64, 1, 576) == (5, 64, 576)
    assert ours.get_kv_cache_shape(5, 64, 1, 576, "fp8") == (5, 64, 576)
    assert ours.get_kv_cache_shape(5, 128, 1, 576, "fp8_ds_mla") == (5, 128, 656)
    with pytest.raises(ValueError, match="block_size must be supported"):
        ours.get_kv_cache_shape(5, 48, 1, 576)


def made(config: Any, sizes: Any, **lists: Any) -> Any:
    with set_current_vllm_config(config):
        return mla_attention.MLAAttention(
            *(sizes.heads, sizes.scale, sizes.nope, sizes.rope, sizes.value, None, sizes.rank),
            Projection(sizes.weights(torch.bfloat16)),
            cache_config=config.cache_config,
            prefix="model.layers.0.self_attn.attn",
            use_sparse=True,
            **lists,
        )


def test_a_layer_needs_lists(
    ours: Any, make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_: Any) -> Any:
        raise ValueError("no prefill kernel")

    monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", none)
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.bfloat16)
    with pytest.raises(ValueError, match="indexer must have a topk_indices_buffer"):
        made(make_config(block_size=64, dtype="bfloat16"), NARROW)
    for cache_dtype, kept in (("fp8", "fp8"), ("fp8_ds_mla", "fp8_ds_mla")):
        config = make_config(block_size=64, dtype="bfloat16", cache_dtype=cache_dtype)
        layer = made(config, WIDE, indexer=Lists())
        # vLLM gives block scales to members of other names that are asked for "fp8".
        assert layer.impl.kv_cache_dtype == kept
        assert layer.prefill_backend is None
        assert not layer.impl.supports_quant_query_input
