"""Building a graph once more in the middle of a call: apart from the modes of the caller, with fixed sizes."""

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
import torch._guards
from torch._dynamo.utils import get_metrics_context
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._python_dispatch import _disable_current_modes

from omnicomp._torch.fx import copy_module


def apart(work: Callable[[], Any]) -> Any:
    """Do some work without the modes of the caller, and leave random numbers as they were.

    Several threads may be in here at once, and others in Dynamo.
    """
    with (
        _same_random_numbers(),
        torch._C._PreserveDispatchKeyGuard(),
        torch._guards.tracing(None),
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.no_grad(),
        get_metrics_context(),
    ):
        return work()


@contextlib.contextmanager
def _same_random_numbers() -> Generator[None]:
    """Put the default generators back.

    Dynamo's `preserve_global_state` would do this too, but it swaps a function of FX's for the whole process, which is
    put back in the right order only by those who hold Dynamo's lock. Two threads that don't leave it swapped: from then
    on, Dynamo skips every `GraphModule` that is made, and runs it in eager without a word.
    """
    on_cpu = torch.random.get_rng_state()
    on_cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.random.set_rng_state(on_cpu)
        if on_cuda is not None:
            torch.cuda.set_rng_state(on_cuda)


def is_symbolic(inputs: Sequence[Any]) -> bool:
    """Whether a graph was traced for inputs of more than one size."""
    symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)
    sizes = (size for v in inputs if isinstance(v, torch.Tensor) for size in (*v.shape, *v.stride()))
    return any(isinstance(value, symbolic) for value in (*inputs, *sizes))


def with_fixed_sizes(module: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    """A copy of a graph whose fake values have the sizes of real inputs, in a mode of their own.

    A build with the symbols of the original could decide something about them after all guards are made.

    Raises:
        Exception: an operator's result depends on data, or has no fake kernel.
    """
    made = copy_module(module)
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    class Fakes(Interpreter):
        def run_node(self, n: Node) -> Any:
            value = super().run_node(n)
            if n.op != "output":
                n.meta["val"] = value
            return value

    fakes = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in inputs]
    with mode:
        Fakes(made).run(*fakes)
    return made


def values_of(module: GraphModule, inputs: Sequence[Any], wanted: Sequence[Node]) -> list[Any]:
    """What some nodes of a graph compute in eager; the others' results are freed as soon as they were used.

    Args:
        module: a graph after autograd.
        inputs: real values of its placeholders; the graph may write to them.
        wanted: nodes of it.
    """
    found: dict[Node, Any] = {}
    last = _last(module, wanted)

    class Values(Interpreter):
        def run_node(self, n: Node) -> Any:
            if n is last:
                raise _Enough
            value = super().run_node(n)
            if n in members:
                found[n] = value
            return value

    members = set(wanted)
    with contextlib.suppress(_Enough):
        Values(module).run(*inputs)
    return [found[node] for node in wanted]


class _Enough(Exception):
    """Everything that was wanted is known."""


def _last(module: GraphModule, wanted: Sequence[Node]) -> Node | None:
    """The node behind the last wanted one."""
    members, behind = set(wanted), False
    following: Node | None = None
    for node in module.graph.nodes:
        if behind:
            following, behind = node, False
        if node in members:
            behind, following = True, None
    return following
