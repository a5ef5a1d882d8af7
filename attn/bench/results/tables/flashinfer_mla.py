"""``attn bench kernels --table trtllm_mla``: time that our latent backends add to FlashInfer's.

The pairs of times are: a layer's ``forward_mqa`` and the wrapper's ``run`` that it calls; rotation,
e4m3 and cache write in one launch, and FlashInfer's function followed by a write; and, without a
target, TRTLLM_MLA with TRITON_MLA's kernel and TRITON_MLA itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch

from attn.bench.cases.case import KernelCase
from attn.bench.cases.inputs import Expected, expected_rows, make_content
from attn.bench.cases.latent import ROPE_CASE
from attn.bench.measure.ours import (
    PLAIN_KERNELS,
    OurLayer,
    backend_refusals,
    latent_impl,
    make_builder,
    make_layer,
    our_run,
)
from attn.bench.measure.pairs import Log, Rounds, checked, direct_call, lines_or_reason, timed
from attn.bench.measure.rotation import Rotation, make_rotation
from attn.bench.measure.timing import Call
from attn.bench.peers.dense import KernelRun
from attn.bench.results.lines import How, Line, Part
from attn.registry import AttentionBackendEnum, RegisteredBackend
from builders.vendor.flashinfer_parts.install import FlashInferUnavailableError, unavailable_reason
from builders.vendor.flashinfer_parts.rope import load_rope
from specs.attention import MlaKernel, RopeKernel
from specs.engine import Kernels

OVER_WRAPPER: Final = "FLASHINFER_MLA"
BY_OTHER: Final = "TRTLLM_MLA"
PLAIN: Final = "TRITON_MLA"
DIRECT: Final = "direct call"
VENDOR_ROPE: Final = "FlashInfer's, then a write"
MAX_OVERHEAD: Final = 1.02
"""Most time of a forward over the wrapper's ``run``."""
MAX_ROPE_US: Final = 6.0
"""Most microseconds to rotate, round and write 128 tokens of 128 heads, in a graph's replay."""
MAX_ROPE_RATIO: Final = 0.5
"""Most time of our one launch over FlashInfer's function and a write."""
HOWS: Final = (How.DEVICE, How.EAGER, How.GRAPH)


def latent_lines(
    case: KernelCase, backends: tuple[str, ...], rounds: Rounds, log: Log
) -> Iterator[Line]:
    """Measure the lines of each backend on a case; a line that fails holds its reason."""
    for name in backends:
        asked = _asked(name, case)
        if not asked:
            continue
        member = AttentionBackendEnum[name]
        measure = {Part.OVERHEAD: _overheads, Part.ROPE: _rotations, Part.KERNEL: _kernels}
        reasons = backend_refusals(case, member, _kernel_of(name))
        given = partial(measure[asked[0].part], member, case, rounds)
        yield from lines_or_reason(asked, reasons, given, log)


def _kernel_of(name: str) -> MlaKernel:
    """The kernel setting for a backend's name, the same on every GPU."""
    return MlaKernel.TRITON if name == BY_OTHER else MlaKernel.AUTO


def _asked(name: str, case: KernelCase) -> list[Line]:
    """The lines of a backend on a case, without numbers."""
    common: dict[str, Any] = {"case": case.name, "what": case.what, "backend": name}
    if case.name == ROPE_CASE and name == BY_OTHER:
        rank = case.head_size_v
        common["what"] = (
            f"RoPE, e4m3, cache write: {case.num_tokens} tokens, {case.num_heads} heads of "
            f"{rank} + {case.rope_size}"
        )
        targets: dict[How, dict[str, Any]] = {
            How.GRAPH: {"max_ratio": MAX_ROPE_RATIO, "max_us": MAX_ROPE_US}
        }
        common |= {"part": Part.ROPE, "other": VENDOR_ROPE}
    elif case.name != ROPE_CASE and name == OVER_WRAPPER:
        targets = {how: {"max_ratio": MAX_OVERHEAD} for how in HOWS}
        common |= {"part": Part.OVERHEAD, "other": DIRECT}
    elif case.name != ROPE_CASE and name == BY_OTHER:
        targets = {}
        common |= {"part": Part.KERNEL, "other": f"{PLAIN}, plain"}
    else:
        return []
    return [Line(**common, how=how, **targets.get(how, {})) for how in HOWS]


