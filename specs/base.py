"""Base of every spec: frozen pydantic models that reject unknown fields and explain bad values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)

S = TypeVar("S", bound="Spec")

PositiveInt = Annotated[int, Field(gt=0, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeInt = Annotated[int, Field(ge=0, strict=True)]


class SpecError(ValueError):
    """A spec was given a bad value; the message names field, value and what is allowed."""

    cause: ValidationError | None = None
    """Pydantic's error, where the record was made without :func:`parse_spec`. A caller that knows
    where the values come from writes a new message from it (:func:`spec_errors`)."""


class _SpecType(ModelMetaclass):
    """Makes records whose errors are ``SpecError``.

    Pydantic makes a record inside a record without calling this class: the error then comes from
    the outer record and keeps the path to the inner field.
    """

    # Hidden from type checkers, so that they check each record's own arguments.
    if not TYPE_CHECKING:

        def __call__(self, *args: Any, **fields: Any) -> Any:
            with _own_errors(self):
                return super().__call__(*args, **fields)


class Spec(BaseModel, metaclass=_SpecType):
    """Immutable, hashable settings record with a JSON schema; JSON in, JSON out.

    Raises:
        SpecError: a bad value, however the record is made, or an assignment to a field.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        ser_json_inf_nan="strings",
        # Field names such as model_dtype begin with "model_", which pydantic reserves by default.
        protected_namespaces=(),
    )

    def replace(self, **changes: Any) -> Self:
        """Copy with some fields changed, validated again (``model_copy`` does not validate)."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_validate({**fields, **changes})

    if not TYPE_CHECKING:

        @classmethod
        def model_validate(cls, *args: Any, **options: Any) -> Self:
            """Pydantic's ``model_validate``, raising ``SpecError``."""
            with _own_errors(cls):
                return super().model_validate(*args, **options)

        @classmethod
        def model_validate_json(cls, *args: Any, **options: Any) -> Self:
            """Pydantic's ``model_validate_json``, raising ``SpecError``."""
            with _own_errors(cls):
                return super().model_validate_json(*args, **options)

        @classmethod
        def model_validate_strings(cls, *args: Any, **options: Any) -> Self:
            """Pydantic's ``model_validate_strings``, raising ``SpecError``."""
            with _own_errors(cls):
                return super().model_validate_strings(*args, **options)

        def __setattr__(self, name: str, value: Any) -> None:
            with _own_errors(type(self)):
                super().__setattr__(name, value)

        def __delattr__(self, name: str) -> None:
            with _own_errors(type(self)):
                super().__delattr__(name)


def cdiv(a: int, b: int) -> int:
    """Ceiling of ``a / b`` for non-negative ``a`` and positive ``b``."""
    return -(-a // b)


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below ``number``."""
    return 1 << max(number - 1, 0).bit_length()


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
def _own_errors(cls: type) -> Iterator[None]:
    """Turn pydantic's ``ValidationError`` into a ``SpecError`` that names the class."""
    try:
        yield
    except ValidationError as error:
        own = SpecError(describe_validation_error(error, cls.__name__))
        own.cause = error
        raise own from None


@contextmanager
def spec_errors(what: str) -> Iterator[None]:
    """Start the lines of errors with ``what``, which names the source of a record's values."""
    try:
        yield
    except SpecError as error:
        if error.cause is None:
            raise
        raise SpecError(describe_validation_error(error.cause, what)) from None


def parse_spec(cls: type[S], data: Mapping[str, Any] | str | bytes, what: str) -> S:
    """Validate a mapping or JSON text as ``cls``; ``SpecError`` starts with ``what``."""
    with spec_errors(what):
        if isinstance(data, str | bytes):
            return cls.model_validate_json(data)
        return cls.model_validate(data)
