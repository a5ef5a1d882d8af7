"""vLLM's own selector over our classes: what it picks, what it refuses, and its words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionBackend, AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import get_attn_backend

from attn.errors import MissingDependencyError
from attn.integrations.vllm import choice, members
from attn.integrations.vllm.choice import LayerKind
from attn.registry import RegisteredBackend
from specs.devices import DeviceKind
from specs.layouts import KVPacking

SERVED: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp16": {"dtype": torch.float16},
    "fp32": {"dtype": torch.float32},
    "head size 40": {"head_size": 40},
    "head size 512": {"head_size": 512},
    "fp8": {"kv_cache_dtype": "fp8"},
    "fp8 e5m2": {"kv_cache_dtype": "fp8_e5m2"},
    "int8 per token and head": {"kv_cache_dtype": "int8_per_token_head"},
    "int4 per token and head": {"kv_cache_dtype": "int4_per_token_head"},
    "window": {"has_sliding_window": True},
    "sinks": {"has_sink": True},
    "sinks window": {"has_sink": True, "has_sliding_window": True},
    "multimodal": {"use_mm_prefix": True},
    "scales per head": {"kv_cache_dtype": "fp8", "use_per_head_quant_scales": True},
    "cross": {"attn_type": AttentionType.ENCODER_DECODER},
    "encoder": {"attn_type": AttentionType.ENCODER},
    "encoder only": {"attn_type": AttentionType.ENCODER_ONLY},
}
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "head size 20": ({"head_size": 20}, ["head_size", "got 20", "multiples of 8 from 32 to 512"]),
    "head size 576": ({"head_size": 576}, ["head_size", "multiples of 8 from 32 to 512"]),
    "nvfp4": ({"kv_cache_dtype": "nvfp4"}, ["kv_cache_dtype", "fp8_e5m2"]),
    "sparse": ({"use_sparse": True}, ["sparse not supported"]),
    "fp64": ({"dtype": torch.float64}, ["dtype", "bfloat16"]),
}


def asked(**changes: Any) -> dict[str, Any]:
    return {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", **changes}


@pytest.fixture
def ours(plugin: Any, cuda: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("ATTN_VLLM_BACKEND", "TRITON_ATTN")
    plugin.register()
    return members.CUSTOM_TRITON_ATTN


@pytest.mark.parametrize("name", SERVED)
def test_the_selector_picks_ours(ours: Any, make_config: Callable[..., Any], name: str) -> None:
    with set_current_vllm_config(make_config()):
        assert get_attn_backend(**asked(**SERVED[name])) is ours


@pytest.mark.parametrize("name", REFUSED)
def test_the_selector_refuses_with_our_reasons(
    ours: Any, make_config: Callable[..., Any], name: str
) -> None:
    changes, words = REFUSED[name]
    with (
        set_current_vllm_config(make_config()),
        pytest.raises(ValueError, match="CUSTOM is not valid") as caught,
    ):
        get_attn_backend(**asked(**changes))
    assert all(word in str(caught.value) for word in words)


def test_a_block_size_that_the_user_asked_for_is_judged(
    ours: Any, make_config: Callable[..., Any]
) -> None:
    config = make_config(block_size=16)
    config.cache_config.block_size = 24
    config.cache_config.user_specified_block_size = True
    with (
        set_current_vllm_config(config),
        pytest.raises(ValueError, match="any multiple of 16"),
    ):
        get_attn_backend(**asked())


def test_an_old_device_is_refused(
    plugin: Any, cuda: Any, make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTN_VLLM_BACKEND", "TRITON_ATTN")
    plugin.register()
    cuda(7, 5)
    with (
        set_current_vllm_config(make_config()),
        pytest.raises(
            ValueError, match=r"compute capability not supported \(got 7\.5, served: sm80"
        ),
    ):
        get_attn_backend(**asked())


@pytest.mark.parametrize("variable", ["ATTN_VLLM_PREFILL_KERNEL", "ATTN_VLLM_DECODE_KERNEL"])
def test_kernels_for_hopper_are_refused_elsewhere_before_there_are_weights(
    ours: Any,
    cuda: Any,
    make_config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
) -> None:
    monkeypatch.setenv(variable, "hopper")
    with set_current_vllm_config(make_config()):
        assert get_attn_backend(**asked()) is ours
    selector._cached_get_attn_backend.cache_clear()
    cuda(8, 6)
    with (
        set_current_vllm_config(make_config()),
        pytest.raises(ValueError, match=f"{variable}=hopper not supported .* 9.0, got 8.6"),
    ):
        get_attn_backend(**asked())


def test_models_with_rswa_are_refused_to_custom_by_vllm_itself(
    cuda: Any, make_config: Callable[..., Any]
) -> None:
    from vllm.model_executor.models.config import UnlimitedOCRForCausalLMConfig

    with pytest.raises(ValueError, match=r"unsupported attention backend .*CUSTOM.* for R-SWA"):
        UnlimitedOCRForCausalLMConfig.verify_and_update_config(make_config(backend="CUSTOM"))
    # Ours may stand behind this name.
    UnlimitedOCRForCausalLMConfig.verify_and_update_config(make_config(backend="TRITON_ATTN"))


def test_a_kind_of_layer_can_be_given_to_ours_alone(
    ours: Any, make_config: Callable[..., Any]
) -> None:
    config = make_config(backend=None)
    config.attention_config.backend_per_kind = {
        "sliding_window": AttentionBackendEnum.CUSTOM,
        "full_attention": AttentionBackendEnum.FLEX_ATTENTION,
    }
    with set_current_vllm_config(config):
        assert get_attn_backend(**asked(has_sliding_window=True)) is ours
        assert get_attn_backend(**asked()) is not ours


def test_an_overridden_member_is_ours_by_its_name(
    plugin: Any, cuda: Any, make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTN_VLLM_OVERRIDE", "TRITON_ATTN")
    plugin.register()
    with set_current_vllm_config(make_config(backend="TRITON_ATTN")):
        chosen = get_attn_backend(**asked())
    assert chosen.__module__ == "attn.integrations.vllm.members"
    assert chosen.get_name() == "TRITON_ATTN"


def test_a_model_of_dense_and_mla_layers_gets_ours_for_the_dense_ones(
    plugin: Any, cuda: Any, make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTN_VLLM_OVERRIDE", "TRITON_ATTN")
    plugin.register()
    config = make_config(backend=None)
    config.attention_config.backend_per_kind = {
        "full_attention": AttentionBackendEnum.TRITON_ATTN,
        "mla_attention": AttentionBackendEnum.TRITON_MLA,
    }
    with set_current_vllm_config(config):
        dense = get_attn_backend(**asked())
        latent = get_attn_backend(**asked(head_size=576, use_mla=True))
    assert dense.__module__ == "attn.integrations.vllm.members"
    assert latent.get_name() == "TRITON_MLA"


def wanted_of(changes: dict[str, Any]) -> dict[str, Any]:
    """The arguments by which vLLM validates a layer, on an H100."""
    return {
        "block_size": None,
        "use_mla": False,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "attn_type": AttentionType.DECODER,
        "device_capability": DeviceCapability(9, 0),
        **asked(**changes),
    }


def test_a_backend_that_cannot_read_vllms_caches_says_so(
    ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reason_of(packing: KVPacking, is_padded: bool, device_capability: Any) -> str:
        return f"{packing.value}, {is_padded}, {device_capability.major}"

    monkeypatch.setattr(ours, "layout_reason", staticmethod(reason_of))
    assert ours.validate_configuration(**wanted_of({})) == ["packed, False, 9"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": 24}, "block_size not supported"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype not supported"),
    ],
)
def test_a_reason_that_vllm_compares_equals_its_words_and_says_more(
    ours: Any, changes: dict[str, Any], words: str
) -> None:
    """By it vLLM warns of ``--block-size``, and lets another backend take one layer on ROCm."""
    (reason,) = found = ours.validate_configuration(**wanted_of(changes))
    assert found == [words]
    assert reason != "head_size not supported"
    (value,) = changes.values()
    assert f"{reason}".startswith(f"{words} (got {value}, served: ")


def test_on_a_gpu_without_its_packages_custom_is_no_reference(
    plugin: Any, cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = RegisteredBackend.missing
    monkeypatch.setattr(
        RegisteredBackend,
        "missing",
        lambda member: ["triton"] if "triton" in member.row.requires else missing(member),
    )
    cuda(9, 0)
    plugin.register()
    assert choice.chosen(DeviceKind.SM90, is_routed=True) == {LayerKind.DENSE: "TRITON_ATTN"}
    with pytest.raises(MissingDependencyError, match="backend TRITON_ATTN needs triton"):
        AttentionBackendEnum.CUSTOM.get_class()


@pytest.mark.parametrize("name", [*SERVED, *REFUSED])
def test_vllms_own_validation_agrees_with_ours(ours: Any, name: str) -> None:
    changes = SERVED[name] if name in SERVED else REFUSED[name][0]
    wanted = wanted_of(changes)
    theirs = AttentionBackend.validate_configuration.__func__(ours, **wanted)
    mine = ours.validate_configuration(**wanted)
    # Equal to vLLM's words, which vLLM compares with its own.
    assert mine == theirs
    assert [reason.split(" (got ")[0] for reason in mine] == [str(words) for words in theirs]
    assert bool(mine) == (name in REFUSED)
