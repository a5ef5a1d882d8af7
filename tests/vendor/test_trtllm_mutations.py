"""Every argument of TRTLLM_MHA's calls matters: changing one makes the conformance suite fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attn.backends.trtllm_mha import TrtllmMhaBackend
from attn.testing.batches import BATCHES
from attn.testing.cases import FEATURES, Case
from attn.testing.conformance import check_case
from specs.devices import KNOWN_DEVICES
from specs.dtypes import CacheDType, DType
from tests.emulators.flashinfer_emulator import ContractError
from tests.emulators.trtllm_emulator import NEW, OLD, Mutation, emulated

DEVICES = {
    "xqa": "h200",
    "ragged_xqa": "h200",
    "fmha_v2": "h200",
    "gen_decode": "b200",
    "gen_prefill": "b200",
}
OF_PREFILL = ("fmha_v2", "gen_prefill")
Change = Callable[[dict[str, Any]], None]


def put(argument: str, with_: Callable[[Any], Any]) -> Change:
    """Put another value for one argument."""

    def change(given: dict[str, Any]) -> None:
        if given.get(argument) is not None:
            given[argument] = with_(given[argument])

    return change


def case_of(kernel: str, name: str) -> Case:
    """A layer and a batch whose rows the kernel takes."""
    batches = {
        "plain": ("chunked_prefill", "ragged_decode"),
        "window": ("chunked_prefill", "ragged_decode"),
        "sinks": ("chunked_prefill", "ragged_decode"),
        "fp8": ("chunked_prefill", "ragged_decode"),
        "verify": ("speculative_verify", "speculative_verify"),
    }
    batch = BATCHES[batches[name][kernel not in OF_PREFILL]]
    if kernel == "ragged_xqa":
        batch = BATCHES["ragged_verify"]
    feature = FEATURES[name if name in ("window", "sinks") else "causal"]
    cache = CacheDType.FP8 if name == "fp8" else CacheDType.AUTO
    return Case(feature, batch, dtype=DType.BFLOAT16, cache_dtype=cache)


def first_page_again(tables: torch.Tensor) -> torch.Tensor:
    """List the first page of each request again in place of its second."""
    tables = tables.clone()
    tables[:, 1] = tables[:, 0]
    return tables


def outside(tables: torch.Tensor) -> torch.Tensor:
    return tables + 2**20


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The values of ``tensor`` in rows that are further apart."""
    wide = torch.cat([tensor, tensor], 1)
    return wide[:, : tensor.shape[1]]


def shorter(lens: torch.Tensor) -> torch.Tensor:
    """Make the last request one key shorter, if it has two."""
    values = lens.view(torch.int32).clone()
    values[-1] -= (values[-1] > 1).int()
    return values.view(lens.dtype)


def one_key_less(given: dict[str, Any]) -> None:
    """Make the last length one less, in each argument that gives it."""
    given["seq_lens"] = shorter(given["seq_lens"])
    if "cum_seq_lens_kv" in given:
        starts = given["cum_seq_lens_kv"].clone()
        starts[-1] -= 1
        given["cum_seq_lens_kv"] = starts


def other_rows(given: dict[str, Any]) -> None:
    """Give a token of the first request to the second."""
    starts = given["cum_seq_lens_q"].clone()
    starts[1] -= 1
    given["cum_seq_lens_q"] = starts


def one_row_earlier(starts: torch.Tensor) -> torch.Tensor:
    """Let the last request begin one token earlier."""
    starts = starts.clone()
    starts[-2] -= 1
    return starts


def dirty(workspace: torch.Tensor) -> torch.Tensor:
    workspace[7] = 1
    return workspace


def swapped(given: dict[str, Any]) -> None:
    """Put values where keys are expected."""
    if "qkv" in given:
        query, stacked = given["qkv"]
        given["qkv"] = query, stacked.flip(1).contiguous()
    else:
        given["kv_cache"] = given["kv_cache"][::-1]


def other_layout(given: dict[str, Any]) -> None:
    if "qkv" in given:
        query, stacked = given["qkv"]
        layout = given["input_layout"]
        given["input_layout"] = layout.replace("NHD", "HND")
        given["qkv"] = query, stacked
    else:
        given["kv_layout"] = "HND"


def strided_query(given: dict[str, Any]) -> None:
    if "qkv" in given:
        query, stacked = given["qkv"]
        given["qkv"] = strided(query), stacked
    else:
        given["query"] = strided(given["query"])


def other_query(given: dict[str, Any]) -> None:
    """Give the query in another type."""
    if "qkv" in given:
        query, stacked = given["qkv"]
        given["qkv"] = query.half(), stacked
    else:
        given["query"] = given["query"].float()


def times(factor: float) -> Callable[[float], float]:
    def scale(value: float) -> float:
        return value * factor

    return scale


