"""`omnicomp cache` writes, reads, lists and prunes what the cache folders hold."""

import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from omnicomp._torch.inductor.store import JsonStore
from omnicomp.cli import app

NUMBERS = JsonStore[int]("numbers", int, int)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("OMNICOMP_CACHE_DIR")
    return tmp_path / "cache"


def cache(*words: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["cache", *map(str, words)])
    assert result.exit_code == status, result.output
    return result.output


def test_what_was_exported_is_listed_described_and_imported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    NUMBERS.write("seven", 7)
    assert "saved: 1 decision" in cache("export", tmp_path / "file")
    assert "numbers/seven.json" in cache("list", tmp_path / "file")
    assert "numbers/seven.json" in cache("list")
    told = cache("info", tmp_path / "file")
    assert "signature: not checked" in told
    assert "here: it can be loaded" in told
    assert f"{folder}: 1 files" in cache("info")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "other"))
    assert "loaded: 1 decision" in cache("import", tmp_path / "file")
    assert NUMBERS.read("seven") == (7, "")


def test_a_file_for_another_version_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache("export", tmp_path / "file")
    monkeypatch.setattr("torch.__version__", "1.0")
    assert "this process has 1.0" in cache("info", tmp_path / "file")
    assert "they were made for torch" in cache("import", tmp_path / "file", status=1)


def test_what_was_not_used_for_long_is_removed(folder: Path) -> None:
    for days, key in enumerate("abc"):
        NUMBERS.write(key, 1)
        used = time.time() - days * 24 * 3600
        os.utime(NUMBERS.path(key), (used, used))
    (folder / "locks").mkdir()
    (folder / "locks" / "a.lock").touch()
    assert "1 files removed, 2 left" in cache("prune", "--days", "1.5")
    assert "1 files removed, 1 left" in cache("prune", "--max-bytes", NUMBERS.path("a").stat().st_size)
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == ["a.json", "a.lock"]
    assert isinstance(CliRunner().invoke(app, ["cache", "prune"]).exception, Exception)
