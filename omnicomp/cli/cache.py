"""`omnicomp cache`: files of artefacts, and the folders that they are made of."""

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from omnicomp._torch.inductor import libraries, store
from omnicomp._torch.inductor.compile_fx import cache_dir
from omnicomp.backend import artefacts
from omnicomp.errors import OmnicompError
from omnicomp.safety.escapes import one_line
from omnicomp.timeline import Artefacts

# A process that compiles holds its locks and writes files of these names.
_IN_USE: Final = ("locks", ".lock", ".tmp")
_DAY: Final = 24 * 3600


def export_file(path: Path) -> str:
    """Write a file of artefacts; returns what it holds, as text."""
    return _told(artefacts.export(path))


def import_file(path: Path) -> tuple[str, bool]:
    """Read a file of artefacts; returns what was taken, as text, and whether nothing was."""
    done = artefacts.load(path)
    return _told(done), done.reason is not None


def _told(done: Artefacts) -> str:
    if done.reason is not None:
        return f"{one_line(done.path)}: {one_line(done.reason.sentence)}; {done.reason.lever}\n"
    counts = ", ".join(f"{count} {name}" for name, count in sorted(done.counts.items())) or "nothing"
    return f"{one_line(done.path)} {done.state}: {counts} ({done.bytes} bytes)\n"


def describe(path: Path | None) -> str:
    """What a file is for, or where the cache folders of this machine are, as text."""
    if path is None:
        sizes = [(folder, [file.stat().st_size for file in _files(folder)]) for folder in _folders()]
        return "".join(f"{folder}: {len(found)} files, {sum(found) / 2**20:.1f} MiB\n" for folder, found in sizes)
    manifest, reason = artefacts.describe(path)
    lines = [f"{name}: {value}" for name, value in manifest.made_for.items()]
    lines.append(f"compiler: {manifest.compiler}")
    lines.append("signature: right" if manifest.signed and os.environ.get(artefacts.KEY) else "signature: not checked")
    kinds = Counter(kind for kind, _, _ in manifest.entries)
    lines += [f"{kind}: {count}" for kind, count in sorted(kinds.items())]
    lines.append("here: it can be loaded" if reason is None else f"here: {reason.sentence}")
    return "".join(f"{one_line(line)}\n" for line in lines)


def list_entries(path: Path | None) -> str:
    """Kind, size and name of each entry of a file or of the cache folders, as text."""
    if path is not None:
        entries = list(artefacts.describe(path)[0].entries)
    else:
        folder = store.folder()
        entries = [("library", name, file.stat().st_size) for name, file in sorted(libraries.kept().items())]
        for file in artefacts.own_files():
            entries.append(("omnicomp", file.relative_to(folder).as_posix(), file.stat().st_size))
        for cache in ("fxgraph", "aotautograd"):
            for file in _files(Path(cache_dir()) / cache):
                entries.append((cache, file.parent.name, file.stat().st_size))
    return "".join(f"{one_line(kind):12} {size:>12} {one_line(name)}\n" for kind, name, size in entries)


def prune(days: float | None, most: int | None) -> str:
    """Remove what was not used for some days, and then for the longest time until some bytes are left.

    Raises:
        OmnicompError: neither was told.
    """
    if days is None and most is None:
        raise OmnicompError("prune needs --days or --max-bytes; see omnicomp cache prune --help")
    now = time.time()
    found: list[tuple[float, int, Path]] = []
    for folder in _folders():
        for file in _files(folder):
            state = file.stat()
            found.append((max(state.st_mtime, state.st_atime), state.st_size, file))
    left = sum(size for _, size, _ in found)
    removed = 0
    for used, size, file in sorted(found):
        if (days is None or now - used < days * _DAY) and (most is None or left <= most):
            continue
        file.unlink(missing_ok=True)
        left -= size
        removed += 1
    return f"{removed} files removed, {len(found) - removed} left, {left / 2**20:.1f} MiB\n"


def _folders() -> list[Path]:
    own, torchs = store.folder(), Path(cache_dir())
    return [torchs] if own.is_relative_to(torchs) else [torchs, own]


def _files(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not file.is_symlink():
            if not any(part.endswith(_IN_USE) for part in file.relative_to(folder).parts):
                yield file
