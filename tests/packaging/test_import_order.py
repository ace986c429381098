"""Imports go one way, down the order of rooms, imports inside functions included; and there is no circle."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "omnicomp"
# From the top down: a room imports from rooms below it; rooms of one line don't know each other.
ORDER = (
    ("cli",),
    ("testing",),
    ("backend",),
    ("builder",),
    ("runtime",),
    ("audit", "passes", "lowerings"),
    ("options",),
    ("weights", "devices"),
    ("timeline", "analysis"),
    ("_torch",),
    ("errors",),
    ("records",),
    ("safety",),
)
LEVEL = {room: level for level, rooms in enumerate(reversed(ORDER)) for room in rooms}


def _modules(package: Path) -> dict[str, Path]:
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _imports(name: str, path: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of the package that a module imports, at its top or inside a function, but not for types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
    return {target for target in found & set(modules) if target != name and not name.startswith(f"{target}.")}


def _graph(package: Path) -> dict[str, set[str]]:
    modules = _modules(package)
    return {name: _imports(name, path, modules) for name, path in modules.items()}


def _room(module: str) -> str:
    return [*module.split("."), ""][1]


def _upward(graph: dict[str, set[str]]) -> list[str]:
    """Imports between rooms that don't go down the order."""
    return sorted(
        f"{name} -> {target}"
        for name, targets in graph.items()
        for target in targets
        if _room(name) in LEVEL and _room(target) != _room(name)
        if _room(target) not in LEVEL or LEVEL[_room(target)] >= LEVEL[_room(name)]
    )


def _circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Strongly connected components of more than one module (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in graph[name]:
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            component = set()
            while name not in component:
                component.add(stack.pop())
            if len(component) > 1:
                found.append(component)

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        for name in graph:
            if name not in index:
                visit(name)
    finally:
        sys.setrecursionlimit(limit)
    return found


def test_every_room_has_its_place_in_the_order() -> None:
    names = {p.stem for p in PACKAGE.iterdir() if p.name[0] != "." and p.suffix in ("", ".py") and "__" not in p.name}
    assert names == set(LEVEL)


def test_imports_between_rooms_go_down() -> None:
    assert _upward(_graph(PACKAGE)) == []


def test_no_circle() -> None:
    assert _circles(_graph(PACKAGE)) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("passes/base.py", "def planted():\n    import omnicomp.audit.model\n"),
        ("options/policy.py", "def planted():\n    from omnicomp.backend import pipeline\n"),
        ("lowerings/base.py", "from omnicomp.passes import base\n"),
    ],
)
def test_an_import_against_the_order_is_found(tmp_path: Path, file: str, line: str) -> None:
    for name, text in {"passes/base.py": "", "audit/model.py": "", "options/policy.py": "", "lowerings/base.py": "",
                       "backend/pipeline.py": "from omnicomp.options import policy\n"}.items():  # fmt: skip
        path = tmp_path / "omnicomp" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text + (line if name == file else ""))
    graph = _graph(tmp_path / "omnicomp")
    assert len(_upward(graph)) == 1
    assert bool(_circles(graph)) == ("pipeline" in line)
