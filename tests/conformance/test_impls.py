"""What every impl refuses, at construction and per call, and what the debug switch finds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn.backends.base import AttentionBackend
from attn.ops.mla import mla_attention
from attn.registry import AttentionBackendEnum
from attn.testing import batches, stored_rows
from attn.testing.batches import BATCHES, WILD_BLOCK, Indexer, Projection
from attn.testing.cases import FEATURES, Case, LatentCase, device_for, latent_shape
from attn.testing.dense_trial import OUTPUT_SCALE, DenseTrial
from attn.testing.latent_trial import LatentTrial
from attn.testing.stored_rows import Stored
from attn.testing.trial import Trial
from specs.attention import AttentionType
from specs.dtypes import CacheDType

HEADS, SIZE, SCALE = 4, 64, 0.125


def backends_here() -> Iterator[type[AttentionBackend]]:
    for row in AttentionBackendEnum:
        if device_for(row) is not None:
            yield row.get_class()


def named(backends: list[type[AttentionBackend]]) -> dict[str, Any]:
    return {"argvalues": backends, "ids": [backend.get_name() for backend in backends]}


EVERY = named(list(backends_here()))
DENSE = named([backend for backend in backends_here() if not backend.is_mla()])
LATENT = named([backend for backend in backends_here() if backend.is_mla()])

ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


def dense_impl(backend: type[AttentionBackend], **changes: Any) -> Any:
    arguments = {
        "num_heads": HEADS,
        "head_size": SIZE,
        "scale": SCALE,
        "num_kv_heads": 2,
        **changes,
    }
    impl_cls: Any = backend.get_impl_cls()
    return impl_cls(**arguments)


def latent_impl(backend: type[AttentionBackend], **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "num_heads": HEADS,
        "head_size": 576,
        "scale": SCALE,
        "num_kv_heads": 1,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "qk_head_dim": 192,
        "v_head_dim": 128,
        "kv_b_proj": Projection(torch.zeros(HEADS * 256, 512)),
        "indexer": Indexer(torch.zeros(8, 4, dtype=torch.int32)),
    }
    impl_cls: Any = backend.get_impl_cls()
    return impl_cls(**{**arguments, **changes})


def make(backend: type[AttentionBackend], **changes: Any) -> Any:
    return (latent_impl if backend.is_mla() else dense_impl)(backend, **changes)


def trial_of(backend: type[AttentionBackend], batch: str = "mixed") -> Trial:
    device = device_for(AttentionBackendEnum[backend.get_name()])
    assert device is not None
    dtype = backend.capabilities.dtypes[0]
    if backend.is_mla():
        lists = "padded" if backend.is_sparse() else None
        case = LatentCase(batch=BATCHES[batch], dtype=dtype, lists=lists, **latent_shape(backend))
        return LatentTrial(backend, case, device)
    return DenseTrial(backend, Case(batch=BATCHES[batch], dtype=dtype), device)


# -- construction


@pytest.mark.parametrize("backend", **EVERY)
@pytest.mark.parametrize("name", ["num_heads", "head_size", "num_kv_heads"])
@pytest.mark.parametrize("value", [0, -3])
def test_counts_and_sizes_must_be_positive(
    backend: type[AttentionBackend], name: str, value: int
) -> None:
    with pytest.raises(ValueError, match=f"{name} must be positive, got {value}"):
        make(backend, **{name: value})


@pytest.mark.parametrize("backend", **EVERY)
def test_kv_heads_must_divide_the_heads(backend: type[AttentionBackend]) -> None:
    with pytest.raises(ValueError, match=r"num_heads \(4\).*num_kv_heads \(3\)"):
        make(backend, num_kv_heads=3)


@pytest.mark.parametrize("backend", **DENSE)
@pytest.mark.parametrize("window", [0, -1])
def test_a_window_must_be_positive(backend: type[AttentionBackend], window: int) -> None:
    with pytest.raises(ValueError, match=f"sliding_window must be positive or None, got {window}"):
        dense_impl(backend, sliding_window=window)


@pytest.mark.parametrize("backend", **DENSE)
def test_a_soft_cap_must_not_be_negative_and_zero_is_off(backend: type[AttentionBackend]) -> None:
    with pytest.raises(ValueError, match=r"logits_soft_cap .* got -2"):
        dense_impl(backend, logits_soft_cap=-2.0)
    assert dense_impl(backend, logits_soft_cap=0).logits_soft_cap is None


@pytest.mark.parametrize("backend", **DENSE)
@pytest.mark.parametrize("length", [HEADS - 1, HEADS + 1, 1])
def test_one_alibi_slope_per_head(backend: type[AttentionBackend], length: int) -> None:
    with pytest.raises(ValueError, match=rf"alibi_slopes .*\[{HEADS}\], got \[{length}\]"):
        dense_impl(backend, alibi_slopes=[0.1] * length)


@pytest.mark.parametrize("backend", **DENSE)
@pytest.mark.parametrize("shape", [(HEADS - 1,), (HEADS + 1,), (HEADS, 1)], ids=str)
def test_one_sink_per_head(backend: type[AttentionBackend], shape: tuple[int, ...]) -> None:
    if not backend.supports_sink():
        pytest.skip("takes no sinks")
    with pytest.raises(ValueError, match=re.escape(f"[{HEADS}], got {list(shape)}")) as caught:
        dense_impl(backend, sinks=torch.zeros(shape))
    assert "sinks" in str(caught.value)


OPTIONAL = {
    "attention_chunk_size": AttentionBackend.supports_chunked_local.__name__,
}


@pytest.mark.parametrize("backend", **DENSE)
@pytest.mark.parametrize("name", OPTIONAL)
def test_optional_sizes_must_be_positive(backend: type[AttentionBackend], name: str) -> None:
    if not getattr(backend, OPTIONAL[name])():
        pytest.skip(f"takes no {name}")
    with pytest.raises(ValueError, match=f"{name} must be positive or None, got 0"):
        dense_impl(backend, **{name: 0})


@pytest.mark.parametrize("backend", **EVERY)
def test_an_unknown_kv_cache_dtype_is_named_and_the_known_are_listed(
    backend: type[AttentionBackend],
) -> None:
    with pytest.raises(ValueError, match=r"'fp9'.*auto.*fp8_e4m3"):
        make(backend, kv_cache_dtype="fp9")


@pytest.mark.parametrize("backend", **EVERY)
def test_an_unknown_attention_type_is_refused(backend: type[AttentionBackend]) -> None:
    with pytest.raises(ValueError, match="sideways"):
        make(backend, attn_type="sideways")


@pytest.mark.parametrize("backend", **DENSE)
@pytest.mark.parametrize("attn_type", ENCODERS)
@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_e5m2", "int8_per_token_head"])
def test_encoders_refuse_a_quantized_cache(
    backend: type[AttentionBackend], attn_type: AttentionType, cache_dtype: str
) -> None:
    if not backend.supports_attn_type(attn_type):
        pytest.skip("serves no encoders")
    with pytest.raises(NotImplementedError, match=f"{cache_dtype}.*{attn_type.value}"):
        dense_impl(backend, attn_type=attn_type.value, kv_cache_dtype=cache_dtype)


@pytest.mark.parametrize("backend", **LATENT)
def test_mla_lists_the_arguments_that_it_does_not_support(
    backend: type[AttentionBackend],
) -> None:
    parts = ["alibi_slopes=[0.5, 0.5, 0.5, 0.5]", "logits_soft_cap=30.0"]
    if backend.supports_sliding_window():
        assert latent_impl(backend, sliding_window=128).sliding_window == 128
    else:
        parts.append("sliding_window=128")
        with pytest.raises(NotImplementedError, match=r"sliding_window=128$"):
            latent_impl(backend, sliding_window=128)
    with pytest.raises(NotImplementedError) as caught:
        latent_impl(backend, alibi_slopes=[0.5] * HEADS, sliding_window=128, logits_soft_cap=30.0)
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize("backend", **LATENT)
@pytest.mark.parametrize("attn_type", [one for one in AttentionType if one != "decoder"])
def test_mla_decodes_only(backend: type[AttentionBackend], attn_type: AttentionType) -> None:
    with pytest.raises(NotImplementedError, match=f"attn_type={attn_type.value}"):
        latent_impl(backend, attn_type=attn_type.value)


@pytest.mark.parametrize("backend", **LATENT)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_size": 512}, r"head_size .*\(512 \+ 64\), got 512"),
        ({"qk_head_dim": 128}, r"qk_head_dim .*\(128 \+ 64\), got 128"),
    ],
)
def test_mla_sizes_must_add_up(
    backend: type[AttentionBackend], changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        latent_impl(backend, **changes)


@pytest.mark.parametrize("backend", **LATENT)
def test_mla_needs_its_weights_and_their_shape(backend: type[AttentionBackend]) -> None:
    impl = latent_impl(backend)
    with pytest.raises(ValueError, match="process_weights_after_loading"):
        _ = impl.W_UK
    with pytest.raises(ValueError, match="process_weights_after_loading"):
        _ = impl.W_UV
    impl = latent_impl(backend, kv_b_proj=Projection(torch.zeros(7, 512)))
    message = rf"kv_b_proj.weight must be \[{HEADS * 256}, .*\(7, 512\)"
    with pytest.raises(ValueError, match=message):
        impl.process_weights_after_loading(torch.float32)


@pytest.mark.parametrize("backend", **LATENT)
def test_mla_refuses_a_cache_without_latent_rows(backend: type[AttentionBackend]) -> None:
    with pytest.raises(NotImplementedError, match="int8_per_token_head"):
        latent_impl(backend, kv_cache_dtype="int8_per_token_head")


@pytest.mark.parametrize("backend", **LATENT)
def test_sparse_layers_need_an_indexer(backend: type[AttentionBackend]) -> None:
    if not backend.is_sparse():
        latent_impl(backend, indexer=None)
        return
    with pytest.raises(ValueError, match="indexer"):
        latent_impl(backend, indexer=None)


# -- calls


@pytest.mark.parametrize("backend", **DENSE)
@pytest.mark.parametrize("with_metadata", [True, False])
def test_block_scaled_output_is_refused(
    backend: type[AttentionBackend], with_metadata: bool
) -> None:
    trial = trial_of(backend)
    assert isinstance(trial, DenseTrial)
    trial.write()
    record = trial.build(trial.builder()) if with_metadata else None
    inputs, one = trial.inputs, torch.ones((), device=trial.device)
    output = torch.zeros_like(inputs.query)
    with pytest.raises(NotImplementedError, match="output_block_scale"):
        trial.impl.forward(
            trial.layer,
            inputs.query,
            inputs.key,
            inputs.value,
            trial.cache(),
            record,
            output,
            one,
            one,
        )
    assert bool((output == 0).all())


@pytest.mark.parametrize("backend", **DENSE)
@pytest.mark.parametrize("feature", ["encoder", "encoder_only"])
@pytest.mark.parametrize("missing", ["key", "value"])
def test_encoders_need_key_and_value(
    backend: type[AttentionBackend], feature: str, missing: str
) -> None:
    case = Case(FEATURES[feature], BATCHES["full_prefill"], dtype=backend.capabilities.dtypes[0])
    if not case.is_served_by(backend):
        pytest.skip("serves no encoders")
    device = device_for(AttentionBackendEnum[backend.get_name()])
    assert device is not None
    trial = DenseTrial(backend, case, device)
    record = trial.build(trial.builder())
    inputs = replace(trial.inputs, **{missing: None})
    with pytest.raises(ValueError, match=f"{missing}.*{case.feature.attn_type.value}"):
        trial.attend(record, inputs, trial.cache())


@pytest.mark.parametrize("backend", **EVERY)
def test_output_quantisation_is_offered_for_static_fp8_per_tensor_only(
    backend: type[AttentionBackend],
) -> None:
    def key(dtype: torch.dtype, static: bool, per_tensor: bool) -> Any:
        """A key like vLLM's ``QuantKey``."""
        group = SimpleNamespace(is_per_tensor=lambda: per_tensor)
        return SimpleNamespace(dtype=dtype, scale=SimpleNamespace(static=static, group_shape=group))

    impl = make(backend)
    e4m3 = torch.float8_e4m3fn
    offered = not backend.is_mla() and backend.capabilities.output_quant
    assert impl.fused_output_quant_supported(key(e4m3, True, True)) is offered
    for other in (
        key(torch.int8, True, True),
        key(e4m3, False, True),
        key(e4m3, True, False),
        SimpleNamespace(),
    ):
        assert impl.fused_output_quant_supported(other) is False


