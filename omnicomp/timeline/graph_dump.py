"""The printable compiler: the graph after each stage of a compilation, as readable code.

There are three ways to have it: `TORCH_LOGS="omnicomp_graphs"` logs it; `TORCH_TRACE=DIR` has it as artefacts
`omnicomp_graph_*`, which tlparse shows; and `omnicomp run --dump DIR` writes a file for each stage, with the difference
from the stage before. The stages are the Dynamo graph, each pass that changed it, the graphs that autograd made of it,
their placement, and each piece that a lowering was given. If nobody asks, `dump` returns at once.
"""

import difflib
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from torch.fx import GraphModule

from omnicomp._torch import structured
from omnicomp._torch.inductor.store import write_whole
from omnicomp._torch.structured import register
from omnicomp.errors import harmless
from omnicomp.safety.forks import new_lock
from omnicomp.safety.privacy import cleaner, logger
from omnicomp.timeline.recorder import rank

NAME: Final = "omnicomp_graphs"
log = logger(NAME)
register(NAME)

_lock = new_lock()
_folder: Path | None = None
_counts: Final[dict[str, int]] = {}
_last: Final[dict[tuple[str, str], tuple[str, str]]] = {}
"""The last stage of each part of each graph, and its text; only while there is a folder to write to."""


def write_to(folder: Path | None) -> None:
    """Write a file for each stage below a folder from now on; None: no more."""
    global _folder
    with _lock:
        _folder = folder
        _counts.clear()
        _last.clear()


def dump(graph: str, stage: str, module: GraphModule, part: str = "") -> None:
    """Print a graph, if somebody asked for it."""
    if _wanted():
        _write(graph, stage, part, lambda: _readable(module))


def dump_placement(graph: str, module: GraphModule, runs: Sequence[tuple[str, Sequence[str]]], part: str) -> None:
    """Print a part of a graph with the lowering of each run of its nodes, if somebody asked for it."""
    if _wanted():
        lines = [f"# {number}: {lowering}: {', '.join(nodes)}\n" for number, (lowering, nodes) in enumerate(runs)]
        _write(graph, "placement", part, lambda: "".join(lines) + _readable(module))


def _wanted() -> bool:
    # A level that the logger inherits asks for omnicomp's lines, and not for graphs.
    logged = log.level != logging.NOTSET and log.isEnabledFor(logging.INFO)
    return logged or _folder is not None or structured.tracing()


def _readable(module: GraphModule) -> str:
    return module.print_readable(print_output=False, include_stride=True, include_device=True)


def _write(graph: str, stage: str, part: str, text: Callable[[], str]) -> None:
    with harmless("a graph as readable code"):
        code = cleaner().text(text()).rstrip() + "\n"
        title = "_".join(filter(None, (stage, part)))
        if log.level != logging.NOTSET:
            log.info("%s after %s\n%s", graph, title, code)
        with _lock:
            number = _counts[graph] = _counts.get(graph, -1) + 1
            name = re.sub(r"[^\w.-]", "-", f"{number:02}_{title}")
            if _folder is not None:
                own = re.sub(r"[^\w.-]", "-", f"{graph}-rank{rank()}" if rank() else graph)
                _write_files(_folder / own, name, code, (graph, part))
        if structured.tracing():
            structured.artifact(f"omnicomp_graph_{graph}_{name}", "string", code, structured.here())


def _write_files(folder: Path, name: str, code: str, place: tuple[str, str]) -> None:
    write_whole(folder / f"{name}.py", code, files=None)
    before, text = _last.get(place, ("", ""))
    _last[place] = (name, code)
    if before:
        lines = difflib.unified_diff(text.splitlines(True), code.splitlines(True), f"{before}.py", f"{name}.py")
        write_whole(folder / f"{name}.diff", "".join(lines), files=None)
