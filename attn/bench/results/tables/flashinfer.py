"""``attn bench kernels --table flashinfer``: time that our backends add to FlashInfer's own calls.

The two calls of a pair are timed in turn, in one process, on the same tensors. The pairs are: a
layer's ``forward`` and the call that it makes into FlashInfer; cache write and decode over fp8 and
over bf16; our ``build`` and that of vLLM's builder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch

from attn.bench.cases.case import KernelCase
from attn.bench.cases.inputs import Expected, expected_rows, make_content, permuted_table
from attn.bench.measure.ours import (
    OurLayer,
    backend_refusals,
    engine_config,
    kv_cache_spec,
    make_layer,
)
from attn.bench.measure.pairs import (
    BrokenError,
    Log,
    Rounds,
    checked,
    direct_call,
    lines_or_reason,
    timed,
)
from attn.bench.measure.timing import Call, count_waits, host_times_us
from attn.bench.peers.dense import FP8_QUERY_TOLERANCE, TOLERANCE, KernelRun, Refusal
from attn.bench.peers.vllm_builder import vllm_build
from attn.bench.results.lines import How, Line, Part
from attn.registry import AttentionBackendEnum, RegisteredBackend
from builders.batch import CommonAttentionMetadata
from specs.dtypes import CacheDType

MAX_OVERHEAD: Final = 1.02
"""Most time of a forward over FlashInfer's own call, for a large batch."""
MAX_MORE_US: Final = 5.0
"""Most microseconds of a forward beyond FlashInfer's own call, for a batch of one request."""
MAX_BUILD_RATIO: Final = 0.5
"""Most time of our ``build`` over that of vLLM's builder."""
DIRECT: Final = "direct call"
BF16: Final = "bf16"
NATIVE, XQA = "vLLM, planned decode", "vLLM, XQA decode"


def vendor_lines(
    case: KernelCase, backends: tuple[str, ...], rounds: Rounds, log: Log
) -> Iterator[Line]:
    """Measure the lines of each backend on a case; a line that fails holds its reason."""
    measure = _MEASURES.get(case.name, _overheads)
    for name in backends:
        member = AttentionBackendEnum[name]
        reasons = backend_refusals(case, member)
        yield from lines_or_reason(
            [*_asked(member, case)], reasons, partial(measure, member, case, rounds), log
        )


def _asked(member: RegisteredBackend, case: KernelCase) -> Iterator[Line]:
    """The lines of a backend on a case, without numbers."""
    part = {_writes: Part.WRITE, _builds: Part.BUILD}.get(
        _MEASURES.get(case.name, _overheads), Part.OVERHEAD
    )
    common: dict[str, Any] = {
        "part": part,
        "case": case.name,
        "what": case.what,
        "backend": member.name,
    }
    if part is Part.BUILD:
        yield Line(**common, how=How.HOST, other=NATIVE, max_ratio=MAX_BUILD_RATIO, asks_waits=True)
        yield Line(**common, how=How.HOST, other=XQA)
        return
    target: dict[str, Any] = {"other": DIRECT, "max_ratio": MAX_OVERHEAD}
    if part is Part.WRITE:
        common["what"] += ", cache write included, fp8_e4m3 KV"
        target = {"other": BF16, "max_ratio": 1.0}
    elif case.num_reqs == 1:
        target = {"other": DIRECT, "max_more_us": MAX_MORE_US}
    for how in (How.DEVICE, How.EAGER, How.GRAPH):
        yield Line(**common, how=how, **target)


# -- A forward beside the call that it makes.


def _overheads(member: RegisteredBackend, case: KernelCase, rounds: Rounds) -> Iterator[Line]:
    layer, expected = _layer_of(member, case, rounds)
    record = decode_record(member, layer)
    ours, output = _forward_of(layer, record), torch.empty_like(layer.content.query)
    direct = direct_call(record, lambda step: _forward_of(layer, step, output).call())
    error = checked(KernelRun(ours.call, ours.output), expected)
    checked(KernelRun(direct, output), expected)
    calls: dict[str, Call] = {"ours": ours.call, DIRECT: direct}
    yield from timed(_asked(member, case), calls, rounds, error)
    checked(KernelRun(ours.call, ours.output), expected)


