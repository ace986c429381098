"""The hash of the package that the caches are keyed by, and what it leaves out."""

from pathlib import Path

import pytest

from omnicomp.options import digest


@pytest.mark.parametrize(("room", "counts"), [("audit", False), ("cli", False), ("testing", False), ("passes", True)])
def test_only_what_compiles_is_part_of_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: str, counts: bool
) -> None:
    monkeypatch.setattr(digest, "__file__", str(tmp_path / "options" / "digest.py"))
    module = tmp_path / room / "some.py"
    module.parent.mkdir()
    seen: set[str] = set()
    for text in ("a = 1\n", "a = 2\n"):
        module.write_text(text)
        seen.add(digest.package_digest.__wrapped__())
    assert len(seen) == (2 if counts else 1)
