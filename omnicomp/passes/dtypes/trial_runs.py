"""Trial runs of a Dynamo graph on real inputs: the error of its outputs, and of single operators in it."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map

from omnicomp._torch.autograd.attention import SDPA
from omnicomp._torch.autograd.run_in_precision import CannotWiden, InPrecision, on_real_tensors
from omnicomp._torch.dynamo.late_compile import hinted, is_fake, is_subclass
from omnicomp._torch.fx import copy_module
from omnicomp._torch.user_code import user_operators
from omnicomp.analysis.accuracy import PRECISIONS, relative_error
from omnicomp.analysis.collectives import collectives_of
from omnicomp.analysis.nodes import submodules
from omnicomp.analysis.random_state import GeneratorStates, generator_states

if TYPE_CHECKING:
    from omnicomp.passes.base import PassContext  # the passes need this module
    from omnicomp.passes.dtypes.calibrate import Bound

Site = tuple[int, str]
"""An operator: the number of its region, and its name."""
Measure = Callable[[frozenset[Site]], float]
Figure = Callable[[], float]
Figures = Callable[[], Mapping[Site, float]]

_LOW: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
_PROBE: Final = "_omnicomp_probe"


class TrialError(RuntimeError):
    """A graph can't be run on real inputs without harm, or there are none."""


def copy_for_trial(module: GraphModule) -> GraphModule:
    """A copy of a graph in which attention drops nothing: its kernels draw other numbers in other dtypes."""
    made = copy_module(module)
    for region in _all(made):
        changed = False
        for node in region.graph.nodes:
            if node.target is SDPA:
                if len(node.args) > 4 and node.args[4]:
                    node.args, changed = (*node.args[:4], 0.0, *node.args[5:]), True
                elif node.kwargs.get("dropout_p"):
                    node.kwargs, changed = {**node.kwargs, "dropout_p": 0.0}, True
        if changed:
            region.recompile()
    return made


def _all(module: GraphModule) -> list[GraphModule]:
    return [module, *(region for child in submodules(module) for region in _all(child))]


class Runs:
    """Runs of copies of one graph on the same inputs with the same random numbers; a context that restores the latter.

    Attributes:
        count: how many there were.
    """

    def __init__(self, bound: "Bound", context: "PassContext", root: GraphModule) -> None:
        """Check that the graph can be run.

        Raises:
            TrialError: there are no real inputs, or a run could have effects.
        """
        self.count = 0
        if collectives_of(root):
            raise TrialError("it communicates with other ranks, which would have to run it as often")
        operators = user_operators(root)
        if operators:
            raise TrialError(f"it calls {', '.join(operators)} of the program, which may have effects")
        self._inputs = _real_inputs(bound, context, root)
        self._root = root
        self._dtype = PRECISIONS[bound.reference]
        self._written = written_inputs(root)
        places = _storage_counts(self._inputs)
        for index in self._written:
            value = self._inputs[index]
            if isinstance(value, torch.Tensor) and places.get(_storage(value), 0) > 1:
                raise TrialError("it writes to an input that shares its memory with another one")
        self._devices = {v.device for v in self._inputs if isinstance(v, torch.Tensor)}
        self._states: GeneratorStates = generator_states(self._devices)
        self._true: list[torch.Tensor] | None = None

    def __enter__(self) -> "Runs":
        """Take the states of random numbers."""
        self._states = generator_states(self._devices)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore them, and let the results go."""
        self._states.restore()
        self._true = None

    def error(self, module: GraphModule) -> float:
        """The worst relative error (L2) of the outputs of a copy of the graph; infinite where numbers are missing."""
        true = self._reference()
        found = self._run(module, None)
        if len(found) != len(true):
            raise TrialError("it has another number of outputs in another precision")
        worst = 0.0
        for value, exact in zip(found, true, strict=True):
            if value.shape != exact.shape:
                raise TrialError("the sizes of its outputs depend on rounding")
            worst = max(worst, relative_error(value, exact))
        return worst

    def local_errors(
        self,
        root: GraphModule,
        regions: Callable[[GraphModule], Sequence[GraphModule]],
        lowered: Mapping[Site, str],
    ) -> dict[Site, float]:
        """Relative error of each operator's result in low precision, on the operands that it has in a wide graph."""
        copy = copy_for_trial(root)
        found: dict[Site, float] = {}
        for index, region in enumerate(regions(copy)):
            for node in list(region.graph.nodes):
                dtype = _LOW.get(lowered.get((index, node.name), ""))
                if dtype is not None:
                    _observe(region, node, dtype, (index, node.name), found)
            region.recompile()
        self._run(copy, None)
        return found

    def _reference(self) -> list[torch.Tensor]:
        if self._true is None:
            try:
                self._true = self._run(copy_for_trial(self._root), self._dtype)
            except CannotWiden:
                raise
            except RuntimeError:
                # Some of torch's functions want operands of one dtype before they call any operator.
                self._true = self._run(copy_for_trial(self._root), self._dtype, parameters=True)
            if not any(bool(value.isfinite().any()) for value in self._true):
                # Nothing would differ from it, whatever is lowered.
                raise TrialError("its outputs have no finite floating-point number to compare")
        return self._true

    def _run(self, module: GraphModule, dtype: torch.dtype | None, *, parameters: bool = False) -> list[torch.Tensor]:
        """The floating-point outputs of a graph, and the inputs that it wrote to."""
        self.count += 1
        self._states.restore()
        with on_real_tensors():
            values = [
                _own(value, dtype, copy=index in self._written, cast_parameter=parameters)
                for index, value in enumerate(self._inputs)
            ]
            written = [values[index] for index in self._written]
            mode = InPrecision(dtype)
            with mode:
                outputs = module.forward(*values)  # a call would print what it raises
            leaves = [*tree_leaves(outputs), *written]
        return [v.detach() for v in leaves if isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex())]


