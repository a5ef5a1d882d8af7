"""``CUSTOM`` as a router: each layer gets our class for its kind, and that class's reasons."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import vllm.platforms
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.worker import utils

from attn.integrations.vllm import choice, compat, members, router
from attn.integrations.vllm.choice import LayerKind
from attn.registry import RegisteredBackend
from specs.devices import DeviceKind

ASKED: dict[str, dict[str, Any]] = {
    "TRITON_ATTN": {"head_size": 128},
    "TRITON_MLA": {"head_size": 576, "use_mla": True},
    "SPARSE_MLA": {"head_size": 576, "use_mla": True, "use_sparse": True},
}
"""What tells layers apart in vLLM's selection, by our backend for them."""
PLAIN = {"dtype": torch.bfloat16, "kv_cache_dtype": "auto"}


def asked(name: str, **changes: Any) -> dict[str, Any]:
    """vLLM's arguments for a layer."""
    return {**PLAIN, **ASKED[name], **changes}


def fields(name: str, **changes: Any) -> dict[str, Any]:
    """The fields by which vLLM validates a layer, on an H100."""
    return {
        "block_size": None,
        "use_mla": False,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "attn_type": "decoder",
        "device_capability": DeviceCapability(9, 0),
        **asked(name, **changes),
    }


def class_of(name: str) -> Any:
    return getattr(members, f"CUSTOM_{name}")


@pytest.fixture
def registered(plugin: Any, cuda: Callable[..., None]) -> Callable[[], Any]:
    """The plugin on a pretended H100; a function that looks up the class behind ``CUSTOM``."""
    plugin.register()
    return AttentionBackendEnum.CUSTOM.get_class


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_each_kind_of_layer_gets_our_class_for_it(
    plugin: Any,
    cuda: Callable[..., None],
    make_config: Callable[..., Any],
    capability: tuple[int, int],
) -> None:
    cuda(*capability)
    plugin.register()
    # A model can have layers of every kind, its draft model too; some selections come again.
    order = [*ASKED, *reversed(ASKED), "TRITON_MLA", "TRITON_ATTN", "TRITON_MLA"]
    with set_current_vllm_config(make_config(block_size=64)):
        for name in order:
            found = get_attn_backend(**asked(name))
            assert found is class_of(name)
            assert found.get_name() == "CUSTOM"
        assert selector._cached_get_attn_backend.cache_info().hits == len(order) - len(ASKED)


def test_a_selection_does_not_see_another_that_is_under_way(registered: Any) -> None:
    held = {name: registered() for name in ASKED}
    for name, cls in held.items():
        assert cls.validate_configuration(**fields(name)) == []
    for name, cls in held.items():
        assert cls.full_cls_name() == class_of(name).full_cls_name()


def test_threads_do_not_see_each_other(registered: Any) -> None:
    names = [name for name in ASKED for _ in range(4)]
    barrier, found = threading.Barrier(len(names)), {}
    for name in ASKED:
        class_of(name)

    def select(index: int, name: str) -> None:
        cls = registered()
        barrier.wait()
        reasons = cls.validate_configuration(**fields(name))
        barrier.wait()
        found[index] = (reasons, cls.full_cls_name())

    threads = [threading.Thread(target=select, args=item) for item in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(len(names))] == [
        ([], class_of(name).full_cls_name()) for name in names
    ]


def test_a_refused_layer_leaves_no_pick_for_the_next(registered: Any) -> None:
    cls = registered()
    assert cls.validate_configuration(**fields("TRITON_ATTN", head_size=20))
    assert cls.validate_configuration(**fields("TRITON_MLA")) == []
    assert cls.full_cls_name() == class_of("TRITON_MLA").full_cls_name()


