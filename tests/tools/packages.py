"""Packages that offer backends to ``attn``, made in a folder as pip would install them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from attn.registry import AttentionBackendEnum


def install(
    folder: Path, project: str, entries: Mapping[str, str], modules: Mapping[str, str] | None = None
) -> None:
    """Write a package's metadata, and its modules, into a folder that will be on ``sys.path``.

    Args:
        folder: stands for ``site-packages``.
        project: name of the package; its version is 1.0.
        entries: value of each entry point in the group ``attn.backends``, by name.
        modules: source by path.
    """
    info = folder / f"{project.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in entries.items()]
    info.joinpath("entry_points.txt").write_text("\n".join(["[attn.backends]", *lines, ""]))
    for path, source in (modules or {}).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source, encoding="utf-8")


def row_module(
    name: str, path: str = "attn.backends.torch_ref:TorchRefBackend", **fields: object
) -> str:
    """Source of a module whose ``ROW`` is the row of a backend.

    Args:
        name: of the backend.
        path: of its class.
        fields: further fields of the row.
    """
    given = "".join(f", {field}={value!r}" for field, value in fields.items())
    return f"from attn.registry import BackendRow\nROW = BackendRow({name!r}, {path!r}{given})\n"


def backend_module(name: str) -> str:
    """Source of a module with a row, and with a class that is TORCH_REF under another name."""
    return row_module(name, f"{name.lower()}:Backend", ranks={"cpu": 1}) + (
        "def __getattr__(asked):\n"
        "    if asked != 'Backend':\n"
        "        raise AttributeError(asked)\n"
        "    from attn.backends.torch_ref import TorchRefBackend\n"
        "    class Backend(TorchRefBackend):\n"
        "        @staticmethod\n"
        "        def get_name():\n"
        f"            return {name!r}\n"
        "    globals()['Backend'] = Backend\n"
        "    return Backend\n"
    )


@contextmanager
def unread(folder: Path) -> Iterator[None]:
    """In it, the registry has not read entry points yet, and everything is put back afterwards.

    Args:
        folder: in which packages are installed meanwhile.
    """
    registry = AttentionBackendEnum
    saved = {name: dict(getattr(registry, name)) for name in ("_members", "_aliases", "_broken")}
    had_read, modules = registry._has_read, set(sys.modules)
    registry._has_read = False
    try:
        yield
    finally:
        for name, content in saved.items():
            setattr(registry, name, content)
        registry._has_read = had_read
        for name in set(sys.modules) - modules:
            if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
