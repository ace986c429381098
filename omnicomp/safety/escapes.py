"""Escapes for terminals, Markdown, GitHub, HTML and XML: names and messages are shown and never obeyed."""

import html
import json
import re
from typing import Final

_MARKUP: Final = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;", **{char: f"\\{char}" for char in "\\`*_[]~!$"}}
)
# GitHub looks for mentions, issues and links in the text that is left once the entities are gone: an empty character
# keeps it from seeing one. The same for links.
_ACTIVE: Final = re.compile(r"[@#](?=\w)|(?<=\w)(?=://)|(?<=\bwww)(?=\.)|\bGH(?=-\d)", re.IGNORECASE)
_NOTHING: Final = "&#8203;"


def printable(text: object) -> str:
    """Text in which control characters, and those that turn its direction, are replaced; line ends stay."""
    found = str(text)
    if found.isprintable():
        return found
    return "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in found)


def one_line(text: object) -> str:
    """The same with blanks for line ends."""
    return " ".join(printable(text).split("\n"))


def shown(value: object) -> str:
    """A value as text, also one that can't say what it is."""
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 - the class is anyone's, and may raise anything
        return f"<{type(value).__name__}, which can't be shown: {type(error).__name__}>"


def json_text(data: object, *, indent: int | None = 2) -> str:
    """JSON in which a terminal finds nothing that it would obey; it means the same."""
    text = json.dumps(data, indent=indent, ensure_ascii=False)
    if text.isascii() and "\x7f" not in text:
        return text
    return "".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text)


def markdown(text: object) -> str:
    """Text on one line in which nothing is Markdown, HTML, a mention, a reference or a link."""
    flat = " ".join(one_line(text).split())
    pieces: list[str] = []
    end = 0
    for found in _ACTIVE.finditer(flat):
        pieces += (flat[end : found.end()].translate(_MARKUP), _NOTHING)
        end = found.end()
    return "".join((*pieces, flat[end:].translate(_MARKUP)))


def code(text: object) -> str:
    """The same as inline code; an empty text stays empty."""
    shown = markdown(text)
    return f"<code>{shown}</code>" if shown else ""


def github_data(text: object) -> str:
    """The message of a workflow command: line ends are escaped, so that no second command can begin in it."""
    return printable(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def github_property(text: object) -> str:
    """A property of a workflow command, on one line."""
    return github_data(one_line(text)).replace(":", "%3A").replace(",", "%2C")


def html_text(value: object) -> str:
    """Text in an element or an attribute of HTML."""
    return html.escape(printable(value), quote=True)


def xml(text: object) -> str:
    """Text of which every character may be in XML 1.0; the writer escapes markup."""
    return printable(text)


def split_source(source: str) -> tuple[str, int]:
    """Path and line of `model.py:12`; line 0 if there is none."""
    path, _, line = source.rpartition(":")
    return (path, int(line)) if path and line.isascii() and line.isdigit() and len(line) < 10 else (source, 0)


def relative(path: str, root: str) -> str:
    """A path below a folder, as that folder sees it; empty if it is elsewhere. Nothing is looked up on the disk."""
    path, root = path.replace("\\", "/"), root.replace("\\", "/").rstrip("/")
    absolute = path.startswith("/") or re.match(r"[A-Za-z]:/", path) is not None
    if absolute:
        if not path.startswith(f"{root}/"):
            return ""
        path = path[len(root) + 1 :]
    pieces = [piece for piece in path.split("/") if piece not in ("", ".")]
    return "" if ".." in pieces or path.startswith("<") else "/".join(pieces)
