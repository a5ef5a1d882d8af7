"""Calls of vendors' kernels of sparse latent attention, over emulated packages.

Numbers are right through builder and impl, the kernels' documented contracts hold, and every wrong
call is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attn.testing.budget import budget, lse_budget, lse_errors, row_errors
from builders.sparse import choice as sparse_choice
from builders.sparse import choice as sparse_mla_choice
from builders.sparse import vendor_calls as sparse_calls
from builders.sparse.vendor_calls import SparseKernelUnavailableError
from specs.devices import KNOWN_DEVICES
from specs.rows import LatentFormat
from specs.sparse_mla import STORED_FORMATS, SparseKernel
from tests.emulators import sparse_calls_emulator as packages
from tests.emulators.flashinfer_mla_emulator import NEW, OLD
from tests.emulators.sparse_calls_emulator import CACHED, PREFILL, VARLEN, ContractError, emulated
from tests.sparse.test_sparse_mla import H, Step, impl_of, scales_of, works
from tests.tools.interpreter import in_torch

BF16, RAW, SCALED = STORED_FORMATS
K = SparseKernel
KERNELS: list[tuple[SparseKernel, LatentFormat, str]] = [
    (K.FLASHMLA_SPARSE, BF16, "h200"),
    (K.FLASHMLA_SPARSE, SCALED, "h200"),
    (K.FLASHMLA_SPARSE, BF16, "b200"),
    (K.FLASHMLA_KV, SCALED, "h200"),
    (K.FLASHMLA_KV, RAW, "h200"),
    (K.FLASHMLA_KV, RAW, "b200"),
    (K.FLASHMLA_KV, BF16, "h200"),
    (K.FA3, BF16, "h200"),
    (K.FLASHINFER_MLA, RAW, "h200"),
    (K.TRTLLM, BF16, "b200"),
    (K.TRTLLM, RAW, "b200"),
]
"""Vendors' kernels, each with rows that it reads and a GPU that it runs on."""
IDS = [f"{kernel.value}-{layout.value}-{device}" for kernel, layout, device in KERNELS]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library's own kernels are replaced by torch, since tests of their own judge them."""
    monkeypatch.setattr(sparse_mla_choice, "unavailable_kernels", dict)
    with in_torch():
        yield


def pair_of(kernel: SparseKernel, layout: LatentFormat) -> tuple[SparseKernel, SparseKernel]:
    """A kernel for both phases; the library's own kernel decodes where the kernel takes no such
    rows.
    """
    only_prefill = kernel is K.FLASHMLA_SPARSE and layout is not BF16
    return kernel, K.TRITON_SPARSE if only_prefill else kernel


def fill_lists(step: Step, every: int) -> None:
    """Lists without gaps for every so-many-th token that sees enough keys."""
    topk = step.lists.shape[1]
    for _, row, visible in step.each_row():
        if row % every == 0 and visible >= topk:
            step.lists[row] = torch.arange(topk).int() * 7 % visible


def errors_of(
    kernel: SparseKernel, layout: LatentFormat, device: str, name: str, **emulator: Any
) -> tuple[float, float]:
    """Errors of the kernel's output and LSE in a step, in units of what is allowed."""
    found = KNOWN_DEVICES[device]
    with emulated(found, **emulator), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_choice, "capability_of", lambda _: found.compute_capability)
        step = Step(name, layout)
        fill_lists(step, 2)
        impl, scales = impl_of(layout, step.lists), scales_of()
        scales._q_scale = torch.tensor(0.5)
        step.write_context(impl, scales)
        if kernel is K.TRTLLM and layout is RAW:
            # The type that the query will have.
            codes = (step.query.float() / 0.5).clamp(-448, 448).to(torch.float8_e4m3fn)
            step.query = (codes.float() * 0.5).bfloat16()
        builder = works(step, *pair_of(kernel, layout))
        assert builder is not None
        record = builder.build(0, step.batch)
        out, lse = impl.forward_mqa(step.query, step.cache, record, scales)
    assert lse is not None
    is_converted = layout is BF16 and kernel is K.FLASHMLA_KV
    wanted, wanted_lse, low, low_lse = step.expected({False: is_converted, True: is_converted})
    allowed = budget(wanted, low, torch.bfloat16), lse_budget(wanted_lse, low_lse)
    # Rows without keys are included: anything but zeros and -inf there is an infinite error.
    worst = row_errors(out, wanted).max(), lse_errors(lse, wanted_lse).max()
    ratios = [float(one) / most for one, most in zip(worst, allowed, strict=True)]
    return tuple(math.inf if math.isnan(one) else one for one in ratios)  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["padding", "verify", "mixed"])
