"""What vLLM makes of the cases' settings; no engine runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from tests.vllm.engine.cases import CASES, LIMITS, PROMPT_LENS, TIGHT_LENS, our_run, their_runs
from tests.vllm.engine.latent import CONFIGS, Lists, Oracle
from tests.vllm.engine.models import make_model, prompts_of
from tests.vllm.engine.runs import Engines, lists_beyond_budget
from tests.vllm.engine.sweep import jobs_of
from tests.vllm.engine.worker import OUTPUT_LEN, Run, lists_of, options_of, run_of


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    folder = tmp_path_factory.mktemp("engines")
    for name in CONFIGS:
        make_model(name, folder / name)
    return Engines(folder)


@pytest.mark.parametrize("name", CASES)
def test_vllm_takes_the_settings(name: str, engines: Engines, cuda: Any, plugin: Any) -> None:
    """Model, cache, parallelism, drafts and graphs fit one another."""
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()
    run, environment = our_run(engines, CASES[name])
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in environment.items():
            patch.setenv(variable, value)
        options = options_of(run)
        # A machine without GPUs has no second rank and no file of the worker's to import.
        options.pop("worker_cls", None)
        options.pop("distributed_executor_backend", None)
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        config = EngineArgs(model=run.folder, attention_backend=run.backend, **options)
        made = config.create_engine_config()
        if "first model runner" in name:
            assert not made.use_v2_model_runner
    assert made.attention_config.backend.name == "CUSTOM"
    assert made.model_config.use_mla
    parallel = made.parallel_config
    assert parallel.tensor_parallel_size == CASES[name].gpus
    assert parallel.decode_context_parallel_size == (2 if "DCP" in name else 1)
    assert made.cache_config.cache_dtype == CASES[name].cache
    assert (made.speculative_config is not None) == ("drafts" in name)


def test_prompts_fit_and_are_long_enough() -> None:
    for name, config in CONFIGS.items():
        longest = max(PROMPT_LENS[name])
        assert longest + OUTPUT_LEN <= LIMITS[name]["max_model_len"]
        if "index_topk" in config:
            assert longest >= 4 * config["index_topk"]
            assert min(PROMPT_LENS[name]) < config["index_topk"]
    # Each prompt ends within its last block, which the answer then leaves.
    assert all(length <= 1024 < length + OUTPUT_LEN for length in TIGHT_LENS)


def test_runs_have_names_of_their_own_and_survive_json(engines: Engines) -> None:
    import json
    from dataclasses import asdict

    keys = {}
    for name, case in CASES.items():
        run, environment = our_run(engines, case)
        assert run_of(json.dumps(asdict(run))) == run
        keys[engines.key_of(run, environment)] = name
        for other, none in their_runs(engines, case):
            assert other.backend != run.backend
            assert engines.key_of(other, none) not in keys
    assert sorted(keys.values()) == sorted(CASES)


def test_a_sweep_has_each_run_once(engines: Engines) -> None:
    jobs = jobs_of(engines, [], dense=True)
    keys = [engines.key_of(run, environment) for _, run, environment, _ in jobs]
    assert len(set(keys)) == len(keys)
    names = [name for name, *_ in jobs]
    # One GPU at most is here, so that cases of two are left out.
    assert {name for name, case in CASES.items() if case.gpus == 1} <= set(names)
    assert not [name for name in names if "TP 2" in name]
    assert "llama" in names
    only = jobs_of(engines, ["weight reload"], dense=False)
    assert [name for name, *_ in only if ":" not in name] == [
        "MLA, weight reload",
        "sparse, weight reload",
    ]


def test_a_missing_list_is_told(tmp_path: Path) -> None:
    rows, path = torch.zeros(8, 4, dtype=torch.int32), tmp_path / "lists.pt"
    sequences, prompts = [[1, 2, 3, 9, 9]], [[1, 2, 3]]
    torch.save({(1, 2, 3): [(2, {0: rows})]}, path)
    ((positions, lists),) = lists_of(path, sequences, prompts)[0]
    # The last token was never an input.
    assert (positions, lists[0].shape) == (range(4), (4, 4))
    missing = rows.clone()
    missing[3] = -2
    torch.save({(1, 2, 3): [(2, {0: missing})]}, path)
    with pytest.raises(ValueError, match="list keys of token 3"):
        lists_of(path, sequences, prompts)
    # Before a preemption, position 3 was never reached.
    torch.save({(1, 2, 3): [(2, {0: missing}), (3, {0: rows})]}, path)
    first, then = lists_of(path, sequences, prompts)[0]
    assert (first[0], then[0]) == (range(3), range(3, 4))
    assert (first[1][0].shape, then[1][0].shape) == ((3, 4), (4, 4))
    torch.save({}, path)
    assert lists_of(path, [[1, 2]], [[1]]) == [[(range(1), None)]]


@pytest.mark.parametrize("name", CONFIGS)
def test_short_prompts_are_answered_by_varied_tokens(name: str, engines: Engines) -> None:
    """Otherwise any attention would answer them alike."""
    oracle = Oracle(engines.folder / name)
    prompts = [prompt for prompt in prompts_of(lens=PROMPT_LENS[name]) if len(prompt) < 64]
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(OUTPUT_LEN):
            tokens.append(int(oracle.answer(tokens).logits[-1].argmax()))
        assert len(set(tokens[len(prompt) :])) >= 6


def test_lists_that_miss_more_than_another_runs_are_told() -> None:
    known = Lists(9, 0.02, 0.04, 0.01, 0.02, 0, 0)
    assert lists_beyond_budget(replace(known, missed_mean=0.039), known) == []
    assert len(lists_beyond_budget(replace(known, missed_mean=0.041), known)) == 1
    assert len(lists_beyond_budget(replace(known, missed_max=0.09), known)) == 1


def test_a_run_has_a_reference(engines: Engines) -> None:
    made = Run(model="deepseek_v32", folder="", backend="CUSTOM")
    assert made.is_latent
    assert not made.is_spread
    assert not Run(model="llama", folder="", backend="CUSTOM").is_latent
