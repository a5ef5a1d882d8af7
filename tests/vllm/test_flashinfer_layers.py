"""vLLM's own layers over our backends that call FlashInfer, whose calls are emulated.

Only trtllm-gen takes vLLM's caches for TRTLLM_MHA: the kernels for other GPUs need K and V apart.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import Attention, mla_attention
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import get_attn_backend

from attn.integrations.vllm import members
from attn.registry import AttentionBackendEnum as OurEnum
from builders.vendor.flashinfer_parts import install as flashinfer_compat
from specs.devices import KNOWN_DEVICES
from tests.emulators import flashinfer_emulator, flashinfer_mla_emulator, trtllm_emulator
from tests.vllm import runner as small
from tests.vllm import test_latent as latent
from tests.vllm.runner import HEADS, Runner, Tokens, expected, plain_rules
from tests.vllm.test_layers import MIX, assert_is_ours

SIZE = 64
SINKS = torch.linspace(-1, 2, HEADS)

Emulated = Callable[[], AbstractContextManager[Any]]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let FlashInfer seem installed and usable."""
    for name in ("FLASHINFER", "TRTLLM_MHA", "FLASHINFER_MLA", "TRTLLM_MLA"):
        monkeypatch.setattr(OurEnum[name], "missing", list)
    monkeypatch.setattr(flashinfer_compat, "unavailable_reason", lambda *_: None)


@pytest.fixture
def sized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the runners' layers sizes for which FlashInfer has kernels."""
    monkeypatch.setattr(small, "HEAD_SIZE", SIZE)
    monkeypatch.setattr(small, "SCALE", SIZE**-0.5)
    monkeypatch.setattr(latent, "RANK", 128)
    monkeypatch.setattr(latent, "ROPE", 64)
    monkeypatch.setattr(latent, "SCALE", (latent.NOPE + 64) ** -0.5)


WRAPPERS: dict[str, Emulated] = {
    version: partial(flashinfer_emulator.emulated, version)
    for version in flashinfer_emulator.VERSIONS
}
BLACKWELL: dict[str, Emulated] = {
    version: partial(trtllm_emulator.emulated, KNOWN_DEVICES["b200"], version)
    for version in trtllm_emulator.VERSIONS
}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}, {}),
    "window": ({"per_layer_sliding_window": 20}, {"sliding_window": 20}, {}),
    "soft cap": ({"logits_soft_cap": 2.0}, {"logits_soft_cap": 2.0}, {}),
    "sinks": ({"sinks": SINKS}, {"sinks": SINKS}, {}),
    "fp8": ({}, {}, {"cache_dtype": "fp8"}),
}
"""Kinds of layers: arguments, rules, and settings of the engine."""
CASES = [
    *(("FLASHINFER", version, kind) for version in WRAPPERS for kind in KINDS if kind != "sinks"),
    *(
        ("TRTLLM_MHA", version, kind)
        for version in BLACKWELL
        for kind in KINDS
        if "cap" not in kind
    ),
]


@pytest.mark.parametrize(("name", "version", "kind"), CASES)
def test_a_dense_layer_computes_attention(
    installed: None,
    sized: None,
    plugin: Any,
    cuda: Callable[..., None],
    make_config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    version: str,
    kind: str,
) -> None:
    extras, rules, settings = KINDS[kind]
    cuda(10 if name == "TRTLLM_MHA" else 9, 0)
    monkeypatch.setenv("ATTN_VLLM_BACKEND", name)
    plugin.register()
    emulated = BLACKWELL if name == "TRTLLM_MHA" else WRAPPERS
    with emulated[version]():
        runner = Runner(
            make_config(dtype="bfloat16", **settings),
            lambda config: small_layer(config, **extras),
        )
        assert_is_ours(runner)
        assert f"{name} as CUSTOM" in runner.builder.label
        tokens = Tokens.random(MIX[1], runner.dtype)
        before = [seq - new for new, seq in zip(*MIX, strict=True)]
        runner.step(tokens, before, before)
        output = runner.step(tokens, *MIX)
    stored = settings.get("cache_dtype", "auto")
    exact = plain_rules(scale=SIZE**-0.5, **rules)
    expected(tokens, *MIX, exact, cache_dtype=stored).assert_is(output)


