"""The conformance runner: put a backend through one case and check every promise of its interface.

    result = run_case(backend, case, device)  # findings, by the name of the check
    check_case(backend, case, device)         # the same, but raises AssertionError with them

``attn.testing.cases`` has the cases and chooses those that a backend serves. ``attn.testing.trial``
sets up a case and runs it. The checks, by name:

- ``cache``: the rows that were written hold the expected numbers, to half an ulp; every other byte
  is untouched.
- ``output``, ``lse``: results are within a computed budget of the float64 oracle on the original
  keys and values. The budget includes the error of a quantised cache. For a latent layer,
  ``output`` is the layer's, ``latent`` and ``lse`` are what ``forward_mqa`` returns.
- ``stored``: results are within the much smaller budget of the oracle on what the cache holds.
- ``padding``: rows of the results past the last request keep their bytes.
- ``unchanged``: batch, inputs, layer and cache are after ``build`` and ``forward`` what they were
  before. A backend that declares ``clears_tails`` may write zeros behind the last key.
- ``rebuild``: a second ``build`` of a batch gives an equal record.
- ``same_bits``: a request alone gives the bits that it gives in the batch, where the backend
  declares ``row_bits``.
- ``block_table``: ``update_block_table`` gives what a fresh build gives, and keeps attributes that
  a wrapper added to the record.
- ``profile``: a forward without metadata gives zeros.
- ``capture``: where the builder supports CUDA graphs, a forward is captured with one batch, another
  batch is built in the same tensors, and the replay gives the bits of an eager step. On a GPU it is
  a real graph. Where plans are made on the host and the backend does not declare ``row_bits``,
  budgets apply in place of bits.

A check has findings only when it fails. Errors that a backend raises pass through.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attn.backends.base import AttentionBackend
from attn.testing import batches
from attn.testing.batches import BatchSpec
from attn.testing.cases import AnyCase, Case, is_interpreted
from attn.testing.dense_trial import DenseTrial
from attn.testing.latent_trial import LatentTrial
from attn.testing.trial import CaseResult, Inputs, Results, Trial
from builders.batch import CommonAttentionMetadata
from specs.attention import AttentionCGSupport
from specs.engine import EngineConfig, Kernels, PrefillKernel


def run_case(
    backend: type[AttentionBackend],
    case: AnyCase,
    device: torch.device | str = "cpu",
    *,
    one_step: bool = False,
) -> CaseResult:
    """Put a backend through one case, and give what the checks found.

    Args:
        backend: the backend on trial.
        case: one that the backend serves.
        device: where the backend's tensors lie.
        one_step: end behind the first step, so that ``profile``, ``block_table``, ``same_bits`` and
            ``capture`` are not checked.
    """
    device = torch.device(device)
    trial: Trial
    if isinstance(case, Case):
        trial = DenseTrial(backend, case, device)
    else:
        trial = LatentTrial(backend, case, device)
    result = CaseResult()
    trial.write()
    builder = trial.builder()
    before = contents(_touchable(trial))
    record = trial.build(builder)
    rebuilt = contents(record), contents(trial.build(builder))
    result.note("rebuild", _difference(*rebuilt))
    kept = trial.buffer.clone()
    results = trial.attend(record, trial.inputs, trial.cache())
    if backend.capabilities.clears_tails:
        trial.restore_tails(kept)
    if backend.forward_includes_kv_cache_update:
        before["cache"] = contents(trial.buffer)
    result.note("unchanged", _difference(before, contents(_touchable(trial))))
    trial.check_cache(result)
    trial.judge(results, record, result)
    trial.check_padding(results, result)
    if one_step:
        return result
    _check_profile(trial, result)
    _check_block_table(trial, builder, results, result)
    _check_same_bits(trial, record, results, result)
    _check_capture(trial, result)
    return result


def check_case(
    backend: type[AttentionBackend],
    case: AnyCase,
    device: torch.device | str = "cpu",
    *,
    one_step: bool = False,
) -> CaseResult:
    """Put a backend through one case, and raise where a check found something.

    Args:
        backend: the backend on trial.
        case: one that the backend serves.
        device: where the backend's tensors lie.
        one_step: see :func:`run_case`.

    Raises:
        AssertionError: a check failed; the text has every finding.
    """
    result = run_case(backend, case, device, one_step=one_step)
    lines = [f"{check}: {problem}" for check, found in result.findings.items() for problem in found]
    if lines:
        raise AssertionError("\n".join([f"{backend.get_name()} on {case}", *lines]))
    return result


def _touchable(trial: Trial) -> dict[str, Any]:
    """What ``build`` and ``forward`` are given and must leave as it is."""
    return {"inputs": trial.inputs, "cache": trial.buffer, "layer": trial.layer}


def _check_profile(trial: Trial, result: CaseResult) -> None:
    """Check that a forward without metadata gives zeros."""
    zeros = bool((trial.profile() == 0).all())
    result.note("profile", None if zeros else "output is not zero without metadata")


def _check_block_table(trial: Trial, builder: Any, results: Results, result: CaseResult) -> None:
    """Move the cache's blocks, as another KV cache group has them elsewhere, and check that
    ``update_block_table`` gives the record of a fresh build and the bits of the first forward.
    """
    if not builder.supports_update_block_table:
        return
    moved, buffer = batches.move_blocks(trial.generator, trial.paging, trial.buffer)
    batch = trial.inputs.batch
    P = trial.paging.block_size
    blocks = {
        int(old): int(new)
        for old, new in zip(trial.paging.table.flatten(), moved.table.flatten(), strict=True)
    }
    slots = [
        slot if slot < 0 else blocks[slot // P] * P + slot % P
        for slot in batch.slot_mapping.tolist()
    ]
    slot_mapping = torch.tensor(slots, dtype=torch.int64, device=trial.device)
    table = moved.table.to(trial.device)
    record = trial.build(builder)
    record.added_by_a_wrapper = "kept"
    updated = builder.update_block_table(record, table, slot_mapping)
    kept = getattr(updated, "added_by_a_wrapper", None) == "kept"
    result.note("block_table", None if kept else "an attribute that a wrapper added is lost")
    again = trial.attend(updated, trial.inputs, trial.cache(buffer), for_bits=True)
    for one in (record, updated):
        vars(one).pop("added_by_a_wrapper", None)
    was = contents(updated)
    fresh = trial.build(builder, batch.replace(block_table_tensor=table, slot_mapping=slot_mapping))
    result.note("block_table", _difference(was, contents(fresh)))
    before = {name: results[name] for name in again}
    difference = _difference(contents(before), contents(again))
    result.note("block_table", difference and f"results over moved blocks: {difference}")


def _check_same_bits(trial: Trial, record: Any, results: Results, result: CaseResult) -> None:
    """Check that a request in the middle of the batch gives the same bits when it is alone.

    A backend that declares batch invariance computes the request's last token alone too, which is
    another chunking. Triton's interpreter is spared that: numpy sums its products in an order that
    depends on a row's place.
    """
    live = trial.batch_spec.live_rows
    if not live or trial.common_prefix_len or not trial.backend.capabilities.row_bits:
        return
    config = _invariant_config(trial)
    if config != trial.config:
        record = trial.build(trial.builder(config))
        results = trial.attend(record, trial.inputs, trial.cache(), for_bits=True)
    whole = trial.own_bits(results, record)
    row = live[len(live) // 2]
    tokens = trial.requests[row].tokens
    parts = [tokens]
    if config.batch_invariant and trial.has_cache and not is_interpreted(trial.backend):
        parts.append(slice(tokens.stop - 1, tokens.stop))
    for part in parts:
        inputs = trial.alone(row, part)
        alone_record = trial.build(trial.builder(config), inputs.batch)
        alone = trial.attend(alone_record, inputs, trial.cache(), for_bits=True)
        trial.together()
        for name, rows in trial.own_bits(alone, alone_record).items():
            if name in whole and part.stop <= len(whole[name]):
                same = _difference(contents(whole[name][part]), contents(rows))
                result.note("same_bits", same and f"tokens {part} alone, {name}: {same}")


def _invariant_config(trial: Trial) -> EngineConfig:
    """The trial's engine settings, with batch invariance where the backend offers it."""
    if not trial.backend.supports_batch_invariance():
        return trial.config
    # A kernel asked for by name may not go together with it.
    plain, kernels = PrefillKernel.TRITON, trial.config.kernels
    return trial.config.replace(
        batch_invariant=True,
        kernels=Kernels(
            dense=kernels.dense.replace(prefill=plain),
            latent=kernels.latent.replace(prefill=plain),
            sparse=kernels.sparse.replace(own_prefill=plain),
        ),
    )