@pytest.mark.parametrize(("kernel", "layout", "device"), KERNELS, ids=IDS)
def test_every_kernel_is_called_for_the_right_numbers(
    kernel: SparseKernel, layout: LatentFormat, device: str, name: str
) -> None:
    assert max(errors_of(kernel, layout, device, name)) <= 1


@pytest.mark.parametrize("kernel", [K.FLASHINFER_MLA, K.TRTLLM])
def test_the_older_flashinfer_is_called_too(kernel: SparseKernel) -> None:
    device = "h200" if kernel is K.FLASHINFER_MLA else "b200"
    assert max(errors_of(kernel, RAW, device, "mixed", version=OLD)) <= 1


@pytest.mark.parametrize("kernel", [K.FLASHMLA_SPARSE, K.FLASHMLA_KV])
def test_flashmla_of_its_own_package_and_in_either_base(kernel: SparseKernel) -> None:
    layout = BF16 if kernel is K.FLASHMLA_SPARSE else SCALED
    for fields in ({"writes": False}, {"base_of_lse": 2.0}):
        assert max(errors_of(kernel, layout, "h200", "mixed", **fields)) <= 1


def test_flash_attention_of_its_own_package() -> None:
    assert max(errors_of(K.FA3, BF16, "h200", "mixed", is_vllm=False)) <= 1


def _set(function: str, name: str, change: Any) -> Any:
    def mutate(called: str, given: dict[str, Any]) -> None:
        if called == function and given.get(name) is not None:
            given[name] = change(given[name])

    return mutate


def _next(indices: Tensor) -> Tensor:
    return torch.where(indices >= 0, (indices - 1).clamp(min=0), indices)


WRONG_NUMBERS: list[tuple[SparseKernel, LatentFormat, Any]] = [
    (K.FLASHMLA_SPARSE, BF16, _set(PREFILL, "indices", _next)),
    (K.FLASHMLA_SPARSE, BF16, _set(PREFILL, "sm_scale", lambda scale: 1.1 * scale)),
    (K.FLASHMLA_SPARSE, BF16, _set(PREFILL, "kv", lambda kv: kv.roll(1, 0))),
    (K.FLASHMLA_KV, SCALED, _set(CACHED, "k_cache", lambda cache: cache.roll(1, 0))),
    (K.FLASHMLA_KV, SCALED, _set(CACHED, "indices", lambda ids: ids.clamp(min=0))),
    (K.FLASHMLA_KV, SCALED, _set(CACHED, "softmax_scale", lambda scale: 1.1 * scale)),
    (K.FA3, BF16, _set(VARLEN, "seqused_k", lambda lens: (lens - 1).clamp(min=0))),
    (K.FA3, BF16, _set(VARLEN, "q_v", lambda query: query.roll(1, 1))),
    (K.FA3, BF16, _set(VARLEN, "block_table", _next)),
    (K.FLASHINFER_MLA, RAW, _set("plan", "sm_scale", lambda scale: 1.1 * scale)),
    (K.TRTLLM, RAW, _set("decode", "bmm1_scale", lambda scale: scale * 1.1)),
    (K.TRTLLM, RAW, _set("decode", "bmm2_scale", lambda scale: scale * 1.1)),
    (K.TRTLLM, RAW, _set("decode", "seq_lens", lambda lens: (lens - 1).clamp(min=1))),
]
"""Changed calls that a kernel accepts, and that give other numbers."""
BROKEN_CONTRACTS: list[tuple[SparseKernel, LatentFormat, Any, str]] = [
    (K.FLASHMLA_SPARSE, BF16, _set(PREFILL, "q", lambda q: q[:, :4]), "4 heads"),
    (K.FLASHMLA_SPARSE, BF16, _set(PREFILL, "indices", lambda ids: ids[..., :-1]), "lists of 127"),
    (
        K.FLASHMLA_KV,
        SCALED,
        _set(CACHED, "indices", lambda ids: ids.masked_fill(ids < 0, 1 << 30)),
        "an illegal access",
    ),
    (K.FLASHMLA_KV, SCALED, _set(CACHED, "is_fp8_kvcache", lambda is_fp8: not is_fp8), "is fp8"),
    (K.FA3, BF16, _set(VARLEN, "seqused_k", lambda lens: lens + 1), "max_seqlen_k"),
    (K.FA3, BF16, _set(VARLEN, "cu_seqlens_q", lambda starts: starts + 1), "starts"),
    (K.FLASHINFER_MLA, RAW, _set("plan", "page_size", lambda size: 2), "another number of keys"),
    (K.TRTLLM, RAW, _set("decode", "seq_lens", lambda lens: lens * 0), "lengths"),
    (K.TRTLLM, RAW, _set("decode", "sparse_mla_top_k", lambda topk: topk + 4), "lists"),
]
"""Changed calls that a kernel refuses, and what the emulated kernel says of each."""


