"""What compute-sanitizer says is read in full, and nothing is explained away by its place alone."""

import inspect
import sys
import time

import pytest

from attn.kernels.hopper import decode, decode_consume, tiles
from tests import sanitize, trials
from tests.kernels import exchanges
from tests.sanitize import DISPATCH, complaints, function_at, outcome_of, render, reports

END = "========= RACECHECK SUMMARY: {0} hazards displayed ({0} errors, 0 warnings)"


def line_of(function, text: str) -> int:
    """The first line of a function of a kernel that has the text."""
    lines, start = inspect.getsourcelines(function.fn)
    return start + next(at for at, line in enumerate(lines) if text in line)


PUT = line_of(tiles._put, "store")
TAKE = line_of(tiles._take, "load")
SEND = line_of(decode_consume._send, "letter.index(0).store")
RECEIVE = line_of(decode_consume._with_sent, "letter.index(0).load")
DISPATCHED = line_of(decode.hopper_decode_kernel, "warp_specialize")


def race(first: str, *others: str, end: str = " [5 hazards]") -> str:
    lines = [f"========= Error: Race reported between {first}"]
    lines += [f"=========     and {other}{end}" for other in others]
    return "\n".join([*lines, "========= "])


def access(kind: str, file: str, line: int, kernel: str = "hopper_decode_kernel") -> str:
    return f"{kind} access at {kernel}+0x3c0 in {file}:{line}"


KNOWN = race(
    access("Write", "decode_consume.py", SEND), access("Read", "decode_consume.py", RECEIVE)
)
OF_TRITON = race(
    access("Read", "decode.py", DISPATCHED),
    access("Write", "decode.py", DISPATCHED),
    access("Write", "decode.py", DISPATCHED + 1),
)


def judged(*parts: str, done: int = 2):
    log = "\n".join([*["DONE one"] * done, "OF 3", *parts])
    return outcome_of("racecheck", "decode", [log])


def test_places_are_of_the_innermost_function():
    assert function_at("tiles.py", PUT) == "_put"
    assert function_at("tiles.py", TAKE) == "_take"
    assert function_at("decode.py", DISPATCHED) == "hopper_decode_kernel"
    assert function_at("exchanges.py", line_of(exchanges.snatch, "load")) == "snatch"
    assert function_at("no_such_file.py", 3) == "no_such_file.py"


def test_exchanges_and_the_dispatch_are_explained():
    (known,), of_triton = reports(f"{KNOWN}\n{OF_TRITON}")
    assert known.reason == sanitize.EXPLAINED["_send", "_with_sent"]
    assert [one.reason for one in of_triton] == [DISPATCH, DISPATCH]
    outcome = judged(KNOWN, OF_TRITON, END.format(2))
    assert (outcome.done, outcome.of, outcome.errors) == (2, 3, 0)
    assert sum(outcome.found.values()) == 3


@pytest.mark.parametrize(
    "report",
    [
        # The other way round, the same function, another write, another line of the kernel's file.
        race(access("Read", "tiles.py", TAKE), access("Write", "decode_consume.py", SEND)),
        race(access("Write", "tiles.py", PUT), access("Write", "tiles.py", PUT)),
        race(
            access("Write", "decode_consume.py", SEND), access("Write", "decode_consume.py", SEND)
        ),
        race(access("Write", "decode.py", DISPATCHED), access("Read", "tiles.py", TAKE)),
        race(access("Write", "tiles.py", PUT), access("Read", "tiles.py", 3)),
        race(
            access("Write", "decode.py", DISPATCHED),
            access("Read", "decode.py", DISPATCHED, "another_kernel"),
        ),
        # One of two is known.
        race(
            access("Write", "tiles.py", PUT),
            access("Read", "tiles.py", TAKE),
            access("Read", "decode_consume.py", RECEIVE),
        ),
        race(access("Write", "tiles.py", PUT)),
    ],
)
def test_anything_else_is_an_error(report):
    outcome = judged(KNOWN, report, END.format(2))
    assert outcome.errors == 1
    assert "NOT known" in render([outcome], "") or not reports(report)[0]


def test_what_is_counted_and_not_understood_is_an_error():
    assert judged(KNOWN, END.format(4)).errors == 3
    with pytest.raises(ValueError, match="racecheck said"):
        judged(race("Read access at ?", access("Write", "tiles.py", PUT)), END.format(1))
    with pytest.raises(ValueError, match="no summary"):
        judged(KNOWN)
    assert complaints("========= ERROR SUMMARY: 1 error") == 1
    assert complaints("========= ERROR SUMMARY: 0 errors") == 0
    assert complaints("========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)") == 1


def test_failed_launches_and_those_that_were_not_reached_are_said():
    log = "DONE a\nFAILED b: AssertionError: 1\nOF 7\n========= ERROR SUMMARY: 0 errors"
    outcome = outcome_of("memcheck", "plan", [log, log])
    assert (outcome.done, outcome.of, outcome.errors) == (2, 14, 0)
    assert outcome.failed == ("FAILED b: AssertionError: 1",) * 2
    assert "| memcheck | plan | 2 of 14 | 2 | 0 | 0 |" in render([outcome], "a GPU")


def test_shares_are_all_launches_once(monkeypatch, capsys):
    ran = []
    jobs = [(str(n), lambda n=n: ran.append(n)) for n in range(10)]
    jobs.append(("bad", lambda: 1 / 0))
    monkeypatch.setitem(sanitize.JOBS, "plan", lambda: iter(jobs))
    for share in range(3):
        sanitize.run_share("plan", share, 3, 60)
    assert sorted(ran) == list(range(10))
    said = capsys.readouterr().out
    assert said.count("DONE ") == 10
    assert "FAILED bad: ZeroDivisionError: division by zero" in said
    sanitize.run_share("plan", 0, 3, -1)
    assert capsys.readouterr().out == "OF 4\n"


def test_what_a_share_says_is_kept_and_it_ends_in_time():
    lots = "print('DONE a\\n' * 100_000)"
    log = sanitize.Running([sys.executable, "-c", lots]).log(time.monotonic() + 60)
    assert log.count("DONE a") == 100_000
    hangs = "import time; print('DONE b', flush=True); time.sleep(600)"
    running = sanitize.Running([sys.executable, "-c", hangs])
    log = running.log(time.monotonic() + 3)
    outcome = outcome_of("memcheck", "plan", [log])
    assert (outcome.done, outcome.failed) == (1, ("FAILED to end in time",))
    assert outcome.errors == 1


def test_every_set_has_launches(monkeypatch):
    # Which a process of launches sets for good.
    monkeypatch.setattr(trials.Trial, "decode_kernel", trials.Trial.decode_kernel)
    monkeypatch.setattr(trials.Trial, "prefill_kernel", trials.Trial.prefill_kernel)
    names = {which: [name for name, _ in sanitize.JOBS[which]()] for which in sanitize.JOBS}
    assert set(names) == {*sanitize.SETS, "control"}
    for of_set in names.values():
        assert of_set
        assert len(set(of_set)) == len(of_set)
