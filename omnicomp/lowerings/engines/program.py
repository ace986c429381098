"""A subgraph on an engine: built for the sizes and weights of a call, and built again when they change.

Weights are built into an executable where a change of theirs would be seen (`omnicomp.weights.baked`). When one
changes the
executable is built again, a few times; weights that go on changing become inputs. Symbolic sizes are fixed to
those of a call, and the executables of the last few of them are cached.
"""

import dataclasses
import gc
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import torch
from torch.fx import GraphModule, Node

from omnicomp._torch.autograd.decompose import decomposed
from omnicomp._torch.fx import copy_module
from omnicomp._torch.inductor.own_context import apart, is_symbolic, with_fixed_sizes
from omnicomp.analysis.hashes import exact_hash
from omnicomp.devices import resolve_device
from omnicomp.errors import EngineError
from omnicomp.lowerings.base import Executable, LoweringContext, Support
from omnicomp.lowerings.eager import eager_executable, prepare
from omnicomp.lowerings.engines.base import Engine, EngineExecutable, RunOptions, Session
from omnicomp.lowerings.engines.store import key_of, store
from omnicomp.lowerings.engines.subgraph import Subgraph, with_plain_sizes
from omnicomp.options.digest import package_digest
from omnicomp.safety.forks import new_lock
from omnicomp.timeline import Reason
from omnicomp.timeline.recorder import record_step_down
from omnicomp.weights.baked import Constants, fixable


class _Process:
    """Native engines that this process has built with, and those whose threads it lost as it was forked."""

    used: ClassVar[set[str]] = set()
    lost: ClassVar[frozenset[str]] = frozenset()


def _forked() -> None:
    _Process.lost = frozenset(_Process.used)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


# How often an executable is built again for changed weights. Weights that change more often are being trained.
_REBUILDS: Final = 3
# Milliseconds to wait for another thread, which makes a session, to let go of a weight's memory.
_PATIENCE: Final = 20
# Of one subgraph: how many sets of weights are built in at a time, as in a model of equal layers compiled one by one.
_SETS: Final = 64


@dataclasses.dataclass
class EngineLowering:
    """The lowering of an engine: what the builder calls."""

    engine: Engine
    name: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.name = self.engine.name

    def supports(self, node: Node, context: LoweringContext) -> Support:
        """Whether the engine takes a node, before anything is built: None, or why not."""
        return self.engine.supports(node, context)

    def accepts(self, nodes: Sequence[Node], context: LoweringContext) -> Support:
        """Whether the engine takes neighbouring nodes as one subgraph, all of which it takes: None, or why not."""
        sentence = self.engine.clustering_for(context).refusal(nodes)
        return Reason(code="cluster_refused", by=self.name, sentence=sentence) if sentence else None

    def lower(self, module: GraphModule, inputs: Sequence[Any], context: LoweringContext) -> Executable:
        """Compile a subgraph for the weights of the call that is being compiled for, if they are known."""
        layouts, operators = prepare(copy_module(module))  # what it changes is for eager alone
        program = Program(self.engine, module, inputs, context)
        program.build()
        built = eager_executable(program, layouts, operators)
        return dataclasses.replace(
            built, lowering=self.name, attest=program.attest, workspace_bytes=program.workspace_bytes
        )


@dataclasses.dataclass(eq=False)
class _Built:
    """What was built for one class of sizes and one set of weights."""

    executable: EngineExecutable
    options: RunOptions
    constants: Constants | None
    source: str
    device: torch.device
    positions: tuple[int, ...]
    warm: bool = False
    local: threading.local = dataclasses.field(default_factory=threading.local)

    def session(self) -> Session:
        found: Session | None = getattr(self.local, "session", None)
        if found is not None:
            return found
        # What it keeps must not become of the inference mode, say, that the caller is in now.
        made: Session = apart(lambda: self.executable.session_with(self.options))
        if self.options.wait:
            made = _waiting(made, self.device)
        self.local.session = made
        return made