@pytest.mark.parametrize("backend", **EVERY)
def test_lse_is_natural_and_declared_alike_by_backend_and_impl(
    backend: type[AttentionBackend],
) -> None:
    impl = make(backend)
    assert impl.lse_base_on_e is True
    assert impl.can_return_lse_for_decode is backend.capabilities.lse
    assert impl.supports_quant_query_input is False


@pytest.mark.parametrize("backend", **LATENT)
def test_writing_no_latent_rows_is_no_error(backend: type[AttentionBackend]) -> None:
    device = device_for(AttentionBackendEnum[backend.get_name()])
    for cache_dtype in backend.capabilities.kv_cache_dtypes:
        lists = "padded" if backend.is_sparse() else None
        case = LatentCase(
            BATCHES["all_padding"],
            dtype=backend.capabilities.dtypes[0],
            cache_dtype=cache_dtype,
            lists=lists,
        )
        assert device is not None
        trial = LatentTrial(backend, case, device)
        trial.write()
        assert batches.is_poison(trial.buffer)


@pytest.mark.parametrize("backend", **LATENT)
def test_skip_scale_writes_values_as_they_are(backend: type[AttentionBackend]) -> None:
    dtype = CacheDType.FP8_E4M3
    if not backend.supports_kv_cache_dtype(dtype):
        pytest.skip("has no per-tensor fp8 rows")
    trial = trial_of(backend)
    assert isinstance(trial, LatentTrial)
    case = replace(trial.case, cache_dtype=dtype)
    buffers = []
    for scale, skip in ((trial.layer._k_scale * 0.25, True), (trial.layer._k_scale, False)):
        trial = LatentTrial(backend, case, trial.device)
        rows = trial.inputs.key
        assert rows is not None
        slots = trial.inputs.batch.slot_mapping
        trial.impl.do_kv_cache_update(
            *trial._parts(rows), trial.cache(), slots, dtype.value, scale, skip_scale=skip
        )
        buffers.append(trial.buffer)
    assert torch.equal(*buffers)


