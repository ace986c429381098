"""The option `background`: a graph runs eager while another process builds it.

`Behind` is what Dynamo gets. It calls the Dynamo graph itself, with eager's autograd, until the worker has answered;
from a later call on it calls the compiled graph. A forward that ran eager has eager's backward, so that both are
exchanged together. A worker returns the state that torch's own ways to save a graph would store (`backend/saved.py`);
a thread restores it, so that no call waits for that.
"""

import contextlib
import dataclasses
import itertools
import os
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from omnicomp._torch.autograd.compiled_function import in_backward, on_function, saves_are_hooked
from omnicomp._torch.dynamo import control_flow, late_compile, overlaps, samples, shipping
from omnicomp._torch.inductor import compile_fx
from omnicomp._torch.parameters import static_dynamo_input
from omnicomp._torch.repairs.recomputed_draws import eager_calls
from omnicomp._torch.user_code import modules_of_operators
from omnicomp.backend.autograd import eager_gradients
from omnicomp.backend.capture import CapturedGraph
from omnicomp.backend.earlier import Earlier, earlier_of
from omnicomp.backend.retreat import graph_compiler, record_eager
from omnicomp.backend.saved import State
from omnicomp.backend.select.candidates import INDUCTORS
from omnicomp.backend.shared_memory import checked
from omnicomp.backend.variants import MOST_VARIANTS, Case, SavedVariants, Variant, Variants, variant_name, within_sizes
from omnicomp.backend.worker_pool import forking, improving, pool
from omnicomp.errors import first_line
from omnicomp.lowerings import GraphRecord
from omnicomp.lowerings.overrides import registry as overrides
from omnicomp.options.policy import LOWERINGS, Policy, engines_of
from omnicomp.runtime.fallback_limit import notify
from omnicomp.safety.forks import new_lock
from omnicomp.timeline import Background, Candidate, Event, Option, Ran, Reason, Retreat, Timeline, current
from omnicomp.timeline.files import event_from_dict
from omnicomp.timeline.recorder import Sink, drafting

