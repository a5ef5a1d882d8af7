"""``attn generate``: checks before the work, lines after it, and the report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from enum import StrEnum, unique
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attn.errors import MissingDependencyError

if TYPE_CHECKING:
    from attn.integrations.transformers.generation import Outcome, Request, Run

GENERATING: Final = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the names of models that generate text."""
WEIGHTS: Final = ("*.safetensors", "*.bin")
TOKENIZERS: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)


@unique
class Other(StrEnum):
    """Attention of Transformers to compare with."""

    EAGER = "eager"
    SDPA = "sdpa"


def check(request: Request, report: Path | None) -> None:
    """Check everything that needs no Transformers, and make the report's folder.

    Args:
        request: what to generate.
        report: folder for the report, or None.

    Raises:
        ValueError: the folder holds no model or no tokenizer, the prompt is empty, or the backend
            is unknown.
    """
    if not request.prompt:
        raise ValueError("--prompt must have text, got ''")
    if request.backend is not None:
        from attn.registry import AttentionBackendEnum

        AttentionBackendEnum[request.backend]
    if report is not None:
        _make_folder(report)
    check_folder(request.folder)


def check_folder(folder: Path) -> None:
    """Check that a folder holds a model with its weights and its tokenizer.

    Raises:
        ValueError: it does not, or the model generates no text; the message says what is missing.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise ValueError(f"--hf must be a folder with a model's config.json, got {str(folder)!r}")
    try:
        fields = json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"--hf: {config} cannot be read: {error}") from None
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise ValueError(f"--hf: {config} has no model_type, so it describes no model")
    classes = fields.get("architectures") or []
    if classes and not any(name.endswith(GENERATING) for name in map(str, classes)):
        raise ValueError(f"--hf: {str(folder)!r} is a {classes[0]}, which generates no text")
    if not any(next(folder.glob(pattern), None) for pattern in WEIGHTS):
        raise ValueError(f"--hf: {str(folder)!r} has no weights (*.safetensors)")
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise ValueError(
            f"--hf: {str(folder)!r} has no tokenizer (such as tokenizer.json); it is saved beside "
            "the model by tokenizer.save_pretrained"
        )


def summary(outcome: Outcome) -> Iterator[str]:
    """The lines below the text."""
    yield (
        f"{outcome.model}, {outcome.dtype}, {outcome.device}: prompt of {outcome.prompt_tokens} "
        f"tokens, {len(outcome.runs[0].tokens)} new"
    )
    for run in outcome.runs:
        yield (
            f"{_name(run, outcome)}: {run.tokens_per_s:.1f} tokens/s, first token after "
            f"{run.first_token_s * 1e3:.0f} ms"
        )
    if len(outcome.runs) == 2:
        ours, other = (run.attention for run in outcome.runs)
        yield (
            f"{ours} against {other}: largest logit difference {outcome.largest_difference:.2g}, "
            f"{outcome.equal_tokens} of {len(outcome.runs[0].tokens)} tokens equal"
        )


def _name(run: Run, outcome: Outcome) -> str:
    """What a run is called: with its backend, where the attention is ours."""
    is_ours = run is outcome.runs[0]
    return f"{run.attention} ({outcome.backend})" if is_ours else run.attention


def write_report(outcome: Outcome, command: Sequence[str], folder: Path) -> list[Path]:
    """Write ``generate.json`` and ``generate.svg``.

    Args:
        outcome: what the command found.
        command: its words.
        folder: where the files go.

    Returns:
        The two paths. The JSON file is written first.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    data, picture = folder / "generate.json", folder / "generate.svg"
    fields = {"command": ["attn", *command], **outcome.as_json()}
    data.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    draw(outcome, picture)
    return [data, picture]


def draw(outcome: Outcome, path: Path) -> None:
    """Draw tokens per second of every run, as SVG.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError("matplotlib", "the picture", extra="cli") from None
    from attn.bench.results import chart

    runs = outcome.runs
    figure = Figure(figsize=(6.4, 1.1 + 0.5 * len(runs)), layout="constrained")
    axes: Any = figure.subplots()
    colours = (chart.OURS, *chart.OTHERS)
    for place, run in enumerate(runs):
        axes.barh(place, run.tokens_per_s, 0.6, color=colours[place])
        axes.text(run.tokens_per_s, place, f" {run.tokens_per_s:.1f}", va="center", fontsize=9)
    axes.set_yticks(range(len(runs)), [_name(run, outcome) for run in runs])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(run.tokens_per_s for run in runs))
    axes.set_title(
        f"Tokens/s of {outcome.model} on {outcome.device} (higher is better)",
        loc="left",
        fontsize=10,
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    chart.write(figure, path)


def _make_folder(folder: Path) -> None:
    """Make the report's folder, and check that a file in it can be written.

    Raises:
        ValueError: it cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = "it is a file" if folder.is_file() else error.strerror
        raise ValueError(f"--report must be a folder, got {str(folder)!r}: {problem}") from None
    # This module loads torch, and the command's help this one.
    from attn.bench.command import check_writable

    check_writable("--report", folder / "generate.json")
