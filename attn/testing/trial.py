"""The base of a trial: one conformance case, set up and run the way an engine runs a layer.

A trial takes a backend, a case and a device. It makes what a step needs: requests, a block table,
the bytes of a poisoned cache, a layer, the backend's impl and the step's inputs. The conformance
runner then works with it in this order:

    trial = DenseTrial(backend, case, device)
    trial.write()                                    # context and new tokens go into the cache
    record = trial.build(trial.builder())            # the metadata of the step
    results = trial.attend(record, trial.inputs, trial.cache())
    result = CaseResult()
    trial.check_cache(result)                        # every byte of the cache
    trial.judge(results, record, result)             # the results against the float64 oracle
    trial.check_padding(results, result)             # rows past the batch

There are two kinds: ``attn.testing.dense_trial.DenseTrial`` for ordinary attention layers and
``attn.testing.latent_trial.LatentTrial`` for MLA layers. A check that fails does not raise: it adds
a finding to the :class:`CaseResult`.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attn.backends.base import AttentionBackend
from attn.testing import batches, budget
from attn.testing.batches import Layer, Paging, Request
from attn.testing.cases import AnyCase
from attn.testing.stored_rows import Stored
from builders.batch import CommonAttentionMetadata
from specs.attention import MlaKernel
from specs.engine import DecodeKernel, EngineConfig, Kernels, PrefillKernel, SpeculativeConfig
from specs.kv_cache import AnyKVCacheSpec

PAGE_PADDING = 256
"""Bytes between the content of a padded page and the next page."""


@dataclass
class CaseResult:
    """What the checks of one case found. The module text of ``attn.testing.conformance`` lists the
    names of the checks.
    """

    findings: dict[str, list[str]] = field(default_factory=dict)
    """Problems, by the name of the check; a check without a problem has no entry."""
    ratios: dict[str, float] = field(default_factory=dict)
    """Largest error divided by its budget, by the name of the check; above 1 is a problem."""
    checked: set[str] = field(default_factory=set)
    """Names of the checks that ran."""

    @property
    def cache_is_right(self) -> bool:
        """True while the cache check has found no problem, so that the numbers that the cache holds
        may be taken as input of another check.
        """
        return "cache" not in self.findings

    def note(self, check: str, problem: str | None) -> None:
        """Record that ``check`` ran, and add ``problem`` to its findings unless that is None."""
        self.checked.add(check)
        if problem:
            self.findings.setdefault(check, []).append(problem)

    def judge(self, check: str, error: float, limit: float) -> None:
        """Record that ``check`` ran with this error, a problem where it is above ``limit``."""
        self.ratios[check] = max(self.ratios.get(check, 0.0), error / limit)
        self.note(check, None if error <= limit else f"error {error:.3g}, budget {limit:.3g}")


@dataclass(eq=False)
class Inputs:
    """The batch and the tensors that a step gives to ``build`` and ``forward``.

    T counts the batch's tokens and the padding rows behind them.
    """

    batch: CommonAttentionMetadata
    query: Tensor
    """``[T, H, D]``; of a latent layer ``[T, H, P + r]``, before absorption."""
    key: Tensor | None
    """``[T, Hk, D]``; of a latent layer the latent rows ``[T, 1, L + r]``; None in cross attention,
    whose keys are all in the cache."""
    value: Tensor | None
    """``[T, Hk, Dv]``; None in cross attention and for a latent layer."""


Results = dict[str, Tensor]
"""What a forward gave: tensors by name (``output``, ``lse``, ``latent``). The first axis counts the
batch's tokens, then the padding rows."""