_PATIENCE: Final = 64
"""After so many calls a graph is exchanged though a backward of an earlier call is still to come."""
_HOT: Final = 16
"""After so many calls of a compiled graph a better one is looked for."""
_SWITCH_SECONDS: Final = 1e-4
_AUTOTUNING: Final = (
    "max_autotune",
    "max_autotune_pointwise",
    "max_autotune_gemm",
    "coordinate_descent_tuning",
)
"""Inductor's options that make it try what it generates."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What a worker is told beside the graph."""

    record: GraphRecord  # of the graph
    capture: dict[str, Any]  # its event, in JSON types
    policy: Policy  # the options
    device: str  # its type
    training: bool  # whether gradients are computed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wish:
    """What a worker is asked for."""

    graph: bytes  # with its task, as `shipping.pack` made it
    values: bytes = b""  # inputs to look at and to measure on, as `samples.packed` made them; may be empty
    # Options that are otherwise in this build.
    policy: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    variant: str = ""  # the name of the variant that it is for; empty for the graph as Dynamo passed it
    # Of the call that it is for, by symbol; empty for those that Dynamo traced with.
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What a worker returns."""

    events: tuple[dict[str, Any], ...]  # what was recorded, in JSON types
    state: State | None = None  # the compiled graph; None if there is none
    sizes: late_compile.SizeGuards | None = None  # the sizes that it is right for
    error: str = ""  # why there is no compiled graph
    kept_here: bool = False  # whether there is one that can't leave the worker


def build_behind(
    gm: GraphModule,
    plain: GraphModule,
    graph: CapturedGraph,
    inputs: Sequence[Any],
    build: Callable[[Sequence[Any]], Callable[..., Any]],
) -> Callable[..., Any] | None:
    """Have a graph built by another process; called while Dynamo compiles it.

    Args:
        gm: the graph, which is not changed.
        plain: a copy of it, which calls run until then.
        graph: what it belongs to.
        inputs: what Dynamo passed.
        build: builds it in this process, given fake inputs; called if the other one can't hand its result over.

    Returns:
        A function of the graph's inputs; None if the graph has to be built here, with its reason in the timeline.
    """
    sharing = overlaps.sharing_of(gm)
    try:
        why = _obstacle(graph, sharing)
        if why:
            raise shipping.ShippingError(why)
        scene = late_compile.keep_scene(inputs)
        policy = dataclasses.replace(graph.policy, progress=False, summary=False, timeline=None, background=False)
        task = Task(
            record=graph.record,
            capture=graph.capture.to_dict(),
            policy=policy,
            device=graph.device.type,
            training=graph.training,
        )
        data = shipping.pack(gm, scene, task, _modules(gm, policy))
        static = [static_dynamo_input(node) for node in gm.graph.find_nodes(op="placeholder")]
        seen = samples.packed(inputs, static, whole=False) if policy.speculate else b""
    except shipping.ShippingError as error:
        reason = _in_foreground(str(error))
        current().append(Background(graph=graph.id, state="foreground", reason=reason))
        current().append(_ineffective(graph.id, reason))
        return None

    meanwhile = eager_calls(plain)

    def wrapped(
        call: Callable[..., Any],
        sizes: late_compile.SizeGuards | None,
        other: Callable[..., Any] | None = None,
        eager: Callable[..., Any] = meanwhile,
    ) -> Callable[..., Any]:
        if sizes is not None and sizes.holds is not None:
            call = within_sizes(call, eager, sizes, graph) if other is None else _where(sizes.holds, call, other)
        return checked(call, plain, sharing, graph)

    def build_here() -> Callable[..., Any]:
        with control_flow.compile_lock, control_flow.unseen_by_hooks():
            compiled, sizes = late_compile.compile_late(scene, build)
        return wrapped(compiled, sizes)

    first, better = _tiers(policy, graph.device.type, training=graph.training)
    wish = Wish(graph=data, values=seen, policy=first)
    behind = Behind(graph, meanwhile, wish, static, shipping.symbols_of(scene.inputs), better, wrapped, build_here)
    behind.start(earlier_of(plain, graph, static, behind))
    return behind.__call__


def _obstacle(graph: CapturedGraph, sharing: overlaps.Sharing) -> str:
    """Why a graph has to be built in this process; empty if it need not."""
    policy = graph.policy
    if os.name != "posix" or not sys.executable:
        return "this system has no process groups, or no Python to start"
    if not late_compile.is_tracing():
        return "it is compiled outside of Dynamo"
    if sharing.returned:
        return "it writes to inputs that share memory, and returns views of them"
    if engines := engines_of(policy):
        return f"the engine {engines[0]!r} gets the weights of this process"
    settings = set(policy.candidates or INDUCTORS) & set(INDUCTORS) if graph.device.type == "cpu" else ()
    if policy.choose == "measure" and not settings:
        return "the candidates of lowerings='measure' build in weights of this process"
    if policy.dtype_error is not None:
        return "the option dtype_error measures on the inputs of a call"
    if policy.fallback is not None or policy.on_error == "raise":
        return "the options ask for errors while the graph is compiled"
    if compile_fx.records_cudagraphs(policy.inductor) or (policy.records and graph.device.type == "cuda"):
        return "CUDA graphs are recorded in this process"
    return ""


def _tiers(policy: Policy, device: str, *, training: bool) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The options that are otherwise in the first build, and in one that is made once the graph is known to be hot.

    What takes long for speed's sake is left to the second: autotuning, and trying ways to compile a graph.
    """
    first: dict[str, Any] = {}
    better: dict[str, Any] = {}
    if any(policy.inductor.get(name) for name in _AUTOTUNING):
        first["inductor"] = {name: value for name, value in policy.inductor.items() if name not in _AUTOTUNING}
        better["inductor"] = dict(policy.inductor)
    if not training and device == "cpu":
        if policy.choose == "measure":
            first["choose"], better["choose"] = "off", "measure"
        elif policy.choose == "off" and policy.lowerings == LOWERINGS and not policy.rules:
            better |= {"choose": "measure", "candidates": INDUCTORS}
    return first, better or None


def _where(holds: Callable[[Sequence[Any]], bool], call: Callable[..., Any], other: Callable[..., Any]) -> Any:
    return lambda *args: (call if holds(args) else other)(*args)


def _modules(gm: GraphModule, policy: Policy) -> tuple[str, ...]:
    """The modules that declare the overrides and operators of a graph.

    Raises:
        ShippingError: one is declared in the program itself.
    """
    found = {
        item.name: item.function.__module__ for item in overrides.enabled(policy.disable_overrides, policy.overrides)
    }
    found.update(modules_of_operators(gm))
    for name, module in found.items():
        if module == "__main__":
            raise shipping.ShippingError(f"{name} is declared in the program itself, which no other process imports")
    return tuple(sorted(set(found.values())))


