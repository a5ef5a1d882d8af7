"""The frame of a page: header, sections, tables and figures in one HTML file without a script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, unique
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from attn.errors import MissingDependencyError


@unique
class Tone(StrEnum):
    """How a value is marked."""

    PLAIN = ""
    GOOD = "good"
    BAD = "bad"
    FAINT = "faint"


@dataclass(frozen=True)
class Cell:
    """A cell of a table that is marked."""

    text: str
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True)
class Table:
    """A table; a wide one scrolls by itself on a narrow screen."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    numbers: int = 0
    """How many columns from the right hold numbers."""
    sentences: int | None = None
    """Number of a column of sentences, which gets more room."""
    folded: str = ""
    """Title of a table that is folded until it is opened; empty for one that is open."""

    @property
    def cells(self) -> list[list[Cell]]:
        """All rows as cells."""
        return [[one if isinstance(one, Cell) else Cell(one) for one in row] for row in self.rows]

    def is_number(self, column: int) -> bool:
        """True for a column of numbers."""
        return column >= len(self.columns) - self.numbers


@dataclass(frozen=True)
class Chart:
    """A chart with a caption."""

    svg: str
    caption: str


@dataclass(frozen=True)
class Section:
    """A part of the page under a heading."""

    title: str
    notes: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()


@dataclass(frozen=True)
class Page:
    """A whole page."""

    title: str
    verdict: Cell
    """The result in a sentence."""
    command: str = ""
    facts: Sequence[tuple[str, str]] = ()
    """Numbers to see at once: name and value."""
    notes: Sequence[str] = ()
    """Lines below the verdict."""
    sections: Sequence[Section] = ()
    versions: dict[str, str] = field(default_factory=dict)


def pairs(title: str, items: Iterable[tuple[str, object]]) -> Table:
    """A table of names and values."""
    return Table((title, "value"), [(name, str(value)) for name, value in items])


def check_page(option: str, path: Path | None) -> None:
    """Check before the work that a page can be made.

    Args:
        option: name of the option that asks for a page, for the message.
        path: its file; None asks for none.

    Raises:
        MissingDependencyError: a package that pages need is not installed.
    """
    if path is None:
        return
    for module in ("jinja2", "matplotlib"):
        if find_spec(module) is None:
            raise MissingDependencyError(module, option, extra="cli")


def render_page(page: Page) -> str:
    """The HTML of a page."""
    from jinja2 import Environment

    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        _TEMPLATE
    )
    return template.render(page=page, style=_STYLE)


_STYLE: Final = """
:root { color-scheme: light; --line: #d7dce3; --faint: #5b6675; --good: #0a6b3d; --bad: #b00020; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 72rem; color: #16202c; background: #fff;
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: 0 0 .5rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); }
p { margin: .4rem 0; max-width: 46rem; }
pre { margin: .5rem 0; padding: .6rem; background: #f3f5f8; border-radius: .3rem;
  white-space: pre-wrap; font-size: .85rem; }
.verdict { font-weight: 600; }
.good { color: var(--good); } .bad { color: var(--bad); } .faint { color: var(--faint); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .6rem;
  margin: 1rem 0; padding: 0; }
.facts div { padding: .5rem .7rem; border: 1px solid var(--line); border-radius: .3rem; }
.facts dt { color: var(--faint); font-size: .8rem; }
.facts dd { margin: 0; font-size: 1.1rem; font-variant-numeric: tabular-nums; }
.charts { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); }
figure { margin: 0; min-width: 0; }
figure svg { display: block; width: 100%; height: auto; max-width: 36rem; }
figcaption { color: var(--faint); font-size: .85rem; }
.scroll { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-size: .85rem; overflow-wrap: normal; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
th { position: sticky; top: 0; background: #f3f5f8; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.sentence { min-width: 14rem; }
summary { cursor: pointer; }
footer { margin-top: 2rem; color: var(--faint); font-size: .85rem; }
"""

_TEMPLATE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{{ page.title }}</title>
<style>{{ style|safe }}</style>
</head>
<body>
{% macro show(table) %}
<div class="scroll"><table>
<thead><tr>{% for name in table.columns %}
<th{% if table.is_number(loop.index0) %} class="number"{% endif %}>{{ name }}</th>
{% endfor %}</tr></thead>
<tbody>
{% for row in table.cells %}<tr>{% for cell in row %}
<td class="{{ cell.tone }}{{ " number" if table.is_number(loop.index0) }}
{{- " sentence" if loop.index0 == table.sentences }}">
{{- cell.text -}}</td>
{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>
{% endmacro %}
<main>
<h1>{{ page.title }}</h1>
<p class="verdict {{ page.verdict.tone }}">{{ page.verdict.text }}</p>
{% for note in page.notes %}
<p>{{ note }}</p>
{% endfor %}
{% if page.command %}
<pre>{{ page.command }}</pre>
{% endif %}
{% if page.facts %}
<dl class="facts">
{% for name, value in page.facts %}
<div><dt>{{ name }}</dt><dd>{{ value }}</dd></div>
{% endfor %}
</dl>
{% endif %}
{% for section in page.sections %}
<section>
<h2>{{ section.title }}</h2>
{% for note in section.notes %}
<p>{{ note }}</p>
{% endfor %}
{% if section.charts %}
<div class="charts">
{% for chart in section.charts %}
<figure role="img" aria-label="{{ chart.caption }}">
{{ chart.svg|safe }}
<figcaption>{{ chart.caption }}</figcaption>
</figure>
{% endfor %}
</div>
{% endif %}
{% for table in section.tables %}
{% if table.folded %}
<details><summary>{{ table.folded }}</summary>
{{ show(table) }}
</details>
{% else %}
{{ show(table) }}
{% endif %}
{% endfor %}
</section>
{% endfor %}
</main>
<footer>
{% for name, version in page.versions.items() %}
{{ name }} {{ version }}{{ ", " if not loop.last }}
{% endfor %}
</footer>
</body>
</html>
"""