def device_of(kernel: SparseKernel) -> str:
    """A GPU that the kernel runs on."""
    return "b200" if kernel is K.TRTLLM else "h200"


@pytest.mark.parametrize("place", range(len(WRONG_NUMBERS)))
def test_calls_with_wrong_numbers_are_noticed(place: int) -> None:
    kernel, layout, fault = WRONG_NUMBERS[place]
    assert max(errors_of(kernel, layout, device_of(kernel), "mixed", mutation=fault)) > 2


@pytest.mark.parametrize("place", range(len(BROKEN_CONTRACTS)))
def test_calls_that_a_kernel_does_not_take_are_noticed(place: int) -> None:
    kernel, layout, fault, message = BROKEN_CONTRACTS[place]
    with pytest.raises(ContractError, match=message):
        errors_of(kernel, layout, device_of(kernel), "mixed", mutation=fault)


def test_lists_are_the_wrapper_s_where_they_are_full() -> None:
    """FlashInfer's wrapper takes full lists without gaps; the library's kernel takes all others."""
    step = Step("long context", RAW)
    fill_lists(step, 1)
    impl, scales = impl_of(RAW, step.lists), scales_of()
    capability = KNOWN_DEVICES["h200"].compute_capability
    results = []
    for factor in (1.0, 1.5):
        fault = _set("plan", "sm_scale", lambda scale, factor=factor: factor * scale)
        with emulated(mutation=fault), pytest.MonkeyPatch.context() as patch:
            patch.setattr(sparse_choice, "capability_of", lambda _: capability)
            step.write_context(impl, scales)
            builder = works(step, K.FLASHINFER_MLA, K.FLASHINFER_MLA)
            record = builder.build(0, step.batch)
            results.append(impl.forward_mqa(step.query, step.cache, record, scales)[0])
    live = len(step.each_row())
    changed = (results[0] != results[1]).flatten(1).any(1)
    assert bool(changed[:live].all())
    assert not changed[live:].any()


@pytest.mark.parametrize("version", [OLD, NEW])
def test_a_captured_wrapper_reads_the_lists_of_a_later_step(version: str) -> None:
    """The wrapper's plan depends on shapes alone, and a replay finds the lists where they were."""
    capability = KNOWN_DEVICES["h200"].compute_capability
    with emulated(version=version), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_choice, "capability_of", lambda _: capability)
        step = Step("decode", RAW)
        fill_lists(step, 2)
        impl, scales = impl_of(RAW, step.lists), scales_of()
        step.write_context(impl, scales)
        builder = works(step, K.FLASHINFER_MLA, K.FLASHINFER_MLA)
        captured = builder.build_for_cudagraph_capture(step.batch)
        again = builder.build(0, step.batch)
        assert captured.decode.planned.wrapper is again.decode.planned.wrapper
        assert captured.decode.planned.wrapper.is_graph
        # The library's own kernel takes rows whose lists are not full.
        assert captured.decode.launch.workspace is again.decode.launch.workspace
        out, _ = impl.forward_mqa(step.query, step.cache, captured, scales)
        wanted = step.expected({False: False, True: False})
        assert float(row_errors(out, wanted[0]).max()) <= 2 * budget(
            wanted[0], wanted[2], torch.bfloat16
        )


