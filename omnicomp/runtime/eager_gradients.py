"""Gradients that a compiled backward cannot give, from eager's autograd: of the graph itself, when one is asked for.

AOTAutograd makes one node of a graph. These need the nodes that eager has:

- `create_graph=True`, as a compiled backward cannot be differentiated;
- a backward of some results after one of other results, which freed what was saved for all of them;
- `retain_graph=True`, once a backward is compiled that overwrites what was saved for it.

The graph is run again on the inputs of the forward, with gradients, and autograd's derivative of that is returned. It
must be safe to run it again, and the inputs must be there as they were; or else the error says what to do. Where only
some results have a gradient, inputs that do not take part in those get None, as in eager.
"""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import torch
from torch.fx import GraphModule, Node

from omnicomp._torch.autograd.compiled_function import (
    AutogradGraph,
    Results,
    donates,
    fill_in_compiled_autograd,
    grad_mode_of,
    in_compiled_autograd,
    keeps_graph,
)
from omnicomp._torch.dynamo.control_flow import disable
from omnicomp._torch.user_code import has_effects, user_operators
from omnicomp.analysis.collectives import communicates
from omnicomp.analysis.costs import size_of
from omnicomp.analysis.nodes import all_nodes, fake_value
from omnicomp.analysis.random_state import generator_states
from omnicomp.errors import GradientError, Once, add_note
from omnicomp.safety.forks import new_lock

LEVER: Final = "set options={'autograd': 'eager'}, with which training runs by eager's autograd"
# Inputs that are neither parameters nor buffers are held until the results are gone, up to this size.
_HELD_BYTES: Final = 64 * 2**20


@dataclasses.dataclass(slots=True, eq=False)
class _Call:
    """What is held of one forward."""

    inputs: tuple[Any, ...]  # of the function; weak references to large ones
    watched: tuple[int, ...]  # the inputs whose versions are known
    versions: tuple[int, ...]  # theirs
    done: tuple[tuple[bool, ...], ...] = ()  # which results had a gradient in each backward that freed what was saved
    later: tuple[int, ...] | None = None  # versions of all inputs behind the first of those, if others may follow


