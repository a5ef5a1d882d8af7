"""What compute-sanitizer says is read in full, and nothing is explained away by its place alone."""

import ast
import inspect
import os
import stat
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from attn.kernels.dense.hopper_decode import consumer as decode_consume
from attn.kernels.dense.hopper_decode import kernel as decode
from attn.kernels.dense.hopper_prefill import kernel as prefill
from attn.kernels.dense.hopper_prefill import scheduler as tiles
from attn.kernels.sparse.hopper_wide import consumer as sparse_consume
from attn.testing.trial import Trial
from builders.launch.call import KernelCall
from builders.launch.launcher import Launcher
from builders.splitkv.device import plan as plan_kernels
from tests.tools import exchanges, sanitize
from tests.tools.sanitize import (
    DISPATCH,
    Outcome,
    Running,
    Share,
    complaints,
    dispatch_lines,
    function_at,
    outcome_of,
    render,
    reports,
)

END = "========= RACECHECK SUMMARY: {0} hazards displayed ({0} errors, 0 warnings)"
CLEAN = "========= ERROR SUMMARY: 0 errors"
KERNEL = "hopper_decode_kernel"


def line_of(function, text: str) -> int:
    """The first line of a function of a kernel that has the text."""
    lines, start = inspect.getsourcelines(function.fn)
    return start + next(at for at, line in enumerate(lines) if text in line)


PUT = line_of(tiles._put, "store")
TAKE = line_of(tiles._take, "load")
SEND = line_of(decode_consume._send, "mailbox.acc.index(0).store")
RECEIVE = line_of(decode_consume._with_sent, "mailbox.acc.index(0).load")
DISPATCHED = line_of(decode.hopper_decode_kernel, "warp_specialize")
DEFINED = line_of(decode.hopper_decode_kernel, "def ")


def race(first: str, *others: str, end: str = " [5 hazards]") -> str:
    lines = [f"========= Error: Race reported between {first}"]
    lines += [f"=========     and {other}{end}" for other in others]
    return "\n".join([*lines, "========= "])


def access(kind: str, file: str, line: int, kernel: str = KERNEL) -> str:
    return f"{kind} access at {kernel}+0x3c0 in {file}:{line}"


KNOWN = race(access("Write", "consumer.py", SEND), access("Read", "consumer.py", RECEIVE))
OF_TRITON = race(
    access("Read", "kernel.py", DEFINED),
    access("Write", "kernel.py", DEFINED),
    # The ``if`` that it stands in.
    access("Write", "kernel.py", DISPATCHED - 1),
)


def judged(*parts: str, done: int = 2, which: str = "decode") -> Outcome:
    said = "\n".join([*["DONE one"] * done, "OF 3"])
    return outcome_of("racecheck", which, [Share(said, "\n".join(parts))])


def test_places_are_of_the_innermost_function():
    assert function_at("scheduler.py", PUT, "hopper_prefill_kernel") == "_put"
    assert function_at("scheduler.py", TAKE, "hopper_prefill_kernel") == "_take"
    # Portable kernels use no file of a Hopper kernel's folder.
    assert function_at("scheduler.py", PUT, "plan_kernel") != "_put"
    assert function_at("kernel.py", DISPATCHED, KERNEL) == KERNEL
    assert function_at("exchanges.py", line_of(exchanges.snatch, "load")) == "snatch"
    assert function_at("no_such_file.py", 3) == "?"


def test_the_dispatch_is_where_partitions_are_named():
    for kernel in (decode.hopper_decode_kernel, prefill.hopper_prefill_kernel):
        file = os.path.basename(inspect.getsourcefile(kernel.fn))
        lines = dispatch_lines(file, kernel.fn.__name__)
        assert {line_of(kernel, "def "), line_of(kernel, "warp_specialize")} <= lines
        assert line_of(kernel, "mbarrier.init") not in lines
    assert dispatch_lines("plan.py", "plan_kernel") == frozenset()
    assert dispatch_lines("no_such_file.py", KERNEL) == frozenset()


def test_exchanges_and_the_dispatch_are_explained():
    (known,), of_triton = reports(f"{KNOWN}\n{OF_TRITON}")
    of_kernel = sanitize.EXPLAINED[KERNEL]
    assert known.reason == of_kernel["consumer.py:_send", "consumer.py:_with_sent"]
    assert [one.reason for one in of_triton] == [DISPATCH, DISPATCH]
    outcome = judged(KNOWN, OF_TRITON, END.format(2))
    assert (outcome.done, outcome.of, outcome.errors) == (2, 3, 0)
    assert outcome.is_as_it_should
    assert sum(outcome.found.values()) == 3


SUMS = line_of(sparse_consume._sums_of_both, "room.sums.index(W).store")
SPARSE = "hopper_sparse_kernel"
PRODUCT = "nvjet_sm90_tst_128x168_64x5_1x2_h_bz_TNT"


