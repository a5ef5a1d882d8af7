"""The entry point: what it registers, how often, and what it says to wrong names."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from attn.integrations.vllm import members
from attn.registry import AttentionBackendEnum as OurEnum

DENSE = ("TORCH_REF", "TRITON_ATTN")


def test_vllm_finds_the_entry_point() -> None:
    entries = importlib.metadata.entry_points(group="vllm.general_plugins")
    (entry,) = [entry for entry in entries if entry.name == "attn_backends"]
    assert entry.value == "attn.integrations.vllm.plugin:register"
    assert callable(entry.load())


def test_loading_vllms_plugins_registers_custom() -> None:
    code = (
        "from vllm.plugins import load_general_plugins as load; load(); load();"
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum as E;"
        "print(E.CUSTOM.get_path(), E.CUSTOM.get_class().get_name(), E.TRITON_ATTN.get_path())"
    )
    environment = {**os.environ, "ATTN_VLLM_BACKEND": "TRITON_ATTN"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    path, name, other = done.stdout.split()[-3:]
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
        ((8, 0), "TRITON_ATTN"),
        ((9, 0), "TRITON_ATTN"),
        ((10, 0), "TRITON_ATTN"),
        ((7, 5), "TORCH_REF"),
        (None, "TORCH_REF"),
    ],
)
def test_the_device_decides_what_custom_is(
    plugin: Any, cuda: Any, capability: tuple[int, int] | None, expected: str
) -> None:
    if capability is None:
        import vllm.platforms
        from vllm.platforms.interface import UnspecifiedPlatform

        vllm.platforms._current_platform = UnspecifiedPlatform()
    else:
        cuda(*capability)
    plugin.register()
    assert AttentionBackendEnum.CUSTOM.get_path() == members.path_of("CUSTOM", expected)


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
        ("ATTN_VLLM_BACKEND", "TORCH_REF_MLA", ["ATTN_VLLM_BACKEND", "dense", "TORCH_REF_MLA"]),
        ("ATTN_VLLM_OVERRIDE", "TRITON_ATTN,NONE_SUCH", ["ATTN_VLLM_OVERRIDE", "NONE_SUCH"]),
        ("ATTN_VLLM_OVERRIDE", "FLEX_ATTENTION", ["FLEX_ATTENTION", "TORCH_REF"]),
    ],
)
def test_wrong_names_are_refused_with_the_right_ones(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: list[str]
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=words[0]) as caught:
        plugin.register()
    assert all(word in str(caught.value) for word in words)
    assert not plugin._registered


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
