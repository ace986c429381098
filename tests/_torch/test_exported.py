"""A graph as an exported program."""

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from omnicomp._torch.exported import exported


def test_a_graph_is_a_program_of_its_inputs_and_results() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + y, x * 2

    module = make_fx(function, tracing_mode="fake")(torch.randn(3), torch.randn(3))
    taken = [node.name for node in module.graph.find_nodes(op="placeholder")]
    program = exported(module)
    assert list(program.graph_signature.user_inputs) == taken
    assert list(program.graph_signature.user_outputs) == ["add", "mul"]
    assert not program.state_dict
