# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Reports and saved plans as one HTML file, and as PNGs; needs matplotlib and jinja2, the extra ``report``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.support.files import write_whole

if TYPE_CHECKING:
    from dreamshard_planner.plans.picture.content import Content
    from dreamshard_planner.plans.picture.sections import Section
    from dreamshard_planner.plans.plan_file import SavedPlan
    from dreamshard_planner.plans.replan import Replan
    from dreamshard_planner.plans.report import Report


def save_html(subject: Report | SavedPlan | Replan, path: str | Path, title: str | None = None) -> None:
    """Write one HTML file that needs neither network nor scripts; an existing one is replaced as a whole.

    Args:
        subject: a report; a plan from a file, whose page also says what it was made from; or what re-planning found,
            whose page begins with the curve.
        path: of the file.
        title: what was planned; ``Sharding plan``, or the name of the saved plan, by default.

    Raises:
        DreamShardError: matplotlib or jinja2 is not installed.
        FileError: the file can't be written.
    """
    content, sections = _shown(subject, title)
    from dreamshard_planner.plans.picture.sections import page

    write_whole(path, page(content, sections))


def save_png(subject: Report | SavedPlan | Replan, folder: str | Path, title: str | None = None) -> tuple[Path, ...]:
    """Write one PNG for each figure of the HTML file into a folder, which is made where it is not there.

    Args:
        subject: as :func:`save_html`.
        folder: where to; files are named as their figures, such as ``ranks.png``.
        title: as :func:`save_html`; part of each picture.

    Returns:
        The files.

    Raises:
        DreamShardError, FileError: as :func:`save_html`.
    """
    content, sections = _shown(subject, title)
    from dreamshard_planner.plans.picture.drawing import png

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for section in sections:
        written.append(folder / f"{section.name}.png")
        write_whole(written[-1], png(section.draw, section.title, content.title))
    return tuple(written)


def check_libraries() -> None:
    """DreamShardError where what draws is not installed; says how to install it. Loads nothing."""
    missing = [name for name in ("matplotlib", "jinja2") if not _installed(name)]
    if missing:
        raise DreamShardError(
            f"pictures of reports need matplotlib and jinja2, and there is no {' and no '.join(missing)}: "
            "pip install 'dreamshard_planner[report]'"
        )


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # of a module that is there by name alone
        return False


def _shown(subject: Report | SavedPlan | Replan, title: str | None) -> tuple[Content, tuple[Section, ...]]:
    from dreamshard_planner.plans.picture.content import Content

    content = Content.of(subject, title)
    check_libraries()
    from dreamshard_planner.plans.picture.sections import sections

    return content, sections(content)
