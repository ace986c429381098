"""Graphs after autograd as `torch.export`'s programs, which importers of other libraries read."""

from typing import Any

from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import GraphModule


def exported(module: GraphModule) -> ExportedProgram:
    """A graph as a program, without tracing it again.

    Args:
        module: a functional graph of ATen operators with fake values and without attributes, which takes tensors and
            returns a tuple of them.
    """
    taken = [node.name for node in module.graph.find_nodes(op="placeholder")]
    made: Any = next(iter(reversed(module.graph.nodes))).args[0]
    signature = ExportGraphSignature(
        [InputSpec(InputKind.USER_INPUT, TensorArgument(name), None) for name in taken],
        [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in made],
    )
    return ExportedProgram(module, module.graph, signature, {}, {}, [], None, {})
