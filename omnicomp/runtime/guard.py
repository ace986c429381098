"""The guard: an executable that raises in a call is replaced by eager, for that call and later ones, if that is safe.

An error that the program's own code raised, such as an operator of the user's, is the program's: it is raised as it is,
and nothing runs again. Else a call may be repeated only if the failed one had no effect: it must not have called such
an operator, nor written to an input, nor taken part in a collective. Whether the graph does so is known before the
first call. Random numbers may be drawn again once the generators are restored, unless other code derives the same
numbers from a seed, which eager does not use. Inputs that generated code has freed are lost, too; those that it still
holds are read from the frames of the error.
"""

import dataclasses
import gc
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from omnicomp._torch.dynamo.forward_mode import carries_tangents
from omnicomp._torch.inductor.compile_fx import live_inputs
from omnicomp._torch.user_code import has_begun, has_effects, raised_by
from omnicomp.analysis.collectives import communicates
from omnicomp.analysis.nodes import fake_value, op_name, source_line
from omnicomp.analysis.random_state import SEEDED, SEEDS, GeneratorStates, default_generators, draws_at_random
from omnicomp.errors import LoweringError, add_note, first_line, harmless
from omnicomp.lowerings import Executable, LoweringContext
from omnicomp.runtime.ranks import explain
from omnicomp.safety.forks import new_lock
from omnicomp.timeline import Reason
from omnicomp.timeline.recorder import record_step_down

Boxed = Callable[[list[Any]], Sequence[Any]]

_COMMUNICATES: Final = "takes part in a collective"
_DRAWS: Final = "draws random numbers"
# A CUDA context is of no use after these.
_DEVICE_LOST: Final = (
    "illegal memory access",
    "device-side assert",
    "misaligned address",
    "unspecified launch failure",
)
_OUT_OF_MEMORY: Final = ("DefaultCPUAllocator: ", "CUDA out of memory")


def obstacle(module: GraphModule, part: str = "") -> Reason | None:
    """Why a failed call of a post-autograd graph must not be repeated; None if it may be.

    Args:
        module: the graph.
        part: `forward`, `backward` or `inference`, if the generators of `drawing_devices` are put back before the call
            is repeated. Without it, random numbers are an obstacle.
    """
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        sentence = _effect(node)
        if sentence == _DRAWS and part:
            sentence = _drawn_elsewhere(node, part)
        if sentence:
            return _not_repeatable(node, sentence)
    return None


def _not_repeatable(node: Node, effect: str) -> Reason:
    return Reason(
        code="not_repeatable",
        by="execution",
        sentence=f"a failed call can't be repeated, as the graph {effect}",
        node=f"{node.name} ({op_name(node)})",
        source=source_line(node),
        lever="run the part eager from the start with options={'lowerings': ['eager']}",
    )


def beside_collectives(module: GraphModule) -> Reason | None:
    """Why a failed call of a piece of this graph must not be repeated although the piece has no effects.

    It would run eager on this rank alone, beside collectives of all.
    """
    node = next((node for node in module.graph.nodes if _effect(node) == _COMMUNICATES), None)
    return None if node is None else _not_repeatable(node, _COMMUNICATES)


def _drawn_elsewhere(node: Node, part: str) -> str:
    """Why eager must not draw the random numbers again, with generators as they were before the call; None if it may.

    Eager draws what Inductor's calls of its operators draw. Inductor's own numbers follow from a seed; eager draws
    others of the same distribution, which may be seen only where the seed is used a second time: by a backward, which
    makes the numbers again, or by another piece of a cut part.
    """
    name = op_name(node)
    if name.startswith("rngprims."):
        return "draws random numbers from a state of its own"
    if part == "inference":
        return ""
    if name.startswith(SEEDED) and any(_is_seed_from_outside(source) for source in node.all_input_nodes):
        return "makes random numbers anew from a seed"
    if name.startswith(SEEDS) and any(user.op == "output" for user in node.users):
        return "hands on the seed of its random numbers, from which they are made anew elsewhere"
    return ""


def _is_seed_from_outside(node: Node) -> bool:
    while node.op == "call_function" and op_name(node).startswith("prims.inductor_lookup_seed"):
        node = node.all_input_nodes[0]
    return node.op == "placeholder" and str(getattr(fake_value(node), "dtype", "")) == "torch.int64"


def drawing_devices(module: GraphModule) -> tuple[torch.device, ...]:
    """The devices whose default generators a post-autograd graph may draw from."""
    nodes = (node for node in module.graph.nodes if node.op == "call_function" and _effect(node) == _DRAWS)
    leaves = (leaf for node in nodes for leaf in tree_leaves(fake_value(node)))
    return tuple(dict.fromkeys(leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)))


