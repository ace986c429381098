"""The pages: links and anchors resolve, and the files and names that they mention exist."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()
    if (ROOT / name).is_file() and not name.startswith("tests/data/")
)  # fmt: skip
NOW = [page for page in PAGES if page.name != "CHANGELOG.md"]
ROOMS = sorted(path.parent for path in (ROOT / "omnicomp").glob("*/__init__.py"))
FENCE = re.compile(r"^```.*?^```\s*?$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)*/[\w-]+\.(?:py|md|json|toml|js|css|cpp|h)")
NEW_FILE = re.compile(r"^\*\*\d+\. .*\n", re.MULTILINE)  # a step of a recipe: it names what the reader writes
FOLDERS = (
    "",
    "omnicomp",
    "docs",
    *(f"omnicomp/cli/templates/{path}" for path in ("device", "device/package", "engine")),
)
DESIGN = (ROOT / "docs" / "design.md", ROOT / "docs" / "glossary.md")
SOURCES = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "omnicomp").rglob("*.py"))
DOTTED = re.compile(r"omnicomp(?:\.\w+)+")


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.add(
            slug if slug not in found else next(f"{slug}-{n}" for n in range(1, 99) if f"{slug}-{n}" not in found)
        )
    return found


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def exists(dotted: str) -> bool:
    """Whether a name is a module, something in one, or a name that the sources spell out: of a logger, a group."""
    module, rest = ROOT, dotted.split(".")
    while rest and (module / rest[0]).is_dir():
        module /= rest.pop(0)
    if rest and (module / f"{rest[0]}.py").is_file():
        module /= f"{rest.pop(0)}.py"
    text = (module if module.is_file() else module / "__init__.py").read_text(encoding="utf-8")
    return not rest or re.search(rf"\b{rest[0]}\b", text) is not None or f'"{dotted}"' in SOURCES


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_and_anchors_resolve(page: Path) -> None:
    broken: list[str] = []
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", NOW, ids=name)
def test_files_that_are_named_exist(page: Path) -> None:
    named = {code for code in CODE.findall(NEW_FILE.sub("", prose(page))) if FILE.fullmatch(code)}
    folders = [page.parent, *(ROOT / folder for folder in FOLDERS)]
    assert not {
        file
        for file in named
        if not any((folder / (file + end)).is_file() for folder in folders for end in ("", ".in"))
    }


@pytest.mark.parametrize("page", [page for page in NOW if page.parent.name == "adr" or page in DESIGN], ids=name)
def test_modules_that_are_named_alone_exist(page: Path) -> None:
    named = set(re.findall(r"`(\w+\.py)`", prose(page)))
    assert not {file for file in named if not any((ROOT / "omnicomp").rglob(file))}


@pytest.mark.parametrize("page", [page for page in NOW if page.name != "ecosystem.md"], ids=name)  # loggers and spans
def test_python_names_exist(page: Path) -> None:
    named = {dotted for code in CODE.findall(prose(page)) for dotted in DOTTED.findall(code)}
    assert not {dotted for dotted in named if not exists(dotted)}


def test_the_way_of_a_graph_names_what_is_there() -> None:
    (screen,) = re.findall(r"## The way of a graph\n\n```\n(.*?)```", DESIGN[0].read_text(encoding="utf-8"), re.DOTALL)
    steps = re.findall(r"^ +(\S+\.py) +(\w+)", screen, re.MULTILINE)
    assert len(steps) > 10
    for file, function in steps:
        text = (ROOT / "omnicomp" / file).read_text(encoding="utf-8")
        assert re.search(rf"^(def|class) {function}\b", text, re.MULTILINE), (file, function)


def test_every_repair_of_torch_is_in_the_table() -> None:
    table = DESIGN[0].read_text(encoding="utf-8").split("### Repairs")[1]
    names = set(re.findall(r'name: ClassVar\[str\] = "(repair_\w+)"', SOURCES))
    issues = set(re.findall(r'issue="(https://\S+)"', SOURCES))
    assert len(names) > 3
    assert not {each for each in names | issues if each not in table}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 160


@pytest.mark.parametrize("room", ROOMS, ids=name)
def test_each_room_has_a_short_readme(room: Path) -> None:
    assert len((room / "README.md").read_text(encoding="utf-8").splitlines()) <= 25


@pytest.mark.parametrize("room", ROOMS, ids=name)
def test_a_room_lists_modules_that_are_there(room: Path) -> None:
    columns = re.findall(r"^\| (`[^|]+)\|", (room / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    modules = {module.rstrip("/").removesuffix(".py") for column in columns for module in CODE.findall(column)}
    assert not {each for each in modules if not (room / each).is_dir() and not (room / f"{each}.py").is_file()}


def test_the_design_names_each_module_of_the_attention_pass() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table = page[page.index("| step | modules |") :].split("\n\n")[0]
    modules = {path.stem for path in (ROOT / "omnicomp/passes/attention").glob("*.py")} - {"__init__"}
    assert set(CODE.findall(table)) == modules
