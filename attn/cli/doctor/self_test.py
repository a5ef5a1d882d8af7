"""A self-test: small replays on this machine, with sampled rows compared with float64.

Each replay serves prompts in chunks, decodes, and batches of both over paged caches, as
``attn run`` does, with the backend that the selector chooses here. A second replay of each family
has a deliberate fault, which the comparison must see: one that passes everything proves nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from attn.cli.faults import Fault
from attn.cli.replay import Replay, RunSettings
from attn.cli.report import RunReport, failure_lines, verdict
from attn.cli.trace import TraceRequest
from attn.errors import one_line
from specs.base import Spec
from specs.devices import Device
from specs.dtypes import CacheDType
from specs.hf_config import load_model_geometry
from specs.model import ModelGeometry

_TOPK: Final = 64
"""Length of the lists of the sparse layer, so that short contexts are longer than a list."""


@dataclass(frozen=True)
class Trial:
    """One replay of the self-test."""

    family: str
    model: str
    """Name of a bundled model, whose first layer is run."""
    ranks: int
    """Tensor-parallel ranks; one of them is run, so that a CPU is fast enough."""
    kv_cache_dtype: CacheDType
    fault: Fault | None = None
    """A deliberate fault, which must be seen."""

    @property
    def name(self) -> str:
        """The trial in words."""
        ending = "" if self.fault is None else f", with the fault {self.fault.value}"
        return f"{self.family}, {self.kv_cache_dtype.value} cache{ending}"


TRIALS: Final = (
    Trial("dense", "llama-3.1-8b", 8, CacheDType.AUTO),
    Trial("dense", "llama-3.1-8b", 8, CacheDType.FP8),
    Trial("dense", "llama-3.1-8b", 8, CacheDType.AUTO, Fault.WRONG_SLOT),
    Trial("latent", "deepseek-v3", 16, CacheDType.AUTO),
    Trial("latent", "deepseek-v3", 16, CacheDType.FP8),
    Trial("latent", "deepseek-v3", 16, CacheDType.AUTO, Fault.WRONG_SLOT),
    Trial("sparse", "deepseek-v3.2", 16, CacheDType.AUTO),
    Trial("sparse", "deepseek-v3.2", 16, CacheDType.FP8_DS_MLA),
    Trial("sparse", "deepseek-v3.2", 16, CacheDType.AUTO, Fault.WRONG_SLOT),
)
"""The trials, each family first as it should be and then with a fault."""
_LENGTHS: Final = ((150, 5), (37, 8), (1, 6), (90, 3), (16, 4))
"""Prompt and generated tokens of the requests: around pages of 16 and 64 tokens, and chunks."""


class TrialResult(Spec):
    """Outcome of a trial."""

    name: str
    backend: str
    """Names of the backends that ran; empty where none could be chosen."""
    passed: bool
    """The rows are within their budgets; with a fault: some row is not."""
    worst_error_ratio: float
    """Largest error of a checked row over its budget."""
    checked_rows: int
    seconds: float
    said: str
    """The outcome in a sentence."""


def run_trial(trial: Trial, device: Device) -> TrialResult:
    """Run one trial on this machine's device; an error is an outcome."""
    begin = time.perf_counter()
    try:
        report = _replay(trial, device)
    except Exception as error:
        # Whatever a kernel, a compiler or a driver raises is what the user needs to report.
        return TrialResult(
            name=trial.name,
            backend="",
            passed=False,
            worst_error_ratio=0.0,
            checked_rows=0,
            seconds=round(time.perf_counter() - begin, 2),
            said=f"{type(error).__name__}: {one_line(error)}",
        )
    totals = report.totals
    passed, said = report.passed, verdict(report)
    if trial.fault is not None:
        passed = totals.checked_rows > 0 and not report.passed
        said = failure_lines(report)[0] if passed else f"fault not seen: {trial.fault.value}"
    elif not passed:
        said = "; ".join([said, *failure_lines(report)])
    return TrialResult(
        name=trial.name,
        backend=", ".join(group.backend for group in report.layer_groups),
        passed=passed,
        worst_error_ratio=totals.worst_error_ratio,
        checked_rows=totals.checked_rows,
        seconds=round(time.perf_counter() - begin, 2),
        said=said,
    )


def _replay(trial: Trial, device: Device) -> RunReport:
    settings = RunSettings(
        model=_model(trial),
        device=device,
        kv_cache_dtype=trial.kv_cache_dtype,
        max_num_seqs=8,
        max_num_batched_tokens=96,
        check_rows=4,
        fault=trial.fault,
    )
    requests = [TraceRequest(float(at), *lengths) for at, lengths in enumerate(_LENGTHS)]
    replay = Replay(settings, requests)
    replay.run(lambda record: None)
    if replay.interrupted:
        raise KeyboardInterrupt
    return replay.report({"corrupt": trial.fault.value if trial.fault else None}, 0)


def _model(trial: Trial) -> ModelGeometry:
    """One layer of the trial's model, as one rank sees it."""
    model = load_model_geometry(trial.model).local(trial.ranks)
    layer = model.layers[0]
    if layer.indexer is not None:
        layer = layer.replace(indexer=layer.indexer.replace(index_topk=_TOPK))
    return model.replace(layers=(layer,), other_layers=())