def recorded_as_cudagraph(part: str) -> Reason:
    """Why a part that is replayed as a CUDA graph is not run another way after it raised."""
    return Reason(
        code="not_repeatable",
        by="execution",
        sentence=f"{part} is recorded as a CUDA graph, which owns the memory of its results",
        lever="compile without mode='reduce-overhead'",
    )


def draws_random_numbers(module: GraphModule) -> Node | None:
    """The first node of a graph that draws random numbers, so that another lowering would compute something else."""
    nodes = (node for node in module.graph.nodes if node.op == "call_function")
    return next((node for node in nodes if _effect(node) == _DRAWS), None)


def _effect(node: Node) -> str:
    if node.op != "call_function":
        return ""
    if communicates(node.target):
        return _COMMUNICATES
    if has_effects(node):
        return "has effects beside its results"
    schema = getattr(node.target, "_schema", None)
    if draws_at_random(node):
        return _DRAWS
    if schema is not None and schema.is_mutable:
        return "writes to a tensor in place"
    return ""


@dataclasses.dataclass(eq=False)
class Guard:
    """A boxed callable that steps down to another one when a call raises."""

    call: Boxed  # the current callable
    inputs: Sequence[str]  # names of the inputs, as generated code calls them
    build: Callable[[], Executable]  # builds the next level; called at most once
    context: LoweringContext  # where the executable belongs
    subgraph: str  # its id
    lowering: str  # its lowering
    overwritten: frozenset[str] = frozenset()  # inputs that the code may write to after their last use
    obstacle: Reason | None = None  # why a failed call can't be repeated, if it can't
    # Whether to hold the inputs during a call. Whoever calls a forward graph holds them anyway; a backward frees values
    # saved for it while it runs, and must go on doing so if they are large.
    keep_inputs: bool = True
    # Devices whose generators are put back before a call is repeated; their states are read at each call.
    draws: tuple[torch.device, ...] = ()
    operators: tuple[str, ...] = ()  # the program's own operators that it calls, which must not run twice

    def __post_init__(self) -> None:
        self._lock = new_lock()
        self._next: Executable | None = None
        self.stepped_down = False
        self.differentiated = False

    def around(self, call: Boxed) -> Boxed:
        """A boxed callable that steps down from `call`."""
        self.call = call
        return self.boxed()

    def boxed(self) -> Boxed:
        """The callable: one Python frame more, which does nothing unless a call raises or an input has a tangent."""
        if self.draws and self.obstacle is None:
            generators: list[torch.Generator] = []

            def guarded(inputs: list[Any]) -> Sequence[Any]:
                if carries_tangents(inputs):
                    return self._differentiated(inputs)
                kept = tuple(inputs) if self.keep_inputs else inputs
                if not generators:  # a device may have none before its first use
                    generators[:] = default_generators(self.draws)
                states = GeneratorStates.of(generators)
                try:
                    return self.call(inputs)
                except Exception as error:  # noqa: BLE001 - becomes a reason in the timeline, or is raised
                    return self._step_down(error, kept, states)
        elif self.keep_inputs and self.obstacle is None:

            def guarded(inputs: list[Any]) -> Sequence[Any]:
                if carries_tangents(inputs):
                    return self._differentiated(inputs)
                kept = tuple(inputs)
                try:
                    return self.call(inputs)
                except Exception as error:  # noqa: BLE001 - becomes a reason in the timeline, or is raised
                    return self._step_down(error, kept)
        else:

            def guarded(inputs: list[Any]) -> Sequence[Any]:
                if carries_tangents(inputs):
                    return self._differentiated(inputs)
                try:
                    return self.call(inputs)
                except Exception as error:  # noqa: BLE001 - as above
                    return self._step_down(error, inputs)

        guarded._boxed_call = True  # type: ignore[attr-defined]
        return guarded

    def _differentiated(self, inputs: list[Any]) -> Sequence[Any]:
        """A call with tangents (forward-mode derivatives), made in eager: generated code would drop them silently."""
        built = self._build()
        outputs = built.call(inputs)
        if not self.differentiated:
            self.differentiated = True
            with harmless("what ran"):
                self._record_differentiated(built)
        return outputs

    def _record_differentiated(self, built: Executable) -> None:
        reason = Reason(
            code="forward_mode",
            by=self.lowering,
            sentence="an input had a tangent, of which generated code computes nothing: calls with tangents run eager",
            lever="none is needed; calls without tangents run as they were compiled",
        )
        self._record(built.lowering, reason, attempts=False, ran=built)

    def refuse(self, difference: str) -> None:
        """Have all calls go to eager, as the inputs of the first are not what the code was built for.

        Raises:
            LoweringError: there is no eager graph to go to.
        """
        lever = "report the program to PyTorch, whose capture announced the input; eager takes it as it comes"
        self._leave(
            Reason(
                code="inputs_differ",
                by="execution",
                sentence=f"the code was not built for its inputs: {difference}",
                lever=lever,
            )
        )

    def follow(self, difference: str) -> None:
        """Have all calls go to eager, as those of other ranks do.

        Raises:
            LoweringError: there is no eager graph to go to.
        """
        lever = "give all ranks the same caches, compilers and overrides"
        self._leave(Reason(code="ranks_differ", by="ranks", sentence=difference, lever=lever))

    def _leave(self, reason: Reason) -> None:
        try:
            built = self._build()
        except Exception as error:
            why = f"{reason.sentence}, and eager could not be built: {first_line(error)}"
            raise LoweringError(f"{self._name}: {why}") from error
        with self._lock:
            self.call, self.stepped_down = built.call, True
        self._record(built.lowering, reason, ran=built)

    def _step_down(
        self, error: Exception, inputs: Sequence[Any], states: GeneratorStates | None = None
    ) -> Sequence[Any]:
        if raised_by(error):
            raise error
        values, sentence = None, self._obstacle(error)
        if not sentence:
            values = self._intact(error, inputs)
            sentence = "some of its inputs were freed or overwritten in the call"
        if values is None:
            add_note(error, f"omnicomp: {self._name} raised; nothing else was tried: {sentence}")
            if self.obstacle is not None and self.obstacle.sentence.endswith(_COMMUNICATES):
                explain(self.context.timeline, self.context.graph_id, error)
            raise error
        no_memory = _is_out_of_memory(error)
        if no_memory:
            _free(error)
        if self.context.policy.on_error == "retry" or no_memory:
            if states is not None:
                states.restore()
            try:
                return self._retry(error, list(values))
            except Exception as second:
                second.__cause__ = error
                error = second
                if raised_by(error):
                    raise
                sentence = self._obstacle(error)
                if sentence:
                    add_note(error, f"omnicomp: {self._name} raised twice; nothing else was tried: {sentence}")
                    raise
                if _is_out_of_memory(error):
                    _free(error)
        try:
            built = self._build()
        except Exception as second:
            add_note(error, f"omnicomp: {self._name} raised, and eager could not be built")
            raise error from second
        if states is not None:
            states.restore()
        try:
            outputs = built.call(list(values))
        except Exception as second:
            # The next level raises as well: that is the program's own error, and the executable is kept.
            if no_memory:
                tried = "memory was freed, and it was called once more, and then in eager"
                add_note(second, f"omnicomp: {self._name} ran out of memory; {tried}")
            raise second from error
        with self._lock:
            first, self.call, self.stepped_down = not self.stepped_down, built.call, True
        if first:
            with harmless("why a call raised"):
                self._record(built.lowering, self._reason(error, "a call raised"), ran=built)
        return outputs

    @property
    def _name(self) -> str:
        return f"{self.subgraph} on {self.lowering}"

    def _obstacle(self, error: Exception) -> str:
        """Why a call that raised this must not be repeated; empty if it may be."""
        if isinstance(error, torch.AcceleratorError) or any(sign in str(error) for sign in _DEVICE_LOST):
            return "the device is lost to this process"
        if self.obstacle is None and has_begun(error, self.operators):
            return f"it may have called {', '.join(self.operators)} of the program, which would run twice"
        return str(self.obstacle or "")

    def _intact(self, error: Exception, inputs: Sequence[Any]) -> Sequence[Any] | None:
        """The inputs as they were before the call, or None."""
        live = live_inputs(error, self.inputs)
        if not inputs:
            return [live[name] for name in self.inputs] if len(live) == len(self.inputs) else None
        # Without any variable the code had not begun.
        return inputs if not live or all(name in live for name in self.overwritten) else None

    def _retry(self, error: Exception, inputs: list[Any]) -> Sequence[Any]:
        outputs = self.call(inputs)
        reason = self._reason(error, "a call raised, and did not when it was repeated")
        self._record(self.lowering, reason, attempts=False)
        return outputs

    def _build(self) -> Executable:
        with self._lock:
            if self._next is None:
                self._next = self.build()
            return self._next

    def _record(self, target: str, reason: Reason, *, attempts: bool = True, ran: Executable | None = None) -> None:
        where = self.context.where(self.subgraph)
        record_step_down(
            self.context.timeline, where, self.lowering, target, reason, attempts=attempts, ran=ran and ran.attest()
        )

    def _reason(self, error: Exception, sentence: str) -> Reason:
        return Reason(
            code="call_failed",
            by=self.lowering,
            sentence=f"{sentence}: {first_line(error)}",
            observed=type(error).__name__,
            lever="report the error, or leave the operator out with options={'lowerings': {...}}",
        )


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(s in str(error) for s in _OUT_OF_MEMORY)


def _free(error: Exception) -> None:
    """Free what only a failed call holds: variables of its frames, garbage, and memory that torch keeps for later."""
    traceback.clear_frames(error.__traceback__)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        _ = frame.f_locals  # before Python 3.13 a copy of the variables, brought up to date when it is read
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