def decode_record(member: RegisteredBackend, layer: OurLayer) -> Any:
    """The record of the case's step of decodes.

    It comes from the builder of the decode phase where the backend has one, because not every
    version of FlashInfer has prefill over fp8.
    """
    backend = member.get_class()
    make: Any = (backend.for_phase("decode") or backend).get_builder_cls()
    case = layer.content.case
    builder = make(kv_cache_spec(case), ["layers.0"], engine_config(case), layer.content.device)
    return builder.build(0, layer.batch)


def _layer_of(
    member: RegisteredBackend, case: KernelCase, rounds: Rounds
) -> tuple[OurLayer, Expected]:
    generator = torch.Generator().manual_seed(rounds.seed)
    content = make_content(case, rounds.device, generator)
    return make_layer(member, content, generator), expected_rows(content)


def _forward_of(layer: OurLayer, record: Any, output: torch.Tensor | None = None) -> KernelRun:
    query = layer.content.query
    impl: Any = layer.impl
    out = torch.empty_like(query) if output is None else output

    def call() -> None:
        impl.forward(layer.scales, query, None, None, layer.kv_cache, record, out)

    return KernelRun(call, out)


# -- fp8 beside bf16, cache writes included.


def _writes(member: RegisteredBackend, case: KernelCase, rounds: Rounds) -> Iterator[Line]:
    calls: dict[str, Call] = {}
    errors = {}
    for name, cache in (("ours", CacheDType.FP8_E4M3), (BF16, case.kv_cache_dtype)):
        own = case.replace(kv_cache_dtype=cache)
        reasons = backend_refusals(own, member)
        if reasons:
            raise BrokenError("; ".join(reasons))
        layer, expected = _layer_of(member, own, rounds)
        run = written_step(member, layer)
        errors[name] = checked(run, expected)
        calls[name] = run.call
    yield from timed(_asked(member, case), calls, rounds, errors["ours"])


def written_step(member: RegisteredBackend, layer: OurLayer) -> KernelRun:
    """A step of decodes as an engine runs it: the new tokens' cache write, then attention.

    Args:
        member: the backend.
        layer: a layer with its cache written; the step writes the new tokens' rows once more.
    """
    content, slots = layer.content, layer.batch.slot_mapping
    ends = torch.tensor(content.case.seq_lens).cumsum(0) - 1
    last = content.slots[ends.to(content.device)]
    key, value = (content.rows(side, last) for side in (content.key, content.value))
    attend = _forward_of(layer, decode_record(member, layer))
    impl: Any = layer.impl

    def call() -> None:
        impl.do_kv_cache_update(layer.scales, key, value, layer.kv_cache, slots)
        attend.call()

    is_fp8 = content.case.kv_cache_dtype.is_quantized
    return KernelRun(call, attend.output, FP8_QUERY_TOLERANCE if is_fp8 else TOLERANCE)


# -- Builds.


def _builds(member: RegisteredBackend, case: KernelCase, rounds: Rounds) -> Iterator[Line]:
    device = rounds.device
    table, _ = permuted_table(case, torch.Generator().manual_seed(rounds.seed))
    batch = CommonAttentionMetadata.from_lengths(
        case.query_lens, case.seq_lens, table.to(device), case.block_size
    )
    make: Any = member.get_class().get_builder_cls()
    builder = make(kv_cache_spec(case), ["layers.0"], engine_config(case), device)

    def ours() -> None:
        builder.build(0, batch)

    for line in _asked(member, case):
        other = vllm_build(case, batch, uses_xqa=line.other == XQA)
        calls: dict[str, Call] = {"ours": ours}
        if isinstance(other, Refusal):
            line = line.replace(reason=other.reason)
        else:
            calls[line.other] = other
        times = host_times_us(calls, device, rounds.rounds, 2 * rounds.reps)
        line = line.replace(ours_us=times["ours"].median_us, spread=times["ours"].spread)
        if line.other in times:
            theirs = times[line.other]
            line = line.replace(other_us=theirs.median_us, other_spread=theirs.spread)
        if line.asks_waits:
            try:
                line = line.replace(waits=count_waits(ours, device))
            except RuntimeError as error:
                line = line.replace(reason="; ".join(filter(None, [line.reason, str(error)])))
        yield line


_MEASURES: Final[dict[str, Callable[..., Iterator[Line]]]] = {
    "dec_b32_4k": _writes,
    "dec_b256_4k": _builds,
}
"""Functions for cases that measure something other than the overhead of a forward."""
