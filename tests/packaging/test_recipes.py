"""The recipes of docs/adding.md, put into a copy of the checkout as they stand there: their own tests pass."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEP = re.compile(r"\*\*\d\. `([^`]+)`\*\*[^\n]*(?:\n[^`\n][^\n]*)*\n\n```\w+\n(.*?)```", re.DOTALL)
# Where an excerpt goes, by the line that it stands before.
BEFORE = {
    "omnicomp/passes/__init__.py": "    AttentionFusion(),\n",
    "omnicomp/audit/views/__init__.py": "}\n",
    "omnicomp/timeline/events.py": "\nEVENT_TYPES: Final",
    "docs/timeline.md": "\n### `cache`:",
    "tests/timeline/test_events.py": "    Stage(graph=",
}
IMPORTS = {
    "omnicomp/passes/__init__.py": "from omnicomp.passes.square import Square\n",
    "omnicomp/audit/views/__init__.py": "from omnicomp.audit.views.builds import to_builds\n",
    "tests/timeline/test_events.py": "from omnicomp.timeline import Eviction\n",
}


@pytest.mark.slow
@pytest.mark.inductor
def test_the_recipes_work_as_they_stand(tmp_path: Path) -> None:
    for part in ("omnicomp", "tests", "docs", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, tmp_path / part)
    steps = [
        (path, text)
        for path, text in STEP.findall((ROOT / "docs" / "adding.md").read_text(encoding="utf-8"))
        if path in BEFORE or (path.startswith(("omnicomp/", "tests/")) and "acme" not in text)
    ]
    assert len(steps) == 12
    for path, text in steps:
        put(tmp_path / path, text, before=BEFORE.get(path, ""), imports=IMPORTS.get(path, ""))
    events = tmp_path / "omnicomp" / "timeline" / "events.py"
    events.write_text(events.read_text().replace('    "Event",\n', '    "Event",\n    "Eviction",\n', 1))

    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    tests = [each for each, _ in steps if each.startswith("tests/")]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr


def put(target: Path, text: str, *, before: str = "", imports: str = "") -> None:
    """Write or extend a file; an excerpt goes before a line of it, with what it has to import."""
    old = target.read_text(encoding="utf-8") if target.exists() else ""
    head, anchor, tail = old.partition(before) if before else (old, "", "")
    assert anchor == before, target
    new = f"{head}{text}{anchor}{tail}"
    first = re.search(r"^from ", new, re.MULTILINE) if imports else None
    at = first.start() if first is not None else 0
    target.write_text(new[:at] + imports + new[at:], encoding="utf-8")
