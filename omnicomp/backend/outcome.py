"""How the compilation of a graph ends: recorded in every case but one, the end of the process."""

import contextlib
import dataclasses
from collections.abc import Generator

from omnicomp._torch.dynamo import control_flow
from omnicomp.runtime.ranks import fail
from omnicomp.timeline import Outcome, current


@dataclasses.dataclass
class Ending:
    """The end of a compilation that is under way."""

    graph: str = ""  # its id; nothing is recorded while it is empty
    state: str = "built"  # of the event `Outcome`, if nothing is raised

    def record(self, state: str, error: str = "") -> None:
        """Record it."""
        if self.graph:
            current().append(Outcome(graph=self.graph, state=state, error=error))


@contextlib.contextmanager
def ending(graph: str = "") -> Generator[Ending]:
    """Inside, a graph is compiled; however that ends, it is recorded."""
    found = Ending(graph)
    try:
        yield found
    except BaseException as error:
        steers = isinstance(error, (*control_flow.CONTROL_FLOW, *control_flow.GRAPH_BREAKS))
        found.record("taken_back" if steers else "raised", type(error).__name__)
        if found.graph and not steers:
            fail(current(), found.graph, error)
        raise
    found.record(found.state)