def test_prefill_decode_and_prefill_again_over_one_cache() -> None:
    """This sequence crashed elsewhere, where decodes decided for the prefills that followed."""
    capability = KNOWN_DEVICES["h200"].compute_capability
    with emulated() as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_choice, "capability_of", lambda _: capability)
        builder = None
        for name, wanted in (("extend", PREFILL), ("decode", CACHED), ("extend", PREFILL)):
            step = Step(name, SCALED)
            impl, scales = impl_of(SCALED, step.lists), scales_of()
            step.write_context(impl, scales)
            builder = builder or works(step, K.FLASHMLA_SPARSE, K.FLASHMLA_KV)
            found.called.clear()
            record = builder.build(0, step.batch)
            out, _ = impl.forward_mqa(step.query, step.cache, record, scales)
            assert set(found.called) == {wanted}
            state = step.expected({False: False, True: False})
            assert float(row_errors(out, state[0]).max()) <= budget(
                state[0], state[2], torch.bfloat16
            )


def test_layers_share_a_step_s_schedule_and_steps_do_not() -> None:
    capability = KNOWN_DEVICES["h200"].compute_capability
    with emulated() as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_choice, "capability_of", lambda _: capability)
        step = Step("decode", SCALED)
        impl, scales = impl_of(SCALED, step.lists), scales_of()
        step.write_context(impl, scales)
        builder = works(step, K.FLASHMLA_KV, K.FLASHMLA_KV)
        assert not found.called
        # The first call of all also asks for the base of its LSE.
        impl.forward_mqa(step.query, step.cache, builder.build(0, step.batch), scales)
        assert found.called == [CACHED, CACHED]
        before = len(found.schedules)
        for _ in range(2):
            record = builder.build(0, step.batch)
            for _ in range(3):
                impl.forward_mqa(step.query, step.cache, record, scales)
        assert len(found.schedules) - before == 2
        assert len(found.called) == 8


def test_a_graph_does_not_ask_for_the_base_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = KNOWN_DEVICES["h200"].compute_capability
    with emulated(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_choice, "capability_of", lambda _: capability)
        step = Step("decode", SCALED)
        impl, scales = impl_of(SCALED, step.lists), scales_of()
        step.write_context(impl, scales)
        builder = works(step, K.FLASHMLA_KV, K.FLASHMLA_KV)
        record = builder.build_for_cudagraph_capture(step.batch)
        with monkeypatch.context() as capturing:
            capturing.setattr(torch.cuda, "is_available", lambda: True)
            capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            with pytest.raises(RuntimeError, match="first call of flashmla_kv on cpu must come be"):
                impl.forward_mqa(step.query, step.cache, record, scales)
        eager, _ = impl.forward_mqa(step.query, step.cache, record, scales)
        with monkeypatch.context() as capturing:
            capturing.setattr(torch.cuda, "is_available", lambda: True)
            capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            captured, _ = impl.forward_mqa(step.query, step.cache, record, scales)
        assert torch.equal(eager, captured)


def test_signatures_are_those_of_the_installed_vllm() -> None:
    installed = packages.installed_signatures()
    if installed is None:
        pytest.skip("vLLM is not installed")
    assert installed == {name: packages.SIGNATURES[name] for name in installed}


def test_a_package_that_cannot_be_used_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(f"libcuda of {name}")

    monkeypatch.setattr(sparse_calls.importlib, "import_module", absent)
    with pytest.raises(SparseKernelUnavailableError, match="flashmla_kv cannot be imported: "):
        sparse_calls.load_flashmla()
    with pytest.raises(SparseKernelUnavailableError, match="fa3 cannot be imported"):
        sparse_calls.load_fa3()

    class Old:
        """FlashMLA before schedules were objects."""

        flash_mla_sparse_fwd = flash_mla_with_kvcache = staticmethod(lambda q: q)

        @staticmethod
        def get_mla_metadata(cache_seqlens: Any) -> Any:
            return cache_seqlens

    monkeypatch.setattr(sparse_calls.importlib, "import_module", lambda name: Old)
    with pytest.raises(SparseKernelUnavailableError, match="is of another version"):
        sparse_calls.load_flashmla()
    with pytest.raises(SparseKernelUnavailableError, match="has no flash_attn_with_kvcache"):
        sparse_calls.load_fa3()


def test_heads_of_the_layer_are_few() -> None:
    """The layer has few heads: with more, nothing above would be padded."""
    assert H < 64