def small_layer(config: Any, **extras: Any) -> Any:
    return Attention(
        HEADS,
        SIZE,
        SIZE**-0.5,
        num_kv_heads=small.KV_HEADS,
        cache_config=config.cache_config,
        prefix=small.NAME,
        **extras,
    )


@pytest.mark.parametrize("version", flashinfer_mla_emulator.VERSIONS)
def test_a_latent_layer_computes_attention(
    installed: None,
    sized: None,
    plugin: Any,
    cuda: Callable[..., None],
    make_config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    version: str,
) -> None:
    cuda()
    monkeypatch.setenv("ATTN_VLLM_OVERRIDE", "FLASHINFER_MLA")
    plugin.register()
    monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", lambda _: latent.NoPrefill)
    config = make_config(dtype="float16", backend="FLASHINFER_MLA")
    with flashinfer_mla_emulator.emulated(version):
        runner = latent.LatentRunner(config, latent.make_layer)
        assert type(runner.layer.impl).__module__ == members.__name__
        assert "FLASHINFER_MLA as FLASHINFER_MLA" in runner.builder.label
        requests, table = latent.whole_requests((20, 7), runner.dtype), runner.table
        for rows, query_lens, seq_lens in (
            ([0, 1], [13, 6], [13, 6]),
            ([1, 0], [1, 7], [7, 20]),
        ):
            runner.table = table[rows]
            chosen = [requests[row] for row in rows]
            output = runner.step(latent.tokens_of(chosen), query_lens, seq_lens)
            latent.expected_rows(chosen, query_lens, seq_lens, "auto").assert_is(output)


def asked(**changes: Any) -> dict[str, Any]:
    return {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", **changes}


@pytest.mark.parametrize("capability", [(9, 0), (12, 0)])
def test_kernels_that_want_k_and_v_apart_are_refused_before_there_are_weights(
    installed: None,
    plugin: Any,
    cuda: Callable[..., None],
    make_config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
) -> None:
    cuda(*capability)
    monkeypatch.setenv("ATTN_VLLM_BACKEND", "TRTLLM_MHA")
    plugin.register()
    with (
        set_current_vllm_config(make_config()),
        pytest.raises(ValueError, match="KV cache must be split for prefill by fmha_v2"),
    ):
        get_attn_backend(**asked())


@pytest.mark.parametrize("name", ["FLASHINFER", "FLASHINFER_MLA"])
def test_plans_of_the_host_are_refused_to_speculation_ahead_of_it(
    installed: None, cuda: Callable[..., None], make_config: Callable[..., Any], name: str
) -> None:
    cuda()
    config = make_config()
    config.scheduler_config.async_scheduling = True
    wanted = {
        **asked(head_size=576 if "MLA" in name else 128),
        "block_size": None,
        "use_mla": "MLA" in name,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "attn_type": "decoder",
        "device_capability": DeviceCapability(9, 0),
    }
    backend = getattr(members, name)
    with set_current_vllm_config(config):
        assert backend.validate_configuration(**wanted) == []
        config.speculative_config = type("Drafts", (), {"num_speculative_tokens": 3})()
        (reason,) = backend.validate_configuration(**wanted)
    assert reason.startswith("asynchronous scheduling of drafts not supported")


def test_a_package_that_cannot_be_used_is_a_reason(
    plugin: Any,
    cuda: Callable[..., None],
    make_config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda()
    monkeypatch.setattr(OurEnum["FLASHINFER"], "missing", list)
    monkeypatch.setattr(flashinfer_compat, "unavailable_reason", lambda *_: "no nvcc")
    monkeypatch.setenv("ATTN_VLLM_BACKEND", "FLASHINFER")
    plugin.register()
    with (
        set_current_vllm_config(make_config()),
        pytest.raises(ValueError, match="no nvcc"),
    ):
        get_attn_backend(**asked())


@pytest.mark.parametrize("name", ["TRTLLM_MHA", "TRTLLM_MLA", "SPARSE_MLA"])
def test_what_vllm_has_no_name_for_replaces_nothing(
    installed: None, plugin: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert name not in AttentionBackendEnum.__members__
    monkeypatch.setenv("ATTN_VLLM_OVERRIDE", name)
    with pytest.raises(ValueError, match=f"must name members of vLLM's, got '{name}'"):
        plugin.register()
