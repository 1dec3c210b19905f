# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The HTML page: one file, without scripts, and with nothing to fetch."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from dreamshard_planner import __version__
from dreamshard_planner.plans.picture.content import Content
from dreamshard_planner.plans.picture.drawing import COLOURS, svg
from dreamshard_planner.plans.picture.sections import Section


def page(content: Content, sections: Sequence[Section]) -> str:
    """The HTML of a report; names are escaped wherever they come from."""
    environment = Environment(
        loader=PackageLoader("dreamshard_planner", "plans/picture"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    figures = {
        section.name: svg(section.draw, section.name, f"{section.title}. {section.finding}") for section in sections
    }
    return environment.get_template("page.html").render(
        content=content, sections=sections, figures=figures, colours=COLOURS, version=__version__
    )
