"""Reader of model geometries: bundled names, Hugging Face ``config.json`` files, our own JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import AliasChoices

from specs.base import SpecError, parse_spec, spec_errors
from specs.dtypes import DType
from specs.hf_families import FAMILIES, NESTED, Family
from specs.model import ModelGeometry
from specs.names import find_name, near_miss


def bundled_model_names() -> tuple[str, ...]:
    """Names that :func:`load_model_geometry` knows without a file, sorted."""
    entries = (files("specs") / "models").iterdir()
    return tuple(sorted(e.name.removesuffix(".json") for e in entries if e.name.endswith(".json")))


def load_model_geometry(source: str | Path) -> ModelGeometry:
    """The geometry of a bundled model or of a file.

    Args:
        source: a name of :func:`bundled_model_names` (in upper or lower case, where no file is
            called so), the path of a Hugging Face ``config.json`` or of a ``ModelGeometry`` in
            JSON, or a folder that holds a ``config.json``.

    Raises:
        SpecError: no such model or file, or a file that cannot be read as one; the message names
            file, field, value and what is allowed.
    """
    bundled = bundled_model_names()
    path = Path(source)
    name = find_name(source, bundled)
    if name is not None and (name == source or not path.exists()):
        text = (files("specs") / "models" / f"{name}.json").read_text("utf-8")
        return _from_json(text, name, f"bundled model {name}")
    if path.is_dir():
        path = path / "config.json"
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise SpecError(
            f"{source}: neither an existing file nor a bundled model; "
            f"bundled models{near_miss(source, bundled)} are {', '.join(bundled)}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read as text: {error}") from None
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return _from_json(text, name, str(path))


def _from_json(text: str, name: str, where: str) -> ModelGeometry:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise SpecError(
            f"{where}: not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    if not isinstance(data, dict):
        raise SpecError(f"{where}: expected a JSON object, got {type(data).__name__}")
    if "model_type" in data or "architectures" in data:
        return read_hf_config(data, name, where)
    if "layers" in data:
        return parse_spec(ModelGeometry, data, where)
    raise SpecError(
        f"{where}: field 'model_type': missing; expected a Hugging Face config.json "
        "(with 'model_type') or a ModelGeometry (with 'layers')"
    )


def read_hf_config(config: Mapping[str, Any], name: str, where: str) -> ModelGeometry:
    """The geometry that a Hugging Face config describes.

    Args:
        config: the parsed ``config.json``.
        name: name to give the model.
        where: file, for error messages.

    Raises:
        SpecError: an unknown ``model_type``, or a field that is missing or wrong.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        came = f"got {model_type!r}" if "model_type" in config else "missing"
        raise SpecError(f"{where}: field 'model_type': {came}; known are {known}")
    body: Any = config
    if model_type in NESTED:
        body = config.get("text_config")
        if not isinstance(body, dict):
            raise SpecError(f"{where}: field 'text_config': expected an object, got {body!r}")
    parsed = _parse_family(family, body, where if body is config else f"{where} (text_config)")
    with spec_errors(where):
        return ModelGeometry(
            name=name,
            architecture=_architecture(config, where) or str(model_type),
            dtype=_dtype((body, config), where) or family.default_dtype,
            hidden_size=parsed.hidden_size,
            max_position_embeddings=parsed.max_position_embeddings,
            layers=parsed.layers(),
        )


def _parse_family(family: type[Family], body: Mapping[str, Any], where: str) -> Family:
    for name, field in family.model_fields.items():
        alias = field.validation_alias
        names = [str(c) for c in alias.choices] if isinstance(alias, AliasChoices) else [name]
        if field.is_required() and not any(choice in body for choice in names):
            raise SpecError(
                f"{where}: field {' or '.join(map(repr, names))}: missing; this model_type needs it"
            )
    return parse_spec(family, body, where)


def _architecture(config: Mapping[str, Any], where: str) -> str | None:
    value = config.get("architectures")
    if not value:
        return None
    if not isinstance(value, list) or not isinstance(value[0], str):
        raise SpecError(f"{where}: field 'architectures': expected a list of names, got {value!r}")
    return value[0]


def _dtype(configs: tuple[Mapping[str, Any], ...], where: str) -> DType | None:
    """``dtype`` (or its older name) of the first config that gives one."""
    for config in configs:
        for field in ("dtype", "torch_dtype"):
            if config.get(field) is not None:
                try:
                    return DType.parse(config[field])
                except ValueError as error:
                    raise SpecError(f"{where}: field {field!r}: {error}") from None
    return None
