"""vLLM's specs and configuration translated to ours: shapes, strides, bytes, and every setting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.v1.kv_cache_interface as theirs
from vllm.platforms.interface import DeviceCapability

import specs.kv_cache as ours
from attn.integrations.vllm import choice, compat, members, translate
from attn.reference.dense import AttentionRules
from specs.devices import DeviceKind
from specs.dtypes import CacheDType
from specs.engine import DecodeKernel, Kernels, PrefillKernel
from specs.layouts import KVOrder, KVPacking
from tests.vllm.views import cache_view

MODEL = torch.bfloat16
SIZES: dict[str, Any] = {"block_size": 32, "num_kv_heads": 3, "head_size": 64, "dtype": MODEL}
SPECS: dict[str, tuple[Callable[..., Any], dict[str, Any], type, dict[str, Any]]] = {
    "full": (theirs.FullAttentionSpec, {}, ours.FullAttentionSpec, {}),
    "full of windows": (
        theirs.FullAttentionSpec,
        {"sliding_window": 100},
        ours.FullAttentionSpec,
        {},
    ),
    "window": (
        theirs.SlidingWindowSpec,
        {"sliding_window": 100},
        ours.SlidingWindowSpec,
        {"sliding_window": 100},
    ),
    "chunk": (
        theirs.ChunkedLocalAttentionSpec,
        {"attention_chunk_size": 128},
        ours.ChunkedLocalAttentionSpec,
        {"attention_chunk_size": 128, "chunk_lookback": 0},
    ),
    "sinks": (
        theirs.SinkFullAttentionSpec,
        {"sink_len": 64},
        ours.SinkFullAttentionSpec,
        {"sink_len": 64},
    ),
    "rswa": (theirs.RSWASpec, {"rswa_window": 50}, ours.FullAttentionSpec, {}),
    "cross": (theirs.CrossAttentionSpec, {}, ours.CrossAttentionSpec, {}),
    "encoder": (theirs.EncoderOnlyAttentionSpec, {}, ours.EncoderOnlyAttentionSpec, {}),
}
FORMATS: dict[str, tuple[torch.dtype, str]] = {
    "auto": (MODEL, "NONE"),
    "fp8": (torch.uint8, "FP8_PER_TENSOR"),
    "fp8_e5m2": (torch.uint8, "FP8_PER_TENSOR"),
    "int8_per_token_head": (torch.int8, "INT8_PER_TOKEN_HEAD"),
    "fp8_per_token_head": (torch.uint8, "FP8_PER_TOKEN_HEAD"),
    "int4_per_token_head": (torch.uint8, "INT4_PER_TOKEN_HEAD"),
}
CACHED = [name for name in SPECS if name != "encoder"]


def their_spec(name: str, cache_dtype: str = "auto", **changes: Any) -> Any:
    kind, fields, _, _ = SPECS[name]
    dtype, mode = FORMATS[cache_dtype]
    quantised = {"dtype": dtype, "kv_quant_mode": theirs.KVQuantMode[mode]}
    spec = kind(**{**SIZES, **fields, **quantised, **changes})
    if compat.BACKENDS_SHAPE_CACHES:
        return spec
    return members.CUSTOM_TRITON_ATTN.customize_spec(spec)


def skip_their_bug(name: str, cache_dtype: str) -> None:
    """Skip a case of vLLM 0.26, which counts a window's int4 rows as int8, and then cannot view
    them.
    """
    if compat.BACKENDS_SHAPE_CACHES and (name, cache_dtype) == ("window", "int4_per_token_head"):
        pytest.skip("vLLM 0.26 has no int4 windows")


@pytest.mark.parametrize("cache_dtype", FORMATS)
@pytest.mark.parametrize("name", SPECS)
def test_a_spec_keeps_its_kind_fields_and_bytes(name: str, cache_dtype: str) -> None:
    if name == "encoder" and cache_dtype != "auto":
        pytest.skip("encoders cache nothing")
    skip_their_bug(name, cache_dtype)
    spec = their_spec(name, cache_dtype)
    mine = translate.kv_cache_spec(spec, cache_dtype, MODEL)
    _, _, kind, fields = SPECS[name]
    assert type(mine) is kind
    assert {field: getattr(mine, field) for field in fields} == fields
    for field in ("block_size", "num_kv_heads", "head_size"):
        assert getattr(mine, field) == getattr(spec, field)
    assert mine.dtype.torch is MODEL
    assert mine.cache_dtype is CacheDType.parse(cache_dtype)
    assert mine.page_size_bytes == spec.page_size_bytes
    assert mine.kv_quant_mode.name == spec.kv_quant_mode.name
    assert mine.storage_dtype.torch is spec.dtype


@pytest.mark.parametrize("order", list(KVOrder))
@pytest.mark.parametrize("cache_dtype", FORMATS)
@pytest.mark.parametrize("name", CACHED)
def test_a_cache_has_the_same_shape_strides_and_bytes(
    name: str, cache_dtype: str, order: KVOrder
) -> None:
    skip_their_bug(name, cache_dtype)
    spec, backend = their_spec(name, cache_dtype), members.CUSTOM_TRITON_ATTN
    view = cache_view(spec, 5, backend, cache_dtype=cache_dtype, layout=order.value)
    mine = translate.kv_cache_spec(spec, cache_dtype, MODEL)
    layout = mine.layout(KVPacking.PACKED, order)
    assert tuple(view.shape) == layout.logical_shape(5)
    assert view.stride() == layout.strides(5)
    assert view.dtype is layout.storage_dtype.torch
    assert view.untyped_storage().nbytes() == layout.nbytes(5)
    parts = layout.split(view)
    assert parts.key.shape == (5, 32, 3, 64 // mine.cache_dtype.packing)
    assert (parts.key_scale is not None) == mine.kv_quant_mode.is_per_token_head


@pytest.mark.parametrize("order", list(KVOrder))
def test_kernel_blocks_and_padded_pages_are_views_too(order: KVOrder) -> None:
    backend = members.CUSTOM_TRITON_ATTN
    spec = their_spec("full")
    cut = translate.kv_cache_spec(spec.copy_with_new_block_size(16), "auto", MODEL)
    layout = cut.layout(KVPacking.PACKED, order)
    view = cache_view(spec, 5, backend, kernel_block_size=16, layout=order.value)
    assert (tuple(view.shape), view.stride()) == (layout.logical_shape(10), layout.strides(10))
    padded = replace(spec, page_size_padded=spec.page_size_bytes + 4096)
    layout = translate.kv_cache_spec(padded, "auto", MODEL).layout(KVPacking.PACKED, order)
    view = cache_view(padded, 5, backend, layout=order.value)
    assert (tuple(view.shape), view.stride()) == (layout.logical_shape(5), layout.strides(5))


def test_value_heads_of_another_size_are_kept() -> None:
    mine = translate.kv_cache_spec(their_spec("full", head_size_v=48), "auto", MODEL)
    assert (mine.head_size, mine.v_size) == (64, 48)


def test_latent_specs_are_split_into_latent_and_rope() -> None:
    fields = {"block_size": 64, "num_kv_heads": 1, "head_size": 576, "dtype": MODEL}
    mine = translate.kv_cache_spec(theirs.MLAAttentionSpec(**fields), "auto", MODEL)
    assert isinstance(mine, ours.MLAAttentionSpec)
    assert (mine.kv_lora_rank, mine.qk_rope_head_dim) == (512, 64)
    assert mine.page_size_bytes == theirs.MLAAttentionSpec(**fields).page_size_bytes
    window = theirs.SlidingWindowMLASpec(**fields, sliding_window=128)
    mine = translate.kv_cache_spec(window, "auto", MODEL)
    assert isinstance(mine, ours.SlidingWindowMLASpec)
    assert mine.sliding_window == 128


def test_a_layer_exempt_from_quantisation_is_stored_as_the_model() -> None:
    spec = their_spec("full")
    assert translate.cache_dtype(spec, "fp8", MODEL) is CacheDType.AUTO
    assert translate.cache_dtype(spec, "auto", torch.float16) is CacheDType.BFLOAT16


@pytest.mark.parametrize("engine", ["auto", "fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("named", ["fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"])
def test_a_spec_that_names_its_format_has_that_and_not_the_engine_s(
    named: str, engine: str
) -> None:
    spec = theirs.MLAAttentionSpec(
        block_size=64,
        num_kv_heads=1,
        head_size=576,
        dtype=torch.uint8,
        kv_quant_mode=theirs.KVQuantMode.FP8_PER_TENSOR,
        cache_dtype_str=named,
    )
    assert translate.cache_dtype(spec, engine, MODEL) is CacheDType.parse(named)


def test_formats_that_are_not_ours_are_refused_by_name() -> None:
    spec = their_spec("full", kv_quant_mode=theirs.KVQuantMode.NVFP4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="NVFP4"):
        translate.kv_cache_spec(spec, "nvfp4", MODEL)
    mamba = SimpleNamespace(
        block_size=16,
        dtype=MODEL,
        kv_quant_mode=theirs.KVQuantMode.NONE,
        num_kv_heads=1,
        head_size=8,
    )
    with pytest.raises(ValueError, match="SimpleNamespace"):
        translate.kv_cache_spec(mamba, "auto", MODEL)


# -- The settings with which a group's steps are planned.


def rules(**changes: Any) -> AttentionRules:
    return AttentionRules(scale=1.0, **changes)


@pytest.mark.parametrize(
    ("name", "layers", "kind", "fields"),
    [
        ("full", [], ours.FullAttentionSpec, {}),
        ("full", [rules(), rules()], ours.FullAttentionSpec, {}),
        (
            "full of windows",
            [rules(sliding_window=9), rules(sliding_window=9)],
            ours.SlidingWindowSpec,
            {"sliding_window": 9},
        ),
        ("full of windows", [rules(sliding_window=9), rules()], ours.FullAttentionSpec, {}),
        ("window", [], ours.SlidingWindowSpec, {"sliding_window": 100}),
        ("window", [rules(sliding_window=100), rules()], ours.FullAttentionSpec, {}),
        (
            "window",
            [rules(sliding_window=100, attention_chunk_size=100, chunk_lookback=1)],
            ours.ChunkedLocalAttentionSpec,
            {"attention_chunk_size": 100, "chunk_lookback": 1},
        ),
        ("chunk", [rules()], ours.FullAttentionSpec, {}),
        ("cross", [rules(causal=False)], ours.CrossAttentionSpec, {}),
        ("sinks", [rules()], ours.SinkFullAttentionSpec, {"sink_len": 64}),
        (
            "encoder",
            [rules(causal=False, sliding_window=7)],
            ours.EncoderOnlyAttentionSpec,
            {"sliding_window": 7},
        ),
    ],
)
def test_a_group_is_planned_by_what_its_layers_see(
    name: str, layers: list[AttentionRules], kind: type, fields: dict[str, Any]
) -> None:
    spec = their_spec(name)
    stored = translate.kv_cache_spec(spec, "auto", MODEL)
    if name == "full":
        stored = stored.replace(page_size_padded=stored.page_size_bytes + 4096)
    planned = translate.planned_spec(stored, layers)
    assert type(planned) is kind
    assert {field: getattr(planned, field) for field in fields} == fields
    assert planned.page_size_padded is None
    assert (planned.block_size, planned.head_size) == (spec.block_size, spec.head_size)


# -- Settings.


@pytest.mark.parametrize(
    ("drafts", "is_async", "kind", "expected"),
    [
        (None, False, "full", True),
        (None, True, "full", True),
        (3, False, "full", True),
        (3, True, "full", False),
        (None, False, "sinks", False),
    ],
)
def test_host_lengths_are_exact_but_for_asynchronous_drafts_and_sinks(
    make_config: Callable[..., Any], drafts: int | None, is_async: bool, kind: str, expected: bool
) -> None:
    config = make_config()
    config.scheduler_config.async_scheduling = is_async
    if drafts is not None:
        config.speculative_config = SimpleNamespace(num_speculative_tokens=drafts)
    mine = translate.engine_config(config, their_spec(kind), 8)
    assert mine.exact_host_lengths is expected
    if drafts is not None:
        config.speculative_config.enable_adaptive_verification = True
        assert not translate.engine_config(config, their_spec(kind), 8).exact_host_lengths


def test_every_setting_arrives(make_config: Callable[..., Any]) -> None:
    config = make_config(max_model_len=200, max_num_seqs=5, max_num_batched_tokens=300)
    config.compilation_config.cudagraph_capture_sizes = [1, 2, 4, 8]
    config.parallel_config.tensor_parallel_size = 2
    config.parallel_config.cp_kv_cache_interleave_size = 4
    config.speculative_config = SimpleNamespace(num_speculative_tokens=3, parallel_drafting=True)
    mine = translate.engine_config(config, their_spec("full"), 8, 2, 1)
    assert (mine.max_model_len, mine.max_num_batched_tokens, mine.num_heads) == (200, 300, 16)
    assert mine.max_num_seqs == 8  # the largest graph has more rows than the scheduler's limit
    assert mine.cudagraph_capture_sizes == (1, 2, 4, 8)
    assert mine.parallel.tensor_parallel_size == 2
    assert mine.parallel.decode_context_parallel_size == 2
    assert mine.parallel.decode_context_parallel_rank == 1
    assert mine.parallel.dcp_interleave == 4
    assert mine.max_decode_query_len == 7
    assert not mine.batch_invariant
    assert mine.rswa_window is None
    assert mine.index_topk is None
    assert mine.kernels == Kernels()
    assert not mine.fp8_mla_queries


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), ("", False)])
def test_queries_over_e4m3_are_rounded_if_the_environment_says_so(
    make_config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    value: str,
    expected: bool,
) -> None:
    monkeypatch.setenv("ATTN_VLLM_FP8_MLA_QUERIES", value)
    mine = translate.engine_config(make_config(), their_spec("full"), 8)
    assert mine.fp8_mla_queries is expected


@pytest.mark.parametrize("kernels", [PrefillKernel, DecodeKernel])
def test_kernels_are_those_that_the_environment_names(
    kernels: type[PrefillKernel | DecodeKernel],
    make_config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    field = "prefill" if kernels is PrefillKernel else "decode"
    variable, config = f"ATTN_VLLM_{field.upper()}_KERNEL", make_config()
    for kernel in kernels:
        monkeypatch.setenv(variable, kernel.value)
        mine = translate.engine_config(config, their_spec("full"), 4)
        assert mine.kernels == Kernels.own(**{field: kernel})
    monkeypatch.setenv(variable, "cutlass")
    with pytest.raises(ValueError, match="must be one of auto, triton, hopper, got 'cutlass'"):
        translate.engine_config(config, their_spec("full"), 4)


def test_settings_that_depend_on_the_spec(
    make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(max_model_len=200, max_num_seqs=5, max_num_batched_tokens=300)
    sinks = translate.engine_config(config, their_spec("sinks"), 4)
    assert sinks.max_model_len == 264
    chunks = translate.engine_config(config, their_spec("chunk"), 4)
    assert chunks.max_num_seqs == 2 * 5 + 3
    assert translate.engine_config(config, their_spec("rswa"), 4).rswa_window == 50
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert translate.engine_config(config, their_spec("full"), 4).batch_invariant


def test_query_heads_come_from_the_layers(make_config: Callable[..., Any]) -> None:
    config = make_config()
    assert translate.query_heads(config, []) == 4
    layers = [SimpleNamespace(num_heads=6), SimpleNamespace(num_heads=6)]
    assert translate.query_heads(config, layers) == 6
    with pytest.raises(ValueError, match=r"\[6, 8\]"):
        translate.query_heads(config, [*layers, SimpleNamespace(num_heads=8)])


@pytest.mark.parametrize(
    ("capability", "kind"),
    [
        (None, DeviceKind.CPU),
        (DeviceCapability(8, 0), DeviceKind.SM80),
        (DeviceCapability(8, 9), DeviceKind.SM89),
        (DeviceCapability(9, 0), DeviceKind.SM90),
        (DeviceCapability(10, 0), DeviceKind.SM100),
        (DeviceCapability(12, 0), DeviceKind.SM120),
        # A GPU that no backend serves.
        (DeviceCapability(7, 5), DeviceKind.CPU),
    ],
)
def test_devices_are_known_by_their_capability(capability: Any, kind: DeviceKind) -> None:
    assert choice.device_of(capability) is kind


def test_both_generations_of_cache_shapes_are_told_apart() -> None:
    from vllm.v1.attention.backend import AttentionBackend

    assert hasattr(AttentionBackend, "get_kv_cache_shape") == compat.BACKENDS_SHAPE_CACHES
    assert hasattr(theirs, "create_kv_cache_views") != compat.BACKENDS_SHAPE_CACHES
