"""Base of every spec: frozen pydantic models that reject unknown fields and explain bad values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

S = TypeVar("S", bound="Spec")

PositiveInt = Annotated[int, Field(gt=0, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeInt = Annotated[int, Field(ge=0, strict=True)]


class SpecError(ValueError):
    """A spec was given a bad value; the message names field, value and what is allowed."""


class Spec(BaseModel):
    """Immutable, hashable settings record with a JSON schema; JSON in, JSON out."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        ser_json_inf_nan="strings",
        # "model_" is a word of this field (model_dtype), not of pydantic here.
        protected_namespaces=(),
    )

    def replace(self, **changes: Any) -> Self:
        """Copy with some fields changed, validated again (``model_copy`` does not validate)."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_validate({**fields, **changes})


def cdiv(a: int, b: int) -> int:
    """Ceiling of ``a / b`` for non-negative ``a`` and positive ``b``."""
    return -(-a // b)


def describe_validation_error(error: ValidationError, what: str) -> str:
    """One line per problem: the field's path, the rule it broke and the value that came."""
    problems = []
    for item in error.errors(include_url=False):
        path = ".".join(str(part) for part in item["loc"]) or "(whole)"
        came = repr(item["input"])
        came = came if len(came) <= 80 else f"{came[:77]}..."
        problems.append(f"{what}: field {path!r}: {item['msg']}; got {came}")
    return "\n".join(problems)


@contextmanager
def spec_errors(what: str) -> Iterator[None]:
    """Turn pydantic's ``ValidationError`` into a ``SpecError`` whose lines start with ``what``."""
    try:
        yield
    except ValidationError as error:
        raise SpecError(describe_validation_error(error, what)) from None


def parse_spec(cls: type[S], data: Mapping[str, Any] | str | bytes, what: str) -> S:
    """Validate a mapping or JSON text as ``cls``; ``SpecError`` starts with ``what``."""
    with spec_errors(what):
        if isinstance(data, str | bytes):
            return cls.model_validate_json(data)
        return cls.model_validate(data)
