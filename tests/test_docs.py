# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What the pages on files show is read, and the keys that they list are those that there are."""

from __future__ import annotations

import re
from pathlib import Path

from dreamshard_planner import TableStatistics
from dreamshard_planner.table_list import _FIELDS, read_table_list

PAGE = (Path(__file__).parent.parent / "docs" / "file_formats.md").read_text()


def test_files_on_the_page_are_read(tmp_path: Path) -> None:
    tables, statistics = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "t.json").write_text(tables)
    (tmp_path / "s.json").write_text(statistics)
    assert [spec.embedding_dim for spec in read_table_list(tmp_path / "t.json")] == [128, 64]
    assert TableStatistics.from_json(tmp_path / "s.json")["user_id"].batch_size == 8192


def test_every_key_of_a_table_is_on_the_page() -> None:
    section = PAGE.split("## Lists of tables")[1].split("## Statistics")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(_FIELDS)
