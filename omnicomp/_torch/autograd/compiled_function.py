"""AOTAutograd's function of a graph in training, and the autograd graph that eager would record for the same program.

AOTAutograd makes one node of a graph: a backward runs as a whole, frees all that was saved at once, gives zeros where
eager gives None, and cannot be differentiated. `on_function` hands the class over, so that its methods can be replaced.
"""

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any
from unittest import mock

import torch
import torch._dynamo
from torch._dynamo import compiled_autograd
from torch._functorch._aot_autograd.runtime_wrappers import RuntimeWrapper
from torch._functorch._aot_autograd.schemas import OutputType
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from omnicomp import records

_OWN = (OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.custom_function_view)
_OF_BASE = (OutputType.alias_of_intermediate, OutputType.alias_of_intermediate_save_as_output)


def in_backward() -> bool:
    """Whether this thread is computing gradients."""
    return torch._C._current_graph_task_id() != -1


def saves_are_hooked() -> bool:
    """Whether the program has hooks for saved tensors, as activation checkpointing does."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None  # type: ignore[attr-defined]


@records.dataclass(frozen=True, kw_only=True)
class Results:
    """What the gradients that a compiled backward gets are gradients of."""

    # For each gradient that the backward reads: its position, the result of the graph that it belongs to, and whether
    # it belongs to the base of that result, which is a view.
    sources: tuple[tuple[int, int, bool], ...]
    inputs: int  # how many inputs the function takes
    written: tuple[int, ...]  # the inputs that the graph writes to
    # The writes to inputs that autograd sees: for each the position of the gradient of what was written, and the input.
    followed: tuple[tuple[int, int], ...]


@contextlib.contextmanager
def on_function(callback: Callable[[Any, Results], None]) -> Generator[None]:
    """Call back for each class of a graph in training that AOTAutograd makes, or restores from its cache, inside.

    Functions of tensors that wrap others, and what compiled autograd is to trace, are passed over. Dynamo's compile
    lock, which is held inside, keeps other compilations out of it.

    Args:
        callback: gets the subclass of `torch.autograd.Function`, and what its gradients belong to.
    """
    original = RuntimeWrapper.post_compile

    def post_compile(self: Any, compiled_fn: Any, aot_config: Any, *, runtime_metadata: Any) -> Any:
        function: Any = getattr(compiled_fn, "__self__", None)
        is_function = isinstance(function, type) and issubclass(function, torch.autograd.Function)
        wraps = torch._dynamo.config.compiled_autograd or getattr(function, "maybe_subclass_metadata", None) is not None
        if is_function and not wraps:
            callback(function, _results(runtime_metadata))
        return original(self, compiled_fn, aot_config, runtime_metadata=runtime_metadata)

    with mock.patch.object(RuntimeWrapper, "post_compile", post_compile):
        yield


def _results(metadata: Any) -> Results:
    first = metadata.num_mutated_inp_runtime_indices
    sources = [
        (first + index, index, False)
        for index, info in enumerate(metadata.output_info)
        if info.output_type in _OWN and issubclass(info.raw_type, torch.Tensor) and _is_differentiated(info)
    ]
    for base in range(metadata.num_intermediate_bases):
        views = [
            index
            for index, info in enumerate(metadata.output_info)
            if info.output_type in _OF_BASE and info.base_idx == base
        ]
        sources += [(first + metadata.num_outputs + base, index, True) for index in views[:1]]
    return Results(
        sources=tuple(sources),
        inputs=len(metadata.input_info),
        written=tuple(
            index for index, info in enumerate(metadata.input_info) if info.mutates_data or info.mutates_metadata
        ),
        followed=tuple(
            (position, index)
            for position, index in enumerate(metadata.mutated_inp_runtime_indices)
            if metadata.input_info[index].mutates_data and metadata.input_info[index].requires_grad
        ),
    )


def _is_differentiated(info: Any) -> bool:
    """Whether the backward takes a gradient of a result; torch 2.11 takes one of views made without gradients, too."""
    return bool(getattr(info, "requires_grad_for_backward", info.requires_grad))


def in_compiled_autograd() -> bool:
    """Whether a backward that begins now would be compiled by torch's compiled autograd."""
    return compiled_autograd.compiled_autograd_enabled


