"""Compiled graphs that torch saves: what they are restored from, and the callable that knows it.

Each stage that surrounds a compiled graph has a `State`, which pickles and is restored to the same callable in another
process. A callable whose stages are not all known cannot be saved, and says why.
"""

import abc
import dataclasses
import importlib
import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final

import torch

import omnicomp
from omnicomp import records
from omnicomp._torch.dynamo import control_flow, saving
from omnicomp._torch.inductor import compile_fx
from omnicomp.backend.capture import CapturedGraph, attach_all, of_this_process
from omnicomp.builder.record import replay
from omnicomp.builder.stitched_artefact import restoring
from omnicomp.devices import resolve_device
from omnicomp.errors import OmnicompError, SaveError, first_line
from omnicomp.lowerings import GraphRecord
from omnicomp.lowerings.overrides.registry import registered
from omnicomp.options.digest import package_digest
from omnicomp.options.policy import SPECS, Policy, parse
from omnicomp.passes.repairs import Repair
from omnicomp.runtime.fallback_limit import enforce, notify
from omnicomp.safety.privacy import logger
from omnicomp.timeline import Cache, Capture, Event, Outcome, PassRun, current
from omnicomp.timeline.files import event_from_dict

log = logger("omnicomp")

CACHE: Final = "saved"
_STATE: Final = "_omnicomp_state"


class State(abc.ABC):
    """What a callable is restored from; it pickles."""

    @abc.abstractmethod
    def restore(self, id: str) -> Callable[..., Any]:
        """The callable, in this process."""


def put_state(call: Any, make: Callable[[], State]) -> None:
    """Tell how the state of a function is made; a method has the `saved_state` of its object."""
    setattr(call, _STATE, (call, make))


def carried(inner: Callable[..., Any], outer: Callable[..., Any]) -> Callable[..., Any]:
    """`outer`, which is restored as `inner` is: what it adds is put there by `State.restore`, or not needed there."""
    make = _maker(inner)
    if outer is not inner and make is not None:
        put_state(outer, make)
    return outer


def state_of(call: Callable[..., Any]) -> State:
    """The state of a callable.

    Raises:
        ValueError: it has none; the message says why.
    """
    make = _maker(call)
    if make is None:
        raise ValueError(
            "all of it runs eager, or through a stage that has no saved form; omnicomp.audit() tells why, and "
            "options={'on_error': 'raise'} raises the error"
        )
    return make()


def _maker(call: Any) -> Callable[[], State] | None:
    method = getattr(getattr(call, "__self__", None), "saved_state", None)
    # A wrapper that copied the attributes of what it calls is another function.
    owner, make = getattr(call, _STATE, (None, None))
    return method or (make if owner is call else None)


@records.dataclass(frozen=True, kw_only=True)
class SavedCapture:
    """A captured graph as it is pickled."""

    capture: dict[str, Any]  # its event, in JSON types
    record: GraphRecord  # what artefacts are restored with
    policy: Policy  # the options, without functions of the user's
    passed: frozenset[str]  # the options that the user passed
    device: str  # its type
    training: bool  # whether gradients are computed

    @classmethod
    def of(cls, graph: CapturedGraph) -> "SavedCapture":
        """What is kept of a graph."""
        passed = frozenset(str(key).replace("-", "_") for key in graph.capture.options)
        # Inductor's options are in the code by now; a function among them may not pickle.
        policy = dataclasses.replace(graph.policy, inductor={}, dtype_sample=None, passes=None)
        return cls(
            capture=graph.capture.to_dict(),
            record=graph.record,
            policy=policy,
            passed=passed,
            device=graph.device.type,
            training=graph.training,
        )

    def here(self, id: str) -> CapturedGraph:
        """The graph in this process.

        What does not change code is as the environment of this process asks for, unless the user passed it.
        """
        here = parse(None, None)
        names = [n for n, spec in SPECS.items() if not spec.in_digest and n not in self.passed]
        # Whether calls are verified is known when the graph is saved: only then is there something to compare with.
        own = {name: getattr(here, name) for name in names if name != "verify"}
        capture = event_from_dict(self.capture)
        assert isinstance(capture, Capture)
        device = resolve_device(self.device)
        return CapturedGraph(
            record=dataclasses.replace(self.record, id=id),
            device=device,
            policy=dataclasses.replace(self.policy, **own),
            training=self.training,
            capture=dataclasses.replace(capture, graph=id, **of_this_process(device)),
        )


@records.dataclass(frozen=True, kw_only=True)
class Compiled(State):
    """What AOTAutograd returned, with the code of all parts."""

    graph: SavedCapture  # what it belongs to
    events: tuple[dict[str, Any], ...]  # what the passes did, in JSON types
    bundle: bytes  # its parts
    # Makes the repairs that were in force while it was compiled, as some are of what AOTAutograd puts around the parts.
    traced_under: tuple[Callable[[], AbstractContextManager[None]], ...]

    @classmethod
    def of(
        cls,
        compiled: Callable[..., Any],
        graph: CapturedGraph,
        events: Sequence[Event],
        traced_under: Sequence[Callable[[], AbstractContextManager[None]]],
    ) -> "Compiled":
        """The state of what AOTAutograd returned for a graph behind the passes.

        Raises:
            ValueError: a part can't be saved.
        """
        bundle = saving.bundle(compiled)
        repairs = [make for make in traced_under if isinstance(getattr(make, "__self__", None), Repair)]
        done = tuple(event.to_dict() for event in events)
        return cls(graph=SavedCapture.of(graph), events=done, bundle=bundle, traced_under=tuple(repairs))

    def restore(self, id: str) -> Callable[..., Any]:
        """The function, with the events of its parts in the timeline, and all wrappers around them."""
        graph = self.graph.here(id)
        timeline = current()
        attach_all(timeline, graph.policy)
        timeline.append(graph.capture)
        for event in filter(None, map(event_from_dict, self.events)):
            now = dataclasses.replace(event, graph=id)
            timeline.append(dataclasses.replace(now, seconds=0.0) if isinstance(now, PassRun) else now)

        def restored(compiled: Any, kept: compile_fx.Kept) -> None:
            replay(kept, graph.context(kept.part, {}), compiled, cache=CACHE)

        with ExitStack() as stack:
            for make in self.traced_under:
                stack.enter_context(make())
            stack.enter_context(compile_fx.on_artefact_loaded(restored))
            stack.enter_context(restoring(lambda part: graph.context(part, {}), cache=CACHE))
            compiled = saving.unbundle(self.bundle)
        timeline.append(Outcome(graph=id, state="restored"))
        compiled = enforce(compiled, id, graph.policy)
        notify(id, graph.policy)
        return compiled