def _is_replayable(level: AttentionCGSupport, spec: BatchSpec) -> bool:
    """True where a graph of this level of support can replay the batch."""
    if level is AttentionCGSupport.ALWAYS:
        return True
    lens = {length for length in spec.query_lens if length}
    uniform = len(lens) <= 1 and spec.num_padding_tokens == 0
    if level is AttentionCGSupport.UNIFORM_BATCH:
        return uniform
    return level is not AttentionCGSupport.NEVER and uniform and lens <= {1}


def _check_capture(trial: Trial, result: CaseResult) -> None:
    """Capture a forward with one batch, replay it with the trial's batch in the same tensors."""
    config = _invariant_config(trial)
    tokens = max(1, len(trial.inputs.query))
    config = config.replace(cudagraph_capture_sizes=(tokens,))
    level = trial.backend.get_builder_cls().get_cudagraph_support(config, trial.spec)
    spec = trial.batch_spec
    if not _is_replayable(level, spec) or not spec.live_rows or trial.common_prefix_len:
        return
    builder = trial.builder(config)
    # A plan for every replay may cut rows elsewhere than one for this step.
    for_bits = trial.backend.capabilities.row_bits or not builder.plans_on_host
    eager_record = trial.build(trial.builder(config))
    eager = trial.attend(eager_record, trial.inputs, trial.cache(), for_bits=for_bits)
    batch = trial.inputs.batch
    static = _capture_batch(batch, spec)
    record = builder.build_for_cudagraph_capture(static)
    inputs = Inputs(static, trial.inputs.query, trial.inputs.key, trial.inputs.value)
    replay = _capture(trial, record, inputs, for_bits)
    _refill(static, batch)
    trial.build(builder, static)
    replayed = replay()
    if not for_bits:
        trial.judge(replayed, record, result)
        return
    real = slice(0, spec.num_tokens)
    for name, rows in trial.own_bits(eager, eager_record).items():
        difference = _difference(contents(rows[real]), contents(replayed[name][real]))
        result.note("capture", difference and f"{name}: {difference}")


