"""Follow-up of a failure: a reproduction script, an entry for the next process, and a lever that names the script."""

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from torch.fx import GraphModule

from omnicomp._torch.dynamo.control_flow import compile_lock
from omnicomp._torch.inductor import repro_script
from omnicomp._torch.inductor.store import folder, write_whole
from omnicomp.analysis.nodes import op_name
from omnicomp.builder.find_failing import Verdict
from omnicomp.builder.known_failures import Entry, PartVerdicts
from omnicomp.builder.partition import extract
from omnicomp.errors import first_line
from omnicomp.lowerings import LoweringContext
from omnicomp.timeline import Reason

FOLDER: Final = "repro"


class PartFailures:
    """The failures of one part."""

    def __init__(self, module: GraphModule, context: LoweringContext) -> None:
        """Take the key of a part before it is built; Inductor changes the graph later."""
        self._context = context
        self._settings = repro_script.settings()
        self._verdicts = PartVerdicts(module, context, self._settings)

    def known(self) -> Entry | None:
        """Known failures of this part from an earlier process; recorded in the timeline."""
        return self._verdicts.known()

    def learn(self, module: GraphModule, verdict: Verdict) -> Verdict:
        """Write a script for a verdict and store both; returns the verdict with levers that name the script."""
        script = ""
        if verdict.smallest:
            piece = extract(module, verdict.smallest)
            script = self._script(piece.module, piece.fake_inputs, first_line(verdict.error))
        if script:
            cut = {name: _with_script(reason, script) for name, reason in verdict.cut.items()}
            verdict = dataclasses.replace(verdict, cut=cut, script=script)
        if verdict.lasting:
            self._verdicts.add(
                verdict.cut,
                verdict.boundaries,
                scripts=(script,) if script else (),
                builds=None if verdict.exact else self._context.policy.max_builds,
                untuned=verdict.untuned,
            )
        return verdict

    def learn_wrong(self, module: GraphModule, inputs: Sequence[Any], reason: Reason) -> Reason:
        """Write a script of a subgraph that computes wrong results; later processes do not give it to Inductor.

        Returns:
            The reason with a lever that names the script.
        """
        with compile_lock, repro_script.changed_settings(self._settings):
            script = self._script(module, inputs, reason.sentence, values=True)
        reason = _with_script(reason, script) if script else reason
        nodes = [node.name for node in module.graph.nodes if node.op == "call_function"]
        self._verdicts.add(dict.fromkeys(nodes, reason), scripts=(script,) if script else (), values=True)
        return reason

    def _script(self, module: GraphModule, inputs: Sequence[Any], error: str, *, values: bool = False) -> str:
        """Path of a script; empty if none is wanted, or none could be written."""
        if self._context.policy.verdicts == "off":
            return ""
        try:
            return str(write_script(module, inputs, error, values=values))
        except Exception as failure:  # noqa: BLE001 - a graph that can't be written down costs the script alone
            self._verdicts.unusable("bypass", f"no script was written: {first_line(failure)}")
            return ""


def write_script(
    module: GraphModule, inputs: Sequence[Any], error: str, *, values: bool = False, whole: bool = False
) -> Path:
    """Write the reproduction script of a graph into the cache folder.

    Args:
        module: the graph; it returns a tuple.
        inputs: fake tensors and symbolic sizes of its placeholders.
        error: what it fails with.
        values: whether it computes something wrong; otherwise it can't be built.
        whole: whether the script compiles it with all passes.

    Raises:
        Exception: the graph can't be written down, or the folder not written to.
    """
    names = [op_name(node) for node in module.graph.nodes if node.op == "call_function"]
    what = "computes something else than eager for" if values else "can't build"
    title = f"Inductor {what} {', '.join(sorted(set(names)))}: {error}"
    text = repro_script.script_of(module, inputs, title, values=values, whole=whole)
    name = re.sub(r"\W+", "_", names[-1]) if names else "graph"
    path = folder() / FOLDER / f"{name}_{hashlib.sha256(text.encode(errors='backslashreplace')).hexdigest()[:12]}.py"
    if not path.exists():
        write_whole(path, text)
    return path


def _with_script(reason: Reason, script: str) -> Reason:
    """A reason whose lever names a script that shows the failure."""
    return dataclasses.replace(
        reason, lever=f"{reason.lever}; `omnicomp bisect {script}` repeats it".removeprefix("; ")
    )
