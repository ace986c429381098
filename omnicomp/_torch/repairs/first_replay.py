"""The random numbers of the call in which torch records a CUDA graph.

A recording begins with zeros for the generator's offset, written on the stream that records. Behind it torch replays
the graph on the program's stream, with the offset of the call, and lets neither stream wait for the other. Where other
work holds the zeros up, as on a GPU that several processes share, they are written last, and the call draws the numbers
of offset 0. It happened to one recording of 75 beside two more processes. The program's stream waits here.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch._inductor.cudagraph_trees import CUDAGraphNode

from omnicomp._torch.repairs.needed import Exchange, Needed

# Since then a generator has numbers for each recording, and writes them only for a replay.
NEEDED: Final = Needed(first="2.11", fixed="2.13", issue="https://github.com/pytorch/pytorch/pull/176752")


def _waited_for(original: Callable[..., Any]) -> Callable[..., Any]:
    """The method that records, with what the program's stream does next behind all that it launched."""

    def record(self: CUDAGraphNode, *args: Any) -> Any:
        outputs = original(self, *args)
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        return outputs

    return record


_RECORD: Final = Exchange(CUDAGraphNode, "_record", _waited_for)


def first_replay_waits() -> AbstractContextManager[None]:
    """While a graph is recorded: its first replay waits for what its recording launched."""
    return NEEDED.exchanging(_RECORD)
