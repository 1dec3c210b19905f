# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Show the README on the landing page, and references to code in docstrings as code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_OTHER_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|\w+\.md)[^)]+\)")
_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):<code>~?([\w.]+)</code>")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the README up to "Promises" on the landing page. Links to files outside of docs become text."""
    if page.file.src_uri != "index.md":
        return markdown
    shown = (ROOT / "README.md").read_text().split("\n```python", 1)[1].split("\n## Promises", 1)[0]
    shown = _OTHER_LINK.sub(r"\1", f"```python{shown}".replace("](docs/", "]("))
    return markdown.replace("<!-- README -->", shown)


def on_page_content(html: str, **_: Any) -> str:
    """Show a reference's last name, as code."""
    return _ROLE.sub(lambda role: f"<code>{role[1].rpartition('.')[2]}</code>", html)
