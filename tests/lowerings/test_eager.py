"""The eager lowering keeps the layouts that its neighbours were built for."""

import pytest
import torch
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from omnicomp.devices import resolve_device
from omnicomp.lowerings import GraphRecord, LoweringContext
from omnicomp.lowerings.eager import EagerLowering
from omnicomp.options.policy import Policy
from omnicomp.timeline import Timeline

CONTEXT = LoweringContext(
    graph=GraphRecord(id="g0"), part="inference", device=resolve_device("cpu"), policy=Policy(), timeline=Timeline()
)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_a_result_with_other_strides_than_predicted_is_copied(mode: str) -> None:
    module = make_fx(lambda x: (x.clone(),), tracing_mode=mode)(torch.rand(3, 4))
    run = EagerLowering().lower(module, [], CONTEXT).call
    x = torch.rand(4, 3).t()  # clone keeps the strides of what it is given, and was traced on contiguous memory
    (result,) = run([x])
    assert result.stride() == (4, 1)
    torch.testing.assert_close(result, x)


def test_inputs_are_cleared() -> None:
    module = make_fx(lambda x: (x + 1,), tracing_mode="fake")(torch.rand(3))
    inputs = [torch.rand(3)]
    EagerLowering().lower(module, [], CONTEXT).call(inputs)
    assert inputs == []


def test_seeded_random_numbers_are_refused() -> None:
    graph = Graph()
    node = graph.call_function(torch.ops.prims.inductor_random.default, ([2], graph.placeholder("seed"), "rand"))
    reason = EagerLowering().supports(node, CONTEXT)
    assert reason is not None
    assert reason.code == "unsafe_in_eager"
    assert "fallback_random" in reason.lever
