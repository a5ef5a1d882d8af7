"""A pytest plugin that puts a backend through every conformance case that it serves.

A package of a backend asks for it in its ``conftest.py``; it is loaded by nothing else:

    pytest_plugins = "attn.testing.plugin"

A test that takes ``attn_case`` then runs once for each case of the backends that its mark names:

    @pytest.mark.attn_backend("MY_ATTN")
    def test_conformance(attn_case):
        attn_case.check()

``pytest --attn-backend NAME`` asks for other backends than the mark does. A backend that cannot run
on this machine gives one skipped test with the reason. Cases that run on a GPU are marked ``gpu``.

``attn.testing.kit`` is such a test, so that a backend can be tried before it has a test of its own:

    pytest -p attn.testing.plugin --pyargs attn.testing.kit --attn-backend MY_ATTN
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from attn.backends.base import AttentionBackend
from attn.device import detect_device
from attn.errors import missing_reason
from attn.registry import AttentionBackendEnum, RegisteredBackend
from attn.selector import import_problem
from attn.testing.cases import AnyCase, cases_for, device_for
from attn.testing.conformance import check_case
from attn.testing.trial import CaseResult

FIXTURE = "attn_case"
MARK = "attn_backend"


@dataclass(frozen=True)
class BackendCase:
    """One conformance case of one registered backend."""

    backend: type[AttentionBackend]
    case: AnyCase
    device: torch.device
    """Where the backend's tensors lie."""

    def check(self) -> CaseResult:
        """Put the backend through the case.

        Raises:
            AssertionError: a check failed; the text has every finding.
        """
        return check_case(self.backend, self.case, self.device)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--attn-backend``."""
    parser.getgroup("attn", "attention backends").addoption(
        "--attn-backend",
        action="append",
        metavar="NAME",
        help="Run conformance cases of this backend in place of those that tests name; repeatable.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks, and take one thread unless ``OMP_NUM_THREADS`` says how many.

    The kit's tensors are small, and on a busy machine threads that wait for each other take many
    times as long as one.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    for line in (
        f"{MARK}(*names): registered backends whose conformance cases {FIXTURE} goes through",
        "gpu: needs a CUDA or ROCm GPU",
    ):
        config.addinivalue_line("markers", line)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test that takes ``attn_case`` every case of its backends.

    Raises:
        UsageError: no backend is named, or one that is unknown or that its package breaks.
    """
    if FIXTURE not in metafunc.fixturenames:
        return
    names = metafunc.config.getoption("--attn-backend") or [
        name for mark in metafunc.definition.iter_markers(MARK) for name in mark.args
    ]
    if not names:
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid} takes {FIXTURE}: name its backends with "
            f"@pytest.mark.{MARK}(NAME), or with --attn-backend NAME"
        )
    try:
        members = [AttentionBackendEnum[name] for name in names]
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    metafunc.parametrize(FIXTURE, [case for member in members for case in parameters_of(member)])


def parameters_of(member: RegisteredBackend) -> Iterator[object]:
    """The parameters of ``attn_case`` for a backend: its cases, or one to skip with a reason.

    Raises:
        UsageError: the class of the backend cannot be imported.
    """
    missing = member.missing()
    problem = None if missing else import_problem(member)
    if problem is not None:
        raise pytest.UsageError(f"backend {member.name} {problem}")
    device = device_for(member)
    if device is None:
        reason = missing_reason(missing[0]) if missing else _why_not_here(member.get_class())
        yield pytest.param(None, id=member.name, marks=pytest.mark.skip(reason=reason))
        return
    backend, marks = member.get_class(), [pytest.mark.gpu] if device.type == "cuda" else []
    for case in cases_for(backend):
        one = BackendCase(backend, case, device)
        yield pytest.param(one, id=f"{member.name}-{case}", marks=marks)


def _why_not_here(backend: type[AttentionBackend]) -> str:
    here = detect_device()
    if not backend.supports_device(here):
        return f"does not run on {here.kind.value}"
    return backend.unavailable_reason() or "cannot run on this machine"
