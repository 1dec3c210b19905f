# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What mkdocs can't do by itself: README's figures, chart and first lines on the landing page, and references to code
in docstrings as code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
SHOWN = (r"^## Ten lines\n.*?^```\n", r"^## What it gains\n.*?(?=^## )")
"""What of README the landing page begins with: the script, without the commands that follow it, and the figures."""
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:)[^)]+\)")
_IMAGE = re.compile(r"!\[([^\]]*)\]\((benchmarks/[^)]+)\)")
_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):<code>~?([\w.]+)</code>")


def _sections() -> str:
    readme = (ROOT / "README.md").read_text()
    return "\n".join(re.search(part, readme, re.M | re.S)[0] for part in SHOWN)


def on_files(files: Files, config: Any) -> Files:
    """The charts of these sections."""
    for _, path in _IMAGE.findall(_sections()):
        files.append(File.generated(config, f"charts/{Path(path).name}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Of the landing page: with these sections, whose links lead to files that are no pages."""
    if page.file.src_uri != "index.md":
        return markdown
    shown = _IMAGE.sub(lambda image: f"![{image[1]}](charts/{Path(image[2]).name})", _LINK.sub(r"\1", _sections()))
    return markdown.replace("<!-- README -->", shown)


def on_page_content(html: str, **_: Any) -> str:
    """References without their roles: the last name, as code."""
    return _ROLE.sub(lambda role: f"<code>{role[1].rpartition('.')[2]}</code>", html)
