# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Progress of long steps."""

import pytest

from dreamshard_planner.support.progress import progress_bar


def test_no_more_is_shown_than_there_is_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("at work", 3, enabled=True) as advance:
        advance("", 2)
        advance("", 5)
    assert "3/3" in capsys.readouterr().err
