"""`omnicomp bisect`: what is known to fail here, and whether a script that shows a failure still fails, and at what."""

import runpy
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node

from omnicomp._torch.fx import copy_module
from omnicomp.analysis.nodes import op_name
from omnicomp.builder.find_failing import Prober, Verdict, find_failing
from omnicomp.builder.known_failures import Entry, entries, forget
from omnicomp.builder.partition import extract, gather_getitems
from omnicomp.builder.repro import write_script
from omnicomp.errors import OmnicompError, first_line
from omnicomp.store import folder

__all__ = ["forget_known", "list_known", "run_script"]

_NAMES: Final = ("Repro", "inputs", "trace", "build", "main")
# A person waits for it, and wants it to the end.
_BUILDS: Final = 500


def list_known() -> str:
    """Every verdict that is kept, as text."""
    found = entries()
    if not found:
        return f"Nothing is known to fail: no verdict in {folder()}.\n"
    lines = [f"Known to fail, in {folder()}:"]
    for path, entry in found:
        lines += _lines(path, entry)
    lines.append("omnicomp bisect SCRIPT repeats one; omnicomp bisect --forget [SCRIPT] forgets them, or that one.")
    return "\n".join(lines) + "\n"


def _lines(path: Path, entry: Entry | str) -> list[str]:
    if isinstance(entry, str):
        return [f"  {path} can't be read: {entry}"]
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.time))
    lines = [f"  {entry.graph}, found {when}"]
    lines += [f"    {reason.node or name}: {reason.sentence}" for name, reason in entry.cut.items()]
    if entry.boundaries:
        lines.append(f"    built in parts only, cut before {', '.join(sorted(entry.boundaries))}")
    if entry.untuned is not None:
        lines.append(f"    built without autotuning: {entry.untuned.sentence}")
    if entry.seconds is not None:
        lines.append(f"    found with {entry.seconds:g} s to build; it is tried again with a larger build_seconds")
    if entry.builds is not None:
        lines.append(f"    not narrowed down with {entry.builds} builds; raise max_builds for less")
    return lines + [f"    {script}" for script in entry.scripts]


def forget_known(script: Path | None = None) -> str:
    """Forget all verdicts, or those that a script shows; returns what was done, as text."""
    count = forget() if script is None else forget(lambda entry: str(script.resolve()) in map(_resolved, entry.scripts))
    return f"Forgot {count} {'verdict' if count == 1 else 'verdicts'} of {folder()}.\n"


def _resolved(path: str) -> str:
    return str(Path(path).resolve())


def run_script(path: Path, say: Callable[[str], None]) -> int:
    """Run a script that omnicomp wrote, and look for the nodes that fail in it.

    Args:
        path: the script.
        say: takes each line of the answer.

    Returns:
        1 if it fails, 0 if it does not.

    Raises:
        OmnicompError: it is no such script.
    """
    if not path.is_file():
        raise OmnicompError(f"{path} is no file; omnicomp bisect lists the scripts that there are")
    try:
        script = runpy.run_path(str(path), run_name="omnicomp_repro")
    except Exception as error:
        raise OmnicompError(f"{path} can't be run: {first_line(error)}") from error
    missing = [name for name in _NAMES if name not in script]
    if missing:
        raise OmnicompError(f"{path} is no script of omnicomp's: it has no {missing[0]}")
    if script.get("VALUES"):
        return int(script["main"]())
    graph, fakes = script["trace"](script["inputs"]())
    gather_getitems(graph)
    error = _failure(script, copy_module(graph), fakes)
    if error is None:
        say(f"It works: torch {torch.__version__} builds it. omnicomp bisect --forget {path} lets it be tried again.")
        return 0
    say(f"It still fails with torch {torch.__version__}: {first_line(error)}")
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    _narrow(script, graph, nodes, error, say)
    return 1


def _narrow(
    script: dict[str, Any], graph: GraphModule, nodes: Sequence[Node], error: Exception, say: Callable[[str], None]
) -> None:
    def build(part: Sequence[Node]) -> Exception | None:
        piece = extract(graph, part)
        return _failure(script, piece.module, piece.fake_inputs)

    verdict: Verdict = find_failing(nodes, error, Prober(build, _BUILDS))
    for name in verdict.cut:
        node = next(node for node in nodes if node.name == name)
        say(f"  {name} ({op_name(node)}) fails by itself: {first_line(verdict.error)}")
    for name in sorted(verdict.boundaries):
        say(f"  it builds in two parts, cut before {name}, and not together: {first_line(verdict.error)}")
    if not verdict.smallest or len(verdict.smallest) == len(nodes):
        say(f"  nothing smaller than its {len(nodes)} operators was seen to fail")
        return
    piece = extract(graph, verdict.smallest)
    said = first_line(verdict.error)
    smaller = write_script(piece.module, piece.fake_inputs, said, backward=bool(script.get("IS_BACKWARD")))
    say(f"  {len(verdict.smallest)} of {len(nodes)} operators fail{f': {smaller}' if smaller else ''}")


def _failure(script: dict[str, Any], module: GraphModule, fakes: Sequence[Any]) -> Exception | None:
    try:
        script["build"](module, fakes)
    except Exception as error:  # noqa: BLE001 - it is what the caller asks for
        return error
    return None