def prefill_of(trial: LatentTrial, output: torch.Tensor, *output_scale: torch.Tensor) -> None:
    """Run ``forward_mha`` on a step's prefill rows; it writes their rows of ``output``."""
    record, inputs = trial.build(trial.builder()), trial.inputs
    assert inputs.key is not None
    rows = slice(record.num_decode_tokens, trial.batch_spec.num_tokens)
    kv_c, k_pe = trial._parts(inputs.key[rows])
    trial.impl.forward_mha(
        inputs.query[rows],
        kv_c,
        k_pe,
        trial.cache(),
        record,
        trial.layer._k_scale,
        output[rows],
        *output_scale,
    )


@pytest.mark.parametrize("backend", **LATENT)
def test_prefill_of_a_step_without_prefills_does_nothing(backend: type[AttentionBackend]) -> None:
    if backend.is_sparse():
        pytest.skip("sparse rows all run in forward_mqa")
    trial = trial_of(backend, "uniform_decode")
    assert isinstance(trial, LatentTrial)
    trial.write()
    output = batches.poisoned(4, 3 * 128, dtype=trial.dtype, device=trial.device)
    prefill_of(trial, output)
    assert batches.is_poison(output)


@pytest.mark.parametrize("backend", **LATENT)
def test_fp8_output_of_a_latent_prefill_is_the_plain_one_rounded(
    backend: type[AttentionBackend],
) -> None:
    if backend.is_sparse():
        pytest.skip("sparse rows all run in forward_mqa")
    trial = trial_of(backend)
    assert isinstance(trial, LatentTrial)
    trial.write()
    plain, narrow = (
        batches.poisoned(42, 3 * 128, dtype=dtype, device=trial.device)
        for dtype in (trial.dtype, torch.float8_e4m3fn)
    )
    prefill_of(trial, plain)
    scale = torch.tensor(OUTPUT_SCALE, device=trial.device)
    if getattr(trial.build(trial.builder()), "ragged", None) is not None:
        # vLLM asks ``fused_output_quant_supported`` first.
        with pytest.raises(NotImplementedError, match="output_scale: trtllm-gen"):
            prefill_of(trial, narrow, scale)
        return
    prefill_of(trial, narrow, scale)
    decodes = trial.build(trial.builder()).num_decode_tokens
    assert batches.is_poison(narrow[:decodes])
    stored = Stored(narrow[decodes:].double(), scale.double(), torch.float8_e4m3fn)
    # The plain output is rounded too, to its own type.
    limit = stored_rows.half_ulp(plain[decodes:].double(), trial.dtype)
    limit = limit + stored_rows.half_ulp(stored.units, stored.dtype) * OUTPUT_SCALE
    assert bool(((stored.real - plain[decodes:].double()).abs() <= limit).all())


