"""The installed FlashInfer's own functions, down to where they launch.

Their checks of arguments pass for every call of TRTLLM_MHA, and kernels get the prepared tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn.impls.base import LayerScales
from attn.impls.vendor.trtllm_mha import TrtllmMhaImpl
from builders.batch import CommonAttentionMetadata
from builders.vendor.flashinfer_parts import calls as flashinfer_calls
from builders.vendor.flashinfer_parts import install as compat
from builders.vendor.trtllm_mha import TrtllmMhaMetadataBuilder
from builders.vendor.trtllm_parts import mha_buffers
from builders.vendor.trtllm_parts import mha_choice as trtllm_mha_choice
from specs.devices import KNOWN_DEVICES, Device
from specs.dtypes import CacheDType, DType
from specs.engine import EngineConfig, SpeculativeConfig
from specs.kv_cache import FullAttentionSpec, SlidingWindowSpec
from specs.layouts import KVPacking
from tests.emulators.flashinfer_signatures import installed_version

H200, B200 = KNOWN_DEVICES["h200"], KNOWN_DEVICES["b200"]
# Bytes at the start of XQA's workspace, and some bytes after them.
WORKSPACE_BYTES = 9 << 20
SPEC = FullAttentionSpec(block_size=16, dtype=DType.BFLOAT16, num_kv_heads=2, head_size=64)
CONFIG = EngineConfig(
    max_model_len=512,
    max_num_seqs=8,
    max_num_batched_tokens=128,
    num_heads=8,
    speculative=SpeculativeConfig(num_speculative_tokens=3),
)

pytestmark = [
    pytest.mark.skipif(installed_version() is None, reason="FlashInfer is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="pretends to a GPU"),
]


class Launches:
    """Stands in for the compiled modules, and keeps the arguments of calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.modules: list[tuple[Any, ...]] = []

    def module(self, *key: Any) -> Any:
        self.modules.append(key)
        return self

    def __getattr__(self, name: str) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.calls.append((name, (*args, *kwargs.values())))

        return launch

    def tensors(self) -> set[int]:
        """Addresses of the arguments of the one launch."""
        ((_, args),) = self.calls
        return {arg.data_ptr() for arg in args if isinstance(arg, torch.Tensor)}


@contextmanager
def installed(device: Device) -> Iterator[Launches]:
    """Let FlashInfer's functions believe in a GPU, and launch nothing."""
    capability = device.compute_capability
    assert capability is not None
    launches = Launches()
    facts = {
        "get_compute_capability": lambda *_: (capability.major, capability.minor),
        "get_device_sm_count": lambda *_: device.num_multiprocessors,
        "device_support_pdl": lambda *_: True,
        "is_sm12x_supported": lambda *_: capability.major == 12,
        "is_sm90a_supported": lambda *_: capability.major == 9,
        "get_trtllm_gen_fmha_module": launches.module,
        "get_trtllm_fmha_v2_module": launches.module,
        "get_xqa_module": launches.module,
    }
    properties = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
        compat.load_calls.cache_clear()
        compat.load_calls()
        for name in ("flashinfer.decode", "flashinfer.prefill", "flashinfer.xqa"):
            module = sys.modules[name]
            for fact, value in facts.items():
                if hasattr(module, fact):
                    patch.setattr(module, fact, value)
        patch.setattr(mha_buffers, "WORKSPACE_BYTES", WORKSPACE_BYTES)
        patch.setattr(trtllm_mha_choice, "capability_of", lambda _: capability)
        try:
            yield launches
        finally:
            compat.load_calls.cache_clear()


def attend(
    lens: list[int],
    cache_dtype: CacheDType = CacheDType.AUTO,
    window: int | None = None,
    sinks: bool = False,
    lse: bool = False,
) -> tuple[Any, torch.Tensor]:
    """Run one forward; returns the step's record and its output."""
    spec: Any = SPEC.replace(cache_dtype=cache_dtype)
    if window is not None:
        fields = spec.model_dump(exclude={"kind", "dcp_sharded"})
        spec = SlidingWindowSpec(**fields, sliding_window=window)
    seq_lens = [40 + length for length in lens]
    table = 1 + torch.arange(len(lens) * 8, dtype=torch.int32).view(-1, 8)
    batch = CommonAttentionMetadata.from_lengths(lens, seq_lens, table, 16)
    record = TrtllmMhaMetadataBuilder(spec, ["layers.0"], CONFIG, "cpu").build(0, batch)
    given = {"sinks": torch.zeros(8)} if sinks else {}
    impl = TrtllmMhaImpl(8, 64, 0.125, 2, None, window, cache_dtype.value, **given)
    query = torch.zeros(sum(lens), 8, 64, dtype=torch.bfloat16)
    output = torch.zeros_like(query)
    cache = spec.layout(KVPacking.SPLIT).allocate(80)
    log_sums = torch.zeros(sum(lens), 8) if lse else None
    scales = LayerScales.of()
    impl.forward(scales, query, None, None, cache, record, output, output_lse=log_sums)
    return record, output


