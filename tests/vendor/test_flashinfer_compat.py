"""A missing, broken or other FlashInfer makes FLASHINFER unavailable, and nothing else."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from attn.errors import UnsupportedError
from attn.registry import AttentionBackendEnum
from attn.selector import Verdict, explain, refusals, select
from builders.vendor.flashinfer_parts import install as compat
from specs.attention import AttentionSelectorConfig
from specs.devices import KNOWN_DEVICES
from specs.dtypes import CacheDType, DType

H200 = KNOWN_DEVICES["h200"]
ASKED = AttentionSelectorConfig(head_size=128, dtype=DType.BFLOAT16)


@pytest.fixture(autouse=True)
def loads_anew() -> Iterator[None]:
    compat.load.cache_clear()
    yield
    compat.load.cache_clear()


class _Finder:
    """Imports of FlashInfer give what a test says."""

    def __init__(self, modules: dict[str, ModuleType | Exception]) -> None:
        self.modules = modules

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] != "flashinfer":
            return None
        if name not in self.modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return importlib.machinery.ModuleSpec(name, self, is_package=name == "flashinfer")

    def create_module(self, spec: Any) -> ModuleType | None:
        module = self.modules[spec.name]
        return module if isinstance(module, ModuleType) else None

    def exec_module(self, module: ModuleType) -> None:
        error = self.modules[module.__spec__.name if module.__spec__ else ""]
        if isinstance(error, Exception):
            raise error


def module(name: str, **contents: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(contents)
    return made


GOOD = {
    "flashinfer.prefill": module(
        "flashinfer.prefill", BatchPrefillWithPagedKVCacheWrapper="prefill"
    ),
    "flashinfer.decode": module("flashinfer.decode", BatchDecodeWithPagedKVCacheWrapper="decode"),
}


def install(monkeypatch: pytest.MonkeyPatch, **modules: ModuleType | Exception) -> None:
    given = {
        f"flashinfer.{name}" if name != "flashinfer" else name: modules[name] for name in modules
    }
    for name in [name for name in sys.modules if name.split(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Finder(given), *sys.meta_path])


def version(text: str) -> ModuleType:
    return module("flashinfer", __version__=text, __path__=[])


@pytest.mark.parametrize("text", ["0.6.14", "0.6.18", "0.7.2.post1", "0.7.9"])
def test_known_versions_are_loaded(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    install(
        monkeypatch,
        flashinfer=version(text),
        prefill=GOOD["flashinfer.prefill"],
        decode=GOOD["flashinfer.decode"],
    )
    found = compat.load()
    assert (found.version, found.prefill_cls, found.decode_cls) == (text, "prefill", "decode")


@pytest.mark.parametrize("has", [False, True])
def test_ragged_verifies_are_known_by_the_functions_own_signature(
    monkeypatch: pytest.MonkeyPatch, has: bool
) -> None:
    names = ("trtllm_batch_decode_with_kv_cache", "xqa_batch_decode_with_kv_cache")
    given: dict[str, Any] = dict.fromkeys(names, lambda query: None)
    if has:
        given[names[1]] = lambda query, q_cu_seq_lens=None: None
    of_prefill = ("trtllm_batch_context_with_kv_cache", "trtllm_fmha_v2_prefill")
    install(
        monkeypatch,
        flashinfer=version("0.7.1"),
        prefill=module("flashinfer.prefill", **dict.fromkeys(of_prefill, print)),
        decode=module("flashinfer.decode", **given),
    )
    compat.load_calls.cache_clear()
    found = compat.load_calls()
    compat.load_calls.cache_clear()
    assert found.verifies_ragged == has
    assert found.ragged_xqa_function is (given[names[1]] if has else None)
    assert found.verifies_windows


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ({}, "flashinfer is not installed: pip install flashinfer-python"),
        ({"flashinfer": version("0.6.13")}, "flashinfer 0.6.13 is installed; at least 0.6.14"),
        ({"flashinfer": version("0.8.0")}, "0.8.0 is installed; .* below 0.8.0 is needed"),
        ({"flashinfer": version("main")}, "flashinfer main is installed"),
        ({"flashinfer": AssertionError("no CUDA")}, "cannot be imported: AssertionError: no CUDA"),
        ({"flashinfer": OSError("libcudart")}, "cannot be imported: OSError: libcudart"),
        (
            {"flashinfer": ModuleNotFoundError("No module named 'tvm_ffi'", name="tvm_ffi")},
            "cannot be imported: No module named 'tvm_ffi'",
        ),
    ],
)
def test_what_cannot_be_used_is_said(
    monkeypatch: pytest.MonkeyPatch, modules: dict[str, Any], reason: str
) -> None:
    good = {"prefill": GOOD["flashinfer.prefill"], "decode": GOOD["flashinfer.decode"]}
    install(monkeypatch, **({**good, **modules} if modules else {}))
    with pytest.raises(compat.FlashInferUnavailableError, match=reason):
        compat.load()


def test_a_version_without_the_wrappers_is_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = {name: module(f"flashinfer.{name}") for name in ("prefill", "decode")}
    install(monkeypatch, flashinfer=version("0.7.2"), **empty)
    with pytest.raises(compat.FlashInferUnavailableError, match=r"0\.7\.2 is incomplete"):
        compat.load()


def test_without_a_gpu_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    install(monkeypatch, flashinfer=AssertionError("imported"))
    assert compat.unavailable_reason() is None


def test_the_selector_gives_the_reason_and_everything_else_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    broken = {"prefill": GOOD["flashinfer.prefill"], "decode": GOOD["flashinfer.decode"]}
    install(monkeypatch, flashinfer=AssertionError("no CUDA"), **broken)
    assert refusals(AttentionBackendEnum["FLASHINFER"], ASKED, H200) == []
    with pytest.raises(UnsupportedError, match="cannot be imported: AssertionError: no CUDA"):
        select(ASKED, H200, "FLASHINFER")
    assert select(ASKED, H200).get_name() == "TRITON_ATTN"
    verdicts = {item.name: item for item in explain(ASKED, H200).candidates}
    assert verdicts["FLASHINFER"].verdict is Verdict.NOT_ASKED


def test_a_missing_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compat.shutil, "which", lambda name: None)
    monkeypatch.setattr(compat, "DEFAULT_CUDA", tmp_path)
    monkeypatch.setattr(compat.importlib.util, "find_spec", lambda name: None)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    install(
        monkeypatch,
        flashinfer=version("0.7.2"),
        **{"prefill": GOOD["flashinfer.prefill"], "decode": GOOD["flashinfer.decode"]},
    )
    reason = compat.unavailable_reason()
    assert reason is not None
    assert "nvcc" in reason
    assert "flashinfer-jit-cache" in reason
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert compat.unavailable_reason() is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_size": 96}, "head_size 96: 64, 128, 256"),
        ({"kv_cache_dtype": CacheDType.FLOAT16}, "kv_cache_dtype must be the model's dtype"),
        ({"use_mla": True}, "MLA not supported"),
        ({"has_sink": True}, "attention sinks not supported"),
        ({"use_adaptive_verification": True}, "device-cpu query lens mismatch not supported"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"block_size": 8}, "block_size 8: any multiple of 16"),
    ],
)
def test_what_the_wrappers_do_not_serve_is_refused(changes: dict[str, Any], reason: str) -> None:
    if AttentionBackendEnum["FLASHINFER"].missing():
        pytest.skip("flashinfer is not installed")
    found = refusals(AttentionBackendEnum["FLASHINFER"], ASKED.replace(**changes), H200)
    assert any(reason in one for one in found)


def test_the_triple_is_imported_without_flashinfer() -> None:
    code = (
        "import sys; sys.modules['flashinfer'] = None\n"
        "import attn.backends.flashinfer as triple\n"
        "print(triple.FlashInferBackend.get_builder_cls().__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "FlashInferMetadataBuilder"
