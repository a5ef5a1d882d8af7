"""Parts of pages that follow from the code.

A page marks such a part:

    <!-- generated: features -->
    <!-- /generated -->

The site is built with every marked part filled in (:mod:`docs.tools.hook`). A part that the page
itself holds too, so that it can be read where the repository is shown, is compared with the code by
a test, and written by

    python -m docs.tools.blocks docs/backends/README.md docs/settings.md
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from specs.base import Spec
from specs.devices import KNOWN_DEVICES
from specs.engine import (
    DecodeKernel,
    DenseKernels,
    EngineConfig,
    LatentKernels,
    ParallelConfig,
    PrefillKernel,
    SparseKernels,
    SpeculativeConfig,
)
from specs.hf_config import bundled_model_names, load_model_geometry

ROOT: Final = Path(__file__).resolve().parents[2]
_BLOCK: Final = re.compile(
    r"^<!-- generated: ([\w-]+) -->\n(.*?)^<!-- /generated -->", re.DOTALL | re.MULTILINE
)


def _table(heads: list[str], rows: list[list[str]]) -> str:
    escaped = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    lines = [heads, ["---"] * len(heads), *escaped]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def features() -> str:
    """What every backend declares."""
    from attn.cli.explain import feature_table

    return feature_table()


def models() -> str:
    """The backend that the selector takes for the layers of every bundled model."""
    from attn.selector import explain
    from specs.dtypes import CacheDType

    rows = []
    for name in bundled_model_names():
        model = load_model_geometry(name)
        for layer, indices in model.groups():
            request = layer.selector_config(model.dtype, CacheDType.AUTO, None)
            chosen = {device: explain(request, device).chosen or "none" for device in KNOWN_DEVICES}
            on_gpus = {backend for device, backend in chosen.items() if device != "cpu"}
            label = f"{len(indices)} {layer.label}".replace("_", " ")
            rows.append([name, label, ", ".join(sorted(on_gpus)), chosen["cpu"]])
    return _table(["model", "layers", "on every known GPU", "on a CPU"], rows)


def settings() -> str:
    """The fields of the engine's settings, with their defaults."""
    parts = []
    for record in (EngineConfig, SpeculativeConfig, ParallelConfig):
        parts += [f"### {record.__name__}", _summary(record), _fields(record)]
    parts += ["### Kernels", "`EngineConfig.kernels` has one record for each family of layers."]
    for family, record in (
        ("dense", DenseKernels),
        ("latent", LatentKernels),
        ("sparse", SparseKernels),
    ):
        parts += [f"`kernels.{family}`: {_summary(record)}", _fields(record)]
    for choice in (PrefillKernel, DecodeKernel):
        parts += [f"### {choice.__name__}", _summary(choice), _members(choice)]
    return "\n\n".join(parts)


def _summary(cls: type) -> str:
    """The first paragraph of a docstring, in Markdown."""
    text = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
    return text.replace("``", "`")


def _fields(record: type[Spec]) -> str:
    rows = []
    for name, field in record.model_fields.items():
        default = "required" if field.is_required() else f"`{_shown(field.default)}`"
        rows.append([f"`{name}`", default, (field.description or "").replace("``", "`")])
    return _table(["field", "default", "meaning"], rows)


def _shown(default: Any) -> str:
    if isinstance(default, Spec):
        return f"{type(default).__name__}()"
    return repr(default.value if isinstance(default, StrEnum) else default)


def _members(choice: type[StrEnum]) -> str:
    path = ROOT / f"{choice.__module__.replace('.', '/')}.py"
    (cls,) = (
        node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == choice.__name__
    )
    rows = [
        [f"`{choice[name].value}`", " ".join(text.split()).replace("``", "`")]
        for name, text in _documented(cls.body)
    ]
    return _table(["value", "meaning"], rows)


