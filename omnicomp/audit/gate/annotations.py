"""The verdict as GitHub workflow commands, which annotate the lines of a pull request."""

import os
from collections.abc import Sequence
from typing import Final

from omnicomp.audit.gate.verdict import Fallen, Verdict, levers, notes, why
from omnicomp.audit.views.rows import missing
from omnicomp.safety.escapes import github_data, github_property, relative, split_source

# GitHub shows no more of one level in a step; the last one says how many there are.
_SHOWN: Final = 10
_LONGEST: Final = 1000
_TITLE: Final = 100


def to_annotations(verdicts: Sequence[Verdict], root: str | os.PathLike[str]) -> str:
    """One command a line: an error for each place that is over the budget, a warning for one that counts within it.

    Args:
        verdicts: of one or several reports.
        root: the folder that the repository is checked out in, as an absolute path; what lies elsewhere is annotated
            without its file.
    """
    found: dict[str, list[str]] = {"error": [], "warning": [], "notice": []}
    seen: set[str] = set()
    for verdict in verdicts:
        level = "error" if verdict.over else "warning"
        for item in verdict.counted:
            command = _command(level, item, os.fspath(root))
            if command not in seen:
                seen.add(command)
                found[level].append(command)
        lacking = "error" if verdict.is_unfinished else "warning"
        told = (github_data(_cut(line)) for line in missing(verdict.audit))
        found[lacking] += [f"::{lacking} title=omnicomp::{each}" for each in told]
        for row in verdict.audit.mismatches:
            text = f"{row.id} did not run as planned: {row.difference}"
            found["warning"].append(f"::warning title=omnicomp::{github_data(_cut(text))}")
    found["warning"] += [f"::warning title=omnicomp::{github_data(_cut(note))}" for note in notes(verdicts)]
    for verdict in verdicts:
        level = "error" if verdict.failed else "notice"
        name = f"{verdict.name}: " if len(verdicts) > 1 else ""
        # Before the places, so that it is shown even if these are many.
        found[level].insert(0, f"::{level} title=omnicomp::{github_data(_cut(name + verdict.summary()))}")
    shown: list[str] = []
    for level, commands in found.items():
        more = len(commands) - _SHOWN
        shown += commands if more <= 0 else commands[: _SHOWN - 1]
        if more > 0:
            shown.append(f"::{level} title=omnicomp::and {more + 1} more; omnicomp check --format text has them all")
    return "".join(f"{line}\n" for line in shown)


def _command(level: str, item: Fallen, root: str) -> str:
    path, line = split_source(item.source)
    file = relative(path, root)
    properties = [f"file={github_property(file)}"] if file else []
    properties += [f"line={line}"] if file and line else []
    properties.append(f"title={github_property(f'{_cut(item.name, _TITLE)} runs eager')}")
    where = " ".join(
        piece for piece in ("" if file else item.source, f"in {item.module}" if item.module else "") if piece
    )
    text = f"{item.name} runs eager{f' ({where})' if where else ''}: {why(item.reasons) or 'no reason was recorded'}"
    lever = levers(item.reasons)
    return (
        f"::{level} {','.join(properties)}::{github_data(_cut(f'{text}. To change this: {lever}' if lever else text))}"
    )


def _cut(text: str, longest: int = _LONGEST) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
