"""Graphs as Dynamo captures them, and as text short enough to be written in a test."""

import re
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule


def captured(function: Callable[..., Any], *inputs: Any) -> GraphModule:
    """The Dynamo graph of a function."""
    graphs: list[GraphModule] = []

    def backend(module: GraphModule, inputs: list[Any]) -> Any:
        graphs.append(module)
        return module.forward

    torch.compiler.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    (graph,) = graphs
    return graph


def code(module: GraphModule) -> str:
    """The calls of a graph in order, and what it returns; inputs are named as in the function."""
    lines = (line.split(";")[0].strip() for line in module.code.strip().splitlines()[1:])
    lines = (
        part for line in lines for part in textwrap.wrap(line, 116, subsequent_indent="    ", break_long_words=False)
    )
    text = "\n".join(line for line in lines if line and not re.search(r" = (None|L_\w+)$", line))
    return re.sub(r"\bl_(\w+?)_\b", r"\1", text)