CHANGES: dict[str, tuple[str, Change]] = {
    "table entry": ("plain", put("block_tables", first_page_again)),
    "table entry outside the cache": ("plain", put("block_tables", outside)),
    "table of int64": ("plain", put("block_tables", torch.Tensor.long)),
    "strided table": ("plain", put("block_tables", strided)),
    "length": ("plain", one_key_less),
    "length said one way": ("plain", put("seq_lens", shorter)),
    "softmax scale": ("plain", put("bmm1_scale", times(1.1))),
    "scale of keys": ("fp8", put("bmm1_scale", times(1 / 0.037))),
    "scale of values": ("fp8", put("bmm2_scale", times(1 / 0.029))),
    "scale on the device": ("fp8", put("bmm1_scale", torch.tensor)),
    "window": ("window", put("window_left", lambda left: left + 1)),
    "no window": ("window", put("window_left", lambda _: -1)),
    "no sinks": ("sinks", put("sinks", lambda _: None)),
    "other sinks": ("sinks", put("sinks", lambda sinks: sinks.roll(1))),
    "sinks of bf16": ("sinks", put("sinks", lambda sinks: sinks.bfloat16())),
    "workspace byte": ("plain", put("workspace_buffer", dirty)),
    "small workspace": ("plain", put("workspace_buffer", lambda buffer: buffer[:64])),
    "keys for values": ("plain", swapped),
    "layout": ("plain", other_layout),
    "type of the query": ("plain", other_query),
}
OF_SOME: dict[str, tuple[tuple[str, ...], str, Change]] = {
    "backend of its own choice": (
        ("xqa", "gen_decode"),
        "plain",
        put("backend", lambda _: "auto"),
    ),
    "strided query": (("xqa", "ragged_xqa", "fmha_v2"), "plain", strided_query),
    "lengths of int32": (
        ("xqa", "ragged_xqa"),
        "plain",
        put("seq_lens", lambda lens: lens.view(torch.int32)),
    ),
    "everything in the mask": (
        ("xqa", "ragged_xqa"),
        "verify",
        put("mask", lambda mask: mask | 0xF),
    ),
    "nothing in the mask": (("xqa", "ragged_xqa"), "verify", put("mask", torch.zeros_like)),
    "no mask": (("xqa", "ragged_xqa"), "verify", put("mask", lambda _: None)),
    "most rows": (("ragged_xqa",), "plain", put("q_len_per_req", lambda length: length // 2)),
    "rows of the requests": (("ragged_xqa",), "plain", put("q_cu_seq_lens", one_row_earlier)),
    "rows of int64": (("ragged_xqa",), "plain", put("q_cu_seq_lens", torch.Tensor.long)),
    "query length": (
        ("xqa", "gen_decode"),
        "verify",
        put("q_len_per_req", lambda length: length // 2),
    ),
    "bound of the lengths": (("gen_decode",), "plain", put("max_seq_len", lambda _: 16)),
    "query starts": (OF_PREFILL, "plain", other_rows),
    "key starts": (OF_PREFILL, "plain", put("cum_seq_lens_kv", lambda starts: starts + 1)),
    "bound of the rows": (OF_PREFILL, "plain", put("max_q_len", lambda length: length - 1)),
    "number of requests": (OF_PREFILL, "plain", put("batch_size", lambda size: size - 1)),
    "bound of the keys": (OF_PREFILL, "plain", put("max_kv_len", lambda _: 16)),
    "mask by another name": (("fmha_v2",), "plain", put("mask_mode", lambda _: "padding")),
    "causality": (("gen_prefill",), "plain", lambda given: given.update(causal=False)),
}
MUTATIONS = [
    *((kernel, name, *CHANGES[name]) for kernel in DEVICES for name in CHANGES),
    *(
        (kernel, name, case, change)
        for name, (kernels, case, change) in OF_SOME.items()
        for kernel in kernels
    ),
]
"""Kernel, name, case, change."""


def versions_of(kernel: str, case: str) -> tuple[str, ...]:
    """Versions of FlashInfer that can run a mutation.

    0.6 prefills no fp8 on Hopper, so that its builder is refused; it verifies no ragged batch
    either.
    """
    only_new = kernel == "ragged_xqa" or (case == "fp8" and DEVICES[kernel] == "h200")
    return (NEW,) if only_new else (OLD, NEW)


def mutated(of: str, change: Change, seen: list[str]) -> Mutation:
    def mutate(kernel: str, given: dict[str, Any]) -> None:
        if kernel == of:
            before = dict(given)
            change(given)
            seen.extend(name for name in given if given[name] is not before.get(name))

    return mutate


@pytest.mark.parametrize(
    ("kernel", "name", "case", "change", "version"),
    [(*one, version) for one in MUTATIONS for version in versions_of(one[0], one[2])],
    ids=[
        f"{one[0]}-{one[1]}-{version}"
        for one in MUTATIONS
        for version in versions_of(one[0], one[2])
    ],
)
def test_every_mutation_of_a_call_makes_the_suite_fail(
    kernel: str, name: str, case: str, change: Change, version: str
) -> None:
    seen: list[str] = []
    device = KNOWN_DEVICES[DEVICES[kernel]]
    with (
        emulated(device, version, mutated(kernel, change, seen)),
        pytest.raises((AssertionError, ContractError)),
    ):
        check_case(TrtllmMhaBackend, case_of(kernel, case))
    assert seen or name == "workspace byte"


@pytest.mark.parametrize("kernel", DEVICES)
def test_each_call_has_ten_mutations_and_more(kernel: str) -> None:
    assert sum(one[0] == kernel for one in MUTATIONS) >= 20


@pytest.mark.parametrize("case", ["plain", "window", "sinks", "fp8", "verify"])
@pytest.mark.parametrize("kernel", DEVICES)
def test_the_cases_of_the_mutations_pass_without_them(kernel: str, case: str) -> None:
    for version in versions_of(kernel, case):
        with emulated(KNOWN_DEVICES[DEVICES[kernel]], version) as calls:
            check_case(TrtllmMhaBackend, case_of(kernel, case))
        if not (case == "verify" and kernel in OF_PREFILL):
            assert kernel in calls.called
