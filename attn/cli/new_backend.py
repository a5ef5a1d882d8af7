"""``attn new-backend``: a package of its own for a backend, which works from the start."""

from __future__ import annotations

import importlib.util
import keyword
import re
from dataclasses import dataclass
from enum import StrEnum, unique
from pathlib import Path
from string import Template

from attn import __version__
from attn.registry import AttentionBackendEnum


@unique
class Family(StrEnum):
    """Which layers the new backend serves."""

    DENSE = "dense"
    LATENT = "latent"


@dataclass(frozen=True)
class Names:
    """The names of a new backend, all made from the one that the user gave."""

    stem: str
    """Name of the package and of its three files: ``my_attn``."""

    @classmethod
    def of(cls, name: str) -> Names:
        """The names for ``my-attn``, ``MY_ATTN`` or ``my_attn``.

        Raises:
            ValueError: no package can have the name, or something has it already.
        """
        stem = name.lower().replace("-", "_")
        if not re.fullmatch(r"[a-z][a-z0-9_]*", stem, re.ASCII) or keyword.iskeyword(stem):
            raise ValueError(
                f"name must be letters, digits, - and _, such as MY_ATTN, got {name!r}"
            )
        if importlib.util.find_spec(stem) is not None:
            raise ValueError(f"name {name!r} is taken: there is a Python module {stem!r}")
        if stem.upper() in AttentionBackendEnum or stem.upper() in AttentionBackendEnum.broken:
            raise ValueError(f"name {name!r} is taken: attn has a backend {stem.upper()}")
        return cls(stem)

    @property
    def backend(self) -> str:
        """Name in the registry: ``MY_ATTN``."""
        return self.stem.upper()

    @property
    def project(self) -> str:
        """Name of the folder, and of the project for pip: ``my-attn``."""
        return self.stem.replace("_", "-")

    @property
    def cls(self) -> str:
        """First part of the names of classes: ``MyAttn``."""
        return "".join(part.capitalize() for part in self.stem.split("_"))


def new_backend(name: str, parent: Path, family: Family) -> list[str]:
    """Write the package of a new backend.

    Args:
        name: of the backend, in any spelling that :meth:`Names.of` takes.
        parent: folder in which the package's folder is made.
        family: which layers the backend serves.

    Returns:
        Lines for the user: what was written, and what to do next.

    Raises:
        ValueError: a name that cannot be used; see :meth:`Names.of`.
        FileExistsError: the folder is there already.
        OSError: the folder cannot be written.
    """
    names = Names.of(name)
    folder = parent / names.project
    if folder.exists() or folder.is_symlink():
        raise FileExistsError(f"folder {folder} is there already")
    written = content_of(names, family)
    folder.mkdir(parents=True)
    for path, text in written.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return [
        f"wrote {folder}: {len(written)} files",
        f"  pip install -e '{folder}[test]'",
        f"  pytest {folder}",
        f"  attn run -b {names.backend}{_model(family)}",
        f"Then replace attend() in {folder / names.stem / 'impls' / names.stem}.py by your kernel.",
    ]


def content_of(names: Names, family: Family) -> dict[str, str]:
    """The files of the package: text by path in its folder."""
    stem = names.stem
    templates = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        f"{stem}/__init__.py": "init.py",
        f"{stem}/backends/{stem}.py": f"{family.value}/backend.py",
        f"{stem}/builders/{stem}.py": f"{family.value}/builder.py",
        f"{stem}/impls/{stem}.py": f"{family.value}/impl.py",
        "tests/conftest.py": "conftest.py",
        f"tests/test_{stem}.py": "test.py",
    }
    values = {
        "name": names.backend,
        "stem": stem,
        "project": names.project,
        "cls": names.cls,
        "version": __version__,
        "model": _model(family),
    }
    written = {
        path: Template(_read(template)).substitute(values) for path, template in templates.items()
    }
    for part in ("backends", "builders", "impls"):
        written[f"{stem}/{part}/__init__.py"] = f'"""{part.capitalize()} of this package."""\n'
    written[f"{stem}/py.typed"] = ""
    return written


def _read(template: str) -> str:
    from importlib.resources import files

    return files("attn.cli").joinpath(f"skeleton/{template}.tmpl").read_text(encoding="utf-8")


def _model(family: Family) -> str:
    """The option of ``attn run`` for a model whose layers the backend serves."""
    return "" if family is Family.DENSE else " -m deepseek-v3 --layers 1 --tp 16"