def test_sums_of_another_piece_and_products_of_cublas_are_explained():
    again = access("Write", "consumer.py", SUMS, SPARSE)
    ((race_of_sums,),) = reports(race(again, again))
    assert "barriers are between" in race_of_sums.reason
    inside = f"Read access at {PRODUCT}+0x930", f"Write access at {PRODUCT}+0x3880"
    ((race_of_product,),) = reports(race(*inside))
    assert race_of_product.reason == sanitize.OF_CUBLAS
    assert race_of_product.what == f"{PRODUCT}: ? writes, ? reads"
    outcome = judged(race(again, again), race(*inside), END.format(2))
    assert outcome.is_as_it_should


def test_what_is_explained_is_there():
    """A name that no kernel has any more would explain nothing, or something else later."""
    places = [
        (kernel, place)
        for kernel, explained in sanitize.EXPLAINED.items()
        for pair in explained
        for place in pair
    ]
    for kernel, place in (*places, *sanitize.REWRITTEN):
        file, function = place.split(":")
        source = sanitize.source_of(file, kernel)
        assert source is not None, (kernel, file)
        names = {node.name for node in ast.walk(source) if isinstance(node, ast.FunctionDef)}
        assert function in names, (kernel, place)


PLAN = line_of(plan_kernels.plan_kernel, "gdc_wait")


@pytest.mark.parametrize(
    "report",
    [
        # The other way round, the same function, another write, another line of the kernel's body.
        race(access("Read", "scheduler.py", TAKE), access("Write", "consumer.py", SEND)),
        race(access("Write", "scheduler.py", PUT), access("Write", "scheduler.py", PUT)),
        race(access("Write", "consumer.py", SEND), access("Write", "consumer.py", SEND)),
        race(access("Write", "kernel.py", DISPATCHED), access("Read", "scheduler.py", TAKE)),
        race(access("Write", "kernel.py", DEFINED), access("Read", "kernel.py", DEFINED + 90)),
        race(access("Write", "scheduler.py", PUT), access("Read", "scheduler.py", 3)),
        race(
            access("Write", "plan.py", PLAN, "plan_kernel"),
            access("Read", "plan.py", PLAN, "plan_kernel"),
        ),
        race(
            access("Write", "kernel.py", DISPATCHED),
            access("Read", "kernel.py", DISPATCHED, "another_kernel"),
        ),
        race(
            access("Write", "scheduler.py", PUT, "plain_kernel"),
            access("Read", "scheduler.py", TAKE, "plain_kernel"),
        ),
        # One of two is known.
        race(
            access("Write", "scheduler.py", PUT),
            access("Read", "scheduler.py", TAKE),
            access("Read", "consumer.py", RECEIVE),
        ),
        # Another line of the same function; a kernel that shares the function's name.
        race(
            access("Write", "consumer.py", SUMS, SPARSE),
            access("Write", "consumer.py", SUMS - 1, SPARSE),
        ),
        race(
            access("Write", "consumer.py", SEND, SPARSE),
            access("Read", "consumer.py", RECEIVE, SPARSE),
        ),
        # A kernel without lines that is not cuBLAS's.
        race(f"Write access at {KERNEL}+0x10", f"Read access at {KERNEL}+0x20"),
        # Not understood.
        race(access("Write", "scheduler.py", PUT)),
        race(
            "Read access at void at::native::sum<int>(T1)+0x10",
            access("Write", "scheduler.py", PUT),
        ),
        race(access("Write", "scheduler.py", PUT), "Read access in ?"),
        "========= Error: Race reported between Wri",
    ],
)
def test_anything_else_is_an_error(report):
    outcome = judged(KNOWN, report, END.format(2))
    assert outcome.errors == 1
    assert not outcome.is_as_it_should
    assert "NOT known" in render([outcome], "") or not reports(report)[0]


def test_what_is_counted_and_not_read_is_an_error():
    assert judged(KNOWN, END.format(4)).errors == 3
    # Nor does one process's explanation cover another's error.
    both = [Share("OF 1", f"{KNOWN}\n{END.format(0)}"), Share("OF 1", END.format(1))]
    assert outcome_of("racecheck", "decode", both).errors == 1
    assert complaints("========= ERROR SUMMARY: 1 error") == 1
    assert complaints(CLEAN) == 0
    assert complaints(f"{CLEAN}\n{END.format(3)}") == 3
    assert complaints("========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)") == 1
    assert complaints("") is None


