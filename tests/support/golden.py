"""Files with what a view printed when somebody looked at it last; `OMNICOMP_ACCEPT=1` writes them anew."""

import os
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "data"


def check(name: str, text: str) -> None:
    """A text is what the file holds."""
    path = FOLDER / name
    if os.environ.get("OMNICOMP_ACCEPT") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"{path} is missing; OMNICOMP_ACCEPT=1 writes it"
    assert text == path.read_text(encoding="utf-8"), (
        f"{path} differs; if that is right, OMNICOMP_ACCEPT=1 writes it anew"
    )
