"""The host's time in every case of several tables, on one page.

``python -m attn.bench.results.host RESULTS.json ... --out PAGE.md``
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from attn.bench.command import USER_ERRORS, Parser, check_writable, usage_error
from attn.bench.results.case_tables import microseconds, table, time_text, verdict_text
from attn.bench.results.render import measured_line
from attn.bench.results.report import load_results
from attn.bench.results.results import BenchResults, CaseResult, Verdict, host_check

_HOW: Final = (
    "Microseconds of the host in one eager `forward`, median, with an idle GPU at first and "
    "without waiting for it. `build` is that of our plan of a step, which all layers share. "
    "`launches` are kernels, copies and fills of one eager `forward` of ours. A case without a "
    "target is shown for information."
)


def host_page(tables: Sequence[BenchResults]) -> str:
    """The page: a section for each table, with a row for each of its cases that was measured."""
    checks = [host_check(result) for results in tables for result in results.cases]
    judged = [check.verdict for check in checks if check is not None]
    said = ", ".join(f"{judged.count(one)} {one.value}" for one in Verdict)
    parts = ["# Time of the host in one forward", f"Targets: {said}.", _HOW]
    for results in tables:
        environment = results.environment
        peers = environment.table.peers
        header = ["case", "ours", "build", "launches", *peers, "target", "verdict"]
        parts += [
            f"## {environment.backend} on {environment.device}, table {environment.table.value}",
            measured_line(environment),
            table(header, [_row(one, peers) for one in results.cases if one.ours.host_us]),
        ]
    return "\n\n".join(parts) + "\n"


def _row(result: CaseResult, peers: Sequence[str]) -> list[str]:
    ours, check = result.ours, host_check(result)
    named = [result.peer(name) for name in peers]
    return [
        result.case.name,
        f"**{microseconds(ours.host_us)}**",
        microseconds(ours.plan_host_us),
        "" if ours.launches is None else str(ours.launches),
        *(time_text(peer, None if peer is None else peer.host_us) for peer in named),
        "" if check is None else check.text,
        "" if check is None else verdict_text(check.verdict, [check]),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; the exit code is 2 for bad input.

    Args:
        arguments: the arguments; None takes the process's.
    """
    parser = Parser(
        prog="python -m attn.bench.results.host", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of attn bench kernels")
    parser.add_argument("--out", type=Path, help="Markdown file to write; default: print it")
    asked: argparse.Namespace = parser.parse_args(arguments)
    try:
        check_writable("--out", asked.out)
        page = host_page([load_results(path) for path in asked.results])
        if asked.out is None:
            print(page, end="")
        else:
            asked.out.write_text(page, encoding="utf-8")
    except USER_ERRORS as error:
        return usage_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
