"""A backend of another package inside vLLM: by name, by rank, and when its package is broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from attn.integrations.vllm import members
from tests.tools.packages import backend_module, install, row_module, unread


def test_the_plugin_takes_it_by_name_and_by_rank(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = backend_module("OUTER").replace("'cpu': 1", "'sm90': 1")
    install(tmp_path, "outer-attn", {"OUTER": "outer:ROW"}, {"outer.py": source})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ATTN_VLLM_BACKEND", "outer")
    with unread(tmp_path):
        plugin.register()
        custom = AttentionBackendEnum.CUSTOM
        assert custom.get_path() == members.path_of("CUSTOM", "OUTER")
        assert custom.get_class().get_name() == "CUSTOM"
        assert custom.get_class().get_impl_cls() is not None


def test_the_best_ranked_one_that_imports_is_custom(
    plugin: Any, cuda: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = backend_module("OUTER").replace("'cpu': 1", "'sm90': 1")
    install(tmp_path, "outer-attn", {"OUTER": "outer:ROW"}, {"outer.py": source})
    gone = row_module("A_GONE", "a_gone.missing:Backend", ranks={"sm90": 1})
    install(tmp_path, "gone-attn", {"A_GONE": "a_gone:ROW"}, {"a_gone.py": gone})
    monkeypatch.syspath_prepend(tmp_path)
    with unread(tmp_path):
        for capability, expected in (((9, 0), "OUTER"), ((10, 0), "TRITON_ATTN")):
            cuda(*capability)
            plugin.register()
            where = AttentionBackendEnum.CUSTOM.get_class().full_cls_name()
            assert ".".join(where) == members.path_of("CUSTOM", expected)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({}, "ATTN_VLLM_BACKEND=BROKEN: package broken-attn 1.0, backend BROKEN: cannot be imp"),
        (
            {"broken.py": row_module("BROKEN", "broken.missing:Backend")},
            r"ATTN_VLLM_BACKEND=BROKEN cannot be imported \(package broken-attn 1.0\): No module",
        ),
    ],
)
def test_a_broken_one_is_refused_by_name_and_else_in_nobodys_way(
    plugin: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    modules: dict[str, str],
    message: str,
) -> None:
    install(tmp_path, "broken-attn", {"BROKEN": "broken:ROW"}, modules)
    monkeypatch.syspath_prepend(tmp_path)
    with unread(tmp_path):
        plugin.register()
        assert AttentionBackendEnum.CUSTOM.is_overridden()
        monkeypatch.setenv("ATTN_VLLM_BACKEND", "BROKEN")
        with pytest.raises(ValueError, match=message):
            plugin.register()