def _real_inputs(bound: "Bound", context: "PassContext", root: GraphModule) -> list[Any]:
    names = [node.name for node in root.graph.find_nodes(op="placeholder")]
    inputs = [hinted(value) for value in context.inputs]
    if len(inputs) != len(names):
        raise TrialError("it is compiled without the inputs of a call")
    if bound.sample is not None:
        given = list(bound.sample(tuple(names), tuple(inputs)))
        if len(given) != len(inputs):
            raise TrialError(f"dtype_sample gave {len(given)} values for {len(inputs)} inputs")
        for name, new, old in zip(names, given, inputs, strict=True):
            if _kind(new) != _kind(old):
                raise TrialError(f"dtype_sample gave {_kind(new)} for {name}, which is {_kind(old)}")
        inputs = given
    for name, value in zip(names, inputs, strict=True):
        if is_fake(value) or (isinstance(value, torch.Tensor) and value.is_meta):
            raise TrialError(f"its input {name} has no real values")
        if is_subclass(value):
            raise TrialError(f"its input {name} is a tensor that wraps others")
    return inputs


def _kind(value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        return (tuple(map(hinted, value.shape)), value.dtype, value.device)
    return (type(value).__name__,)


def _own(value: Any, dtype: torch.dtype | None, *, copy: bool, cast_parameter: bool) -> Any:
    """An input for one run: a copy, unless it is a parameter that nobody writes to."""
    if not isinstance(value, torch.Tensor):
        return value
    shared = isinstance(value, torch.nn.Parameter) and not copy
    value = value.detach()
    if dtype is not None and value.is_floating_point() and not (shared and not cast_parameter):
        return value.to(dtype, copy=True)
    # What the compiler doesn't see being written to, such as running statistics, is copied as well.
    return value if shared else value.clone()


def written_inputs(root: GraphModule) -> tuple[int, ...]:
    """The inputs that a graph writes to."""
    from omnicomp.passes.dtypes.analysis import changed_storages, storages  # the passes need this module

    changed = changed_storages(root)
    nodes = root.graph.find_nodes(op="placeholder")
    return tuple(index for index, node in enumerate(nodes) if not changed.isdisjoint(storages(node)))


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr() if value.layout is torch.strided else -1


def _storage_counts(values: Sequence[Any]) -> dict[int, int]:
    """How many tensors are in the same memory, by its address."""
    counts: dict[int, int] = {}
    for value in values:
        if isinstance(value, torch.Tensor) and _storage(value) > 0:
            counts[_storage(value)] = counts.get(_storage(value), 0) + 1
    return counts


def _observe(region: GraphModule, node: Node, dtype: torch.dtype, site: Site, found: dict[Site, float]) -> None:
    """Let a graph compute an operator a second time in `dtype` right behind it, and keep the difference."""
    target: Any = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
    attention = target is SDPA

    def low(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        # A mask's -3e38 would become -inf, as the pass takes care that it does not.
        return (value.clamp(min=torch.finfo(dtype).min) if attention else value).to(dtype)

    class Probe(torch.nn.Module):
        def forward(self, result: Any, args: Any, kwargs: Any) -> None:
            again = target(*tree_map(low, args), **tree_map(low, kwargs))
            errors = [
                relative_error(value, exact)
                for value, exact in zip(tree_leaves(again), tree_leaves(result), strict=True)
                if isinstance(exact, torch.Tensor) and exact.is_floating_point()
            ]
            found[site] = max([found.get(site, 0.0), *errors])

    name = next(name for i in itertools.count() if not hasattr(region, name := f"{_PROBE}_{i}"))
    region.add_submodule(name, Probe())
    with region.graph.inserting_after(node):
        region.graph.call_module(name, (node, node.args, dict(node.kwargs)))