class Program:
    """The callable of one subgraph: takes the list of its inputs, which it clears."""

    _boxed_call = True

    def __init__(self, engine: Engine, module: GraphModule, inputs: Sequence[Any], context: LoweringContext) -> None:
        """Set up; nothing is built yet."""
        self._engine, self._module, self._fakes, self._context = engine, module, list(inputs), context
        self._clustering, self._run_options = engine.configured(context.policy.engines.get(engine.name, {}))
        self._symbolic = is_symbolic(self._fakes)
        self._fixes = self._symbolic and self._clustering.dynamic == "classes"
        names = [str(node.target) for node in module.graph.find_nodes(op="placeholder")]
        known = context.weights if engine.bakes and context.part == "inference" else {}
        self._weights = [index for index, name in enumerate(names) if name in known]
        self._values = {index: known[names[index]] for index in self._weights}
        tensors = [value for value in self._fakes if isinstance(value, torch.Tensor)]
        self._grad = context.part != "inference" or any(value.requires_grad for value in tensors)
        self._complex = any(value.is_complex() or value.is_neg() for value in tensors)
        self._built: OrderedDict[tuple[Any, ...], _Built] = OrderedDict()
        self._rebuilt = 0
        self._lock = new_lock()
        self._last: _Built | None = None

    def build(self) -> None:
        """Build for the sizes and weights that are being compiled for; with symbolic sizes, at the first call.

        Raises:
            Exception: what the engine raises.
        """
        if self._fixes:
            return
        weights = {index: value for index, reference in self._values.items() if (value := reference()) is not None}
        self._values = {}
        if len(weights) < len(self._weights) or not _all_fixable(tuple(weights.values())):
            self._weights = [index for index in self._weights if index in weights and fixable(weights[index])]
        self._build((), [weights.get(index) for index in range(len(self._fakes))])

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """Run; what has to be built for these sizes or weights is built first.

        Raises:
            Exception: what the engine raises, in building or in running.
        """
        if _Process.lost:
            self._survived()
        built = self._last
        if built is None or self._fixes or (built.constants is not None and not self._holds(built, inputs)):
            built = self._find(inputs)
        arguments = self._arguments(inputs, built)
        inputs.clear()
        if built.warm:
            return built.session()(arguments)
        outputs = built.session()(arguments)
        if built.constants is not None:
            built.constants.built()  # a first call may make more references to the weights
        built.warm = True
        return outputs

    def _survived(self) -> None:
        if self._engine.name in _Process.lost:
            raise EngineError(f"this process was forked from one in which {self._engine.name} had run: it would hang")

    @property
    def workspace_bytes(self) -> int:
        """Memory that the executables hold between calls."""
        return sum(built.executable.workspace_bytes for built in self._built.values())

    def attest(self) -> tuple[str, dict[str, int]]:
        """Evidence of what runs."""
        built = self._last
        if built is None:
            return f"{self._engine.name}: nothing was built yet", {}
        baked = 0 if built.constants is None else len(self._weights)
        facts = [f"{self._engine.name} {self._engine.version()}", built.executable.description]
        facts += [f"{baked} weights built in" if baked else "", f"from {built.source}"]
        return ", ".join(fact for fact in facts if fact), {}

    def _holds(self, built: _Built, inputs: Sequence[Any]) -> bool:
        return built.constants is None or built.constants.hold(tuple([inputs[index] for index in self._weights]))

    def _arguments(self, inputs: Sequence[Any], built: _Built) -> list[Any]:
        arguments = [inputs[index] for index in built.positions]
        if self._grad:
            arguments = [v.detach() if isinstance(v, torch.Tensor) else v for v in arguments]
        if self._complex:  # the same bits may mean a conjugate, or a negative
            arguments = [v.resolve_conj().resolve_neg() if isinstance(v, torch.Tensor) else v for v in arguments]
        if self._engine.contiguous:
            arguments = [v.contiguous() if isinstance(v, torch.Tensor) else v for v in arguments]
        return arguments

    def _positions(self) -> tuple[int, ...]:
        """The inputs of the next executable: no weights, and no sizes that are numbers in the graph."""
        left = set(self._weights)
        if self._fixes:
            left |= {index for index, value in enumerate(self._fakes) if not isinstance(value, torch.Tensor)}
        return tuple(index for index in range(len(self._fakes)) if index not in left)

    def _find(self, inputs: Sequence[Any]) -> _Built:
        """What was built for these sizes and weights, or build it."""
        with self._lock:
            weights = tuple([inputs[index] for index in self._weights])
            sizes = self._class_of(inputs)
            case = (*sizes, id(weights[0]) if weights else 0)
            built = self._built.get(case)
            for _ in range(_PATIENCE):
                if built is None or built.constants is None or self._holds(built, inputs):
                    break
                if not built.constants.merely_shared(weights):
                    break
                time.sleep(0.001)
            if built is not None and self._holds(built, inputs):
                self._built.move_to_end(case)
                self._last = built
                return built
            if built is not None and built.constants is not None and built.constants.same_objects(weights):
                self._rebuilt += 1
            if built is not None:
                # It may hold the memory of the weights, and nothing else may.
                del self._built[case], built
                self._last = None
            if weights and (self._rebuilt > _REBUILDS or not _all_fixable(weights)):
                self._thaw([] if self._rebuilt > _REBUILDS else [i for i in self._weights if fixable(inputs[i])])
                return self._find(inputs)
            built = self._build(sizes, inputs)
            most = self._clustering.most_classes if self._fixes else _SETS
            while len(self._built) > max(most, 1):
                self._built.popitem(last=False)
            return built

    def _class_of(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        if not self._fixes:
            return ()
        return tuple(
            [(*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else value for value in inputs]
        )

    def _thaw(self, left: list[int]) -> None:
        """Make inputs of the weights from now on, but for those that are left."""
        self._weights, self._built, self._last = left, OrderedDict(), None
        context, name = self._context, self._engine.name
        reason = Reason(
            code="weights_changed",
            by=name,
            sentence="weights that were built in go on changing, or can't be followed any more: "
            "they are inputs from now on",
            observed=f"{self._rebuilt} changes, {len(left)} weights still built in",
            lever="compile for inference once the weights are final",
        )
        record_step_down(context.timeline, context.where(context.part_id), name, name, reason, attempts=False)

    def _build(self, sizes: tuple[Any, ...], inputs: Sequence[Any]) -> _Built:
        # What a library computes while it compiles is not for the modes of whoever compiles or calls.
        return apart(lambda: self._build_apart(sizes, inputs))

    def _build_apart(self, sizes: tuple[Any, ...], inputs: Sequence[Any]) -> _Built:
        self._survived()
        if self._engine.native:
            _Process.used.add(self._engine.name)
        weights = tuple([inputs[index] for index in self._weights])
        constants = Constants(weights) if weights else None  # before they are read
        subgraph = self._subgraph(inputs)
        engine = self._engine

        def make() -> EngineExecutable:
            return _checked(engine.compile(subgraph), engine)

        keeps = type(engine).loads is not Engine.loads
        hashes = constants.hashes(weights) if constants is not None and keeps else list(map(id, weights))
        key = key_of(
            exact_hash(list(subgraph.module.graph.nodes)),
            list(zip(self._weights, hashes, strict=True)),
            engine.name,
            engine.version(),
            engine.state(),
            self._clustering,
            subgraph.threads,
            torch.__version__,
            package_digest(),
        )
        if keeps or not weights:
            load = (lambda data: _checked(engine.loads(data, subgraph), engine)) if keeps else None
            owner = "" if engine.copies else repr(list(map(id, weights)))
            found, source = store.get(key, engine.name, make, load, _dump if keeps else None, owner)
            made = _checked(found, engine)
        else:
            made, source = make(), "compiled"  # an id says nothing about the contents in a later call
        if constants is not None:
            constants.built()
        built = _Built(
            executable=made,
            options=self._run_options,
            constants=constants,
            source=source,
            device=subgraph.device,
            positions=self._positions(),
        )
        self._built[(*sizes, id(weights[0]) if weights else 0)] = built
        self._last = built
        return built

    def _subgraph(self, inputs: Sequence[Any]) -> Subgraph:
        module, fakes = copy_module(self._module), self._fakes
        if self._fixes:
            module = with_fixed_sizes(module, inputs)
            with_plain_sizes(module)
            fakes = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
        if self._engine.decompositions:
            module = decomposed(module, fakes, self._engine.decompositions, whole=False)
        tensors = [value for value in fakes if isinstance(value, torch.Tensor)]
        return Subgraph(
            module=module,
            constants={index: _alias(inputs[index].detach()) for index in self._weights},
            device=tensors[0].device if tensors else torch.device(self._context.device.type),
            dynamic=self._symbolic and not self._fixes,
            threads=self._run_options.threads or torch.get_num_threads(),
            options=self._clustering,
        )


def _waiting(session: Session, device: torch.device) -> Session:
    """A session that returns once the device is done."""
    contract = resolve_device(device.type)

    def run(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        results = session(inputs)
        contract.synchronize()
        return results

    return run


def _checked(made: object, engine: Engine) -> EngineExecutable:
    if not isinstance(made, EngineExecutable):
        raise TypeError(f"the engine {engine.name} made {type(made).__name__}, which is no EngineExecutable")
    return made


def _all_fixable(weights: Sequence[torch.Tensor]) -> bool:
    if all(map(fixable, weights)):
        return True
    gc.collect()  # an executable that was given up may hold them, in a cycle of references
    return all(map(fixable, weights))


def _alias(value: torch.Tensor) -> torch.Tensor:
    """The same memory behind a storage of its own.

    `Tensor.numpy`, which libraries are fed by, marks a storage for good as one that something else may hold, so that
    the weight could not be followed any more.
    """
    try:
        return torch.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError):  # a dtype that the protocol has no name for, or no elements
        return value


def _dump(made: object) -> bytes | None:
    return made.dumps() if isinstance(made, EngineExecutable) else None
