"""The classes of operators, as Dynamo's graphs spell them."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule

from omnicomp._torch.fx import read_attributes
from omnicomp.passes.dtypes.operators import CLASSES, operator_class


def captured(function):
    graphs: list[GraphModule] = []

    def backend(module, inputs):
        read_attributes(module)
        graphs.append(module)
        return module.forward

    x = torch.randn(4, 4)
    torch.compile(function, backend=backend, fullgraph=True)(x)
    return [n for n in graphs[0].graph.nodes if n.op.startswith("call_")]


@pytest.mark.parametrize(
    ("cls", "function"),
    [
        ("matrix", lambda x: x @ x),
        ("matrix", lambda x: F.linear(x, x)),
        ("matrix", lambda x: torch.einsum("ij,jk->ik", x, x)),
        ("softmax", lambda x: x.softmax(-1)),
        ("softmax", lambda x: torch.special.log_softmax(x, -1)),
        ("norm", lambda x: F.rms_norm(x, (4,))),
        ("norm", lambda x: torch.linalg.vector_norm(x)),
        ("loss", lambda x: F.mse_loss(x, x)),
        ("reduction", lambda x: x.sum()),
        ("reduction", lambda x: torch.mean(x)),
        ("exp", lambda x: x**2.5),
        ("exp", lambda x: torch.rsqrt(x)),
        ("exp", lambda x: x.log1p()),
        ("cumulative", lambda x: torch.cumsum(x, 0)),
        ("pointwise", lambda x: x + 1),
        ("pointwise", lambda x: F.silu(x)),
        ("pointwise", lambda x: F.relu(x)),
        ("move", lambda x: x.view(-1)),
        ("move", lambda x: x[0]),
        ("move", lambda x: torch.cat((x, x))),
        ("move", lambda x: x.to(torch.float16)),
        ("move", lambda x: x.T),
    ],
)
def test_class(cls, function):
    (node,) = captured(function)
    found = operator_class(node)
    assert found[0] == cls
    assert ("wide" in found) == (cls not in ("matrix", "pointwise", "move"))


def test_no_operator_is_in_two_classes():
    names = [name for members in CLASSES.values() for name in members]
    assert len(names) == len(set(names))


def test_what_is_not_torchs_has_no_class():
    @torch.library.custom_op("omnicomp_test::unclassed", mutates_args=())
    def unclassed(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    unclassed.register_fake(torch.empty_like)
    (node,) = captured(lambda x: unclassed(x))
    assert operator_class(node) == ()