class SavedGraph(saving.SerializableCallable):
    """A compiled graph whose bytes torch can ask for."""

    def __init__(self, call: Callable[..., Any], dumps: Callable[[], bytes]) -> None:
        """Wrap a function of the graph's inputs."""
        self._call, self._dumps = call, dumps

    def __call__(self, *args: Any) -> Any:
        """Run the graph."""
        return self._call(*args)

    @classmethod
    def serialize_compile_artifacts(cls, fn: "SavedGraph") -> bytes:
        """The bytes of the graph.

        Raises:
            SaveError: it can't be saved.
        """
        return fn._dumps()

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> "SavedGraph":
        """The graph of bytes that `serialize_compile_artifacts` made.

        Raises:
            SaveError: another omnicomp or torch made them, or an override is missing here.
        """
        return cls(_restored(_Content.of(data)), lambda: data)


class _Artefact(saving.BackendCacheArtifact[Any]):
    """A compiled graph in Dynamo's cache; one that does not fit this process is not unpickled, which is a miss."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _artefact, (self.key, self.content)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Artefact":
        return self

    def after_deserialization(self) -> Callable[..., Any]:
        """The function of the graph's inputs."""
        saving.fresh_names()
        return _restored(_Content.of(self.content))


def _artefact(key: str, content: bytes) -> _Artefact:
    _Content.of(content)
    return _Artefact(key, content)


def hand_over(call: Callable[..., Any], wish: saving.Wish | None, graph: str = "") -> Callable[..., Any]:
    """What Dynamo gets of a compiled graph, which torch may save."""
    if wish is None:
        return call
    if not wish.key:
        return SavedGraph(call, lambda: _dumps(call, graph))
    try:
        saving.record(_Artefact(wish.key, _dumps(call, graph)))
    except SaveError as error:
        log.warning("omni: %s", error)
        current().append(Cache(graph=graph, part="", cache=CACHE, verdict="bypass", note=str(error)))
    return call


@records.dataclass(frozen=True)
class _Content:
    """What is saved of a graph."""

    versions: tuple[str, str, str]  # of omnicomp with its sources, and of torch
    # The overrides that it calls, by name, each with the module that declares it.
    overrides: tuple[tuple[str, str], ...]
    state: bytes  # the pickled state

    @classmethod
    def of(cls, data: bytes) -> "_Content":
        """Read what was saved, and see that this process can run it.

        Raises:
            SaveError: it can't.
        """
        content = cls(*pickle.loads(data))
        if content.versions != _versions():
            theirs, ours = (f"omnicomp {v[0]} and torch {v[2]}" for v in (content.versions, _versions()))
            also = " with other sources" if theirs == ours else ""
            raise SaveError(f"the function was saved by {theirs}{also}, and this process has {ours}: save it again")
        for name, module in content.overrides:
            _declare(name, module)
        return content


def _declare(name: str, module: str) -> None:
    """Import the module of an override, unless it is registered."""
    if any(item.name == name for item in registered()):
        return
    why = ""
    if module != "__main__":
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - becomes part of the error
            why = f" ({first_line(error)})"
    if not any(item.name == name for item in registered()):
        raise SaveError(
            f"the saved function calls the override {name!r} of the module {module!r}, which this process does not "
            f"have{why}: import what declares it before the function is loaded"
        )


def _versions() -> tuple[str, str, str]:
    return omnicomp.__version__, package_digest(), torch.__version__


def _dumps(call: Callable[..., Any], graph: str) -> bytes:
    try:
        state = pickle.dumps(state_of(call))
        return pickle.dumps((_versions(), _overrides_in(state), state))
    except OmnicompError:
        raise
    except Exception as error:
        why = str(error) if isinstance(error, ValueError) else first_line(error)
        raise SaveError(f"{graph or 'the graph'} can't be saved: {why}") from error


def _overrides_in(state: bytes) -> tuple[tuple[str, str], ...]:
    """The overrides whose operators generated code or graphs of a state name, but for those that come with omnicomp."""
    found: list[tuple[str, str]] = []
    for item in registered():
        names = [
            f"{op.namespace}{between}{op._schema.name.split('::')[-1]}"
            for op in item.operators
            for between in (".", "::")
        ]
        if any(name.encode() in state for name in names):
            found.append((item.name, item.function.__module__))
    return tuple(found)


def _restored(content: _Content) -> Callable[..., Any]:
    with control_flow.compile_lock, control_flow.unseen_by_hooks():
        state: State = pickle.loads(content.state)
        return state.restore(current().next_graph())
