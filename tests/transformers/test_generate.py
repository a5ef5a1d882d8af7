"""``attn generate`` with a model that the test makes, on the CPU."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from attn.cli.app import app
from attn.integrations.transformers import attention
from tests.transformers.small_models import make_tokenizer

PROMPT = "Once upon a time"


def generate(folder, *words, prompt=PROMPT):
    given = ["generate", "--hf", str(folder), "--prompt", prompt, "--threads", "1", *words]
    return CliRunner().invoke(app, given)


def test_text_comes_with_rates_and_the_difference_to_eager(saved_model, tmp_path):
    report = tmp_path / "report"
    words = ["--max-new-tokens", "6", "--compare", "eager", "--report", str(report)]
    result = generate(saved_model, *words)
    assert result.exit_code == 0, result.output + result.stderr
    found = json.loads((report / "generate.json").read_text())
    ours, eager = found["runs"]
    assert ours["attention"] == "attn"
    assert eager["attention"] == "eager"
    assert ours["tokens"] == eager["tokens"]
    assert len(ours["tokens"]) == found["equal_tokens"] == 6
    assert 0 < found["largest_logit_difference"] < 1e-3
    assert found["backend"] == "TORCH_REF"
    assert result.stdout.startswith(
        make_tokenizer().decode(ours["tokens"], skip_special_tokens=True)
    )
    for line in (
        "tiny-llama, float32, CPU: prompt of 16 tokens, 6 new",
        f"attn (TORCH_REF): {ours['tokens_per_s']:.1f} tokens/s",
        f"eager: {eager['tokens_per_s']:.1f} tokens/s",
        "6 of 6 tokens equal",
    ):
        assert line in result.stdout
    picture = (report / "generate.svg").read_text()
    assert f"{ours['tokens_per_s']:.1f}" in picture
    assert "eager" in picture
    assert "tiny-llama" in picture


def test_a_wrong_result_shows_in_the_difference(saved_model, monkeypatch):
    scores = attention.Scores
    monkeypatch.setattr(attention, "Scores", lambda scale, *rest: scores(2 * scale, *rest))
    result = generate(saved_model, "--max-new-tokens", "6", "--compare", "eager")
    difference = float(result.stdout.split("largest logit difference ")[1].split(",")[0])
    assert difference > 0.1


def broken(kind):
    def change(folder):
        if kind == "no_config":
            (folder / "config.json").unlink()
        elif kind == "no_json":
            (folder / "config.json").write_text("{")
        elif kind == "no_model":
            (folder / "config.json").write_text("{}")
        elif kind == "unknown_model":
            (folder / "config.json").write_text('{"model_type": "no_such_model"}')
        elif kind == "encoder":
            fields = {"model_type": "bert", "architectures": ["BertModel"]}
            (folder / "config.json").write_text(json.dumps(fields))
        elif kind == "no_weights":
            (folder / "model.safetensors").unlink()
        elif kind == "broken_weights":
            (folder / "model.safetensors").write_bytes(b"nothing")
        elif kind == "no_tokenizer":
            for path in folder.glob("tokenizer*"):
                path.unlink()

    return change


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no_config", ["--hf must be a folder with a model's config.json"]),
        ("no_json", ["config.json cannot be read"]),
        ("no_model", ["no model_type"]),
        ("unknown_model", ["cannot load", "no_such_model"]),
        ("encoder", ["BertModel, which generates no text"]),
        ("no_weights", ["no weights (*.safetensors)"]),
        ("broken_weights", ["cannot load"]),
        ("no_tokenizer", ["no tokenizer", "tokenizer.json"]),
    ],
)
def test_a_folder_that_is_no_model_is_one_line(kind, words, saved_model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(saved_model, folder)
    broken(kind)(folder)
    result = generate(folder)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert all(word in result.stderr for word in words), result.stderr


def test_missing_transformers_is_one_line(saved_model, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = generate(saved_model)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "needs transformers, which is not installed" in result.stderr
