"""What nothing else runs in continuous integration: the benches and examples import what there is."""

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(path for folder in ("bench", "examples") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_is_imported_of_the_package_is_there(path: Path) -> None:
    missing: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "omnicomp":
            module = importlib.import_module(node.module)
            parts = {each.name for each in pkgutil.iter_modules(getattr(module, "__path__", []))}
            names = [each.name for each in node.names if not hasattr(module, each.name) and each.name not in parts]
            missing += [f"{node.module}.{name}" for name in names]
    assert not missing