def _recording() -> bool:
    """Whether the calls are being recorded as a CUDA graph, in which nothing is read or exchanged."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _in_foreground(why: str) -> Reason:
    return Reason(
        code="not_in_background",
        by="background",
        sentence=f"the program waits for the graph, as it can't be built by another process: {why}",
        lever="leave the option background out for this model",
    )


def _ineffective(graph: str, reason: Reason) -> Option:
    return Option(graph=graph, key="background", requested="True", effective="False", reason=reason)


class Behind:
    """The callable that Dynamo gets: the graph itself, and from some call on what was built of it."""

    def __init__(
        self,
        graph: CapturedGraph,
        eager: Callable[..., Any],
        wish: Wish,
        static: Sequence[bool],
        symbols: Sequence[str],
        better: Mapping[str, Any] | None,
        wrapped: Callable[..., Callable[..., Any]],
        build_here: Callable[[], Callable[..., Any]],
    ) -> None:
        """Set up the graph; `start` has it built.

        Args:
            graph: what it belongs to.
            eager: the graph.
            wish: what a worker gets.
            static: which inputs are weights.
            symbols: the names of the inputs that are sizes.
            better: options of a better build; None if there is to be none.
            wrapped: puts around a compiled graph what its calls need: conditions on sizes, and what runs elsewhere.
            build_here: compiles it in this process.
        """
        self._graph, self._eager, self._wrapped, self._build_here = graph, eager, wrapped, build_here
        self._wish, self._static, self._better, self._timeline = wish, static, better, current()
        self._symbols, self._resized = symbols, 0
        self._busy = self._partial = False  # another build is under way; what was built is for some sizes only
        self._asked: set[Case] = set()
        self._variants: Variants | None = None
        self._lock = new_lock()
        self._begun, self._process = time.monotonic(), os.getpid()
        self._calls = self._refused = 0
        self._outstanding: set[_Backward] = set()
        # The first is what runs. Where it is None, the second makes it, once a build is over; until then, calls go to
        # the third, or eager.
        self._target: Callable[..., Any] | None = None
        self._exchange: Callable[[], Callable[..., Any]] | None = None
        self._good: Callable[..., Any] | None = None
        self._earlier: Sequence[Earlier] = ()
        self._lends = False

    def start(self, earlier: Sequence[Earlier]) -> None:
        """Have the graph built; until it is, calls go to an earlier graph that is for their sizes, or eager."""
        self._earlier = earlier
        self._record("started")
        self._submit()

    def _submit(self) -> None:
        with _changed:
            _building.add(self)
        pool().submit(_Order(self, self._wish, Behind.take, Behind.give_up))

    def __call__(self, *args: Any) -> Any:
        """Run the graph."""
        target = self._target
        if target is None:
            target = self._meanwhile if self._exchange is None or not self._may_exchange() else self._exchanged()
        return target(*args)

    def _meanwhile(self, *args: Any) -> Any:
        call = self._good or self._lent(args)
        if call is None:
            return self._eagerly(*args)
        results = call(*args)
        if self._graph.training:
            self._follow(results)
        return results

    def _lent(self, args: Sequence[Any]) -> Callable[..., Any] | None:
        """What runs an earlier graph that is for the sizes of a call."""
        found = next(filter(None, (each.taking(args) for each in self._earlier)), None)
        if found is not None and not self._lends:
            self._lends = True
            self._record("earlier")
        return found

    def _eagerly(self, *args: Any) -> Any:
        if self._process != os.getpid():  # a forked child has no worker yet
            self._process = os.getpid()
            self._submit()
        results = self._eager(*args)
        self._calls += 1
        if self._calls.bit_count() == 1:
            self._record("eager")
        if self._graph.training:
            self._follow(results)
        return results

    def _follow(self, results: Any) -> None:
        """Know when the backward of a call has begun, or can't come any more."""
        for value in tree_leaves(results):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                backward = _Backward(saves_are_hooked())
                self._outstanding.add(backward)
                forget = weakref.WeakMethod(self._forget)
                value.grad_fn.register_prehook(_Watch(backward, forget))
                return

    def _forget(self, backward: "_Backward") -> None:
        self._outstanding.discard(backward)

    def _may_exchange(self) -> bool:
        """Whether what was built may take over: no backward is under way, nor still to come from an eager forward.

        Activation checkpointing calls a graph again in the backward, and counts what is saved. A backward that never
        comes is not waited for, unless the program has hooks for saved tensors.
        """
        if in_backward() or _recording():
            return False
        left = self._outstanding.copy()  # at once: the garbage collector may forget one at any moment
        self._refused += bool(left)
        return not left or (self._refused > _PATIENCE and not any(each.hooked for each in left))

    def _exchanged(self) -> Callable[..., Any]:
        with self._lock:
            exchange, self._exchange = self._exchange, None
            if exchange is not None:
                try:
                    self._good = exchange()
                except BaseException:  # an interrupt, while the graph is built here; the next call goes on
                    self._exchange = exchange
                    raise
                self._go_on(self._good)
                self._outstanding.clear()
                self._refused = 0
            return self._target or self._meanwhile

    def _go_on(self, call: Callable[..., Any] | None) -> None:
        self._target = call if call is None or self._better is None else self._warming(call)

    def _warming(self, call: Callable[..., Any]) -> Callable[..., Any] | None:
        """What runs until a better build is asked for: the call, counted."""
        count = itertools.count(1)

        def counted(*args: Any) -> Any:
            if next(count) >= _HOT and self._begin(better=True):
                # In training, what is called until the exchange is followed, as a backward must be of one kind.
                self._target = None if self._graph.training else call
                self._improve(args)
            return call(*args)

        return counted

    def _begin(self, *, better: bool = False) -> bool:
        """Whether a further build may be ordered; there is one at a time, as each is put around what runs."""
        with self._lock:
            free = not self._busy and self._exchange is None and not _recording()
            begun = free and (self._better is not None or not better)
            self._busy = self._busy or begun
        return begun

    def _resize(self, *args: Any) -> Any:
        """A call of sizes that no build is for: it runs eager, and a build for them is ordered, a few times."""
        if self._resized + 1 < MOST_VARIANTS and self._begin():
            self._resized += 1
            sizes = {name: value for name, value in zip(self._symbols, args, strict=True) if name}
            values = samples.packed(args, self._static, whole=False) if self._wish.values else b""
            wish = dataclasses.replace(self._wish, values=values, sizes=sizes, variant=f"sizes{self._resized}")
            with _changed:
                _building.add(self)
            # What is called until the exchange is followed in training, as a backward must be of one kind.
            self._target = None
            pool().submit(_Order(self, wish, Behind._take_resized, Behind._keep))
        return self._eager(*args)

    def _take_resized(self, reply: bytes) -> None:
        try:
            with self._restoring():
                answer: Answer = pickle.loads(reply)
                if answer.state is None:
                    raise ValueError(answer.error)
                for event in filter(None, map(event_from_dict, answer.events)):
                    self._timeline.append(event)
                restored = self._restored(answer.state, f"{self._graph.id}:sizes{self._resized}")
                call = self._wrapped(restored, answer.sizes, self._good)
        except Exception as error:  # noqa: BLE001 - becomes the reason why these sizes stay eager
            self._keep(f"what was built can't be loaded: {first_line(error)}")
            return
        self._exchange = lambda: self._swapped(call, "swapped")
        self._over()

    def _improve(self, args: Sequence[Any]) -> None:
        """Have a better build made, for what a call brings."""
        assert self._better is not None
        values = samples.packed(args, self._static, whole=True) if "choose" in self._better else self._wish.values
        with _changed:
            _building.add(self)
        self._record("improving")
        wish = dataclasses.replace(self._wish, values=values, policy=self._better)
        self._better = None
        improving().submit(_Order(self, wish, Behind._take_better, Behind._keep))

    def _take_better(self, reply: bytes) -> None:
        try:
            with self._restoring():
                call = self._read_better(pickle.loads(reply))
        except Exception as error:  # noqa: BLE001 - becomes the reason why the other build stays
            self._keep(f"what was built can't be loaded: {first_line(error)}")
            return
        if call is None:
            self._keep("")
            return
        self._exchange = lambda: self._swapped(call, "improved")
        self._target = None
        self._over()

    def _read_better(self, answer: Answer) -> Callable[..., Any] | None:
        """The better build; None if none is better."""
        events = [event for event in map(event_from_dict, answer.events) if event is not None]
        tried = [event for event in events if isinstance(event, Candidate)]
        if answer.state is None:
            raise ValueError(answer.error)
        better = any(each.selected and each.candidate != INDUCTORS[0] for each in tried) or not tried
        for event in events if better else tried:
            if isinstance(event, Candidate) or getattr(event, "part", ""):  # what passes did is known
                self._timeline.append(event)
        if not better:
            return None
        return self._wrapped(self._restored(answer.state), answer.sizes, self._good)

    def _keep(self, why: str) -> None:
        """Leave the graph as it is."""
        reason = Reason(
            code="build_failed",
            by=graph_compiler(self._graph),
            sentence=f"no further build could be made in the background: {why}",
            lever="leave the option background out to see what the build does in the program itself",
        )
        self._record("kept", reason if why else None)
        if self._target is None:
            self._go_on(self._good)
        self._over()

    def _over(self) -> None:
        self._busy = False
        with _changed:
            _building.discard(self)
            _changed.notify_all()

    def _vary(self, case: Case, args: Sequence[Any]) -> None:
        """Have a variant built for masks of other classes, as a call brings them."""
        with self._lock:
            number = len(self._asked) + 2
            if case in self._asked or number > MOST_VARIANTS:
                return
            self._asked.add(case)
        name = variant_name(number)
        wish = dataclasses.replace(self._wish, values=samples.packed(args, self._static, whole=False), variant=name)
        order = _Order(self, wish, lambda behind, reply: behind.take_variant(case, name, reply), Behind.leave_general)
        with _changed:
            _building.add(self)
        pool().submit(order)

    def take(self, reply: bytes) -> None:
        """Restore what a worker returned; the next call may run it."""
        try:
            with self._restoring():
                exchange = self._read(pickle.loads(reply))
        except Exception as error:  # noqa: BLE001 - becomes the reason why the graph stays eager
            self.give_up(f"what was built can't be loaded: {first_line(error)}")
        else:
            self._end(exchange)

    def _read(self, answer: Answer) -> Callable[[], Callable[..., Any]]:
        events = [event for event in map(event_from_dict, answer.events) if event is not None]
        for event in events:
            self._timeline.append(event)
        if answer.state is None:
            return self._failing(answer, events)
        restored = self._restored(answer.state)
        variants = getattr(restored, "__self__", None)
        self._partial = answer.sizes is not None and answer.sizes.holds is not None
        if isinstance(variants, Variants) and not self._partial:
            self._variants = variants
            variants.on_new_case(self._vary)
        eager, resize = self._eager, weakref.WeakMethod(self._resize)  # what is called keeps no caller alive
        call = self._wrapped(restored, answer.sizes, eager=lambda *args: (resize() or eager)(*args))
        return lambda: self._swapped(call, "swapped")

    def give_up(self, why: str) -> None:
        """Leave the graph eager."""
        self._end(self._failing(Answer(events=(), error=why), ()))

    def _end(self, exchange: Callable[[], Callable[..., Any]]) -> None:
        if self._better is None and self._variants is None and not self._partial:
            self._wish = Wish(graph=b"")
        self._exchange = exchange
        self._over()

    @contextlib.contextmanager
    def _restoring(self) -> Generator[None]:
        """Read what was built, while calls go on.

        Each of their operators gives the interpreter away. It is to get it back at once, not after the five
        milliseconds that Python lets a thread have.
        """
        with control_flow.compile_lock, control_flow.unseen_by_hooks(), forking:
            before = sys.getswitchinterval()
            sys.setswitchinterval(min(before, _SWITCH_SECONDS))
            try:
                yield
            finally:
                sys.setswitchinterval(before)

    def _restored(self, state: State, id: str = "") -> Callable[..., Any]:
        relay = _Relay(self._timeline)
        with drafting(relay), on_function(eager_gradients(self._graph)):
            compiled = state.restore(id or self._graph.id)
        relay.open = True
        notify(self._graph.id, self._graph.policy)
        return compiled

    def _swapped(self, call: Callable[..., Any], state: str) -> Callable[..., Any]:
        self._record(state)
        return call

    def take_variant(self, case: Case, name: str, reply: bytes) -> None:
        """Restore a variant that was built for other masks."""
        assert self._variants is not None
        id = f"{self._graph.id}:{name}"
        try:
            with self._restoring():
                answer: Answer = pickle.loads(reply)
                state = answer.state
                found = dict(state.assumed).get(case) if isinstance(state, SavedVariants) else None
                if found is None or (answer.sizes is not None and answer.sizes.holds is not None):
                    why = answer.error or "the build is not one for the masks of the call"
                    raise ValueError(why)
                for event in filter(None, map(event_from_dict, answer.events)):
                    if event.graph == id:
                        self._timeline.append(event)
                call = self._restored(found, id)
                self._variants.add(case, Variant(name=name, graph=id, build=None, call=call))
        except Exception as error:  # noqa: BLE001 - becomes the reason why calls go to the general variant
            self.leave_general(first_line(error))
        else:
            self._over()

    def leave_general(self, why: str) -> None:
        """Leave masks of other classes to the general variant."""
        reason = Reason(
            code="build_failed",
            by="speculation",
            sentence=f"no variant was built in the background for other masks, which the general one is for: {why}",
            lever="leave the option background out to see what the build does in the program itself",
        )
        self._record("kept", reason)
        self._over()

    def _failing(self, answer: Answer, events: Sequence[Event]) -> Callable[[], Callable[..., Any]]:
        def build_here() -> Callable[..., Any]:
            reason = _in_foreground(answer.error)
            self._record("foreground", reason)
            self._timeline.append(_ineffective(self._graph.id, reason))
            try:
                return self._build_here()
            except Exception as error:  # noqa: BLE001 - becomes the reason why the graph stays eager
                return stay_eager(first_line(error))

        def stay_eager(why: str = answer.error) -> Callable[..., Any]:
            reason = Reason(
                code="build_failed",
                by=graph_compiler(self._graph),
                sentence=f"the graph runs eager, as its build in the background failed: {why}",
                lever="leave the option background out to see what the build does in the program itself",
            )
            self._record("failed", reason)
            id = self._graph.id
            if any(isinstance(event, Retreat) and event.subgraph == id for event in events):
                evidence = "torch.fx.GraphModule"
                self._timeline.append(Ran(graph=id, part="", subgraph=id, lowering="eager", evidence=evidence))
            else:
                record_eager(id, graph_compiler(self._graph), reason)()
            return self._eager

        self._better = None
        return build_here if answer.kept_here else stay_eager

    def _record(self, state: str, reason: Reason | None = None) -> None:
        seconds = time.monotonic() - self._begun
        self._timeline.append(
            Background(graph=self._graph.id, state=state, calls=self._calls, seconds=seconds, reason=reason)
        )


