import os
from pathlib import Path

import pytest

from omnicomp import privacy
from omnicomp.audit.views.excerpts import Excerpts


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text("".join(f"line {number}\n" for number in range(1, 11)))
    return path


def test_lines_around_a_place(file: Path) -> None:
    found = Excerpts(around=2).of(f"{file}:5")
    assert found is not None
    assert list(found.numbered()) == [(n, f"line {n}", n == 5) for n in range(3, 8)]


@pytest.mark.parametrize(("line", "first", "count"), [(1, 1, 3), (10, 8, 3)])
def test_the_ends_of_the_file(file: Path, line: int, first: int, count: int) -> None:
    found = Excerpts(around=2).of(f"{file}:{line}")
    assert found is not None
    assert (found.first, len(found.lines)) == (first, count)


@pytest.mark.parametrize(
    "source", ["", "model.py", "{file}:0", "{file}:11", "{file}:x", "{folder}/none.py:1", "{folder}:1"]
)
def test_no_such_place(file: Path, source: str) -> None:
    assert Excerpts().of(source.format(file=file, folder=file.parent)) is None


def test_a_report_cannot_make_a_reader_show_other_files(tmp_path: Path) -> None:
    (tmp_path / "id_rsa").write_text("secret\n")
    assert Excerpts().of(f"{tmp_path}/id_rsa:1") is None
    assert Excerpts().of("/etc/passwd:1") is None
    (tmp_path / "link.py").symlink_to(tmp_path / "id_rsa")
    assert Excerpts().of(f"{tmp_path}/link.py:1") is None
    os.mkfifo(tmp_path / "pipe.py")
    assert Excerpts().of(f"{tmp_path}/pipe.py:1") is None


def test_secrets_and_control_characters_are_hidden(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "correct-horse-battery")
    privacy.refresh()
    file.write_text('key = "correct-horse-battery"\nshow("\x1b[2J")\n')
    found = Excerpts().of(f"{file}:1")
    monkeypatch.undo()
    privacy.refresh()
    assert found is not None
    assert found.lines == ('key = "***"', 'show("\ufffd[2J")')


def test_a_file_that_was_changed_after_the_run_says_so(file: Path) -> None:
    since = file.stat().st_mtime
    for run, changed in ((since + 5, False), (since - 5, True), (0.0, False)):
        found = Excerpts().of(f"{file}:1", run)
        assert found is not None
        assert found.changed is changed
