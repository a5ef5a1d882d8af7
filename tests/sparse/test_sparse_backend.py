"""SPARSE_MLA as the selector sees it: names, devices, what it declares and what it refuses."""

from __future__ import annotations

import pytest

from attn.backends.sparse_mla import SparseMLABackend
from attn.impls.sparse.sparse_mla import SparseMLAImpl
from attn.registry import AttentionBackendEnum
from attn.selector import explain, select
from builders.sparse import choice as sparse_mla_choice
from builders.sparse.sparse_mla import SparseMLAMetadataBuilder
from specs.attention import AttentionSelectorConfig
from specs.devices import KNOWN_DEVICES
from specs.dtypes import CacheDType, DType
from specs.engine import EngineConfig
from specs.kv_cache import MLAAttentionSpec

SPARSE = AttentionSelectorConfig(
    head_size=576,
    dtype=DType.BFLOAT16,
    kv_cache_dtype=CacheDType.FP8_DS_MLA,
    block_size=64,
    use_mla=True,
    use_sparse=True,
)
GPUS = [name for name, device in KNOWN_DEVICES.items() if device.compute_capability is not None]


@pytest.mark.parametrize("name", ["SPARSE_MLA", "NSA", "DSA"])
def test_all_its_names_are_one_triple(name: str) -> None:
    backend = AttentionBackendEnum[name].get_class()
    assert backend is SparseMLABackend
    assert backend.get_impl_cls() is SparseMLAImpl
    assert backend.get_builder_cls() is SparseMLAMetadataBuilder
    assert select(SPARSE, KNOWN_DEVICES["h200"], name) is SparseMLABackend


@pytest.mark.parametrize("device", GPUS)
def test_it_ranks_first_for_sparse_layers_and_serves_no_others(device: str) -> None:
    assert explain(SPARSE, KNOWN_DEVICES[device]).chosen == "SPARSE_MLA"
    dense = explain(SPARSE.replace(use_sparse=False), KNOWN_DEVICES[device], "NSA")
    assert dense.chosen is None
    assert any("non-sparse not supported" in reason for reason in dense.reasons)


def test_a_machine_without_a_gpu_gets_the_reference() -> None:
    assert explain(SPARSE, KNOWN_DEVICES["cpu"]).chosen == "TORCH_REF_SPARSE_MLA"


REFUSED = {
    "pages of 16": ({"block_size": 16}, "block_size 16: any multiple of 64"),
    "another 16-bit type": (
        {"kv_cache_dtype": CacheDType.FLOAT16},
        "kv_cache_dtype must be the model's dtype (torch.bfloat16) or fp8, got 'float16'",
    ),
    "integers": (
        {"kv_cache_dtype": CacheDType.INT8_PER_TOKEN_HEAD},
        "kv_cache_dtype int8_per_token_head: auto",
    ),
    "wide rows": (
        {"head_size": 608},
        "head_size 608: 64, 96, 128, 160, 192, 256, 288",
    ),
    "a window": ({"has_sliding_window": True}, "sliding window not supported"),
    "sinks": ({"has_sink": True}, "attention sinks not supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_does_not_serve_is_refused_with_the_reason(case: str) -> None:
    fields, said = REFUSED[case]
    report = explain(SPARSE.replace(**fields), KNOWN_DEVICES["h200"], "SPARSE_MLA")
    assert report.chosen is None
    (candidate,) = [one for one in report.candidates if one.name == "SPARSE_MLA"]
    assert any(said in reason for reason in candidate.reasons), candidate.reasons


@pytest.mark.parametrize(
    ("rank", "rope", "said"),
    [
        (384, 64, "kv_lora_rank must be a power of two from 32 on, got 384"),
        (512, 16, "qk_rope_head_dim must be a power of two from 32 on, got 16"),
        (512, 128, "rows must be at most 576 wide, got 640"),
    ],
)
def test_rows_without_a_tile_are_refused_at_construction(rank: int, rope: int, said: str) -> None:
    spec = MLAAttentionSpec(block_size=64, kv_lora_rank=rank, qk_rope_head_dim=rope, topk=8)
    config = EngineConfig(max_model_len=128, num_heads=4)
    with pytest.raises(ValueError, match=said):
        SparseMLAMetadataBuilder(spec, ["0"], config, "cpu")


def test_kernels_of_others_are_noted_with_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = KNOWN_DEVICES["h200"].compute_capability
    assert SparseMLABackend.device_notes(None) == []
    monkeypatch.setattr(sparse_mla_choice, "find_module", lambda name: False)
    notes = SparseMLABackend.device_notes(capability)
    assert notes[0] == (
        "prefill and decode by triton_sparse, either by another kernel that is asked for"
    )
    assert "fa3 is not available: no flash_attn_interface or " in " ".join(notes)
    assert not any("trtllm" in note for note in notes)
    monkeypatch.setattr(sparse_mla_choice, "unavailable_kernels", dict)
    notes = SparseMLABackend.device_notes(capability)
    assert "flashmla_kv is there, and reads fp8_nope_block_scale_bf16_rope" in notes
