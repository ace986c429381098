"""Every name and every test in docs/contracts.md is there."""

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from omnicomp.cli import app

ROOT = Path(__file__).parents[2]
NAMES = re.compile(r"`([^`]+)`")


def rows() -> Iterator[list[str]]:
    for line in (ROOT / "docs" / "contracts.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("|") and not line.startswith(("|---", "| interface")):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == 4, line
            yield cells


def resolve(name: str) -> Any:
    """What a dotted name stands for: a module, and attributes behind it."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, parts[length:], found)
    raise AssertionError(name)


@functools.cache
def functions_of(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("column", ["interface", "here", "test"])
def test_what_is_named_is_there(column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Torch's test framework freezes the flags of backends when it is imported.
    monkeypatch.setattr(torch.backends, "disable_global_flags", lambda: None)
    cells = [row[("interface", "here", "test").index(column)] for row in rows()]
    assert len(cells) > 70
    commands = {command.name for command in app.registered_commands} | {g.name for g in app.registered_groups}
    for cell in cells:
        names = NAMES.findall(cell)
        assert names or column == "interface", cell
        for name in names:
            if column == "test":
                path, _, function = name.partition("::")
                assert function in functions_of(path), name
            elif name.startswith("torch.") and re.fullmatch(r"[\w.]+", name):
                resolve(name)
            elif column == "here":
                if name.startswith("omnicomp "):
                    assert name.split()[1] in commands, name
                elif "/" in name:
                    assert (ROOT / name).exists(), name
                else:
                    assert name.startswith("omnicomp"), name
                    resolve(name)
