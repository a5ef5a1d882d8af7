"""The whole examination of a machine, as data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from attn.bench.results.origin import SCHEMA_VERSION
from attn.cli.doctor.machine import (
    Installation,
    Machine,
    find_device,
    find_installation,
    find_machine,
)
from attn.cli.doctor.self_test import TRIALS, TrialResult, run_trial
from attn.cli.doctor.serving import Serving, serving_of
from attn.cli.doctor.vllm import Vllm, find_vllm
from attn.cli.terminal.threads import use_threads
from attn.device import known_device
from specs.base import NonNegativeInt, Spec
from specs.hf_config import load_model_geometry

MODELS: Final = ("llama-3.1-8b", "deepseek-v3", "deepseek-v3.2")
"""The models that are looked at where none is named: a dense, a latent and a sparse one."""


class Examination(Spec):
    """What ``attn doctor`` found."""

    schema_version: NonNegativeInt = SCHEMA_VERSION
    command: str
    machine: Machine
    installation: Installation
    asked_device: str
    """The device of ``serving`` and ``vllm``."""
    serving: tuple[Serving, ...]
    vllm: Vllm
    self_test: tuple[TrialResult, ...]
    """Outcomes on this machine's own device; empty where no self-test was asked for."""

    @property
    def passed(self) -> bool:
        """True where no trial of the self-test failed."""
        return all(trial.passed for trial in self.self_test)


def examine(
    models: Sequence[str] | None,
    asked: str | None,
    command: str,
    on_trial: Callable[[str], None] | None = None,
) -> Examination:
    """Examine this machine.

    Args:
        models: names or files of models whose layers are looked at; None means :data:`MODELS`.
        asked: name of the device that backends are chosen for, present or not; None means this
            machine's, which the self-test runs on in any case.
        command: the command line, for the report.
        on_trial: takes the name of each trial of the self-test before it runs; None leaves the
            self-test out.

    Raises:
        ValueError: a model or the device is unknown.
    """
    here, problem = find_device()
    device = here if asked is None else known_device(asked)
    use_threads(None, here)
    found = [load_model_geometry(name) for name in models or MODELS]
    serving = [one for model in found for one in serving_of(model, device)]
    results = []
    for trial in TRIALS if on_trial is not None else ():
        if on_trial is not None:
            on_trial(trial.name)
        results.append(run_trial(trial, here))
    return Examination(
        command=command,
        machine=find_machine(here, problem),
        installation=find_installation(),
        asked_device=device.name,
        serving=tuple(serving),
        vllm=find_vllm(device),
        self_test=tuple(results),
    )
