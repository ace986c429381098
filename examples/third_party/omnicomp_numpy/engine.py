"""The engine `numpy`: subgraphs of float32 operators on the CPU, computed by NumPy."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.fx.node import map_arg

from omnicomp.lowerings.engines import Clustering, Engine, EngineExecutable, Subgraph
from omnicomp_numpy.functions import FUNCTIONS


class NumpyEngine(Engine):
    """Runs a subgraph operator by operator."""

    name = "numpy"
    clustering = Clustering(dtypes=(torch.float32,))
    native = False

    def missing(self) -> str:
        """Nothing: NumPy is a dependency."""
        return ""

    def version(self) -> str:
        """NumPy's, and a number to count up when this module compiles otherwise."""
        return f"{np.__version__}-1"

    def compile(self, subgraph: Subgraph) -> EngineExecutable:
        """The steps of the subgraph."""
        return NumpyExecutable(subgraph)


for target, function in FUNCTIONS.items():
    NumpyEngine.op(target)(function)


class NumpyExecutable(EngineExecutable):
    """The steps of a subgraph, with the weights that were built in."""

    def __init__(self, subgraph: Subgraph) -> None:
        self._inputs, self._outputs = subgraph.inputs, subgraph.outputs
        fixed = {subgraph.placeholders[index]: value for index, value in subgraph.constants.items()}
        for node in subgraph.module.graph.find_nodes(op="get_attr"):
            fixed[node] = getattr(subgraph.module, node.target)
        self._fixed = {node: value.detach().numpy() for node, value in fixed.items()}
        self._steps = [node for node in subgraph.module.graph.nodes if node.op == "call_function"]

    @property
    def description(self) -> str:
        """What was built, for the audit."""
        return f"{len(self._steps)} steps of NumPy"

    def session(self):
        """What a thread calls; nothing is kept between calls."""
        return self._run

    def _run(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        values = {**self._fixed, **{n: x.numpy() for n, x in zip(self._inputs, inputs, strict=True)}}
        for node in self._steps:
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = FUNCTIONS[node.target](*args, **kwargs)
        # Copies, as an array may be a view of an input or of a weight.
        return [None if n is None else torch.from_numpy(np.array(values[n], np.float32)) for n in self._outputs]
