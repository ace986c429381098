"""Small files that are kept between processes: what is stored is read, and whatever else is there is a miss."""

import json
import logging
import os
import stat
from pathlib import Path

import pytest

from omnicomp._torch.inductor.store import JsonStore, append, folder, prune, read_trusted, write_whole


def numbers(**more: int) -> JsonStore[int]:
    return JsonStore[int]("numbers", lambda value: [value], lambda data: int(data[0]), **more)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMNICOMP_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_what_was_stored_is_read(place: Path) -> None:
    assert folder() == place
    store = numbers()
    assert store.read("a") == (None, "")
    assert store.write("a", 3) == ""
    assert store.write("a", 4) == ""
    assert store.read("a") == (4, "")
    assert store.all() == [("a", 4)]
    assert [path.name for path in store.folder.iterdir()] == ["a.json"]
    store.remove("a")
    store.remove("a")
    assert store.all() == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[1, 2]",
        b'{"schema": 1}',
        b'{"schema": 1, "key": "b", "value": [3]}',
        b'{"schema": 1, "key": "a", "value": []}',
        b'{"schema": 1, "key": "a", "value": ["x"]}',
    ],
)
def test_a_damaged_file_is_a_miss_that_says_so(content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    store = numbers()
    store.folder.mkdir()
    store.path("a").write_bytes(content)
    value, problem = store.read("a")
    assert value is None
    assert str(store.path("a")) in problem
    assert store.read("a") == (None, problem), "said again, and logged once"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    ((key, found),) = store.all()
    assert key == "a"
    assert isinstance(found, str)
    assert store.write("a", 5) == ""
    assert store.read("a") == (5, "")


def test_a_file_of_another_version_is_a_miss_without_a_complaint(caplog: pytest.LogCaptureFixture) -> None:
    numbers(schema=1).write("a", 3)
    numbers(schema=1).path("b").write_text(json.dumps({"kept": "by a version without schemas"}))
    for key in "ab":
        value, problem = numbers(schema=2).read(key)
        assert value is None
        assert problem.endswith("another version")
    assert {key: type(value) for key, value in numbers(schema=2).all()} == {"a": str, "b": str}
    assert not caplog.records


def test_what_can_not_be_written_says_why(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert "too many" in numbers(size=8).write("a", 3)
    (place / "numbers").touch()
    assert "can't be written" in numbers().write("a", 3)
    assert "can't be read" in numbers().read("a")[1]
    assert len(caplog.records) == 3
    assert (place / "numbers").read_bytes() == b""


def test_files_that_were_not_used_for_the_longest_time_go() -> None:
    store = numbers(files=3)
    for index in range(3):
        store.write(str(index), index)
        os.utime(store.path(str(index)), (index + 1.0, index + 1.0))
    store.read("0")  # which uses it
    store.write("3", 3)
    assert sorted(key for key, _ in store.all()) == ["0", "2", "3"]


def test_files_that_another_process_removes_meanwhile(tmp_path: Path) -> None:
    """Of a link that leads nowhere there is no time either."""
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    prune(tmp_path, ".json", 2)
    assert not os.path.lexists(tmp_path / "gone.json")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_files_and_folders_are_for_this_user_alone(place: Path) -> None:
    write_whole(place / "a" / "b" / "c.json", "{}")
    append(place / "d" / "wrong", "x")
    assert [mode(place / name) for name in ("a", "a/b", "a/b/c.json", "d", "d/wrong")] == [
        *(0o700, 0o700, 0o600),
        *(0o700, 0o600),
    ]


def test_nothing_is_written_or_read_through_a_link(place: Path) -> None:
    precious = place / "precious"
    precious.write_text("precious")
    for name in ("whole", "appended"):
        (place / name).symlink_to(precious)
    write_whole(place / "whole", "new")
    assert not (place / "whole").is_symlink()
    with pytest.raises(OSError, match="symbolic links"):
        append(place / "appended", "more")
    with pytest.raises(OSError, match="symbolic links"):
        read_trusted(place / "appended")
    assert precious.read_text() == "precious"


def test_what_others_may_have_written_is_not_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = numbers()
    store.write("a", 3)
    store.path("a").chmod(0o620)
    assert store.read("a")[0] is None
    assert "other users may write" in store.read("a")[1]
    assert store.write("a", 3) == ""
    assert store.read("a") == (3, "")
    os.mkfifo(place / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        read_trusted(place / "pipe")
    if os.getuid() == 0:
        os.chown(store.path("a"), 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert "another user" in store.read("a")[1]


def test_secrets_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "correct-horse-battery")
    store = JsonStore[dict[str, list[str]]]("texts", dict, dict)
    store.write("a", {"said": ["401 for correct-horse-battery", "npm_" + "aB3" * 12]})
    assert store.read("a") == ({"said": ["401 for ***", "***"]}, "")


def test_text_that_is_no_unicode_is_written(place: Path) -> None:
    write_whole(place / "a.py", "# caf\udce9")
    assert (place / "a.py").read_text() == "# caf\\udce9"


def test_the_first_that_settles_a_key_decides(place: Path) -> None:
    assert numbers().settle("k", 1) == (1, "")
    assert numbers().settle("k", 2) == (1, "")
    (place / "numbers" / "k.json").write_text("{")
    assert numbers().settle("k", 3) == (3, "")
    assert numbers().read("k") == (3, "")
    assert [path.name for path in (place / "numbers").iterdir()] == ["k.json"]
