"""What is done about a failure beside cutting: a script that shows it, a verdict for the next process, and a lever."""

import dataclasses
from pathlib import Path

from torch.fx import GraphModule

from omnicomp.builder.find_failing import Verdict
from omnicomp.builder.known_failures import Entry, PartVerdicts
from omnicomp.builder.partition import extract
from omnicomp.builder.repro import write_script
from omnicomp.errors import first_line
from omnicomp.lowerings import LoweringContext
from omnicomp.timeline import Reason

__all__ = ["Setbacks"]


class Setbacks:
    """The failures of one part."""

    def __init__(self, module: GraphModule, context: LoweringContext) -> None:
        """Take the key of a part before it is built; Inductor changes the graph later.

        Args:
            module: the graph, before overrides are put into it.
            context: where it belongs.
        """
        self._context = context
        self._verdicts = PartVerdicts(module, context)

    def known(self) -> Entry | None:
        """What an earlier process found of this part; recorded in the timeline."""
        return self._verdicts.known()

    def learn(self, module: GraphModule, verdict: Verdict, *, values: bool = False) -> Verdict:
        """Write a script for a verdict and keep it; returns it with levers that name the script.

        Args:
            module: the graph that its nodes are of.
            verdict: what was found.
            values: whether what was built computed something wrong.
        """
        script = self._script(module, verdict, values=values) if verdict.smallest else None
        if script is not None:
            cut = {name: with_script(reason, script) for name, reason in verdict.cut.items()}
            verdict = dataclasses.replace(verdict, cut=cut, script=str(script))
        if verdict.lasting:
            self._verdicts.add(
                verdict.cut,
                verdict.boundaries,
                scripts=() if script is None else (str(script),),
                builds=None if verdict.exact else self._context.policy.max_builds,
                values=values,
                untuned=verdict.untuned,
                seconds=verdict.seconds,
            )
        return verdict

    def _script(self, module: GraphModule, verdict: Verdict, *, values: bool) -> Path | None:
        if self._context.policy.verdicts == "off":
            return None
        piece = extract(module, verdict.smallest)
        backward = self._context.part == "backward"
        said = first_line(verdict.error)
        try:
            return write_script(piece.module, piece.fake_inputs, said, backward=backward, values=values)
        except OSError as error:
            self._verdicts.unusable("bypass", f"no script was written: {error}")
            return None


def with_script(reason: Reason, script: Path | str) -> Reason:
    """A reason whose lever names a script that shows the failure."""
    return dataclasses.replace(
        reason, lever=f"{reason.lever}; `omnicomp bisect {script}` repeats it".removeprefix("; ")
    )
