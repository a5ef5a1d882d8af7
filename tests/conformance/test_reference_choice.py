"""On a GPU a reference backend is taken by name or where a caller allows it, and never silently."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from attn import get_attn_backend
from attn.backends.torch_ref import TorchRefBackend
from attn.cli.app import app
from attn.cli.explain import print_backends
from attn.cli.replay import RunSettings, choose_groups, reference_notes
from attn.errors import UnsupportedError
from attn.registry import ROWS
from attn.selector import PRIORITIES, SelectionReport, Verdict, explain, select
from specs.attention import AttentionSelectorConfig
from specs.devices import KNOWN_DEVICES, Device, DeviceKind
from specs.dtypes import DType
from specs.hf_config import load_model_geometry

ONLY = "chosen on a GPU only by name or allow_reference=True"
GPUS = [device for device in KNOWN_DEVICES.values() if device.kind is not DeviceKind.CPU]
H200 = KNOWN_DEVICES["h200"]
CPU = KNOWN_DEVICES["cpu"]
DENSE = AttentionSelectorConfig(head_size=100, dtype=DType.BFLOAT16)
LATENT = AttentionSelectorConfig(head_size=576, dtype=DType.FLOAT64, use_mla=True)
# Requests that only a reference backend serves.
LEFT = {
    "TORCH_REF": DENSE,
    "TORCH_REF_MLA": LATENT,
    "TORCH_REF_SPARSE_MLA": LATENT.replace(use_sparse=True),
}
every_gpu = pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
every_reference = pytest.mark.parametrize("name", LEFT)


def candidates(report: SelectionReport) -> dict[str, Any]:
    """Verdict and reasons of each backend, by its name."""
    return {item.name: (item.verdict, item.reasons) for item in report.candidates}


def test_the_requests_are_of_every_reference_backend() -> None:
    assert list(LEFT) == [row.name for row in ROWS if row.name.startswith("TORCH_REF")]
    assert PRIORITIES[DeviceKind.CPU] == tuple(LEFT)


def test_a_head_size_that_no_kernel_serves_is_refused_with_every_reason() -> None:
    with pytest.raises(
        UnsupportedError, match="no attention backend serves this layer on h200:"
    ) as e:
        get_attn_backend(100, torch.bfloat16, "auto", device=H200)
    assert "TRITON_ATTN: head_size 100: multiples of 8 from 32 to 512" in e.value.reasons
    assert f"TORCH_REF: {ONLY}" in e.value.reasons


@every_gpu
@every_reference
def test_on_a_gpu_it_is_withheld_until_it_is_named_or_allowed(device: Device, name: str) -> None:
    request = LEFT[name]
    report = explain(request, device)
    assert report.chosen is None
    assert not report.allow_reference
    assert candidates(report)[name] == (Verdict.NOT_ASKED, (ONLY,))
    with pytest.raises(UnsupportedError):
        select(request, device)
    assert select(request, device, name).get_name() == name
    assert select(request, device, allow_reference=True).get_name() == name
    allowed = explain(request, device, allow_reference=True)
    assert allowed.allow_reference
    assert allowed.chosen == name
    rank = PRIORITIES[device.kind].index(name) + 1
    why = f"best-ranked on {device.kind.value} that serves it (rank {rank})"
    assert candidates(allowed)[name] == (Verdict.CHOSEN, (why,))
    assert SelectionReport.model_validate_json(allowed.model_dump_json()) == allowed


@every_gpu
def test_a_kernel_is_chosen_before_it_whether_it_is_allowed_or_not(device: Device) -> None:
    request = DENSE.replace(head_size=128)
    for allowed, expected in (
        (False, (Verdict.NOT_ASKED, (ONLY,))),
        (True, (Verdict.RANKED_LOWER, ("TRITON_ATTN ranks higher",))),
    ):
        report = explain(request, device, allow_reference=allowed)
        assert report.chosen == "TRITON_ATTN"
        assert candidates(report)["TORCH_REF"] == expected
    asked = explain(request, device, "TRITON_ATTN")
    assert candidates(asked)["TORCH_REF"] == (Verdict.NOT_ASKED, ("TRITON_ATTN was asked for",))


@every_gpu
@pytest.mark.parametrize("allowed", [False, True])
def test_what_it_cannot_serve_it_refuses_with_its_own_reason(device: Device, allowed: bool) -> None:
    report = explain(DENSE.replace(dtype=DType.INT8), device, allow_reference=allowed)
    verdict, reasons = candidates(report)["TORCH_REF"]
    assert verdict is Verdict.REFUSED
    assert reasons == ("dtype int8: float16, bfloat16, float32, float64",)


@every_reference
@pytest.mark.parametrize("allowed", [False, True])
def test_a_machine_without_a_gpu_gets_it_as_before(name: str, allowed: bool) -> None:
    report = explain(LEFT[name], CPU, allow_reference=allowed)
    assert report.chosen == name
    assert not any(ONLY in reason for reason in report.reasons)


def test_an_explicit_choice_of_another_is_no_way_to_it() -> None:
    with pytest.raises(UnsupportedError) as caught:
        get_attn_backend(
            100, torch.bfloat16, "auto", backend="TRITON_ATTN", device=H200, allow_reference=True
        )
    assert caught.value.reasons == ["head_size 100: multiples of 8 from 32 to 512"]
    found = get_attn_backend(100, torch.bfloat16, "auto", device=H200, allow_reference=True)
    assert found is TorchRefBackend


# -- The command.

CONFIG = {
    "model_type": "llama",
    "hidden_size": 400,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 100,
    "max_position_embeddings": 160,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def test_attn_explain_says_that_nothing_serves_and_how_to_get_it(model: str) -> None:
    arguments = ["explain", "--model", model, "--device", "h200", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    (decision,) = json.loads(result.stdout)
    assert decision["chosen"] is None
    assert {"name": "TORCH_REF", "verdict": "not asked for", "reasons": [ONLY]} in decision[
        "candidates"
    ]
    result = CliRunner().invoke(app, [*arguments, "--allow-reference"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)[0]["chosen"] == "TORCH_REF"


def test_attn_run_takes_it_on_a_gpu_and_says_so(model: str) -> None:
    geometry = load_model_geometry(model)
    (group,) = groups = choose_groups(RunSettings(geometry, H200))
    assert group.backend is TorchRefBackend
    assert reference_notes(groups, H200) == [
        "full_attention: no kernel for h200 serves these layers; TORCH_REF does, in plain torch"
    ]
    asked = choose_groups(RunSettings(geometry, H200, backend="torch_ref"))
    assert reference_notes(asked, H200) == []
    assert reference_notes(choose_groups(RunSettings(geometry, CPU)), CPU) == []
    served = load_model_geometry("llama-3.2-1b").select_layers(1)
    assert reference_notes(choose_groups(RunSettings(served, H200)), H200) == []


def test_attn_backends_says_how_it_is_taken_on_a_gpu() -> None:
    for device, said in ((H200, True), (CPU, False)):
        text = io.StringIO()
        print_backends(device, Console(file=text, width=400))
        (line,) = [row for row in text.getvalue().splitlines() if " TORCH_REF " in row]
        assert (f"yes, {ONLY}" in line) == said
        assert "yes" in line
