# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Files are whole, have one writer at a time, and fail before the work rather than after it; progress."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dreamshard_planner import FileError, StatisticsError
from dreamshard_planner.support.files import (
    MAX_NESTING,
    check_writable,
    open_locked,
    parse_json,
    read_json,
    write_whole,
)
from dreamshard_planner.support.formatting import progress_bar
from tests.faults import files_up_to


def test_a_file_has_one_lock_at_a_time(tmp_path: Path) -> None:
    with open_locked(tmp_path / "new" / "lock"), pytest.raises(FileError, match="another process is writing to it"):
        open_locked(tmp_path / "new" / "lock")
    open_locked(tmp_path / "new" / "lock").close()  # it was given back
    with pytest.raises(FileError, match="cannot be opened for writing: File exists"):
        open_locked(tmp_path / "new" / "lock" / "lock")


def test_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    path, contents = tmp_path / "result", [bytes([65 + i]) * 100_000 for i in range(3)]
    with ThreadPoolExecutor() as threads:
        for _ in range(30):
            assert list(threads.map(write_whole, [path] * 3, contents)) == [None] * 3
            assert path.read_bytes() in contents and os.listdir(tmp_path) == ["result"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real")
    write_whole(tmp_path / "link", "text ü")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text(encoding="utf-8") == "text ü"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", "cannot be written: it is a folder"),
        ("nowhere/x", "cannot be written: there is no folder"),
        ("/proc/x", "cannot be written: No such file"),
        ("/dev/full", "cannot be written: it is no regular file"),
        ("n" * 300, "cannot be written: File name too long"),
        ("null\0", "cannot be written: embedded null byte"),
    ],
)
@pytest.mark.parametrize("write", [check_writable, lambda path: write_whole(path, b"x")])
def test_what_cannot_be_written_is_named(write: Callable, path: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=reason) as caught:
        write(tmp_path / path)
    assert str(tmp_path / path) in str(caught.value) and not list(tmp_path.iterdir())


def test_a_full_disk_is_noticed_before_the_work_and_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    with files_up_to(10_000), pytest.raises(FileError, match="result: cannot be written: File too large"):
        check_writable(tmp_path / "result")
    check_writable(tmp_path / "result")
    assert not list(tmp_path.iterdir())
    (tmp_path / "a").write_text("before")
    with files_up_to(10_000), pytest.raises(FileError, match="a: cannot be written: File too large"):
        write_whole(tmp_path / "a", b"x" * 100_000)
    assert (tmp_path / "a").read_text() == "before" and os.listdir(tmp_path) == ["a"]


def test_json_of_any_form_is_read_in_bounds(tmp_path: Path) -> None:
    deepest = "[" * (MAX_NESTING - 1) + "1" + "]" * (MAX_NESTING - 1)
    assert parse_json(deepest) and parse_json('{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}
    path = tmp_path / "some.json"
    for text in (f"[[{deepest}]]", "[" * 100_000, "9" * 5_000, '{"a":' * 100_000, "{", "\0", ""):
        path.write_text(text)
        with pytest.raises(StatisticsError, match="some.json: not a JSON file") as caught:
            read_json(path, StatisticsError)
        assert len(str(caught.value)) < 600
    os.mkfifo(tmp_path / "pipe")
    for special in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(StatisticsError, match=f"{special}: cannot be read: no regular file"):
            read_json(special, StatisticsError)


def test_no_more_is_shown_than_there_is_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("at work", 3, enabled=True) as advance:
        advance("", 2)
        advance("", 5)
    assert "3/3" in capsys.readouterr().err