REFUSED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "dense, head size": ("TRITON_ATTN", {"head_size": 20}, ["head_size", "32 to 512"]),
    "dense, cache": ("TRITON_ATTN", {"kv_cache_dtype": "nvfp4"}, ["kv_cache_dtype", "fp8_e5m2"]),
    "latent, head size": ("TRITON_MLA", {"head_size": 40}, ["head_size", "got 40"]),
    "latent, cache": ("TRITON_MLA", {"kv_cache_dtype": "fp8_ds_mla"}, ["fp8_ds_mla", "fp8_e4m3"]),
    "latent, sinks": ("TRITON_MLA", {"has_sink": True}, ["sinks not supported"]),
    "sparse, head size": ("SPARSE_MLA", {"head_size": 584}, ["head_size", "got 584", "576"]),
    "sparse, cache": (
        "SPARSE_MLA",
        {"kv_cache_dtype": "int8_per_token_head"},
        ["kv_cache_dtype", "fp8_ds_mla"],
    ),
}
"""The backend that is asked, what it cannot serve, and words of its reasons."""


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_is_vllms_error_with_the_reasons_of_the_class_for_the_kind(
    registered: Any, make_config: Callable[..., Any], case: str
) -> None:
    name, changes, words = REFUSED[case]
    with (
        set_current_vllm_config(make_config(block_size=64)),
        pytest.raises(ValueError, match="CUSTOM is not valid for this configuration") as caught,
    ):
        get_attn_backend(**asked(name, **changes))
    assert all(word in str(caught.value) for word in words)
    mine = class_of(name).validate_configuration(**fields(name, **changes))
    assert registered().validate_configuration(**fields(name, **changes)) == mine


@pytest.mark.parametrize(("name", "size"), [("TRITON_MLA", 24), ("SPARSE_MLA", 48)])
def test_a_block_size_that_the_user_asked_for_is_judged_by_kind(
    registered: Any, make_config: Callable[..., Any], name: str, size: int
) -> None:
    config = make_config(block_size=64)
    config.cache_config.block_size = size
    config.cache_config.user_specified_block_size = True
    with (
        set_current_vllm_config(config),
        pytest.raises(ValueError, match=rf"block_size not supported \(got {size}, served: .*any"),
    ):
        get_attn_backend(**asked(name))