class Trial(ABC):
    """A backend's builder and impl, set up for one case, with a cache for the case's requests.

    The class attributes with values are settings of the engine. A test that wants another kernel
    sets them on this class or on a subclass.

    Args:
        backend: the backend on trial.
        case: what the layer, its batch and its cache are like. It also seeds the random numbers:
            the same case makes the same tensors.
        device: where the backend's tensors lie; requests and the oracle's results are on the CPU.
    """

    requests: list[Request]
    """The step's requests, unpaged, on the CPU."""
    paging: Paging
    """The block table that the batch carries."""
    buffer: Tensor
    """uint8 ``[num_blocks * page_bytes]``: all bytes of the cache."""
    inputs: Inputs
    """What the step gives to ``build`` and ``forward``."""
    impl: Any
    """The backend's impl, its weights loaded."""
    spec: AnyKVCacheSpec
    """The KV cache spec of the layer."""
    layer: Layer
    """What the impl sees of the model's layer."""
    config: EngineConfig
    """Settings of the engine: limits that the batch just meets."""
    common_prefix_len = 0
    """Tokens of the prefix that all requests share, handed to ``build``."""
    prefill_kernel = PrefillKernel.TRITON
    """Prefill kernel of the trial, in ``EngineConfig.kernels``."""
    decode_kernel = DecodeKernel.TRITON
    """Decode kernel of the trial, in ``EngineConfig.kernels``."""
    mla_kernel = MlaKernel.AUTO
    """``EngineConfig.mla_kernel`` of the trial."""
    fp8_mla_prefill = False
    """``EngineConfig.fp8_mla_prefill`` of the trial."""
    fp8_mla_queries = False
    """``EngineConfig.fp8_mla_queries`` of the trial."""

    def __init__(
        self, backend: type[AttentionBackend], case: AnyCase, device: torch.device
    ) -> None:
        self.backend = backend
        self.case = case
        self.device = device
        self.batch_spec = case.batch
        self.generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        return self.case.dtype.torch

    def engine(self, num_heads: int, **settings: Any) -> EngineConfig:
        """Engine settings whose limits the batch just meets.

        Args:
            num_heads: query heads of the layer.
            settings: further fields of the settings.
        """
        spec = self.batch_spec
        speculative = None
        if spec.num_speculative_tokens is not None:
            speculative = SpeculativeConfig(num_speculative_tokens=spec.num_speculative_tokens)
        tokens = spec.num_tokens + spec.num_padding_tokens
        return EngineConfig(
            max_model_len=max(*spec.kv_lens, *spec.seq_lens, 1) + self.case.block_size,
            max_num_seqs=len(spec.query_lens),
            max_num_batched_tokens=max(tokens, 1),
            num_heads=num_heads,
            speculative=speculative,
            kernels=Kernels.own(self.prefill_kernel, self.decode_kernel, self.mla_kernel),
            fp8_mla_prefill=self.fp8_mla_prefill,
            fp8_mla_queries=self.fp8_mla_queries,
            **settings,
        )

    def builder(self, config: EngineConfig | None = None) -> Any:
        """A fresh metadata builder of the backend, by default for the trial's own settings."""
        return self.backend.get_builder_cls()(
            self.spec, ["layer.0"], config or self.config, self.device
        )

    def build(self, builder: Any, batch: CommonAttentionMetadata | None = None) -> Any:
        """The metadata record that a builder makes of a batch, by default of the trial's own."""
        return builder.build(self.common_prefix_len, batch or self.inputs.batch)

    def cache(self, buffer: Tensor | None = None) -> Tensor:
        """The cache as the impl takes it: a view of ``buffer``, by default of the trial's bytes."""
        content = self.buffer if buffer is None else buffer
        view: Tensor = self.layout.view(content, self.paging.num_blocks)
        return view

    @property
    @abstractmethod
    def layout(self) -> Any:
        """The spec's layout of the cache: its ``view`` makes a tensor of the cache's bytes."""

    def allocate(self) -> Tensor:
        """uint8 ``[num_blocks * page_bytes]`` of poison: the cache before anything is written."""
        nbytes = self.paging.num_blocks * self.page_bytes
        return batches.poisoned(nbytes, dtype=torch.uint8, device=self.device)

    @property
    @abstractmethod
    def page_bytes(self) -> int:
        """Bytes from one block to the next, padding included."""

    @abstractmethod
    def write(self) -> None:
        """Write the cache through the impl: first the context, as earlier steps did, then this
        step's tokens unless the backend's forward writes them.
        """

    def restore_tails(self, kept: Tensor) -> None:
        """Undo what a backend that declares ``clears_tails`` may do: put the bytes of ``kept`` back
        into the slots behind the last key of each request, up to the end of that key's page.

        Where anything but zeros was written to these slots, nothing is put back, so that the check
        of the cache finds it.

        Args:
            kept: uint8 ``[num_blocks * page_bytes]``, the cache's bytes before the forward.

        Raises:
            NotImplementedError: this kind of trial has no backend that clears tails.
        """
        raise NotImplementedError

    @abstractmethod
    def check_cache(self, result: CaseResult) -> None:
        """Check every byte of the cache: written rows hold what was to be written, to half an ulp,
        and all other bytes are still poison.
        """

    @abstractmethod
    def attend(
        self, record: Any, inputs: Inputs, cache: Tensor, *, for_bits: bool = False
    ) -> Results:
        """One forward into poisoned outputs.

        Args:
            record: metadata of the step.
            inputs: the step's batch and tensors.
            cache: the cache as :meth:`cache` gives it.
            for_bits: leave out results that :meth:`own_bits` drops anyhow.
        """

    @abstractmethod
    def profile(self) -> Tensor:
        """The output of a forward without metadata, as an engine's profiling run calls it."""

    @abstractmethod
    def judge(self, results: Results, record: Any, result: CaseResult) -> None:
        """Check results against the float64 oracle, within budgets computed from the data.

        Args:
            results: of one forward.
            record: metadata of the step; says which kernel took which rows, hence what they round.
            result: takes the findings.
        """

    def check_padding(self, results: Results, result: CaseResult) -> None:
        """Check that rows past the last request's are still poison."""
        for name, rows in results.items():
            touched = not batches.is_poison(rows[self.batch_spec.num_tokens :])
            result.note("padding", f"{name} rows past the batch were written" if touched else None)

    def own_bits(self, results: Results, record: Any) -> Results:
        """The results whose bits must be the same in every batch: by default all of them.

        ``record`` is the metadata of the forward that gave ``results``.
        """
        return results

    # -- a request alone

    def alone(self, row: int, tokens: slice) -> Inputs:
        """Inputs of a step with one request only, over the same cache.

        Args:
            row: of the request.
            tokens: rows of the batch, the request's own: all of them or its last ones.
        """
        inputs = self.inputs

        def part(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[tokens].clone()

        batch = _single_request(inputs.batch, row, tokens)
        return Inputs(batch, inputs.query[tokens].clone(), part(inputs.key), part(inputs.value))

    def together(self) -> None:  # noqa: B027 (most trials have nothing to undo)
        """Set back what :meth:`alone` changed in the impl."""

    @property
    def has_cache(self) -> bool:
        """True where keys are read from a cache. A part of a request's queries can then be computed
        alone; an encoder, which has no cache, needs all of its keys in the batch.
        """
        return True

    def written_slots(self) -> list[Tensor]:
        """int64 cache slots of the keys of each request, in order of position."""
        return [self.paging.slots(request.row, 0, len(request.key)) for request in self.requests]


def _single_request(
    batch: CommonAttentionMetadata, row: int, tokens: slice
) -> CommonAttentionMetadata:
    """The part of a batch that belongs to one request, as a batch of its own."""
    one, count = slice(row, row + 1), tokens.stop - tokens.start
    starts = torch.tensor([0, count], dtype=torch.int32)

    def request(value: Any) -> Any:
        return value[one].clone() if isinstance(value, Tensor) else value

    ranges = batch.mm_req_doc_ranges
    return batch.replace(
        query_start_loc=starts.to(batch.query_start_loc.device),
        query_start_loc_cpu=starts,
        seq_lens=request(batch.seq_lens),
        num_reqs=1,
        num_actual_tokens=count,
        max_query_len=count,
        block_table_tensor=request(batch.block_table_tensor),
        slot_mapping=batch.slot_mapping[tokens].clone(),
        causal=request(batch.causal),
        encoder_seq_lens=request(batch.encoder_seq_lens),
        encoder_seq_lens_cpu=None
        if batch.encoder_seq_lens_cpu is None
        else batch.encoder_seq_lens_cpu[one],
        positions=None if batch.positions is None else batch.positions[tokens].clone(),
        seq_lens_cpu_upper_bound=request(batch.seq_lens_cpu_upper_bound),
        rswa_prefix_lens=request(batch.rswa_prefix_lens),
        mm_req_doc_ranges=None if ranges is None else {0: ranges[row]} if row in ranges else {},
    )


def judge_output(
    check: str,
    actual: Tensor,
    expected: Tensor,
    low: Tensor,
    dtype: torch.dtype,
    result: CaseResult,
) -> None:
    """Check outputs ``[T, H, Dv]`` by their row errors; without rows there is nothing to check.

    Args:
        check: name of the check.
        actual: the backend's.
        expected: float64, the oracle's.
        low: the same computed in low precision, which sets the budget.
        dtype: of the output, whose rounding the budget allows for.
        result: takes the findings.
    """
    if len(expected):
        error = float(budget.row_errors(actual, expected).max())
        result.judge(check, error, budget.budget(expected, low, dtype))


def judge_lse(
    check: str,
    actual: Tensor,
    expected: Tensor,
    low: Tensor,
    result: CaseResult,
    soft_cap: float | None = None,
) -> None:
    """Check logsumexps ``[T, H]`` by their errors; without rows there is nothing to check.

    Args:
        check: name of the check.
        actual: fp32, the backend's.
        expected: float64, the oracle's.
        low: the same computed in low precision, which sets the budget.
        result: takes the findings.
        soft_cap: the layer's ``logits_soft_cap``, which widens the budget.
    """
    if len(expected):
        error = float(budget.lse_errors(actual, expected).max())
        result.judge(check, error, budget.lse_budget(expected, low, soft_cap))


def check_poison(rows: Tensor, margins: Tensor, untouched: Tensor, result: CaseResult) -> None:
    """Check that what no token has is still poison, under the name ``cache``.

    Args:
        rows: uint8, the cache's bytes by slot.
        margins: uint8, the padding of the pages.
        untouched: bool ``[slots]``, True where nothing may have been written.
        result: takes the findings.
    """
    for slot in (untouched.nonzero().flatten()).tolist():
        if not batches.is_poison(rows[slot]):
            result.note("cache", f"slot {slot}, which no token has, was written")
    result.note("cache", None if batches.is_poison(margins) else "page padding was written")


def check_rows(name: str, x: Tensor, stored: Stored, result: CaseResult) -> None:
    """Check that the cache holds ``x`` to half an ulp, under the name ``cache``.

    Args:
        name: what the numbers are, for the finding.
        x: ``[T, ...]`` numbers that were to be written.
        stored: numbers that the cache holds, of the same shape.
        result: takes the findings.
    """
    misses = stored.misses(x)
    problem = None
    if bool(misses.any()):
        token = int(misses.flatten(1).any(1).nonzero()[0])
        problem = f"{int(misses.sum())} numbers of {name} are off, the first in token {token}"
    result.note("cache", problem)