def fill_in_compiled_autograd(function: Any, zeros: Callable[[list[Any]], None]) -> None:
    """Let compiled autograd, which calls no method of the function, replace gradients that are None by zeros."""
    original = getattr(function, "_bw_prologue_fn", None)
    if original is None:
        return

    def prologue(saved: Any, symints: Any, opaque: Any, grads: Sequence[Any]) -> Any:
        if any(grad is None for grad in grads):
            grads = list(grads)
            zeros(grads)
        return original(saved, symints, opaque, grads)

    function._bw_prologue_fn = prologue


def keeps_graph() -> bool:
    """Whether the backward that is running was called with `retain_graph=True`."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())  # pyright: ignore[reportAttributeAccessIssue]


def donates(function: Any) -> bool:
    """Whether a backward is compiled that overwrites what was saved for it, and so refuses `retain_graph=True`."""
    return function.compiled_bw is not None and bool(function.metadata.bw_donated_idxs)


def grad_mode_of(devices: Iterable[str]) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A context manager with gradients on, and autocast as it is now."""
    states = [(name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in sorted({*devices})]

    @contextlib.contextmanager
    def inside() -> Generator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for name, enabled, dtype in states:
                stack.enter_context(torch.autocast(name, dtype=dtype, enabled=enabled))
            yield

    return inside


class AutogradGraph:
    """The autograd graph of a Dynamo graph, recorded on fake tensors: who needs whom, and which nodes save values."""

    def __init__(
        self,
        module: GraphModule,
        inputs: Sequence[Any],
        sources: Iterable[tuple[int, int, bool]],
        written: Sequence[int] = (),
    ) -> None:
        """Record it.

        Args:
            module: the graph; it is run on fake tensors.
            inputs: tensors and numbers, one a placeholder; only their metadata is read.
            sources: of `Results`.
            written: inputs whose values behind the graph come before the results.

        Raises:
            Exception: an operator can't be run on fake tensors.
        """
        with FakeTensorMode(allow_non_fake_inputs=True):
            fakes = [_leaf(value) if isinstance(value, torch.Tensor) else value for value in inputs]
            self._leaves = {id(fake): index for index, fake in enumerate(fakes) if isinstance(fake, torch.Tensor)}
            self._fakes = fakes  # their ids are in use
            given = [fake.clone() if index in written else fake for index, fake in enumerate(fakes)]
            results: Sequence[Any] = module(*given)
        ends = [given[index] for index in written]
        ends += [results[index]._base if of_base else results[index] for _, index, of_base in sources]
        self._nodes = [end.grad_fn for end in ends]
        self._found: dict[tuple[bool, ...], tuple[frozenset[int], frozenset[Any]]] = {}

    def reached(self, given: tuple[bool, ...]) -> tuple[frozenset[int], frozenset[Any]]:
        """The inputs that get a gradient where only some results have one, and the nodes that need values saved for it.

        Args:
            given: which results of `sources` have a gradient.
        """
        if given not in self._found:
            stack: list[Any] = [node for node, wanted in zip(self._nodes, given, strict=True) if wanted and node]
            seen: set[Any] = set()
            while stack:
                node = stack.pop()
                if node not in seen:
                    seen.add(node)
                    stack.extend(following for following, _ in node.next_functions if following is not None)
            leaves = frozenset(self._leaves[id(node.variable)] for node in seen if hasattr(node, "variable"))
            self._found[given] = leaves, frozenset(node for node in seen if _saves(node))
        return self._found[given]


def _leaf(value: torch.Tensor) -> torch.Tensor:
    sizes = [size if type(size) is int else size.node.hint for size in value.shape]  # type: ignore[attr-defined]
    strides = [step if type(step) is int else step.node.hint for step in value.stride()]  # type: ignore[attr-defined]
    made = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
    return made.requires_grad_(value.requires_grad)


def _saves(node: Any) -> bool:
    if hasattr(node, "variable"):
        return False
    names = ["saved_tensors"] if hasattr(node, "saved_tensors") else [n for n in dir(node) if n.startswith("_saved_")]
    return any(isinstance(leaf, torch.Tensor) for name in names for leaf in tree_leaves(getattr(node, name)))
