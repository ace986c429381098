"""What omnicomp has to know of the device `npy`, and its compiler."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule
from torch.fx.node import map_arg

from omnicomp.devices import Capabilities, Device
from omnicomp_numpy import driver
from omnicomp_numpy.functions import FUNCTIONS


class NumpyDevice(Device):
    """NumPy as a device, with a compiler of its own."""

    type = driver.NAME

    def is_available(self) -> bool:
        """Whether torch knows it."""
        return driver.is_enabled()

    def capabilities(self) -> Capabilities:
        """It has float32, and nothing else."""
        return Capabilities(
            compute_dtypes=(torch.float32,),
            storage_dtypes=(torch.float32,),
            compiler="NumPy",
            device_count=1,
            name="NumPy",
        )

    def compiler_version(self) -> str:
        """NumPy's."""
        return np.__version__

    def compile_subgraph(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Sequence[Any]]:
        """One function of arrays for a subgraph; an operator that NumPy has no form of is an error."""
        steps = [node for node in module.graph.nodes if node.op == "call_function"]
        unknown = next((node for node in steps if node.target not in FUNCTIONS), None)
        if unknown is not None:
            raise NotImplementedError(f"it has no form of {unknown.target}")
        placeholders = module.graph.find_nodes(op="placeholder")
        (results,) = module.graph.output_node().args

        def run(arguments: list[Any]) -> Sequence[Any]:
            values = dict(zip(placeholders, map(driver.array_of, arguments), strict=True))
            for node in steps:
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = FUNCTIONS[node.target](*args, **kwargs)
            return tuple(map_arg(results, lambda node: driver.tensor_of(values[node])))

        return run
