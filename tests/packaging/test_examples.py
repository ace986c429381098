"""The examples of the documentation run as they stand there.

Blocks of Python of one page run in order in one process, whose reader has a `model` and inputs `x`. Commands run in a
folder that has the files which they name. What can't be run here has a comment in front, `<!-- not run: reason -->`.
In the fast tier everything is placed on eager; in the slow one it is compiled as it is written.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pages import PAGES, ROOT, Block, Command, blocks, commands
from processes import python

EAGER = {"OMNICOMP_PLACE": "*:eager"}
TIERS = [pytest.param(EAGER, id="eager"), pytest.param({}, id="as written", marks=[pytest.mark.slow])]
# Held elsewhere: by the test that puts recipes into a checkout, and the one that compares a tutorial with its module.
RECIPES = ("omnicomp/", "tests/", "docs/")
TUTORIAL = ROOT / "docs" / "new-engine.md"
# Their tests build a driver first, or ask for the libraries.
ELSEWHERE = (ROOT / "docs" / "sim.md", ROOT / "docs" / "recipes.md")
PYTHON = [page for page in PAGES if blocks(page, "python", "py") and page not in ELSEWHERE]
CONSOLE = [page for page in PAGES if blocks(page, "console") and page != ROOT / "docs" / "recipes.md"]
MOST_NOT_RUN = 20

RUNNER = """
import json, sys
import torch
import omnicomp
from omnicomp.backend.options import policy_of

real, asked = torch.compile, []

def recording(*args, **options):
    if options.get("backend") == "omni":
        asked.append((options.get("mode"), options.get("options")))
    return real(*args, **options)

torch.compile = recording
space = {"torch": torch, "omnicomp": omnicomp, "__name__": "__main__"}
space["model"] = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval()
space["x"] = torch.randn(4, 8)
for place, text in json.load(open(sys.argv[1])):
    exec(compile(text, place, "exec"), space)
for mode, options in asked:
    policy_of(mode, options)
"""
TRAIN = """
import sys
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x

compiled = torch.compile(Model(), backend="omni")
for _ in range(int(sys.argv[-1]) if sys.argv[1:] else 1):
    loss = compiled(torch.ones(4, 8)).mean()
print(f"loss {loss.item():.4f}")
"""
ROUTER = """
import torch

def test_router():
    route = torch.compile(lambda x: x.topk(2).values, backend="omni", options={"lowerings": {"aten.topk": "eager"}})
    route(torch.randn(4, 8))
