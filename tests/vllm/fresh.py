"""Code in processes where vLLM was imported and nothing has changed it.

Importing vLLM takes seconds, and most checks of what an import or a registration does take none.
One process imports it, and a fork of that process runs each check.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

SERVER: Final = """
import json, os, sys, traceback

import vllm.platforms.interface

for line in sys.stdin:
    code, environment, folder = json.loads(line)
    child = os.fork()
    if not child:
        os.environ.clear()
        os.environ.update(environment)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        status = 0
        try:
            exec(code, {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    _, ended = os.waitpid(child, 0)
    print("ended", os.waitstatus_to_exitcode(ended), flush=True)
"""


class FreshProcesses:
    """Forks of a process that has imported vLLM.

    Args:
        folder: for what they print.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, **environment: str) -> str:
        """Run code and return what it printed.

        Args:
            code: Python.
            environment: variables beside those of this process.

        Raises:
            AssertionError: the code failed; the message has what it printed as an error.
        """
        server, folder = self._server, self._folder
        assert server.stdin is not None
        assert server.stdout is not None
        asked = code, {**os.environ, **environment}, str(folder)
        print(json.dumps(asked), file=server.stdin, flush=True)
        for line in server.stdout:
            if line.startswith("ended "):
                assert line.split()[1] == "0", (folder / "stderr").read_text()
                return (folder / "stdout").read_text()
        raise AssertionError("the process that imports vLLM ended")

    def close(self) -> None:
        """End the process."""
        self._server.communicate()
