"""The example for vLLM: its imports and its settings, without a GPU."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs

EXAMPLE = Path(__file__).parents[2] / "docs/examples/vllm_offline.py"


def test_vllm_takes_the_settings_of_the_example(plugin: Any) -> None:
    names = runpy.run_path(str(EXAMPLE))
    arguments = EngineArgs(model=names["MODEL"], **names["ENGINE"])
    assert str(arguments.attention_backend) == "CUSTOM" == names["ENGINE"]["attention_backend"]
    assert SamplingParams(**names["SAMPLING"]).max_tokens == 64
    plugin.register()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert AttentionBackendEnum[names["ENGINE"]["attention_backend"]].is_overridden()