@pytest.mark.parametrize(
    "share",
    [
        Share("DONE a", CLEAN),
        Share("DONE a\nOF 2", ""),
        Share("DONE a\nOF 2", CLEAN, -11),
        Share("DONE a\nOF 2", CLEAN, None),
        Share("Traceback: no module", CLEAN, 1),
    ],
)
def test_a_share_that_does_not_end_well_is_a_failure(share):
    outcome = outcome_of("memcheck", "decode", [Share("DONE b\nOF 1", CLEAN), share])
    assert len(outcome.failed) == 1
    assert not outcome.is_as_it_should


def test_failed_launches_and_those_that_were_not_reached_are_said():
    share = Share("KERNELS plan_kernel\nDONE a\nFAILED b: AssertionError: 1\nOF 7", CLEAN)
    outcome = outcome_of("memcheck", "plan", [share, share])
    assert (outcome.done, outcome.of, outcome.errors) == (2, 14, 0)
    assert outcome.failed == ("FAILED b: AssertionError: 1",) * 2
    row = "| memcheck | plan | 2 of 14 | 2 | 0 | 0 | `plan_kernel` |"
    assert row in render([outcome], "a GPU")


def test_controls_have_to_be_seen_as_they_are():
    for name, is_found in sanitize.CONTROLS.items():
        which = sanitize.CONTROL + name
        unknown = race(access("Write", "scheduler.py", PUT), access("Write", "scheduler.py", PUT))
        assert judged(KNOWN, END.format(1), which=which).is_as_it_should is not is_found
        assert judged(unknown, END.format(1), which=which).is_as_it_should is is_found
        assert not judged(unknown, END.format(1), which=which, done=0).is_as_it_should


def test_shares_are_all_launches_once(monkeypatch, capsys):
    ran = []
    jobs = [(str(n), lambda n=n: ran.append(n)) for n in range(10)]
    jobs.append(("bad", lambda: pytest.fail("by pytest's own means")))
    monkeypatch.setitem(sanitize.JOBS, "plan", lambda: iter(jobs))
    for share in range(3):
        sanitize.run_share("plan", share, 3, 60)
    assert sorted(ran) == list(range(10))
    said = capsys.readouterr().out
    assert said.count("DONE ") == 10
    assert "FAILED bad: Failed: by pytest's own means" in said
    sanitize.run_share("plan", 0, 3, -1)
    assert capsys.readouterr().out == "OF 4\n"


def test_a_launch_fails_where_its_set_s_kernels_are_not_launched(monkeypatch, capsys):
    def said_of(which: str, *names: str, programs: int = 1) -> list[str]:
        launchers = [Launcher(SimpleNamespace(arg_names=(), __name__=name), {}) for name in names]
        jobs = [("a", lambda: [launcher((programs,)) for launcher in launchers])]
        monkeypatch.setitem(sanitize.JOBS, which, lambda: iter(jobs))
        sanitize.run_share(which, 0, 1, 60)
        return capsys.readouterr().out.splitlines()

    monkeypatch.setattr(KernelCall, "launch_through_triton", lambda call: None)
    both = ["KERNELS fold_kernel hopper_a_kernel", "DONE a", "OF 1"]
    assert said_of("sparse", "hopper_a_kernel", "fold_kernel") == both
    assert said_of("plan", "plan_kernel") == ["KERNELS plan_kernel", "DONE a", "OF 1"]
    failed = "FAILED a: RuntimeError: no Hopper kernel was launched, only "
    assert said_of("sparse", "fold_kernel") == [f"{failed}['fold_kernel']", "OF 1"]
    # A launch without programs is none.
    assert said_of("sparse", "hopper_a_kernel", programs=0) == [f"{failed}[]", "OF 1"]
    assert Launcher.__call__.__name__ == "__call__"


def test_a_launch_is_done_when_the_gpu_has_ended_it(monkeypatch, capsys):
    def fail():
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setitem(sanitize.JOBS, "plan", lambda: iter([("a", lambda: None)]))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", fail)
    sanitize.run_share("plan", 0, 1, 60)
    assert capsys.readouterr().out == (
        "FAILED a: RuntimeError: an illegal memory access was encountered\nOF 1\n"
    )


def test_shares_are_of_launches_whose_names_match(monkeypatch, capsys):
    jobs = [(f"{kind} {n}", lambda: None) for kind in ("bf16", "e4m3", "fp16") for n in range(5)]
    monkeypatch.setitem(sanitize.JOBS, "plan", lambda: iter(jobs))
    for share in range(2):
        arguments = ["--share", "plan", str(share), "2", "--seconds", "60"]
        assert sanitize.main([*arguments, "--case", "e4m3*", "--case", "fp16 3"]) == 0
    said = capsys.readouterr().out
    assert said.count("DONE e4m3 ") == 5
    assert said.count("DONE fp16 3") == 1
    assert said.count("DONE ") == 6


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Stands for compute-sanitizer: writes a summary to its log, and runs what it is told to."""
    path = tmp_path / "compute-sanitizer"

    def make(instead: str = "") -> None:
        path.write_text(
            f"""#!{sys.executable}