class _Backward:
    """The backward of a call that ran eager, which is still to come."""

    def __init__(self, hooked: bool) -> None:
        self.hooked = hooked


class _Watch:
    """Hook of a node of autograd's: it forgets the backward once that begins, or once the node is gone."""

    def __init__(self, backward: _Backward, forget: Callable[[], Callable[[_Backward], None] | None]) -> None:
        self._backward, self._forget = backward, forget

    def __call__(self, gradients: Any) -> None:
        self.__del__()

    def __del__(self) -> None:
        forget = self._forget()
        if forget is not None:
            forget(self._backward)


class _Order:
    """A build of a graph in the pool; it does not keep the graph alive."""

    def __init__(
        self,
        behind: Behind,
        wish: Wish,
        take: Callable[[Behind, bytes], None],
        leave: Callable[[Behind, str], None],
    ) -> None:
        self._behind, self.data = weakref.ref(behind), pickle.dumps(wish)
        self._take, self._leave = take, leave

    def is_wanted(self) -> bool:
        """Whether the program still has the graph; who waits for its build is told if not."""
        wanted = self._behind() is not None
        if not wanted:
            with _changed:
                _changed.notify_all()
        return wanted

    def done(self, reply: bytes) -> None:
        """Restore it."""
        behind = self._behind()
        if behind is not None:
            self._take(behind, reply)
        else:
            self.is_wanted()

    def failed(self, why: str) -> None:
        """Leave it eager."""
        behind = self._behind()
        if behind is not None:
            self._leave(behind, why)


class _Relay(Timeline):
    """The timeline of a graph that is restored: the worker recorded its building, so that only calls are passed on."""

    def __init__(self, target: Timeline) -> None:
        super().__init__()
        self._target, self.open = target, False

    def append(self, event: Event) -> Event:
        return self._target.append(event) if self.open else event

    def has_sink(self, key: str) -> bool:
        return True

    def add_sink(self, key: str, sink: Sink) -> None:
        with contextlib.suppress(OSError):
            sink.close()


_changed = threading.Condition()
_building: "weakref.WeakSet[Behind]" = weakref.WeakSet()


def _after_fork() -> None:
    # A child has nothing under way before its first call of a graph.
    global _changed, _building
    _changed, _building = threading.Condition(), weakref.WeakSet()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def wait(timeout: float | None = None) -> bool:
    """Wait until nothing is built in the background any more; the next call of each graph may run what was built.

    Args:
        timeout: seconds to wait at most; None waits as long as it takes.

    Returns:
        Whether all builds are over.
    """
    with _changed:
        return _changed.wait_for(lambda: not _building, timeout)
