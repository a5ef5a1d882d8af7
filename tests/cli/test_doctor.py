"""``attn doctor``: what it finds, its self-test, its exit codes."""

import importlib.metadata
import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from attn.cli.app import app
from attn.cli.doctor import examination, machine, self_test
from attn.cli.doctor.examination import MODELS, Examination, examine
from attn.cli.doctor.self_test import TRIALS, run_trial
from attn.cli.doctor.serving import serving_of
from attn.cli.doctor.show import examination_lines
from attn.cli.doctor.vllm import find_vllm
from attn.device import detect_device
from attn.errors import UnsupportedError
from attn.registry import AttentionBackendEnum
from specs.devices import KNOWN_DEVICES, DeviceKind
from specs.hf_config import load_model_geometry

CPU = KNOWN_DEVICES["cpu"]


def attn(*arguments: str) -> Any:
    torch.set_num_threads(1)
    return CliRunner().invoke(app, ["doctor", *arguments])


# -- Self-test.


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.name)
def test_every_trial_passes_here(trial: self_test.Trial) -> None:
    result = run_trial(trial, detect_device())
    assert result.passed, result.said
    assert result.checked_rows > 20
    assert (result.worst_error_ratio > 1.0) == (trial.fault is not None)


def test_the_trials_cover_every_family_with_a_fault() -> None:
    families = {"dense", "latent", "sparse"}
    assert {trial.family for trial in TRIALS} == families
    assert {trial.family for trial in TRIALS if trial.fault is not None} == families


def test_a_kernel_that_raises_fails_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    impl = AttentionBackendEnum["TORCH_REF"].get_class().get_impl_cls()

    def broken(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("ptxas fatal: no such thing\nand more")

    monkeypatch.setattr(impl, "forward", broken)
    monkeypatch.setattr(examination, "TRIALS", TRIALS[:1])
    result = attn("--model", "llama-3.2-1b")
    assert result.exit_code == 1
    assert "the self-test FAILED: dense, auto cache" in result.stdout
    assert "RuntimeError: ptxas fatal: no such thing; and more" in result.stdout


def test_a_wrong_result_fails_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    impl: Any = AttentionBackendEnum["TORCH_REF"].get_class().get_impl_cls()
    forward = impl.forward

    def off(*arguments: Any, **options: Any) -> torch.Tensor:
        output: torch.Tensor = forward(*arguments, **options)
        return output.mul_(1.1)

    monkeypatch.setattr(impl, "forward", off)
    result = run_trial(TRIALS[0], CPU)
    assert not result.passed
    assert "FAILED: worst error" in result.said
    assert "first failure: step 0" in result.said


def test_a_fault_that_is_not_seen_fails_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn.cli.replay.corrupt_backend", lambda backend, fault: backend)
    (trial, *_) = (one for one in TRIALS if one.fault is not None)
    result = run_trial(trial, CPU)
    assert not result.passed
    assert result.said == "fault not seen: wrong-slot"


# -- Report.


def test_the_report_has_every_part() -> None:
    result = attn("--no-self-test")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("attn doctor: no self-test was run\n")
    for part in ("Machine", "Installed", "Backends on ", "vLLM on "):
        assert f"\n{part}" in result.stdout
    for model in MODELS:
        assert model in result.stdout
    for member in AttentionBackendEnum:
        assert member.name in result.stdout
    assert f"torch {importlib.metadata.version('torch')}" in result.stdout


def test_json_is_the_report_as_data() -> None:
    result = attn("--no-self-test", "--json", "--device", "h200", "--model", "deepseek-v3")
    assert result.exit_code == 0, result.stderr
    found = Examination.model_validate_json(result.stdout)
    assert json.loads(result.stdout)["schema_version"] == 1
    assert found.asked_device == "h200"
    (serving,) = found.serving
    assert (serving.model, serving.family) == ("deepseek-v3", "latent")
    assert [phase.phase for phase in serving.phases] == ["prefill", "decode"]
    assert found.self_test == ()
    assert found.machine.device == detect_device().name


def test_trials_are_told_while_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "TRIALS", TRIALS[:1])
    result = attn("--model", "llama-3.2-1b")
    assert result.exit_code == 0, result.output
    assert result.stderr == "self-test: dense, auto cache\n"
    assert result.stdout.startswith("attn doctor: the self-test passed, 1 trials in ")
    assert "  ok   dense, auto cache by " in result.stdout


