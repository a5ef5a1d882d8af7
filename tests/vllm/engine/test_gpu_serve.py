"""The server of vLLM, started as users start it, answers for a sparse model with our backend.

Nothing is patched: the process finds the plugin by its entry point, so that the project has to be
installed.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm.engine.cases import LIMITS, PROMPT_LENS
from tests.vllm.engine.latent import SPARSE
from tests.vllm.engine.models import make_model, prompts_of
from tests.vllm.engine.runs import FOLDER_VARIABLE, ROOT, worker_environment
from tests.vllm.engine.served import faults_of, served_of

pytestmark = pytest.mark.gpu

START_S = 400
"""Most seconds until the server answers."""
OUTPUT_LEN = 16


def require_entry_point() -> None:
    """Skip where the plugin is not installed."""
    known = importlib.metadata.entry_points(group="vllm.general_plugins")
    if not any(point.value.startswith("attn.integrations.vllm") for point in known):
        pytest.skip("the project is not installed: vLLM finds no entry point of its plugin")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def asked(port: int, path: str, body: dict[str, Any] | None = None) -> str:
    """The text that a path of the server answers."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(answer.read().decode())


@contextmanager
def served(folder: Path, log: Path, *arguments: str) -> Iterator[int]:
    """A server of the model in ``folder``; gives its port."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]
    command += ["--attention-backend", "CUSTOM", "--port", str(port), "--host", "127.0.0.1"]
    with log.open("w", encoding="utf-8") as output:
        server = subprocess.Popen(
            [*command, *arguments],
            cwd=ROOT,
            env=worker_environment({}),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            limit = time.monotonic() + START_S
            while True:
                try:
                    asked(port, "/health")
                    break
                except (urllib.error.URLError, OSError):
                    if server.poll() is not None or time.monotonic() > limit:
                        text = log.read_text(encoding="utf-8", errors="replace")
                        pytest.fail(f"the server did not start ({server.poll()}):\n{text[-8000:]}")
                    time.sleep(1.0)
            yield port
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()


@pytest.mark.parametrize("cache", ["auto", "fp8_ds_mla"])
def test_a_sparse_model_is_served(tmp_path: Path, cache: str) -> None:
    require_entry_point()
    folder, log = tmp_path / "model", tmp_path / "log.txt"
    kept = os.environ.get(FOLDER_VARIABLE)
    if kept:
        log = Path(kept) / f"serve-{cache}-log.txt"
    make_model(SPARSE, folder)
    prompts = prompts_of(lens=PROMPT_LENS[SPARSE])
    options = {**LIMITS[SPARSE], "block_size": 64, "gpu_memory_utilization": 0.2}
    arguments = ["--served-model-name", "sparse", "--kv-cache-dtype", cache]
    # One of the two runs as users start it, compiled and with CUDA graphs.
    arguments += ["--enforce-eager"] if cache == "auto" else []
    for name, value in options.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    with served(folder, log, *arguments) as port:
        body = {
            "model": "sparse",
            "prompt": prompts,
            "max_tokens": OUTPUT_LEN,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": 1,
            "prompt_logprobs": 0,
        }
        choices = json.loads(asked(port, "/v1/completions", body))["choices"]
    if kept:
        answer = Path(kept) / f"serve-{cache}-answer.json"
        answer.write_text(json.dumps(choices), encoding="utf-8")
    choices.sort(key=lambda choice: choice["index"])
    assert [len(choice["token_ids"]) for choice in choices] == [OUTPUT_LEN] * len(prompts)
    answers = [served_of(*pair) for pair in zip(prompts, choices, strict=True)]
    assert faults_of(answers, folder, cache) == []
    text = log.read_text(encoding="utf-8", errors="replace")
    assert "SPARSE_MLA as CUSTOM serves" in text
