"""`omnicomp bisect`: what is known to fail here, and whether a script that shows a failure still fails, and at what."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node

from omnicomp._torch.fx import copy_module
from omnicomp._torch.inductor.own_context import values_of
from omnicomp._torch.inductor.repro_script import load_script, without_cache
from omnicomp._torch.inductor.store import folder
from omnicomp.analysis.accuracy import copy_of
from omnicomp.analysis.layouts import layout_of, restride
from omnicomp.analysis.nodes import op_name
from omnicomp.builder.find_failing import Prober, Verdict, find_failing
from omnicomp.builder.known_failures import Entry, entries, forget
from omnicomp.builder.on_failure import write_script
from omnicomp.builder.partition import extract, gather_getitems
from omnicomp.devices import primary_device
from omnicomp.errors import LoweringError, OmnicompError, first_line
from omnicomp.lowerings import GraphRecord, LoweringContext
from omnicomp.lowerings.inductor import InductorLowering
from omnicomp.options.policy import Policy
from omnicomp.runtime.verify import Verifier
from omnicomp.safety.escapes import one_line
from omnicomp.safety.privacy import cleaner
from omnicomp.timeline import Timeline

# A person waits for it, and wants it to the end.
_BUILDS: Final = 500


def list_known() -> str:
    """Every stored failure, as text."""
    found = entries()
    if not found:
        return f"Nothing is known to fail: no verdict in {folder()}.\n"
    lines = [f"Known to fail, in {folder()}:"]
    for path, entry in found:
        lines += [one_line(cleaner().secrets(line)) for line in _lines(path, entry)]
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
    if entry.builds is not None:
        lines.append(f"    not narrowed down with {entry.builds} builds; raise max_builds for less")
    return lines + [f"    {script}" for script in entry.scripts]


def forget_known(script: Path | None = None) -> str:
    """Forget all verdicts, or those that a script shows; returns what was done, as text."""
    count = forget() if script is None else forget(lambda entry: str(script.resolve()) in map(_resolved, entry.scripts))
    return f"Forgot {count} {'verdict' if count == 1 else 'verdicts'} of {folder()}.\n"


def _resolved(path: str) -> str:
    return str(Path(path).resolve())


def run_script(path: Path, say: Callable[[str], object]) -> int:
    """Compile the graph of a script with Inductor, compare it with eager, and look for the nodes that fail.

    Returns:
        1 if it fails, 0 if it does not.

    Raises:
        OmnicompError: it is no such script.
    """
    if not path.is_file():
        raise OmnicompError(f"{path} is no file; omnicomp bisect lists the scripts that there are")
    try:
        graph, values = load_script(path)
    except LookupError as error:
        raise OmnicompError(f"{path} is no script of omnicomp's: {error}") from error
    except Exception as error:
        raise OmnicompError(f"{path} can't be run: {first_line(error)}") from error
    gather_getitems(graph)
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    error = _failure(graph, values, nodes)
    if error is None:
        say(f"It works with torch {torch.__version__}. omnicomp bisect --forget {path} lets it be tried again.")
        return 0
    say(f"It still fails with torch {torch.__version__}: {first_line(error)}")
    _narrow(graph, values, nodes, error, say)
    return 1


def _narrow(
    graph: GraphModule, values: Sequence[Any], nodes: Sequence[Node], error: Exception, say: Callable[[str], object]
) -> None:
    prober = Prober(lambda part: _failure(graph, values, part), _BUILDS)
    verdict: Verdict = find_failing(nodes, error, prober)
    for name in verdict.cut:
        node = next(node for node in nodes if node.name == name)
        say(f"  {name} ({op_name(node)}) fails by itself: {first_line(verdict.error)}")
    for name in sorted(verdict.boundaries):
        say(f"  it works in two parts, cut before {name}, and not together: {first_line(verdict.error)}")
    if not verdict.smallest or len(verdict.smallest) == len(nodes):
        say(f"  nothing smaller than its {len(nodes)} operators was seen to fail")
        return
    piece = extract(graph, verdict.smallest)
    wrong = isinstance(verdict.error, LoweringError)
    smaller = write_script(piece.module, piece.fake_inputs, first_line(verdict.error), values=wrong)
    say(f"  {len(verdict.smallest)} of {len(nodes)} operators fail: {smaller}")


def _failure(graph: GraphModule, values: Sequence[Any], nodes: Sequence[Node]) -> Exception | None:
    """What Inductor fails with on some nodes of a graph, or how far off eager's results it is; None if it is right."""
    piece = extract(graph, nodes)
    tensors = [value for value in piece.fake_inputs if isinstance(value, torch.Tensor)]
    context = LoweringContext(
        graph=GraphRecord(id="script"),
        part="inference",
        device=primary_device(tensor.device.type for tensor in tensors),
        policy=Policy(verify="first", on_error="raise"),
        timeline=Timeline(),
    )
    module, inputs = copy_module(piece.module), piece.fake_inputs
    verifier = Verifier(module=module, inputs=inputs, context=context, subgraph="it", lowering="inductor")
    try:
        with without_cache():
            built = InductorLowering().lower(piece.module, inputs, context)
        found = values_of(graph, [copy_of(value) for value in values], piece.inputs)
        verifier.around(built.call)(
            [restride(value, layout_of(fake)) for value, fake in zip(found, inputs, strict=True)]
        )
    except Exception as error:  # noqa: BLE001 - it is what the caller asks for
        return error
    return None
