"""Structures of kernels as plain Python classes."""

import pytest
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn.kernels.lang.compat import aggregate
from tests.tools.gluon_in_numpy import Translation


@gluon.jit
def _doubled(x):
    return x * 2


@aggregate
class _Line:
    """A line through two numbers."""

    slope: gl.tensor | gl.constexpr
    SHIFT: gl.constexpr

    @gluon.jit
    def at(self, x):
        """Its height."""
        y = self.slope * x
        if self.SHIFT:
            y = _doubled(y)
        return y

    @gluon.jit
    def steeper(self):
        """Another line."""
        return _Line(slope=_doubled(self.slope), SHIFT=self.SHIFT)


@gluon.jit
def _height(line, x):
    return line.steeper().at(x)


@gluon.jit
def _height_of(slope, x, SHIFT: gl.constexpr):
    line = _Line(slope=slope, SHIFT=SHIFT)
    return _height(line, x)


def test_a_structure_is_made_handed_on_and_has_methods() -> None:
    height = Translation().function(_height_of)
    assert height(3, 5, True) == 60
    assert height(3, 5, False) == 30


def test_a_structure_keeps_the_fields_that_it_is_made_with() -> None:
    line = Translation().structure(_Line)
    made = line(slope=1, SHIFT=False)
    with pytest.raises(AttributeError, match=r"_Line\.slope is assigned to"):
        made.slope = 2
    with pytest.raises(AssertionError, match="fields missing or unknown"):
        line(slope=1)
    with pytest.raises(AssertionError, match="fields missing or unknown"):
        line(slope=1, SHIFT=False, shift=1)


def test_a_structure_of_triton_takes_each_field_by_keyword_and_in_its_type() -> None:
    line = _Line(slope=2, SHIFT=True)
    assert line.SHIFT.value is True
    assert line.slope.value == 2
    with pytest.raises(TypeError, match="_Line: fields missing or unknown: SHIFT"):
        _Line(slope=2)
    with pytest.raises(TypeError, match="for attribute 'SHIFT'"):
        _Line(slope=2, SHIFT=line)


def test_fields_whose_annotations_are_postponed_are_refused() -> None:
    with pytest.raises(TypeError, match="_Late: the annotations of its fields are postponed"):

        @aggregate
        class _Late:
            slope: "gl.tensor"
