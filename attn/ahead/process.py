"""A process that compiles the kernels of layers while an engine loads its model.

The engine starts it by :class:`AheadProcess` and names layers as they are made. The process uses no
GPU: it makes the layers' launches by :mod:`attn.ahead.layers` and compiles them into Triton's
cache, where the engine finds them. It ends with the engine, and what it did not compile, the engine
does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from queue import Empty, SimpleQueue
from typing import Final

from attn.ahead.layers import LayerAhead, launches_of
from specs.base import NonNegativeInt, PositiveInt, Spec
from specs.devices import Device

IDLE_SECONDS: Final = 600.0
"""How long the process waits for a line at most: an engine that failed may never send the last."""
_END: Final = "end"
"""The line after the last layer."""
_logger = logging.getLogger(__name__)


class Order(Spec):
    """A layer whose kernels are to be compiled: one line of the process's standard input."""

    ahead: LayerAhead
    device: Device
    jobs: PositiveInt
    """Threads that compile."""


class Summary(Spec):
    """What the process did: the line of its standard output."""

    compiled: NonNegativeInt
    cached: NonNegativeInt
    """Kernels that were in Triton's cache already."""
    seconds: float
    """From the process's first line to its last kernel."""
    problems: tuple[str, ...] = ()
    """Why layers or kernels were not compiled."""


class AheadProcess:
    """The engine's side: one process, which gets layers and is waited for once."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start the process.

        Args:
            environment: its variables, ``TRITON_CACHE_DIR`` among them.

        Raises:
            OSError: the process cannot be started.
        """
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "attn.ahead.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment, "PYTHONPATH": paths},
            text=True,
        )
        self._ordered: set[Order] = set()

    def compile(self, order: Order) -> None:
        """Have a layer's kernels compiled; an order that was given before costs nothing."""
        if order not in self._ordered:
            self._ordered.add(order)
            self._write(order.model_dump_json())

    def finish(self, seconds: float) -> Summary | None:
        """Wait until the process has compiled all that was ordered, and end it.

        Args:
            seconds: how long to wait at most.

        Returns:
            What it did; None if it failed or took longer.
        """
        self._write(_END)
        try:
            said, _ = self._process.communicate(timeout=seconds)
            return Summary.model_validate_json(said)
        except (subprocess.TimeoutExpired, OSError, ValueError) as error:
            _logger.debug("no kernels were compiled ahead: %s", error)
            return None
        finally:
            self._process.kill()
            # Closing its input writes what it did not read.
            with contextlib.suppress(OSError), self._process:
                pass

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:
            # The process has ended, and its engine compiles by itself.
            _logger.debug("the process that compiles ahead has ended: %s", error)


def _read(lines: SimpleQueue[str]) -> None:
    """Pass on lines of standard input. Where it ends without a last line, the engine has ended."""
    for line in sys.stdin:
        lines.put(line.strip())
        if line.strip() == _END:
            return
    os._exit(1)


def _taken(lines: SimpleQueue[str]) -> list[str]:
    """The next line, and all others that are there already; the last line if none comes."""
    found = []
    try:
        found.append(lines.get(timeout=IDLE_SECONDS))
        while True:
            found.append(lines.get_nowait())
    except Empty:
        return found or [_END]


def main() -> None:
    """Compile what standard input orders, and print a summary."""
    lines: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_read, args=[lines], daemon=True).start()
    # The imports take seconds and need no order.
    from builders.launch.ahead import compile_ahead

    begin, compiled, cached = time.monotonic(), 0, 0
    problems: list[str] = []
    is_last = False
    while not is_last:
        given = _taken(lines)
        is_last = given[-1] == _END
        orders = [Order.model_validate_json(line) for line in given if line != _END]
        calls = []
        for order in orders:
            try:
                calls += launches_of(order.ahead, order.device)
            except Exception as error:
                problems.append(f"{order.ahead.backend}: {error}")
        if calls:
            capability = orders[0].device.compute_capability
            assert capability is not None
            for outcome in compile_ahead(calls, capability, orders[0].jobs):
                compiled, cached = compiled + outcome.compiled, cached + outcome.cached
                if outcome.error:
                    problems.append(f"{outcome.kernel}: {outcome.error}")
    seconds = time.monotonic() - begin
    summary = Summary(compiled=compiled, cached=cached, seconds=seconds, problems=tuple(problems))
    print(summary.model_dump_json(), flush=True)


if __name__ == "__main__":
    main()