import os, sys, time
given = sys.argv[1:]
log = given[given.index("--log-file") + 1]
print(os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"), flush=True)
{instead}
open(log, "w").write("========= ERROR SUMMARY: 0 errors")
print("DONE a\\nOF 1")
"""
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return make


def test_what_a_share_says_is_kept_and_it_ends_in_time(tool):
    tool("print('DONE b\\n' * 100_000)")
    share = Running("memcheck", "plan", 0, 1, 1.0).wait(time.monotonic() + 60)
    assert share.said.count("DONE b") == 100_000
    assert share.said.startswith("1\n")
    assert (share.log, share.status) == (CLEAN, 0)
    share = Running("memcheck", "prefill", 0, 1, 1.0).wait(time.monotonic() + 60)
    assert share.said.startswith("None\n")
    tool("time.sleep(600)")
    started = time.monotonic()
    share = Running("racecheck", "plan", 0, 1, 1.0).wait(time.monotonic() + 2)
    assert share.status is None
    assert time.monotonic() - started < 60


def test_every_set_is_run_by_every_tool(tool, monkeypatch):
    tool()
    monkeypatch.setattr(sanitize, "GRACE", 60.0)
    outcomes = sanitize.run(["memcheck", "racecheck"], 1.0, 4)
    controls = [sanitize.CONTROL + name for name in sanitize.CONTROLS]
    assert [(one.tool, one.which) for one in outcomes] == [
        *(("memcheck", which) for which in sanitize.SETS),
        *(("racecheck", which) for which in (*sanitize.SETS, *controls)),
    ]
    wrong = [one.which for one in outcomes if not one.is_as_it_should]
    assert wrong == [f"{sanitize.CONTROL}a race"]


@pytest.mark.parametrize("nameless", [1, sanitize.TRIES])
def test_a_process_whose_reports_name_no_kernel_is_started_again(
    nameless, tool, tmp_path, monkeypatch
):
    # The stand-in's first logs have a report without a name, the others have none.
    monkeypatch.setattr(sanitize, "GRACE", 60.0)
    monkeypatch.setattr(sanitize, "CONTROLS", {})
    report = "========= Error: Race reported between Read access at \n" + END.format(1)
    tool(
        f"""
with open({str(tmp_path / "starts")!r}, "a+") as starts:
    starts.write("one\\n")
    starts.seek(0)
    if len(starts.readlines()) <= {nameless}:
        open(log, "w").write({report!r})
        sys.exit(print("DONE a\\nOF 1"))
"""
    )
    (outcome,) = sanitize.run(["racecheck"], 1.0, 1, ["plan"])
    assert outcome.done == 1
    if nameless < sanitize.TRIES:
        assert (outcome.errors, outcome.again) == (0, nameless)
        assert "1 process was started again" in render([outcome], "")
    else:
        assert (outcome.errors, outcome.again) == (1, sanitize.TRIES - 1)
        assert not outcome.is_as_it_should


def test_a_process_is_not_started_again_if_anything_else_is_wrong():
    first = "========= Error: Race reported between Read access at "
    other = "=========     and Write access at  [145 hazards]"
    unknown = race(access("Write", "consumer.py", RECEIVE), access("Read", "consumer.py", SEND))

    def may_be_again(*lines: str, said: str = "DONE a\nOF 1", status: int | None = 0) -> bool:
        share = Share(said, "\n".join(lines), status)
        return sanitize.lacks_names_only("racecheck", "decode", share)

    assert may_be_again(first, other, END.format(1))
    assert may_be_again(KNOWN, first, other, END.format(2))
    assert not may_be_again(KNOWN, END.format(1))
    assert not may_be_again(first, other, unknown, END.format(2))
    assert not may_be_again(first, other, END.format(2)), "one hazard was counted and not told"
    assert not may_be_again(first, other, END.format(1), said="FAILED a: 1\nOF 1")
    assert not may_be_again(first, other, END.format(1), status=1)


def test_every_set_has_launches(monkeypatch):
    # Which a process of launches sets for good.
    monkeypatch.setattr(Trial, "decode_kernel", Trial.decode_kernel)
    monkeypatch.setattr(Trial, "prefill_kernel", Trial.prefill_kernel)
    names = {which: [name for name, _ in sanitize.JOBS[which]()] for which in sanitize.JOBS}
    assert set(names) == {*sanitize.SETS, "control"}
    for of_set in names.values():
        assert of_set
        assert len(set(of_set)) == len(of_set)


def test_a_table_is_not_written_of_an_unknown_commit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        sanitize.main(["--out", str(tmp_path / "table.md")])
    assert "--commit" in capsys.readouterr().err
