"""SVG that stands inside a page.

Each chart is drawn twice, for wide and for narrow windows, so that its text stays readable. The
colours written here are stand-ins: they become variables of the page's style sheet, which gives
them one value on a light page and another on a dark one.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from markupsafe import Markup, escape
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Callable

INK, MUTED, ACCENT, ALLOCATED, FAILED = "#010101", "#020202", "#030303", "#040404", "#050505"
PARTS = tuple(f"#0606{number:02}" for number in range(1, 11))
SHADE, STEP, ON_PART = "#070701", "#070702", "#070703"

_VARIABLES = {
    INK: "currentColor",
    MUTED: "var(--muted)",
    ACCENT: "var(--accent)",
    ALLOCATED: "var(--allocated)",
    FAILED: "var(--failed)",
    SHADE: "var(--shade)",
    STEP: "var(--step)",
    ON_PART: "var(--on-part)",
    **{colour: f"var(--part-{index})" for index, colour in enumerate(PARTS, start=1)},
}
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": MUTED,
    "grid.linewidth": 0.5,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "path.simplify": True,
}
WIDE, NARROW = (7.6, 3.5), (4.3, 3.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart in its two widths."""

    wide: Markup
    narrow: Markup


def draw(name: str, title: str, description: str, paint: Callable[[Any, bool], None]) -> Chart:
    """Draw a chart in both widths; `paint` gets a figure and whether it is the narrow one."""
    drawn = []
    for kind, inches in (("wide", WIDE), ("narrow", NARROW)):
        prefix = f"{name}-{kind}"
        with mpl.rc_context():
            mpl.rcdefaults()  # a user's own style must not change the page
            mpl.rcParams.update({**_SETTINGS, "svg.hashsalt": prefix})
            figure = Figure(figsize=inches, layout="constrained")
            FigureCanvasSVG(figure)
            paint(figure, kind == "narrow")
            _lay_out(figure)
            stream = io.StringIO()
            nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            figure.savefig(stream, format="svg", transparent=True, metadata=nothing)
        drawn.append(_inline(stream.getvalue(), prefix, title, description))
    return Chart(wide=drawn[0], narrow=drawn[1])


def _lay_out(figure: Figure) -> None:
    """Make the layout now: `savefig` would draw the whole figure one more time to make it."""
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
        figure.set_layout_engine(None)


def _inline(svg: str, prefix: str, title: str, description: str) -> Markup:
    """Make matplotlib's document fit to stand inside HTML: no prolog, unique ids, page colours."""
    body = svg[svg.index("<svg") :]
    box = re.search(r'viewBox="([^"]*)"', body)
    if box is None:
        raise AssertionError("matplotlib wrote an SVG without a viewBox")
    body = body[body.index(">") + 1 :].rstrip()
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", body, flags=re.DOTALL)
    body = re.sub(r'(<g) id="[^"]*"', r"\1", body)
    body = re.sub(r'\bid="([^"]*)"', rf'id="{prefix}-\1"', body)
    body = re.sub(r'xlink:href="#', f'href="#{prefix}-', body)
    body = re.sub(r"url\(#", f"url(#{prefix}-", body)
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    body = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", body)
    body = re.sub(r"#0[1-7]0[0-9]0[0-9]", lambda m: _VARIABLES.get(m[0], m[0]), body)
    body = re.sub(r'="[^"]*"', lambda m: re.sub(r"(\d+\.\d\d)\d+", r"\1", m[0]), body)
    body = re.sub(r"\n\s*", "\n", body)
    head = (
        f'<svg viewBox="{box[1]}" role="img" '
        f'aria-labelledby="{prefix}-title {prefix}-description">\n'
        f'<title id="{prefix}-title">{escape(title)}</title>\n'
        f'<desc id="{prefix}-description">{escape(description)}</desc>'
    )
    return Markup(head + body)  # noqa: S704 - matplotlib escapes its text; the rest is ours
