"""Reader of model geometries: bundled names, Hugging Face ``config.json`` files, our own JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from specs.base import SpecError, parse_spec, spec_errors
from specs.dtypes import DType
from specs.families.base import Family
from specs.families.defaults import declared_defaults
from specs.families.fields import ATTENTION_FIELDS, unread_fields
from specs.families.unknown import family_by_names
from specs.hf_families import FAMILIES, MISSING, NESTED
from specs.model import ModelGeometry
from specs.names import bundled_model_names, find_name, near_miss

_KNOWN: Final = sorted(FAMILIES)
_TEXT_CONFIGS: Final = ("text_config", "llm_config", "language_config")
"""Fields that hold the text model's config in files of multimodal models."""


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

    A ``model_type`` without a family here is read by the names of its fields, and the geometry's
    ``notes`` say so. Sizes that a file leaves out are transformers' defaults where transformers is
    installed; a note names them.

    Args:
        config: the parsed ``config.json``.
        name: name to give the model.
        where: file, for error messages.

    Raises:
        SpecError: no ``model_type``; a ``model_type`` with attention that this library does not
            have; a field that is missing or wrong; or a field that changes attention and that the
            model's family does not know.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        came = f"got {model_type!r}" if "model_type" in config else "missing"
        raise SpecError(f"{where}: field 'model_type': {came}; known are {', '.join(_KNOWN)}")
    _refuse_missing(model_type, where)
    body, inner_type, inside = _attention_config(config, model_type, where)
    _refuse_missing(inner_type, inside)
    family = FAMILIES.get(inner_type) or FAMILIES.get(model_type)
    notes = []
    if family is None:
        family = family_by_names(body)
        notes.append(
            f"model_type {inner_type!r} is not known: its attention is read by the names of its "
            "fields, and may do more than they say"
        )
    elif model_type not in FAMILIES:
        notes.append(f"model_type {model_type!r} is not known: its text model {inner_type!r} is")
    body, taken = _with_defaults(family, body, inner_type)
    if taken:
        notes.append(f"not in the file, defaults of transformers: {', '.join(taken)}")
    parsed = _parse_family(family, body, inner_type, inside)
    with spec_errors(inside):
        return ModelGeometry(
            name=name,
            architecture=_architecture(config, where) or model_type,
            dtype=_dtype((body, config), where) or family.default_dtype,
            hidden_size=parsed.hidden_size,
            max_position_embeddings=parsed.longest_sequence,
            layers=parsed.layers(),
            other_layers=parsed.other_layers(),
            notes=(*notes, *parsed.notes),
        )


def _refuse_missing(model_type: str, where: str) -> None:
    if model_type in MISSING:
        raise SpecError(
            f"{where}: field 'model_type': got {model_type!r}, whose attention nothing here "
            f"serves: it {MISSING[model_type]}"
        )


def _attention_config(
    config: Mapping[str, Any], model_type: str, where: str
) -> tuple[Mapping[str, Any], str, str]:
    """The part of a config that describes attention, its own model type, and where it is."""
    nested = "text_config"
    if model_type not in NESTED:
        found = [key for key in _TEXT_CONFIGS if isinstance(config.get(key), dict)]
        if model_type in FAMILIES or "num_hidden_layers" in config or not found:
            return config, model_type, where
        nested = found[0]
    body = config.get(nested)
    if not isinstance(body, dict):
        raise SpecError(f"{where}: field {nested!r}: expected an object, got {body!r}")
    inside, given = f"{where} ({nested})", body.get("model_type")
    if given is not None and not isinstance(given, str):
        raise SpecError(f"{inside}: field 'model_type': expected a name, got {given!r}")
    return body, given or NESTED.get(model_type, model_type), inside


def _with_defaults(
    family: type[Family], body: Mapping[str, Any], model_type: str
) -> tuple[Mapping[str, Any], list[str]]:
    """A config completed with transformers' defaults, and ``"name value"`` for each one taken.

    A known family has defaults of its own and takes only sizes that it requires. For an unknown
    model type every field is completed.
    """
    known = model_type in FAMILIES
    prepared = family.prepared(body)
    wanted = [
        family.names_of(name)
        for name, field in family.model_fields.items()
        if field.is_required() or not known
    ]
    if not known:
        wanted += [(name,) for name in ATTENTION_FIELDS]
    wanted = [names for names in wanted if not any(name in prepared for name in names)]
    defaults = declared_defaults(model_type) if wanted else {}
    found = [next((name for name in names if name in defaults), None) for names in wanted]
    taken = {name: defaults[name] for name in found if name is not None}
    if not known:
        # For an unknown model type a field that is null means the same as a missing field.
        taken = {name: value for name, value in taken.items() if value is not None}
    return {**taken, **body}, [f"{name} {value!r}" for name, value in taken.items()]


def _parse_family(
    family: type[Family], body: Mapping[str, Any], model_type: str, where: str
) -> Family:
    prepared = family.prepared(body)
    fields = family.model_fields
    for name, field in fields.items():
        names = family.names_of(name)
        if field.is_required() and not any(choice in prepared for choice in names):
            raise SpecError(
                f"{where}: field {' or '.join(map(repr, names))}: missing; this model_type needs it"
            )
    understood = frozenset(choice for name in fields for choice in family.names_of(name))
    for name in unread_fields(prepared, understood.union(family.not_read)):
        raise SpecError(
            f"{where}: field {name!r}: got {prepared[name]!r}; it changes attention, and what it "
            f"means for model_type {model_type!r} is not known"
        )
    return parse_spec(family, prepared, where)


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