def test_the_environment_may_name_one_backend_per_kind(
    registered: Any, make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTN_VLLM_BACKEND", " torch_ref_mla,TORCH_REF ")
    with set_current_vllm_config(make_config(block_size=64)):
        assert get_attn_backend(**asked("TRITON_ATTN")) is members.CUSTOM_TORCH_REF
        assert get_attn_backend(**asked("TRITON_MLA")) is members.CUSTOM_TORCH_REF_MLA
        assert get_attn_backend(**asked("SPARSE_MLA")) is class_of("SPARSE_MLA")


def test_a_kind_of_layer_can_be_left_to_vllm(
    registered: Any, make_config: Callable[..., Any]
) -> None:
    config = make_config(block_size=64, backend=None)
    config.attention_config.backend_per_kind = {
        "mla_attention": AttentionBackendEnum.CUSTOM,
        "full_attention": AttentionBackendEnum.FLEX_ATTENTION,
    }
    with set_current_vllm_config(config):
        assert get_attn_backend(**asked("TRITON_MLA")) is class_of("TRITON_MLA")
        assert get_attn_backend(**asked("SPARSE_MLA")) is class_of("SPARSE_MLA")
        assert get_attn_backend(**asked("TRITON_ATTN")).get_name() == "FLEX_ATTENTION"


@pytest.mark.parametrize("order", [tuple(ASKED), tuple(reversed(ASKED))])
def test_a_model_of_every_kind_of_layer_gets_blocks_and_a_layout_that_all_take(
    registered: Any,
    make_config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    order: tuple[str, ...],
) -> None:
    if compat.BACKENDS_SHAPE_CACHES:
        # vLLM 0.26 asks the class of the first layer alone.
        order = ("SPARSE_MLA", *order)
    config = make_config()
    config.cache_config.user_specified_block_size = False
    layers = {}
    with set_current_vllm_config(config):
        for index, name in enumerate(order):
            layers[f"model.layers.{index}"] = selected(get_attn_backend(**asked(name)))
    config.compilation_config.static_forward_context.update(layers)
    vllm.platforms.current_platform.update_block_size_for_backend(config)
    size = config.cache_config.block_size
    classes = [layer.get_attn_backend() for layer in layers.values()]
    assert size == 64
    assert all(cls.supports_block_size(size) for cls in classes)
    assert utils.select_common_block_size(size, classes) in (16, 64)
    if not compat.BACKENDS_SHAPE_CACHES:
        from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts

        assert get_supported_kv_cache_layouts(classes)


@pytest.mark.parametrize(("name", "size"), [("TRITON_ATTN", 16), ("TRITON_MLA", 64)])
def test_blocks_of_one_kind_of_layer_have_the_size_that_its_kernels_like(
    registered: Any, make_config: Callable[..., Any], name: str, size: int
) -> None:
    config = make_config()
    config.cache_config.user_specified_block_size = False
    with set_current_vllm_config(config):
        layer = selected(get_attn_backend(**asked(name)))
    config.compilation_config.static_forward_context["model.layers.0"] = layer
    vllm.platforms.current_platform.update_block_size_for_backend(config)
    assert config.cache_config.block_size == size
    assert layer.get_attn_backend().get_preferred_block_size(128) == 128


def selected(backend: Any) -> Any:
    """A layer of a model, of which only its backend is asked."""

    class Layer(AttentionLayerBase):
        impl: Any = None

        def get_attn_backend(self) -> Any:
            return backend

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            raise NotImplementedError

    return Layer()


@pytest.mark.parametrize("name", ASKED)
def test_every_kind_is_served_with_batch_invariance(
    registered: Any,
    make_config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with set_current_vllm_config(make_config(block_size=64)):
        assert get_attn_backend(**asked(name)) is class_of(name)
    assert class_of(name).supports_batch_invariance()


def test_questions_about_no_layer_are_answered_as_for_dense_layers(registered: Any) -> None:
    cls, dense = registered(), members.CUSTOM_TRITON_ATTN
    assert issubclass(cls, dense)
    assert cls.full_cls_name() == dense.full_cls_name()
    assert cls.get_name() == "CUSTOM"
    assert not cls.is_mla()
    assert cls.get_preferred_block_size() == dense.get_preferred_block_size()
    assert cls.get_impl_cls() is dense.get_impl_cls()


def test_missing_packages_are_the_reason(
    registered: Any, make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, missing = registered(), RegisteredBackend.missing
    monkeypatch.setattr(
        RegisteredBackend,
        "missing",
        lambda member: ["triton"] if "triton" in member.row.requires else missing(member),
    )
    reasons = dense.validate_configuration(**fields("TRITON_MLA"))
    assert reasons == ["latent layers not supported (triton is not installed: pip install triton)"]


def test_a_class_that_cannot_be_made_is_refused_with_the_error(
    registered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> Any:
        raise ImportError(f"{name} needs x")

    cls = registered()
    monkeypatch.setattr(router, "class_of", broken)
    assert cls.validate_configuration(**fields("TRITON_MLA")) == ["TRITON_MLA needs x"]


def test_the_module_has_one_class(registered: Any) -> None:
    with pytest.raises(AttributeError, match="NONE_SUCH"):
        _ = router.NONE_SUCH


def test_the_best_backends_are_of_their_kind() -> None:
    assert choice.chosen(DeviceKind.SM90, is_routed=True) == {
        LayerKind.DENSE: "TRITON_ATTN",
        LayerKind.LATENT: "TRITON_MLA",
        LayerKind.SPARSE: "SPARSE_MLA",
    }
    assert choice.chosen(DeviceKind.ROCM, is_routed=False) == {LayerKind.DENSE: "TRITON_ATTN"}
