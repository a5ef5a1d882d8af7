"""The pytest plugin of the conformance kit, in a test session of its own."""

from __future__ import annotations

import pytest

from attn.registry import AttentionBackendEnum, register_backend

BACKEND = """
import pytest
from attn.backends.torch_ref import TorchRefBackend
from attn.impls.dense.torch_ref import TorchRefImpl

class Future(TorchRefImpl):
    "Lets every token see all keys."
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self.rules, "causal", False)

class Right(TorchRefBackend):
    @staticmethod
    def get_name():
        return "KIT_RIGHT"

class Wrong(TorchRefBackend):
    @staticmethod
    def get_name():
        return "KIT_WRONG"

    @staticmethod
    def get_impl_cls():
        return Future
"""
TEST = """
import pytest

@pytest.mark.attn_backend("KIT_RIGHT")
def test_conformance(attn_case):
    attn_case.check()
"""


@pytest.fixture
def session(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with two backends, one of them wrong, and a test of the right one."""
    pytester.makepyfile(kit_backends=BACKEND, test_kit_of_backends=TEST)
    pytester.makeconftest('pytest_plugins = "attn.testing.plugin"')
    pytester.makeini("[pytest]\naddopts = --strict-markers")
    monkeypatch.syspath_prepend(pytester.path)
    for name in ("Right", "Wrong"):
        register_backend(f"KIT_{name.upper()}", f"kit_backends:{name}")
    yield pytester
    for name in ("KIT_RIGHT", "KIT_WRONG"):
        AttentionBackendEnum.remove(name)


CASES = "alibi-mixed or soft_cap-mixed"


def test_a_backend_is_put_through_its_cases(session: pytest.Pytester) -> None:
    done = session.runpytest_inprocess("-q", "-k", CASES)
    outcomes = done.parseoutcomes()
    assert outcomes["passed"] > 2
    assert outcomes.get("failed", 0) == 0


def test_a_wrong_backend_fails_with_what_was_found(session: pytest.Pytester) -> None:
    done = session.runpytest_inprocess("-q", "-k", CASES, "--attn-backend", "kit_wrong")
    outcomes = done.parseoutcomes()
    assert outcomes["failed"] > 2
    assert outcomes.get("passed", 0) == 0
    done.stdout.fnmatch_lines(["E*KIT_WRONG on alibi-mixed*", "E*output: error *, budget *"])


def test_the_shipped_test_takes_backends_from_the_command_line(session: pytest.Pytester) -> None:
    arguments = ("--pyargs", "attn.testing.kit", "-q", "-k", CASES, "--attn-backend")
    done = session.runpytest_inprocess(*arguments, "KIT_RIGHT")
    assert done.parseoutcomes()["passed"] > 2


def test_a_backend_that_does_not_run_here_is_skipped_with_the_reason(
    session: pytest.Pytester,
) -> None:
    done = session.runpytest_inprocess("-q", "-rs", "--attn-backend", "TRTLLM_MLA")
    assert done.parseoutcomes() == {"skipped": 1}
    done.stdout.fnmatch_lines(["SKIPPED*: *"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attn-backend", "NOTHING"], "*unknown attention backend 'NOTHING'*"),
        (["--attn-backend", "KIT_GONE"], "*backend KIT_GONE cannot be imported: No module*"),
        (["unmarked.py"], "*unmarked.py::test_it takes attn_case: name its backends with*"),
    ],
)
def test_a_session_without_a_backend_says_what_is_wrong(
    session: pytest.Pytester, arguments: list[str], message: str
) -> None:
    register_backend("KIT_GONE", "no_such_module_9:Backend")
    session.makepyfile(unmarked="def test_it(attn_case):\n    attn_case.check()\n")
    try:
        done = session.runpytest_inprocess("-q", *arguments)
    finally:
        AttentionBackendEnum.remove("KIT_GONE")
    assert done.ret != 0
    done.stdout.fnmatch_lines([message])


def test_pytest_elsewhere_loads_nothing_of_attn(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import sys\n\ndef test_it():\n    assert not {'attn', 'torch'} & set(sys.modules)\n"
    )
    done = pytester.runpytest_subprocess("-q")
    assert done.parseoutcomes() == {"passed": 1}