def _capture_batch(batch: CommonAttentionMetadata, spec: BatchSpec) -> CommonAttentionMetadata:
    """A batch of the same size over tensors of its own, with the values of a capture: even query
    lengths, no context, block 0 and no slots.
    """
    fields = {
        item.name: getattr(batch, item.name).clone()
        for item in dataclasses.fields(batch)
        if isinstance(getattr(batch, item.name), Tensor)
    }
    rows, tokens = len(spec.query_lens), spec.num_tokens
    starts = torch.tensor([tokens * row // rows for row in range(rows + 1)], dtype=torch.int32)
    if len({length for length in spec.query_lens if length}) == 1:
        starts = fields["query_start_loc_cpu"].clone()
    fields["query_start_loc"].copy_(starts)
    fields["query_start_loc_cpu"].copy_(starts)
    for name in ("seq_lens", "seq_lens_cpu_upper_bound"):
        if name in fields:
            fields[name].copy_(starts.diff())
    fields["block_table_tensor"].zero_()
    fields["slot_mapping"].fill_(-1)
    return batch.replace(**fields)


def _refill(static: CommonAttentionMetadata, batch: CommonAttentionMetadata) -> None:
    """Copy a batch's values into the tensors of the captured batch."""
    for item in dataclasses.fields(batch):
        value = getattr(batch, item.name)
        if isinstance(value, Tensor):
            getattr(static, item.name).copy_(value)


def _capture(trial: Trial, record: Any, inputs: Inputs, for_bits: bool) -> Any:
    """A function that replays ``attend``: a CUDA graph on a GPU, the call itself on a CPU."""
    cache = trial.cache()
    if trial.device.type != "cuda":
        return lambda: trial.attend(record, inputs, cache, for_bits=for_bits)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        trial.attend(record, inputs, cache)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = trial.attend(record, inputs, cache)

    def replay() -> Results:
        graph.replay()
        torch.cuda.synchronize()
        return captured

    return replay


# -- comparing whatever a record may hold


def contents(value: Any) -> Any:
    """A copy of ``value`` that can be compared later: plain containers, CPU tensors and numbers.

    Dataclasses become dictionaries of their attributes, without cached properties. What is of any
    other kind becomes None.
    """
    if isinstance(value, Tensor):
        return value.detach().cpu().contiguous().clone()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # A cached property is computed from the other attributes.
        computed = {name for name, x in vars(type(value)).items() if isinstance(x, cached_property)}
        return {name: contents(x) for name, x in vars(value).items() if name not in computed}
    if isinstance(value, dict):
        return {key: contents(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [contents(item) for item in value]
    return value if isinstance(value, int | float | str | bool | torch.dtype) else None


def _difference(one: Any, other: Any, path: str = "") -> str | None:
    """Where two results of :func:`contents` first differ; None where they are equal.

    Tensors are compared by their bits.
    """
    where = path or "value"
    if type(one) is not type(other):
        return f"{where} is a {type(one).__name__} and a {type(other).__name__}"
    if isinstance(one, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{where} is {one.dtype} {[*one.shape]} and {other.dtype} {[*other.shape]}"
        same = torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
        return None if same else f"{where} differs"
    if isinstance(one, dict | list):
        keys = list(one) if isinstance(one, dict) else list(range(len(one)))
        if len(one) != len(other) or (isinstance(one, dict) and set(one) != set(other)):
            return f"{where} has other entries"
        for key in keys:
            found = _difference(one[key], other[key], f"{path}.{key}" if path else str(key))
            if found:
                return found
        return None
    return None if one == other else f"{where} is {one} and {other}"
