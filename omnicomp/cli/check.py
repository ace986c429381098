"""`omnicomp check`: whether what fell back is within a budget, as an exit status and in the forms that CI reads."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from omnicomp.audit import Audit
from omnicomp.audit.fleet import timelines
from omnicomp.audit.gate import judge
from omnicomp.audit.gate.annotations import to_annotations
from omnicomp.audit.gate.junit import to_junit
from omnicomp.audit.gate.markdown import to_markdown
from omnicomp.audit.gate.verdict import Verdict, to_json, to_text
from omnicomp.audit.source import load as load_report
from omnicomp.audit.views.layout import fitted
from omnicomp.cli.output import emit, keep_inputs, pick
from omnicomp.errors import TimelineError, wrong_value
from omnicomp.options.acknowledged import load
from omnicomp.options.fallback_limits import FallbackBudget, parse_share

UNFINISHED: Final = 3
"""The exit status for a report that is within the budget, and of which something has no end, or that has no graph."""

FORMATS: Final[dict[str, Callable[[Sequence[Verdict]], str]]] = {
    "text": to_text,
    "markdown": to_markdown,
    "github": lambda verdicts: to_annotations(verdicts, os.environ.get("GITHUB_WORKSPACE") or Path.cwd()),
    "junit": to_junit,
    "json": to_json,
}
_SUFFIXES: Final = {".txt": "text", ".json": "json", ".md": "markdown", ".xml": "junit"}


def reports(path: Path) -> list[tuple[str, Audit]]:
    """The reports of a file, or of every timeline in a folder, with their names.

    Raises:
        OmnicompError: one of them can't be read, or the folder has none.
    """
    files = timelines(path) if path.is_dir() else [path]
    found = [(str(file), load_report(file)) for file in files]
    if not found:
        raise TimelineError(f"{path} has no timelines (*.jsonl); write some with OMNICOMP_TIMELINE='{path}/%p.jsonl'")
    for name, audit in found:
        if audit.left_out:
            raise TimelineError(f"{name} has {audit.left_out} graphs more than are judged; give one timeline a process")
    return found


def run_check(
    report: Path,
    *,
    baseline: Path | None = None,
    max_nodes: int | None = None,
    max_flops_share: float | None = None,
    allow: Sequence[str] = (),
    allow_unfinished: bool = False,
    format: str | None = None,
    output: Path | None = None,
) -> int:
    """Judge a report, and print or write the verdict.

    Returns:
        0 if every report is within the budget, 1 if one is over it, and 3 if none is, but something has no end, or
        nothing was compiled.

    Raises:
        OmnicompError: a file can't be read or written, or a value is wrong.
    """
    keep_inputs(output, report, baseline)
    name = pick(FORMATS, format, output, _SUFFIXES)
    if max_nodes is not None and max_nodes < 0:
        raise wrong_value("--max-nodes", max_nodes, "a number of operators", example=0)
    share = parse_share("--max-flops-share", max_flops_share)
    if max_nodes is None and share is None:
        max_nodes = 0
    budget = FallbackBudget(max_nodes=max_nodes, max_flops_share=share, allow=tuple(allow))
    acknowledged = load()
    before = None if baseline is None else [audit for _, audit in reports(baseline)]
    verdicts = [
        judge(
            audit,
            budget,
            acknowledged=acknowledged,
            baseline=before,
            name=file,
            allow_unfinished=allow_unfinished,
        )
        for file, audit in reports(report)
    ]
    idle = not (allow_unfinished or any(verdict.audit.graphs for verdict in verdicts))
    if idle:
        print("omnicomp: nothing was compiled with omni; --allow-unfinished lets that pass", file=sys.stderr)
    unfinished = UNFINISHED if idle or any(verdict.is_unfinished for verdict in verdicts) else 0
    status = 1 if any(verdict.over for verdict in verdicts) else unfinished
    text = FORMATS[name](verdicts)
    return emit(fitted(text) if name == "text" and output is None else text, output, status=status)
