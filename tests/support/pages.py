"""Examples of the documentation: blocks of Python and of commands, with the place where they stand."""

import dataclasses
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / "examples" / "third_party" / "README.md"]
# An example that a reader of this machine can't run as it stands has a comment in front, with what it needs.
NOT_RUN = re.compile(r"<!-- not run: (.+) -->\n\Z")
STEP = re.compile(r"\*\*\d+\. `([^`]+)`\*\*[^\n]*(?:\n[^\n]+)*\n\n\Z")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """An example.

    Attributes:
        page: where it stands.
        line: of its first line of code.
        language: as the fence names it.
        text: what is in it.
        needs: why it is not run as it stands, or empty.
        file: the file that a step of a recipe makes of it, or empty.
    """

    page: Path
    line: int
    language: str
    text: str
    needs: str = ""
    file: str = ""

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A line of a console, and what it printed.

    Attributes:
        words: the command.
        environment: variables that are set for it.
        status: the exit status that the example shows; None if it shows none.
        output: lines that it shows.
    """

    words: tuple[str, ...]
    environment: dict[str, str]
    status: int | None
    output: tuple[str, ...]


def blocks(page: Path, *languages: str) -> list[Block]:
    """The examples of a page in some languages."""
    text = page.read_text(encoding="utf-8")
    found: list[Block] = []
    for match in FENCE.finditer(text):
        before = text[: match.start()]
        needs, step = NOT_RUN.search(before), STEP.search(before)
        if match[1] in languages:
            found.append(
                Block(
                    page=page,
                    line=before.count("\n") + 2,
                    language=match[1],
                    text=match[2],
                    needs=needs[1] if needs else "",
                    file=step[1] if step else "",
                )
            )
    return found


def commands(block: Block) -> list[Command]:
    """The commands of a console: `$ NAME=value command words; echo $?`, then what it prints."""
    found: list[Command] = []
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        line, _, printed = part.partition("\n")
        output = [text for text in printed.splitlines() if text.strip()]
        line = re.sub(r"\s+\| head -\d+$", "", re.split(r"\s{2,}# ", line)[0].strip())
        asked = line.endswith("; echo $?")
        words = shlex.split(line.removesuffix("; echo $?"))
        environment: dict[str, str] = {}
        while "=" in words[0]:
            name, _, environment[name] = words.pop(0).partition("=")
        status = int(output.pop()) if asked else None
        found.append(Command(words=tuple(words), environment=environment, status=status, output=tuple(output)))
    return found
