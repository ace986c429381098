"""What is kept on disk between processes: verdicts, measured speeds, trust in overrides, the parts of keys.

Small files, each written whole, and the oldest of a folder removed when there are too many.
"""

import os
import threading
from pathlib import Path
from typing import Final

from omnicomp._torch.inductor.compile_fx import cache_dir

__all__ = ["folder", "prune", "write_whole"]

_FILES: Final = 512


def folder() -> Path:
    """Where it is kept: `OMNICOMP_CACHE_DIR`, or `omnicomp` in Inductor's cache folder."""
    own = os.environ.get("OMNICOMP_CACHE_DIR")
    return Path(own).expanduser() if own else Path(cache_dir()) / "omnicomp"


def write_whole(path: Path, text: str, keep: int = _FILES) -> None:
    """Write a file so that a reader sees all of it or what was there before, and keep at most `keep` such.

    Those of the same folder and suffix that were not used for the longest time are removed.

    Raises:
        OSError: it can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        made.write_text(text, encoding="utf-8")
        os.replace(made, path)
    finally:
        made.unlink(missing_ok=True)
    prune(path.parent, path.suffix, keep)


def prune(place: Path, suffix: str, keep: int = _FILES) -> None:
    """Remove the files of a suffix that were not used for the longest time, if there are more than `keep`."""

    def age(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except FileNotFoundError:  # another process was faster
            return 0.0

    files = list(place.glob(f"*{suffix}"))
    for path in sorted(files, key=age)[: max(len(files) - keep, 0)]:
        path.unlink(missing_ok=True)