def is_old() -> bool:
    return flashinfer_calls.numbers_of(str(installed_version())) < flashinfer_calls.RECENT


CALLS = [
    ("xqa", H200, [1, 1], {}),
    ("xqa", H200, [1, 1], {"cache_dtype": CacheDType.FP8}),
    ("xqa", H200, [1, 1], {"window": 20}),
    ("xqa", H200, [1, 1], {"sinks": True}),
    ("xqa", H200, [4, 4], {}),
    ("fmha_v2", H200, [30, 9], {}),
    ("fmha_v2", H200, [30, 9], {"window": 20}),
    ("fmha_v2", H200, [30, 9], {"sinks": True}),
    ("fmha_v2", H200, [30, 9], {"cache_dtype": CacheDType.FP8}),
    ("gen_decode", B200, [1, 1], {}),
    ("gen_decode", B200, [4, 4], {"cache_dtype": CacheDType.FP8}),
    ("gen_decode", B200, [1, 4, 2], {"lse": True}),
    ("gen_decode", B200, [1, 1], {"sinks": True, "window": 20}),
    ("gen_prefill", B200, [30, 9], {"lse": True}),
    ("gen_prefill", B200, [30, 9], {"cache_dtype": CacheDType.FP8, "window": 20}),
]
LAUNCHED = {
    "xqa": "xqa",
    "fmha_v2": "run",
    "gen_decode": "trtllm_paged_attention_decode",
    "gen_prefill": "trtllm_paged_attention_context",
}


@pytest.mark.parametrize(
    ("kernel", "device", "lens", "given"),
    CALLS,
    ids=[f"{row[0]}-{row[2]}-{'-'.join(row[3])}" for row in CALLS],
)
def test_every_call_passes_flashinfer_s_own_checks(
    kernel: str, device: Device, lens: list[int], given: dict[str, Any]
) -> None:
    if device is H200 and given.get("cache_dtype") is CacheDType.FP8 and is_old():
        with installed(device), pytest.raises(ValueError, match="install flashinfer-python"):
            attend(lens, **given)
        return
    with installed(device) as launches:
        record, output = attend(lens, **given)
    assert [name for name, _ in launches.calls] == [LAUNCHED[kernel]]
    part = record.decode or record.prefill
    expected = {output.data_ptr(), part.pages.data_ptr(), part.kv_lens.data_ptr()}
    assert expected <= launches.tensors()


@pytest.mark.parametrize(
    ("device", "lens", "changes"),
    [
        (B200, [1, 1], {"out": lambda out: out.float()}),
        (B200, [1, 1], {"out": lambda out: out[:1]}),
        (B200, [1, 1], {"block_tables": lambda tables: tables[None, None]}),
        (H200, [4, 4], {"mask": lambda _: None}),
        (H200, [1, 1], {"out": lambda out: out.half()}),
    ],
)
def test_its_checks_are_run(device: Device, lens: list[int], changes: dict[str, Any]) -> None:
    """A call that FlashInfer itself refuses is refused here, before any launch."""
    with installed(device) as launches:
        calls = compat.load_calls()
        names = ("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len")

        def changed(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | kwargs
            for name, change in changes.items():
                given[name] = change(given[name])
            return calls.decode_function(**given)

        other = compat.DirectCalls(
            calls.version, changed, calls.context_function, calls.fmha_v2_function
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compat, "load_calls", lambda: other)
            with pytest.raises((ValueError, AssertionError, RuntimeError)):
                attend(lens)
        assert launches.calls == []


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU: FlashInfer asks some tensors."""

    is_cuda = property(lambda _: True)  # type: ignore[assignment]


def test_ragged_verifies_pass_its_checks_too() -> None:
    with installed(H200) as launches:
        calls = compat.load_calls()
        if not calls.verifies_ragged:
            pytest.skip(f"flashinfer {calls.version} has none")
        ragged = calls.ragged_xqa_function

        def asked(*args: Any, q_cu_seq_lens: torch.Tensor, **kwargs: Any) -> Any:
            starts = q_cu_seq_lens.as_subclass(OnGpu)
            return ragged(*args, q_cu_seq_lens=starts, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compat, "load_calls", lambda: replace(calls, ragged_xqa_function=asked))
            record, output = attend([1, 4, 2])
    part = record.decode
    assert [name for name, _ in launches.calls] == ["xqa"]
    # One module serves every ragged batch: it is compiled for the longest verify.
    assert launches.modules[0][-2:] == (4, True)
    tensors = {output.data_ptr(), part.pages.data_ptr(), part.mask.data_ptr()}
    assert tensors | {part.query_starts.data_ptr()} <= launches.tensors()