"""
TESTED = """
import torch
model, x = torch.nn.Linear(8, 8).eval(), torch.randn(4, 8)
"""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run_here(block: Block) -> bool:
    recipe = block.file.startswith(RECIPES)
    tutorial = block.page == TUTORIAL and block.language == "python"
    return not (block.needs or recipe or tutorial)


def is_test(block: Block) -> bool:
    return "def test_" in block.text and not block.file


TESTS = [each for page in PYTHON for each in blocks(page, "python") if run_here(each) and is_test(each)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a program, its timelines and its reports, by the names that the pages use."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "train.py").write_text(TRAIN)
    (folder / "test_router.py").write_text(ROUTER)
    (folder / "runs").mkdir()
    done = python("train.py", folder=folder, environment={**EAGER, "OMNICOMP_TIMELINE": "run.jsonl"})
    assert done.returncode == 0, done.stderr
    for copy in ("monday", "today", "before", "after", "runs/4711"):
        shutil.copy(folder / "run.jsonl", folder / f"{copy}.jsonl")
    python("-m", "omnicomp", "audit", "run.jsonl", "-o", "report.json", folder=folder, check=True)
    for copy in ("monday", "today"):
        shutil.copy(folder / "report.json", folder / f"{copy}.json")
    return folder


@pytest.fixture
def folder(recorded: Path, tmp_path: Path) -> Path:
    """A copy of it for a page."""
    made = shutil.copytree(recorded, tmp_path / "reader")
    (made / "examples").mkdir()
    (made / "examples" / "audit").symlink_to(ROOT / "examples" / "audit")
    return made


@pytest.mark.parametrize("placed", TIERS)
@pytest.mark.parametrize("page", PYTHON, ids=name)
def test_python_runs(page: Path, placed: dict[str, str], folder: Path) -> None:
    found = [block for block in blocks(page, "python", "py") if run_here(block)]
    plain = [(block.place, block.text) for block in found if not is_test(block) and not block.file]
    (folder / "blocks.json").write_text(json.dumps(plain))
    done = python("-c", RUNNER, "blocks.json", folder=folder, environment=placed)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("block", TESTS, ids=lambda block: block.place)
def test_a_test_passes(block: Block, tmp_path: Path) -> None:
    (tmp_path / "test_example.py").write_text(TESTED + block.text)
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_example.py", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_recipe_of_a_device_works(tmp_path: Path) -> None:
    """Its files with its entry point, as pip would have installed them."""
    page = ROOT / "docs" / "adding.md"
    for block in blocks(page, "python", "toml"):
        if "acme" in block.text and block.file and "AcmeEngine" not in block.text:
            path = tmp_path / block.file
            path.parent.mkdir(exist_ok=True)
            path.write_text(block.text)
    (entry,) = re.findall(r"^acme = .*$", (tmp_path / "pyproject.toml").read_text(), re.MULTILINE)
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[omnicomp.devices]\n{entry}\n".replace('"', ""))
    done = python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_device.py",
        folder=tmp_path, environment={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )  # fmt: skip
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def cases() -> list[Any]:
    """Each page that has commands, in both tiers; in the slow one alone if it installs something.

    Each command has tests of its own in the fast tier (`tests/cli`), and so has the walk-through of audit.md.
    """
    found: list[Any] = []
    for page in CONSOLE:
        words = [command.words[0] for block in blocks(page, "console") for command in commands(block)]
        if "pip" not in words and page.name not in ("audit.md", "cli.md"):
            found.append(pytest.param(page, EAGER, id=f"{name(page)}-eager"))
        found.append(pytest.param(page, {}, id=f"{name(page)}-as written", marks=pytest.mark.slow))
    return found


@pytest.mark.parametrize(("page", "placed"), cases())
def test_commands_run(page: Path, placed: dict[str, str], folder: Path) -> None:
    for block in blocks(page, "console"):
        for written in re.findall(r"--timeline (\S+)", block.text):
            (folder / written).unlink(missing_ok=True)  # a timeline that is there is appended to
        for command in commands(block) if run_here(block) else ():
            done = execute(command, placed, folder)
            if done is None:
                continue
            told = f"{block.place}: {' '.join(command.words)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
            assert "Traceback" not in done.stderr, told
            assert done.returncode in ((0, 1) if command.status is None else (command.status,)), told
            if not placed and "examples/audit/" in block.text:
                missing = not_printed(command.output, done.stdout + done.stderr)
                assert not missing, f"{told}\nnot printed: {missing}"


def execute(command: Command, placed: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str] | None:
    """Run a command; of make and of benches, which take hours, look whether the target and the flags are there."""
    first, *words = command.words
    site = folder / "site"
    environment = {**placed, "COLUMNS": "120", "OMNICOMP_CACHE_DIR": str(folder / "cache"), **command.environment}
    environment["PYTHONPATH"] = f"{site}{os.pathsep}{ROOT}"
    if first == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
        return None
    if first == "python" and words[0].startswith("bench/"):
        text = (ROOT / words[0]).read_text() + (ROOT / "bench" / "harness.py").read_text()
        assert not [word for word in words if word.startswith("--") and f'"{word}"' not in text], words
        return None
    if first == "pip":
        if words[-1] == ".":
            return None  # it is what is tested
        assert words[0] == "install"
        source = shutil.copytree(here(folder, words[-1]), folder / "source")
        words = ["install", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site), str(source)]
    if first == "tlparse":
        program = shutil.which(first, path=str(Path(sys.executable).parent))
        if program is None:
            return None
        found = [str(path) for word in words for path in (folder.glob(word) if "*" in word else [word])]
        return subprocess.run([program, *found], cwd=folder, capture_output=True, text=True, check=False)
    if first == "pytest":
        words = [str(here(folder, word)) for word in words]
    if first in ("omnicomp", "pytest", "pip"):
        first, words = "python", ["-m", first, *words]
    assert first == "python", f"how is {first} run? mark it with <!-- not run: reason -->"
    # What was installed is found by a process that was started since; pip refuses imports in a process that has torch.
    alone = site.exists() or "pytest" in words or "pip" in words
    return python(*words, folder=folder, environment=environment, fresh=alone)


def here(folder: Path, path: str) -> Path:
    """A path in the reader's folder, or in the checkout."""
    return folder / path if (folder / path).exists() else ROOT / path


def not_printed(shown: tuple[str, ...], printed: str) -> list[str]:
    """The lines of an example that were not printed, numbers and what an ellipsis stands for left out."""

    def plain(text: str) -> str:
        numbers = re.sub(r"\d[\d.,]*", "#", " ".join(text.split()))
        return re.sub(r" in # m?s\b", "", numbers)  # not there where a cache had it

    there = plain(printed)
    pieces = [(line, [plain(piece) for piece in line.split("…")]) for line in shown]
    return [line for line, parts in pieces if not all(part in there for part in parts)]


def test_few_examples_are_not_run() -> None:
    marked = [block for page in PAGES for block in blocks(page, "python", "py", "console", "bash") if block.needs]
    assert len(marked) <= MOST_NOT_RUN, [block.place for block in marked]