class EagerGradients:
    """Puts eager's autograd beside the compiled backward of a graph.

    Attributes:
        refusal: why the graph can't be run again; empty if it can.
    """

    def __init__(self, graph: GraphModule, devices: Sequence[str], record: Callable[[str], object]) -> None:
        """Prepare; nothing is run.

        Args:
            graph: as Dynamo captured it; owned by this object.
            devices: device types of its tensors.
            record: called once, with the reason, when eager's autograd takes over for a call.
        """
        self._graph, self._record = graph, record
        self._placeholders = [fake_value(node) for node in graph.graph.find_nodes(op="placeholder")]
        self._inside = grad_mode_of(["cpu", *devices])
        self._run = disable(graph, reason="omnicomp computes gradients by eager's autograd")
        self._lock = new_lock()
        self._autograd: AutogradGraph | None = None
        self._traced = False
        others = [value for value in self._placeholders if not _is_static(value)]
        large = not 0 <= size_of(others)[1] <= _HELD_BYTES
        self._weak = frozenset(
            index
            for index, value in enumerate(self._placeholders)
            if large and isinstance(value, torch.Tensor) and not _is_static(value)
        )
        self._watched: tuple[int, ...] | None = None
        self._asked = False
        self._say: Once | None = None
        self.refusal = effects_of(graph)

    def attach(self, function: Any, results: Results) -> None:
        """Replace the methods of AOTAutograd's function of the graph."""
        if results.inputs != len(self._placeholders):
            return
        nodes = self._graph.graph.find_nodes(op="placeholder")
        self._statistics = frozenset(index for index in results.written if _only_accumulates(nodes[index]))
        if len(self._statistics) < len(results.written):
            self.refusal = self.refusal or "it writes to an input"
        forward, backward = function.forward, function.backward
        self._sources, self._function, self._written = results.sources, function, results.followed
        self._slots = [position for position, *_ in (*results.followed, *results.sources)]
        self._original = backward

        def keeping(ctx: Any, *inputs: Any) -> Any:
            if not in_compiled_autograd():
                ctx.set_materialize_grads(False)
            returned = forward(ctx, *inputs)
            if self._written:
                return returned
            watched = self._watched
            if watched is None:
                watched = self._watched = self._unsaved(ctx, inputs)
            held = self._weakly(inputs) if self._weak else inputs
            ctx.omnicomp_call = _Call(held, watched, tuple([inputs[index]._version for index in watched]))
            return returned

        fill_in_compiled_autograd(function, self._fill_static)
        function.forward = staticmethod(keeping)
        function.backward = staticmethod(self._followed if results.followed else self._backward)

    def _unsaved(self, ctx: Any, inputs: Sequence[Any]) -> tuple[int, ...]:
        """The inputs that autograd does not save, and so does not watch.

        Until a gradient was asked of eager's autograd, parameters and buffers are left out, for the sake of the many
        graphs of which none ever is: whoever writes to those between forward and backward writes to saved ones as well.
        """
        saved = {id(value) for value in ctx.to_save or ()}
        return tuple(
            index
            for index, value in enumerate(inputs)
            if isinstance(value, torch.Tensor)
            and not (id(value) in saved or index in self._statistics or value.is_inference())
            and (self._asked or not _is_static(self._placeholders[index]))
        )

    def _weakly(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([weakref.ref(x) if index in self._weak else x for index, x in enumerate(inputs)])

    def _followed(self, ctx: Any, *args: Any) -> Any:
        """The backward of a graph whose writes to inputs autograd follows: compiled, whatever is asked for."""
        grads: list[Any] = args[0] if len(args) == 1 and isinstance(args[0], list) else list(args)
        given = tuple([grads[position] is not None for position in self._slots])
        found = self._original(ctx, *self._filled(ctx, grads, bool(args) and grads is args[0]))
        if torch.is_grad_enabled():
            for value in found:
                if value is not None and value.grad_fn is not None:
                    value.grad_fn.register_prehook(lambda _: _refuse(self.refusal))
        return self._without_part(found, given)

    def _without_part(self, found: Any, given: tuple[bool, ...]) -> Any:
        """Gradients with None for the inputs that take no part in the results which have a gradient."""
        autograd = None if all(given) else self._graph_of_autograd()
        if autograd is None:
            return found
        reached, _ = autograd.reached(given)
        return tuple([value if index in reached else None for index, value in enumerate(found)])

    def _backward(self, ctx: Any, *args: Any) -> Any:
        grads: list[Any] = args[0] if len(args) == 1 and isinstance(args[0], list) else list(args)
        given = tuple([grads[position] is not None for position in self._slots])
        keeps, call = keeps_graph(), ctx.omnicomp_call
        if all(given) and not call.done and not torch.is_grad_enabled() and not (keeps and donates(self._function)):
            if not keeps:
                call.done = (given,)
            del grads
            return self._original(ctx, *args)
        return self._otherwise(ctx, grads, given, boxed=bool(args) and grads is args[0])

    def _otherwise(self, ctx: Any, grads: list[Any], given: tuple[bool, ...], *, boxed: bool) -> Any:
        call, keeps, twice = ctx.omnicomp_call, keeps_graph(), torch.is_grad_enabled()
        done = call.done
        why = refusal = ""
        if done:
            if not self._separate(given, done):
                return self._original(ctx, *self._filled(ctx, grads, boxed))  # which raises what eager raises
            why = "results of one graph had backwards of their own"
        elif twice:
            why = "a gradient was asked for with create_graph=True"
        elif keeps and donates(self._function):
            why = "a backward was asked for with retain_graph=True behind one without"
        if why:
            if not self._asked:
                self._asked, self._watched = True, None
            refusal = self.refusal or self._changed(call)
            found = None if refusal else self._eager(ctx, call, grads, given, create_graph=twice)
            if found is not None:
                if not keeps:
                    call.done = (*done, given)
                self._recorded(why)
                return found
            refusal = refusal or self.refusal
            if done:
                raise GradientError(f"{why}, and the second can't be computed, as {refusal}; {LEVER}")
        try:
            found = self._original(ctx, *self._filled(ctx, grads, boxed))
        except RuntimeError as error:
            if why and not twice:
                add_note(error, f"omnicomp: eager's autograd can't compute it either, as {refusal}; {LEVER}")
            raise
        if not keeps:
            call.done = (given,)
            call.later = self._versions(call)
        if twice:
            return self._not_twice(call, found, refusal)
        return self._without_part(found, given)

    def _not_twice(self, call: _Call, found: Sequence[Any], refusal: str) -> Any:
        """Gradients of which a derivative raises an error that says why."""
        inputs = [value for value in _held(call) if isinstance(value, torch.Tensor) and value.requires_grad]
        made = iter(_NotTwice.apply(refusal, len(inputs), *inputs, *(v.detach() for v in found if v is not None)))
        return tuple([None if value is None else next(made) for value in found])

    def _filled(self, ctx: Any, grads: list[Any], boxed: bool) -> tuple[Any, ...]:
        """The gradients as the compiled backward takes them: zeros for results that have none."""
        for position in self._slots:
            if grads[position] is None:
                like = ctx._input_metadata[position]
                grads[position] = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        return (grads,) if boxed else tuple(grads)

    def _fill_static(self, grads: list[Any]) -> None:
        """The same where the sizes of results are known without a call."""
        results: Any = self._graph.graph.output_node().args[0]
        likes = [(position, self._placeholders[index]) for position, index in self._written]
        for position, index, of_base in self._sources:
            like = fake_value(results[index])
            likes.append((position, like._base if of_base else like))
        for position, like in likes:
            if grads[position] is None:
                if not all(type(size) is int for size in like.shape):
                    raise GradientError(
                        f"compiled autograd needs a gradient for each result of a dynamic graph; {LEVER}"
                    )
                grads[position] = torch.zeros(like.shape, dtype=like.dtype, device=like.device)

    def _separate(self, given: tuple[bool, ...], done: tuple[tuple[bool, ...], ...]) -> bool:
        """Whether eager would still have what it saved for these results."""
        autograd = self._graph_of_autograd()
        if autograd is None:
            return False
        _, needed = autograd.reached(given)
        return all(needed.isdisjoint(autograd.reached(before)[1]) for before in done)

    def _changed(self, call: _Call) -> str:
        """Why the inputs of the forward can't be used any more; empty if they can."""
        inputs = _held(call)
        if any(value is None and index in self._weak for index, value in enumerate(inputs)):
            return "an input is gone, which is too large to be held"
        same = call.versions == tuple([inputs[index]._version for index in call.watched])
        # Behind a backward of all results, only what needs no values can still be computed.
        same = same and call.later in (None, self._versions(call))
        return "" if same else "an input of the forward was written to since"

    def _versions(self, call: _Call) -> tuple[int, ...]:
        values = (value for index, value in enumerate(_held(call)) if index not in self._statistics)
        return tuple([v._version for v in values if isinstance(v, torch.Tensor) and not v.is_inference()])

    def _eager(self, ctx: Any, call: _Call, grads: Sequence[Any], given: Sequence[bool], *, create_graph: bool) -> Any:
        """The gradients by eager's autograd; None if the graph turns out to draw random numbers."""
        if not call.done:
            _ = ctx.saved_tensors  # raises what autograd raises if one of them was written to
        inputs = _held(call)
        states = generator_states([value.device for value in inputs if isinstance(value, torch.Tensor)])
        with self._inside():
            own = [
                value.clone()
                if index in self._statistics
                else value.view_as(value)
                if isinstance(value, torch.Tensor) and value.requires_grad
                else value
                for index, value in enumerate(inputs)
            ]
            results = self._run(*own)
            ends = [results[index]._base if of_base else results[index] for _, index, of_base in self._sources]
        if states.changed():
            states.restore()
            self.refusal = "it draws random numbers"
            return None
        pairs = [(end, grads[p]) for end, p, wanted in zip(ends, self._slots, given, strict=True) if wanted]
        wanted = [index for index, needs in enumerate(ctx.needs_input_grad) if needs]
        found = torch.autograd.grad(
            [end for end, _ in pairs],
            [own[index] for index in wanted],
            [grad for _, grad in pairs],
            create_graph=create_graph,
            allow_unused=True,
        )
        made: list[Any] = [None] * len(inputs)
        for index, value in zip(wanted, found, strict=True):
            made[index] = value
        return tuple(made)

    def _graph_of_autograd(self) -> AutogradGraph | None:
        """The autograd graph; None if it could not be recorded, so that nothing is known of it."""
        with self._lock:
            if not self._traced:
                self._traced = True
                try:
                    with self._inside():
                        self._autograd = AutogradGraph(
                            self._run, self._placeholders, self._sources, [index for _, index in self._written]
                        )
                except Exception as error:  # noqa: BLE001 - becomes the reason in the timeline
                    self._recorded(f"which inputs have no gradient is not known: {error}")
            return self._autograd

    def _recorded(self, why: str) -> None:
        if self._say is None:
            self._say = Once(lambda: self._record(why))
        self._say()


class _NotTwice(torch.autograd.Function):
    """Hands gradients through, which take part in a derivative of the inputs that raises an error."""

    @staticmethod
    def forward(ctx: Any, refusal: str, count: int, *values: Any) -> Any:  # type: ignore[override]
        ctx.refusal = refusal
        return tuple(value.view_as(value) for value in values[count:])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        _refuse(ctx.refusal)


def _refuse(refusal: str) -> NoReturn:
    raise GradientError(f"a second derivative can't be computed, as {refusal}; {LEVER}")


def _only_accumulates(node: Node) -> bool:
    """Whether an input is written to, and its values reach no result: statistics of a batch norm, and its counter."""
    return all(
        _trains_batch_norm(node, user)
        or (user.op == "call_method" and user.target == "add_" and user.args == (node, 1) and not user.users)
        for user in node.users
    )


def _trains_batch_norm(statistic: Node, user: Node) -> bool:
    if user.target is not torch.nn.functional.batch_norm or len(user.args) < 6:
        return False
    others = (user.args[0], *user.args[3:5])
    return statistic in user.args[1:3] and statistic not in others and user.args[5] is True


def _held(call: _Call) -> list[Any]:
    return [value() if isinstance(value, weakref.ref) else value for value in call.inputs]


def _is_static(value: Any) -> bool:
    return isinstance(value, torch.nn.Parameter) or getattr(value, "_dynamo_static_input_type", None) is not None


def effects_of(graph: GraphModule) -> str:
    """Why a Dynamo graph must not be run twice; random numbers are seen when it is."""
    operators = user_operators(graph)
    if operators:
        return f"it calls {', '.join(operators)} of the program, which may have effects"
    for node in all_nodes(graph):
        if node.op == "call_function" and has_effects(node):
            return "it has effects beside its results"
        if node.op == "call_function" and communicates(node.target):
            return "it takes part in a collective"
    return ""
