# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Progress of long steps."""

from __future__ import annotations

import pytest

from dreamshard_planner.support.progress import progress_bar


@pytest.mark.parametrize(("total", "shown"), [(3, "3/3"), (None, "7/?")])
def test_no_more_is_shown_than_there_is_to_do(
    total: int | None, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_bar("at work", total, enabled=True) as advance:
        advance("", 2)
        advance("", 5)
    assert shown in capsys.readouterr().err
