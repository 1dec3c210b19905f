# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Figures of matplotlib as PNG, and as SVG that lies in a page and takes its colours from it."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from xml.etree import ElementTree

from matplotlib import style
from matplotlib.figure import Figure

INK, SOFT, GRID, PAPER = "#1b2433", "#5b6577", "#d9dee6", "#fffffe"
BLUE, ORANGE, GREEN, SKY = "#0072b2", "#e69f00", "#009e73", "#56b4e9"
VERMILION, PURPLE, GREY = "#d55e00", "#a65a8a", "#c3c9d2"
COLOURS = {
    "ink": (INK, "#e7eaf0"),
    "soft": (SOFT, "#a6b0c0"),
    "grid": (GRID, "#343d4b"),
    "paper": (PAPER, "#161b24"),
    "blue": (BLUE, "#4aa8e0"),
    "orange": (ORANGE, "#eeb33b"),
    "green": (GREEN, "#22b98c"),
    "sky": (SKY, "#9ad4f7"),
    "vermilion": (VERMILION, "#f2813a"),
    "purple": (PURPLE, "#d292ba"),
    "grey": (GREY, "#4d5768"),
}
"""Name, light and dark. After Okabe and Ito (jfly.uni-koeln.de/color), told apart with any colour vision."""
WIDTH_INCHES = 10.0
PNG_DPI = 160
_STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # which matplotlib brings
    "font.size": 10,
    "text.parse_math": False,  # names may hold dollars
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": SOFT,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.prop_cycle": f"cycler('color', ['{BLUE[1:]}'])",
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "figure.facecolor": PAPER,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08,
    "axes.facecolor": "none",
    "savefig.facecolor": "auto",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "dreamshard",
}
_NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}
_XLINK = "{http://www.w3.org/1999/xlink}href"
_COLOUR = re.compile("|".join(light for light, _ in COLOURS.values()))
_DIGITS = re.compile(r"(\.\d\d)\d+")
"""Of coordinates in points; a thousand ranks have thousands of them."""
_NAMES = {light: name for name, (light, _) in COLOURS.items()}


@contextmanager
def _drawn(draw: Callable[[], Figure]) -> Iterator[Figure]:
    """In our style, whatever the user's is."""
    with style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # browsers have it, or a box says so
        yield draw()


def png(draw: Callable[[], Figure], title: str, subtitle: str) -> bytes:
    """A picture that stands alone."""
    buffer = io.BytesIO()
    with _drawn(draw) as figure:
        figure.suptitle(f"{title}\n{subtitle}", x=0.01, ha="left", fontsize=12, linespacing=1.5)
        figure.savefig(buffer, format="png", dpi=PNG_DPI)
    return buffer.getvalue()


def svg(draw: Callable[[], Figure], name: str, alt: str) -> str:
    """An ``svg`` element for a page: colours are the page's ``--blue`` and so on, ids begin with ``name``, there is no
    address in it, and ``alt`` is what screen readers say."""
    buffer = io.StringIO()
    with _drawn(draw) as figure:
        figure.savefig(buffer, format="svg", metadata=_NO_METADATA, transparent=True)
    root = ElementTree.fromstring(buffer.getvalue())
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        if "id" in element.attrib:
            element.set("id", f"{name}-{element.get('id')}")
        if _XLINK in element.attrib:
            element.set("href", f"#{name}-{element.attrib.pop(_XLINK)[1:]}")
        if "d" in element.attrib:
            element.set("d", _DIGITS.sub(r"\1", element.attrib["d"]))
        for attribute, value in element.attrib.items():
            value = re.sub(r"url\(#", f"url(#{name}-", value) if attribute != "href" else value
            element.set(attribute, _COLOUR.sub(lambda light: f"var(--{_NAMES[light[0]]})", value))
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.set("role", "img")
    root.set("aria-label", alt)
    return ElementTree.tostring(root, encoding="unicode")
