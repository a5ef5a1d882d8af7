"""Charts as SVG inside a page, drawn by matplotlib; small, so that a phone shows their words."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, Final

from attn.errors import MissingDependencyError

WIDTH: Final = 4.6
"""Inches of a chart; at the width of a phone its words are then about as large as a table's."""
# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLORS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
ALERT: Final = "#B00020"


def draw_svg(draw: Callable[[Any], None], height: float = 2.7) -> str:
    """The SVG of a chart.

    Args:
        draw: draws into the one panel of a figure.
        height: inches.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError("matplotlib", "a page", extra="cli") from None
    # Words stay words, so that a reader can select them and the file stays small.
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "attn", "font.size": 9.5}
    with rc_context(settings):
        # Figure instead of pyplot, which keeps figures alive.
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        panel = figure.subplots()
        panel.spines[["top", "right"]].set_visible(False)
        draw(panel)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    # Inside HTML there is no XML declaration and no document type.
    return text[text.index("<svg") :]


def put_legend(panel: Any) -> None:
    """A legend above a panel, where it hides nothing."""
    handles, labels = panel.get_legend_handles_labels()
    if labels:
        panel.legend(
            handles,
            labels,
            loc="lower left",
            bbox_to_anchor=(0.0, 1.0),
            ncols=min(len(labels), 4),
            frameon=False,
            fontsize=8.5,
            borderaxespad=0.2,
            handlelength=1.2,
            columnspacing=1.0,
        )