def _layer_of(
    member: RegisteredBackend, case: KernelCase, rounds: Rounds
) -> tuple[OurLayer, Expected]:
    generator = torch.Generator().manual_seed(rounds.seed)
    content = make_content(case, rounds.device, generator)
    return make_layer(member, content, generator), expected_rows(content)


# -- A forward beside the call that it makes.


def _overheads(member: RegisteredBackend, case: KernelCase, rounds: Rounds) -> Iterator[Line]:
    layer, expected = _layer_of(member, case, rounds)
    builder = make_builder(member, layer)
    ours = our_run(layer, builder)
    # Both calls use one wrapper, planned for one step.
    record, impl = builder.build(0, layer.batch), layer.impl
    rank = case.head_size_v
    query = layer.content.query[..., :rank], layer.content.query[..., rank:]

    def attend(step: Any) -> object:
        attends: Any = impl
        return attends.forward_mqa(query, layer.kv_cache, step, layer.scales)

    call = direct_call(record, attend)
    theirs = KernelRun(call, call.keywords["out"])
    error = checked(ours, expected)
    checked(theirs, expected)
    calls: dict[str, Call] = {"ours": ours.call, DIRECT: call}
    yield from timed(_asked(member.name, case), calls, rounds, error)
    # Checked again after many launches, which may show an error that is not in every launch.
    checked(ours, expected)
    checked(theirs, expected)


# -- By TRITON_MLA's kernel, beside it.


def _kernels(member: RegisteredBackend, case: KernelCase, rounds: Rounds) -> Iterator[Line]:
    runs, (asked, *rest) = {}, _asked(member.name, case)
    for name, one in (("ours", member), (asked.other, AttentionBackendEnum[PLAIN])):
        layer, expected = _layer_of(one, case, rounds)
        kernels = Kernels(latent=PLAIN_KERNELS.latent.replace(rows=_kernel_of(one.name)))
        builder = make_builder(one, layer, kernels=kernels)
        runs[name] = our_run(layer, builder), expected
    errors = [checked(*run) for run in runs.values()]
    calls: dict[str, Call] = {name: run.call for name, (run, _) in runs.items()}
    yield from timed([asked, *rest], calls, rounds, errors[0])
    for run in runs.values():
        checked(*run)


# -- Rotation, e4m3 and cache write.


def _rotations(member: RegisteredBackend, case: KernelCase, rounds: Rounds) -> Iterator[Line]:
    layer, _ = _layer_of(member, case, rounds)
    asked, slots = _asked(member.name, case), layer.batch.slot_mapping
    steps: dict[str, Rotation] = {}
    reason = unavailable_reason(load_rope)
    for name, kernel in (("ours", RopeKernel.TRITON), (VENDOR_ROPE, RopeKernel.FLASHINFER)):
        if name == VENDOR_ROPE and reason is not None:
            continue
        try:
            impl = latent_impl(member, case, rope_kernel=kernel)
        except FlashInferUnavailableError as error:
            reason = str(error)
            continue
        # Each call has a cache of its own, so that neither finds rows that the other wrote.
        cache = layer.kv_cache.clone()
        steps[name] = make_rotation(layer.content, cache, slots, impl, rounds.seed)
    errors = {name: step.error() for name, step in steps.items()}
    calls: dict[str, Call] = {name: step.call for name, step in steps.items()}
    if reason is not None:
        asked = [line.replace(reason=reason) for line in asked]
    yield from timed(asked, calls, rounds, errors["ours"])
    for step in steps.values():
        step.error()