# -- the debug switch


@pytest.fixture
def debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DEBUG", "1")


def step(trial: Trial) -> None:
    """Build and attend, as the runner does."""
    record = trial.build(trial.builder())
    trial.attend(record, trial.inputs, trial.cache())


def change_batch(trial: Trial, **fields: Any) -> None:
    trial.inputs = replace(trial.inputs, batch=trial.inputs.batch.replace(**fields))


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize("backend", **EVERY)
@pytest.mark.parametrize("batch", ["mixed", "padding_tokens_counted", "ragged_verify"])
def test_debugging_finds_nothing_in_a_good_step(
    backend: type[AttentionBackend], batch: str
) -> None:
    trial = trial_of(backend, batch)
    trial.write()
    step(trial)


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize("backend", **DENSE)
@pytest.mark.parametrize(
    "feature", ["cross", "cross_decoder_lens", "encoder_only", "cascade", "window"]
)
def test_debugging_finds_nothing_in_a_good_step_of_every_kind(
    backend: type[AttentionBackend], feature: str
) -> None:
    for batch in FEATURES[feature].batches:
        case = Case(FEATURES[feature], BATCHES[batch], dtype=backend.capabilities.dtypes[0])
        device = device_for(AttentionBackendEnum[backend.get_name()])
        assert device is not None
        if case.is_served_by(backend):
            trial = DenseTrial(backend, case, device)
            trial.write()
            step(trial)


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize("backend", **EVERY)
@pytest.mark.parametrize("block", [WILD_BLOCK, -1])
def test_debugging_finds_a_block_id_outside_the_cache(
    backend: type[AttentionBackend], block: int
) -> None:
    trial = trial_of(backend)
    trial.write()
    table = trial.inputs.batch.block_table_tensor.clone()
    table[2, 1] = block
    change_batch(trial, block_table_tensor=table)
    with pytest.raises(ValueError, match=rf"block_table.*\[2, 1\].*got {block}"):
        step(trial)


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize("backend", **EVERY)
def test_debugging_finds_a_length_beyond_the_table(backend: type[AttentionBackend]) -> None:
    trial = trial_of(backend)
    trial.write()
    columns = trial.inputs.batch.block_table_tensor.shape[1]
    lens = trial.inputs.batch.seq_lens.clone()
    lens[1] = too_long = columns * trial.paging.block_size + 1
    change_batch(trial, seq_lens=lens, max_seq_len=too_long)
    with pytest.raises(ValueError, match=rf"request 1 of length {too_long} needs {columns + 1}"):
        step(trial)


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize("backend", **EVERY)
@pytest.mark.parametrize("slot_of", [lambda slots: slots, lambda slots: -2], ids=["past", "below"])
def test_debugging_finds_a_bad_slot(
    backend: type[AttentionBackend], slot_of: Callable[[int], int]
) -> None:
    trial = trial_of(backend)
    bad = slot_of(trial.paging.num_blocks * trial.paging.block_size)
    slots = trial.inputs.batch.slot_mapping.clone()
    slots[3] = bad
    change_batch(trial, slot_mapping=slots)
    with pytest.raises(ValueError, match=f"slot_mapping.*got {bad} at token 3"):
        trial.write()


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize("backend", **EVERY)
def test_debugging_checks_the_batch_at_build(backend: type[AttentionBackend]) -> None:
    trial = trial_of(backend)
    batch = trial.inputs.batch
    change_batch(trial, max_query_len=3)
    with pytest.raises(ValueError, match="max_query_len"):
        trial.build(trial.builder())
    change_batch(trial, max_query_len=30, seq_lens=batch.seq_lens.long())
    with pytest.raises(TypeError, match=r"seq_lens must be torch.int32, got torch.int64"):
        trial.build(trial.builder())


@pytest.mark.parametrize("backend", **LATENT)
def test_a_profiling_call_of_a_latent_layer_returns_its_output(
    backend: type[AttentionBackend],
) -> None:
    trial = trial_of(backend)
    output = torch.ones(3, 2)
    inputs, empty = trial.inputs, torch.empty(0)
    assert inputs.key is not None
    returned = mla_attention(
        trial.impl, trial.layer, inputs.query, inputs.key, inputs.key, empty, None, output
    )
    assert returned is output
    assert bool((output == 0).all())
