"""The entry point: what it registers, how often, and its messages about wrong names."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import pickle
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from attn.integrations.vllm import members
from attn.registry import AttentionBackendEnum as OurEnum
from tests.vllm.fresh import FreshProcesses

DENSE = ("TORCH_REF", "TRITON_ATTN")
EXAMPLE = Path(__file__).parents[3] / "docs/examples/vllm_offline.py"
LOGGER = logging.getLogger("vllm.attn_backends")


@contextmanager
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """A function that gives what the plugin has logged meanwhile."""
    caplog.clear()
    # vLLM's loggers do not propagate their records.
    LOGGER.addHandler(caplog.handler)
    level = LOGGER.level
    LOGGER.setLevel(logging.INFO)
    try:
        yield lambda: list(dict.fromkeys(record.getMessage() for record in caplog.records))
    finally:
        LOGGER.setLevel(level)
        LOGGER.removeHandler(caplog.handler)


def test_vllm_finds_the_entry_point() -> None:
    entries = importlib.metadata.entry_points(group="vllm.general_plugins")
    (entry,) = [entry for entry in entries if entry.name == "attn_backends"]
    assert entry.value == "attn.integrations.vllm.plugin:register"
    assert callable(entry.load())


def test_loading_vllms_plugins_registers_custom(fresh: FreshProcesses) -> None:
    code = (
        "from vllm.plugins import load_general_plugins as load; load(); load();"
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum as E;"
        "print(E.CUSTOM.get_path(), E.CUSTOM.get_class().get_name(), E.TRITON_ATTN.get_path())"
    )
    path, name, other = fresh.run(code, ATTN_VLLM_BACKEND="TRITON_ATTN").split()[-3:]
    assert path == "attn.integrations.vllm.members.CUSTOM_TRITON_ATTN"
    assert name == "CUSTOM"
    assert other.startswith("vllm.")


def test_registering_again_changes_nothing(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_VLLM_BACKEND", "TRITON_ATTN")
    plugin.register()
    first = AttentionBackendEnum.CUSTOM.get_class()
    plugin.register()
    assert AttentionBackendEnum.CUSTOM.get_class() is first
    assert not AttentionBackendEnum.TRITON_ATTN.is_overridden()


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((8, 0), ["TRITON_ATTN", "TRITON_MLA", "SPARSE_MLA"]),
        ((9, 0), ["TRITON_ATTN", "TRITON_MLA", "SPARSE_MLA"]),
        ((10, 0), ["TRITON_ATTN", "TRITON_MLA", "SPARSE_MLA"]),
        ((7, 5), ["TORCH_REF", "TORCH_REF_MLA", "TORCH_REF_SPARSE_MLA"]),
    ],
)
def test_on_cuda_custom_is_the_router_and_the_log_names_its_backends(
    plugin: Any,
    cuda: Any,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int],
    expected: list[str],
) -> None:
    cuda(*capability)
    with logged(caplog) as lines:
        plugin.register()
    custom = AttentionBackendEnum.CUSTOM
    assert custom.get_path() == "attn.integrations.vllm.router.CUSTOM"
    # Before any selection it answers as the class for dense layers.
    assert ".".join(custom.get_class().full_cls_name()) == members.path_of("CUSTOM", expected[0])
    kinds = zip(expected, ("dense", "latent", "sparse"), strict=True)
    served = ", ".join(f"{name} for {kind} layers" for name, kind in kinds)
    assert f"attn-backends: CUSTOM is {served}; replaced by ours: none" in lines()


def test_without_cuda_custom_is_one_class_for_dense_layers(
    plugin: Any, cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.platforms
    from vllm.platforms.interface import UnspecifiedPlatform

    vllm.platforms._current_platform = UnspecifiedPlatform()
    plugin.register()
    assert AttentionBackendEnum.CUSTOM.get_path() == members.path_of("CUSTOM", "TORCH_REF")
    monkeypatch.setattr(UnspecifiedPlatform, "is_rocm", lambda platform: True)
    plugin.register()
    assert AttentionBackendEnum.CUSTOM.get_path() == members.path_of("CUSTOM", "TRITON_ATTN")
    monkeypatch.setenv("ATTN_VLLM_BACKEND", "TRITON_MLA")
    with pytest.raises(ValueError, match="dense layers on this platform, got TRITON_MLA"):
        plugin.register()


def test_overrides_replace_members_and_are_taken_back(
    plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = AttentionBackendEnum.TRITON_ATTN.get_path()
    monkeypatch.setenv("ATTN_VLLM_OVERRIDE", " TRITON_ATTN ,")
    plugin.register()
    assert AttentionBackendEnum.TRITON_ATTN.is_overridden()
    assert AttentionBackendEnum.TRITON_ATTN.get_class().get_name() == "TRITON_ATTN"
    monkeypatch.delenv("ATTN_VLLM_OVERRIDE")
    plugin.register()
    assert AttentionBackendEnum.TRITON_ATTN.get_path() == theirs


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("ATTN_VLLM_BACKEND", "FASTEST", ["ATTN_VLLM_BACKEND", "FASTEST", "TRITON_ATTN"]),
        (
            "ATTN_VLLM_BACKEND",
            "TRITON_MLA, TRITON_ATTN, TORCH_REF_MLA",
            ["at most one backend", "TRITON_MLA and TORCH_REF_MLA", "latent layers"],
        ),
        ("ATTN_VLLM_OVERRIDE", "TRITON_ATTN,NONE_SUCH", ["ATTN_VLLM_OVERRIDE", "NONE_SUCH"]),
        ("ATTN_VLLM_OVERRIDE", "FLEX_ATTENTION", ["FLEX_ATTENTION", "TORCH_REF"]),
        (
            "ATTN_VLLM_OVERRIDE",
            "SPARSE_MLA",
            ["got 'SPARSE_MLA'", "ATTN_VLLM_BACKEND=SPARSE_MLA", "--attention-backend CUSTOM"],
        ),
        ("ATTN_VLLM_PREFILL_KERNEL", "cutlass", ["ATTN_VLLM_PREFILL_KERNEL", "hopper", "cutlass"]),
        ("ATTN_VLLM_DECODE_KERNEL", "Hopper", ["ATTN_VLLM_DECODE_KERNEL", "hopper", "'Hopper'"]),
        ("ATTN_VLLM_FP8_MLA_QUERIES", "yes", ["must be 0 or 1", "'yes'"]),
        ("ATTN_VLLM_DECODE_KERNELS", "auto", ["ATTN_VLLM_BACKEND", "got ATTN_VLLM_DECODE_KERNELS"]),
    ],
)
def test_wrong_names_are_refused_with_the_right_ones(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: list[str]
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=words[0]) as caught:
        plugin.register()
    assert all(word in str(caught.value) for word in words[1:])
    assert not plugin._registered


@pytest.mark.parametrize("name", ["FLASHINFER", "TRTLLM_MHA"])
def test_a_backend_whose_package_is_not_there_is_refused_with_its_name(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(OurEnum[name], "missing", lambda: ["flashinfer"])
    monkeypatch.setenv("ATTN_VLLM_BACKEND", name)
    with pytest.raises(ValueError, match=f"ATTN_VLLM_BACKEND={name} needs flashinfer"):
        plugin.register()


@pytest.mark.parametrize("version", ["0.10.2", "0.25.1", "0.34.0", "1.0.0", "dev"])
def test_other_versions_get_one_line_and_nothing_else(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", version)
    # This vLLM has no such module.
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", None)
    monkeypatch.setenv("ATTN_VLLM_BACKEND", "FASTEST")
    with logged(caplog) as lines:
        plugin.register()
    assert lines() == [
        f"attn-backends: serves vLLM 0.26 to 0.33, this is {version}; nothing is registered"
    ]
    assert not plugin._registered


@pytest.mark.parametrize("version", ["0.26.0", "0.30.1.post1", "0.33.1.dev7+g0123abc"])
def test_versions_from_the_first_to_the_last_are_served(plugin: Any, version: str) -> None:
    assert plugin.is_served(version)


def test_custom_of_another_plugin_stays_theirs_and_the_log_names_both(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    monkeypatch.setenv("ATTN_VLLM_BACKEND", "TRITON_ATTN")
    monkeypatch.setenv("ATTN_VLLM_OVERRIDE", "TRITON_ATTN")
    register_backend(AttentionBackendEnum.CUSTOM, theirs)
    try:
        with logged(caplog) as lines:
            plugin.register()
        assert AttentionBackendEnum.CUSTOM.get_path() == theirs
        assert AttentionBackendEnum.TRITON_ATTN.is_overridden()
        warning, said = lines()
        assert theirs in warning
        assert members.path_of("CUSTOM", "TRITON_ATTN") in warning
        assert "VLLM_PLUGINS" in warning
        assert said == "attn-backends: CUSTOM is not ours; replaced by ours: TRITON_ATTN"
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()


def test_custom_that_another_plugin_took_later_is_left_to_it(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ATTN_VLLM_BACKEND", "TRITON_ATTN")
    plugin.register()
    register_backend(AttentionBackendEnum.CUSTOM, "another.Backend")
    try:
        with logged(caplog) as lines:
            plugin.register()
        assert "another.Backend" in lines()[0]
        assert AttentionBackendEnum.CUSTOM.get_path() == "another.Backend"
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()


def test_a_member_that_is_asked_for_is_ours_and_the_log_says_whose_it_was(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    register_backend(AttentionBackendEnum.TRITON_ATTN, "another.Backend")
    monkeypatch.setenv("ATTN_VLLM_OVERRIDE", "TRITON_ATTN")
    with logged(caplog) as lines:
        plugin.register()
    assert AttentionBackendEnum.TRITON_ATTN.get_class().__module__ == members.__name__
    assert "another.Backend" in lines()[0]
    assert "TRITON_ATTN" in lines()[0]


def test_ray_workers_get_our_variables(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.ray.ray_env import get_env_vars_to_copy

    asked = {"ATTN_VLLM_BACKEND": "TRITON_ATTN", "ATTN_VLLM_DECODE_KERNEL": "triton"}
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    assert not asked.keys() & get_env_vars_to_copy()
    monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "MINE")
    plugin.register()
    plugin.register()
    assert {"MINE", *asked} <= get_env_vars_to_copy()
    assert os.environ["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"].count("ATTN_VLLM_BACKEND") == 1
    assert "ATTN_VLLM_OVERRIDE" not in get_env_vars_to_copy()


@pytest.mark.parametrize("named", ["", "TRITON_ATTN,SPARSE_MLA"])
@pytest.mark.parametrize("is_cuda", [True, False])
def test_registering_imports_no_kernel_and_no_backend_of_vllms(
    fresh: FreshProcesses, named: str, is_cuda: bool
) -> None:
    code = (
        "import sys, vllm, vllm.platforms.interface as p;"
        f"p.Platform.is_cuda = lambda platform: {is_cuda};"
        f"p.Platform.get_device_capability = lambda *_: p.DeviceCapability(9, 0) if {is_cuda} "
        "else None;"
        "before = set(sys.modules);"
        "from attn.integrations.vllm.plugin import register; register();"
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum as E;"
        "print(E.CUSTOM.get_path()); print(*(set(sys.modules) - before))"
    )
    named = named if is_cuda else named.partition(",")[0]
    *_, path, modules = fresh.run(code, ATTN_VLLM_BACKEND=named).splitlines()
    assert path.endswith("router.CUSTOM") == is_cuda
    found = set(modules.split())
    assert "attn.integrations.vllm.plugin" in found
    heavy = ("attn.kernels", "attn.integrations.vllm.adapter", "flashinfer", "triton.language")
    assert [name for name in found if name.startswith(heavy)] == []
    assert [name for name in found if name.startswith("vllm.model_executor")] == []


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("is_custom", [True, False])
def test_classes_are_vllms_and_ours_and_stand_where_their_path_says(
    name: str, is_custom: bool
) -> None:
    member = "CUSTOM" if is_custom else name
    path = members.path_of(member, name)
    module, _, attribute = path.rpartition(".")
    cls = getattr(importlib.import_module(module), attribute)
    assert cls is getattr(importlib.import_module(module), attribute)
    assert cls.full_cls_name() == (module, attribute)
    assert cls.get_name() == member
    ours = OurEnum[name].get_class()
    for mine, base, method in (
        (cls, AttentionBackend, None),
        (cls.get_impl_cls(), AttentionImpl, ours.get_impl_cls()),
        (cls.get_builder_cls(), AttentionMetadataBuilder, ours.get_builder_cls()),
    ):
        assert issubclass(mine, base)
        assert issubclass(mine, method or ours)
        assert mine.__module__ == module
        assert not getattr(mine, "__abstractmethods__", None)
    assert pickle.loads(pickle.dumps(cls)) is cls


def test_names_that_are_no_backends_are_no_attributes() -> None:
    for name in ("NONE_SUCH", "CUSTOM_NONE_SUCH", "custom"):
        with pytest.raises(AttributeError, match=name):
            getattr(members, name)
    with pytest.raises(ValueError, match="sparse"):
        _ = members.TORCH_REF_SPARSE_MLA


def test_vllm_takes_the_settings_of_the_example(plugin: Any) -> None:
    names = runpy.run_path(str(EXAMPLE))
    arguments = EngineArgs(model=names["MODEL"], **names["ENGINE"])
    assert str(arguments.attention_backend) == "CUSTOM" == names["ENGINE"]["attention_backend"]
    assert SamplingParams(**names["SAMPLING"]).max_tokens == 64
    plugin.register()
    assert AttentionBackendEnum[names["ENGINE"]["attention_backend"]].is_overridden()