def _documented(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Names that are assigned, each with the docstring under it."""
    for node, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        text = after.value if isinstance(after, ast.Expr) else None
        is_text = isinstance(text, ast.Constant) and isinstance(text.value, str)
        if isinstance(target, ast.Name) and is_text:
            yield target.id, text.value


def environment() -> str:
    """The environment variables that the library reads, with the file that reads each."""
    found: dict[str, tuple[str, str]] = {}
    for path in sorted([*ROOT.glob("attn/**/*.py"), *ROOT.glob("builders/**/*.py")]):
        source = path.read_text(encoding="utf-8")
        if '"ATTN_' not in source:
            continue
        where = path.relative_to(ROOT).as_posix()
        for name, text in _variables(ast.parse(source)):
            found.setdefault(name, (text, where))
    rows = [[f"`{name}`", text, f"`{where}`"] for name, (text, where) in sorted(found.items())]
    return _table(["variable", "meaning", "read in"], rows)


def _variables(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Variables that a module names, each with the docstring of its constant or function."""
    documented = dict(_documented(tree.body))
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            value = node.value.value if isinstance(node.value, ast.Constant) else None
            if isinstance(value, str) and value.startswith("ATTN_") and not value.endswith("_"):
                text = documented.get(node.target.id) or ast.get_docstring(tree) or ""
                yield value, _plain(text)
        if isinstance(node, ast.FunctionDef):
            for inner in ast.walk(node):
                is_text = isinstance(inner, ast.Constant) and isinstance(inner.value, str)
                if is_text and re.fullmatch(r"ATTN_[A-Z_]*[A-Z]", str(inner.value)):
                    yield str(inner.value), _plain(ast.get_docstring(node) or "")


def _plain(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split()).replace("``", "`")


def cli() -> str:
    """The reference of the ``attn`` command, from the command itself."""
    import typer
    from typer.cli import get_docs_for_click

    from attn.cli.app import app

    command = typer.main.get_command(app)
    text = get_docs_for_click(
        obj=command, ctx=typer.Context(command, info_name="attn"), name="attn"
    )
    return re.sub(r"^(#+ )", r"#\1", text.strip(), flags=re.MULTILINE)


def kernels() -> str:
    """The table of kernels."""
    return _without_title("attn/kernels/README.md")


def builders() -> str:
    """The table of builders."""
    return _without_title("builders/README.md")


def changelog() -> str:
    """What changed, by version."""
    return _without_title("CHANGELOG.md")


def _without_title(page: str) -> str:
    """A page of another folder below its first heading, with links as pages of ``docs`` need."""
    path = ROOT / page
    text = path.read_text(encoding="utf-8").partition("\n")[2].strip()

    def link(match: re.Match[str]) -> str:
        target = (path.parent / match[1]).resolve().relative_to(ROOT)
        return f"](../{target.as_posix()}{match[2] or ''})"

    return re.sub(r"\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)", link, text)


BLOCKS: Final[dict[str, Callable[[], str]]] = {
    "builders": builders,
    "changelog": changelog,
    "cli": cli,
    "environment": environment,
    "features": features,
    "kernels": kernels,
    "models": models,
    "settings": settings,
}
"""The parts, by the name in their marks."""


def filled(text: str, *, empty_too: bool = True) -> str:
    """A page with its marked parts as the code has them now.

    Args:
        text: the page.
        empty_too: fill parts that the page leaves empty.

    Raises:
        ValueError: a part has an unknown name.
    """

    def block(match: re.Match[str]) -> str:
        if match[1] not in BLOCKS:
            raise ValueError(f"generated part must be one of {', '.join(BLOCKS)}, got {match[1]!r}")
        if not (match[2].strip() or empty_too):
            return match[0]
        return f"<!-- generated: {match[1]} -->\n\n{BLOCKS[match[1]]()}\n\n<!-- /generated -->"

    return _BLOCK.sub(block, text)


def main() -> None:
    """Write the parts of the named pages."""
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