@pytest.mark.parametrize("name", KNOWN_DEVICES)
def test_every_phase_of_every_device_has_a_backend_and_others_have_reasons(name: str) -> None:
    device = KNOWN_DEVICES[name]
    for model in MODELS:
        (serving,) = serving_of(load_model_geometry(model), device)
        chosen = {phase.backend for phase in serving.phases}
        assert None not in chosen
        assert set(serving.others) | chosen == {member.name for member in AttentionBackendEnum}
        assert all(serving.others.values())
        if device.kind is DeviceKind.SM90 and serving.family != "sparse":
            assert all("Gluon for Hopper" in phase.kernel for phase in serving.phases)


# -- vLLM.


def test_the_class_of_custom_follows_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = "attn.integrations.vllm.members.CUSTOM_"
    best = {"dense": "TRITON_ATTN", "latent": "TRITON_MLA", "sparse": "SPARSE_MLA"}
    paths = {kind: prefix + name for kind, name in best.items()}
    assert find_vllm(KNOWN_DEVICES["h200"]).custom == paths
    assert find_vllm(KNOWN_DEVICES["mi300x"]).custom == {"dense": f"{prefix}TRITON_ATTN"}
    monkeypatch.setenv("ATTN_VLLM_BACKEND", "torch_ref")
    found = find_vllm(KNOWN_DEVICES["h200"])
    assert found.custom == {**paths, "dense": f"{prefix}TORCH_REF"}
    assert found.variables == {"ATTN_VLLM_BACKEND": "torch_ref"}
    monkeypatch.setenv("ATTN_VLLM_BACKEND", "FASTEST")
    found = find_vllm(CPU)
    assert found.custom == {}
    assert any("ATTN_VLLM_BACKEND must name one of" in one for one in found.problems)


@pytest.mark.parametrize(
    ("version", "problem"),
    [(None, "vllm is not installed"), ("0.12.0", "serves vLLM 0.26 to 0.33"), ("0.30.1", "")],
)
def test_the_version_of_vllm_is_judged(
    monkeypatch: pytest.MonkeyPatch, version: str | None, problem: str
) -> None:
    monkeypatch.setattr("attn.cli.doctor.vllm.installed", lambda package: version)
    found = find_vllm(CPU)
    assert found.version == version
    assert found.is_served == (not problem)
    assert any(problem in one for one in found.problems) or not problem


def test_a_missing_entry_point_and_a_list_of_plugins_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert machine.plugin_is_registered()
    monkeypatch.setattr("attn.cli.doctor.vllm.plugin_is_registered", lambda: False)
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    problems = find_vllm(CPU).problems
    assert any("entry point is not installed" in one for one in problems)
    assert "VLLM_PLUGINS=other leaves attn_backends out" in problems


def test_a_machine_with_a_gpu_is_described() -> None:
    found = examine(["llama-3.2-1b"], "h200", "attn doctor")
    gpu = found.machine.replace(
        device="NVIDIA H200",
        device_kind="sm90",
        compute_capability="9.0",
        device_memory_gib=140.0,
        free_device_memory_gib=100.0,
        cuda="13.0",
        driver="580.1",
    )
    text = "\n".join(examination_lines(found.replace(machine=gpu)))
    assert "GPU NVIDIA H200, sm90, compute capability 9.0, 100 of 140 GiB free" in text
    assert "torch's CUDA or ROCm 13.0, driver 580.1" in text


def test_a_gpu_that_cannot_be_used_is_a_part_of_the_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_old() -> None:
        raise UnsupportedError("GTX 1080 cannot be used:", ["compute capability 6.1 is below 8.0"])

    monkeypatch.setattr(machine, "detect_device", too_old)
    result = attn("--model", "llama-3.2-1b", "--no-self-test")
    assert result.exit_code == 0, result.stderr
    assert "problem: GTX 1080 cannot be used: compute capability 6.1 is below 8.0" in result.stdout
    assert "the CPU is used instead" in result.stdout
