"""The contract of an engine: which operators it takes, and how it compiles a subgraph of them.

`program.EngineLowering` is the lowering of an engine: building for the shapes of a call, and following the weights.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from omnicomp.analysis.nodes import fake_value, op_name, source_line
from omnicomp.errors import EngineError, nearest, wrong_value
from omnicomp.lowerings.base import LoweringContext, Support
from omnicomp.lowerings.engines.clustering import Clustering
from omnicomp.lowerings.engines.operators import Operators
from omnicomp.lowerings.engines.subgraph import Subgraph
from omnicomp.timeline import Reason

_ALIGNMENT: Final = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What a session is made with; an engine with run options of its own derives a class.

    Attributes:
        threads: how many threads of the CPU the library may use; None for as many as torch uses. It is in
            `Subgraph.threads` too, as many libraries want to know it when they compile.
        wait: whether a call returns once the device is done, and not when the work is queued.
    """

    threads: int | None = None
    wait: bool = False

    def changed(self, engine: str, values: Any) -> "RunOptions":
        """The same with a user's values.

        Raises:
            EngineError: there is no such option, or a value is of another type than the default.
        """
        if not isinstance(values, Mapping):
            what = f"option run of the engine {engine}"
            raise wrong_value(what, values, "a mapping", example={"threads": 2}, error=EngineError)
        known = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, value in values.items():
            if name not in known:
                raise EngineError(f"the engine {engine} has no run option {name!r}{nearest(str(name), known)}")
            whole = isinstance(value, int) and not isinstance(value, bool)
            if name == "threads":
                fits = value is None or (whole and value > 0)
            else:
                fits = isinstance(value, Mapping if isinstance(known[name], Mapping) else type(known[name]))
            if not fits:
                what = f"run option {name} of the engine {engine}"
                raise wrong_value(what, value, "a value as its default", example=known[name], error=EngineError)
        return dataclasses.replace(self, **values)


Session = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor | None]]
"""Runs a subgraph on its inputs; used by one thread at a time. What it returns belongs to the caller for good."""


class EngineExecutable(abc.ABC):
    """An engine's executable of a subgraph; it is cached, and shared by all subgraphs of the same content."""

    @abc.abstractmethod
    def session(self) -> Session:
        """What one thread calls. Each thread asks for one of its own.

        An executable that threads may call at the same time returns the same each time; one that keeps state between
        setting inputs and reading outputs returns a new one.

        The inputs of a call are those of `Subgraph.inputs`, in that order, with the dtypes, shapes and device that
        were compiled for, and contiguous if `Engine.contiguous`. They must be left as they are.
        """

    def session_with(self, options: RunOptions) -> Session:
        """The same with run options, for a library that has such; `wait` is looked after outside."""
        del options
        return self.session()

    def dumps(self) -> bytes | None:
        """What `Engine.loads` makes the same executable of in another process; None where the library can't."""
        return None

    @property
    def description(self) -> str:
        """One line for the evidence: for example versions and precision."""
        return ""

    @property
    def workspace_bytes(self) -> int:
        """Memory that stays allocated between calls; 0 if that is unknown."""
        return 0


class Engine(abc.ABC):
    """A compiler beside Inductor. A subclass is declared by the entry-point group `omnicomp.engines`.

    Attributes:
        name: what options call it by.
        clustering: which subgraphs it gets, unless the user's options say otherwise.
        run_options: how its sessions run, likewise.
        contiguous: whether it is called with contiguous inputs alone.
        copies: whether its executables have copies of the weights that are built in, so that weights of the same
            contents may share one; else it is for the tensors alone that it was made of, whose memory it may read.
        bakes: whether weights are given to `compile` as constants where they can be followed.
        native: whether its library has threads or locks of its own, which a forked process would lack: it is not
            called there if it was used before the fork.
        empty: whether it takes tensors without elements.
        decompositions: operator to decomposition, applied to a subgraph before it is compiled; what they are made of
            is to be in `operators`.
        operators: which operators it takes; each subclass has its own, with what it inherits.
    """

    name: str
    clustering: ClassVar[Clustering] = Clustering()
    run_options: ClassVar[RunOptions] = RunOptions()
    contiguous: ClassVar[bool] = True
    bakes: ClassVar[bool] = True
    copies: ClassVar[bool] = False
    native: ClassVar[bool] = True
    empty: ClassVar[bool] = True
    decompositions: ClassVar[Mapping[Any, Callable[..., Any]]] = {}
    operators: ClassVar[Operators] = Operators()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.operators = Operators(cls.operators)

    @classmethod
    def op(
        cls,
        *targets: torch._ops.OpOverload,
        train: bool = True,
        devices: tuple[str, ...] | None = None,
        dtypes: tuple[torch.dtype, ...] | None = None,
        check: Callable[[Node], str] | None = None,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Declare operators; the decorated function makes the engine's own form of them. See `Operator`."""

        def declare(convert: Callable[..., Any]) -> Callable[..., Any]:
            cls.operators.add(*targets, convert=convert, train=train, devices=devices, dtypes=dtypes, check=check)
            return convert

        return declare

    @abc.abstractmethod
    def missing(self) -> str:
        """One sentence on why it can't be used here and what to install; empty if it can. It never raises."""

    @abc.abstractmethod
    def version(self) -> str:
        """Version of its library, and of what else changes what `compile` makes. Asked only if nothing is missing."""

    def state(self) -> str:
        """What else of this process decides on what `compile` makes, such as settings of the library; often nothing."""
        return ""

    @abc.abstractmethod
    def compile(self, subgraph: Subgraph) -> EngineExecutable:
        """Compile a subgraph.

        Raises:
            Exception: anything; the subgraph goes to the next lowering, and the message is the reason.
        """

    def loads(self, data: bytes, subgraph: Subgraph) -> EngineExecutable:
        """The inverse of `EngineExecutable.dumps`, in a process with the same `version`.

        Raises:
            Exception: anything; the subgraph is compiled again.
        """
        raise NotImplementedError(f"the engine {self.name} keeps nothing")

    def supports(self, node: Node, context: LoweringContext) -> Support:
        """Whether the engine takes a node, before anything is built: None, or why not."""
        missing = self.absence()
        if missing:
            return self._reason("engine_missing", missing, lever=missing)
        clustering = self.clustering_for(context)
        if context.device.type not in clustering.devices:
            return self._refused(node, "it is not for this device", context.device.type, ", ".join(clustering.devices))
        if context.part != "inference" and not clustering.training:
            return self._refused(node, "it is for inference alone", context.part, "inference")
        entry = self.operators.get(node.target)
        if entry is None:
            if node.target in self.decompositions:
                return self._tensors(node, clustering.dtypes, context)
            if getattr(node.target, "__name__", "") == "getitem":
                return None  # it goes where the operator went whose results it takes apart
            return self._refused(node, "it has no form of the operator")
        if context.part != "inference" and not entry.train:
            return self._refused(node, "it takes the operator in inference alone", context.part, "inference")
        if entry.devices is not None and context.device.type not in entry.devices:
            return self._refused(node, "it has no form of it here", context.device.type, ", ".join(entry.devices))
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable and not clustering.mutable_inputs:
            return self._refused(node, "the operator writes to an input")
        sentence = entry.check(node) if entry.check is not None else ""
        if sentence:
            return self._refused(node, sentence)
        return self._tensors(node, entry.dtypes if entry.dtypes is not None else clustering.dtypes, context)

    def clustering_for(self, context: LoweringContext) -> Clustering:
        """Its clustering with the user's options.

        Raises:
            EngineError: an option is unknown or of a wrong type.
        """
        return self.configured(context.policy.engines.get(self.name, {}))[0]

    def configured(self, values: Mapping[str, Any]) -> tuple[Clustering, RunOptions]:
        """Its clustering and its run options with a user's options for it, of which `run` has the latter.

        Raises:
            EngineError: an option is unknown or of a wrong type.
        """
        if not values:
            return self.clustering, self.run_options
        others = {name: value for name, value in values.items() if name != "run"}
        run = self.run_options.changed(self.name, values.get("run", {}))
        return self.clustering.changed(self.name, others), run

    def absence(self) -> str:
        """What `missing` says, or that it raised."""
        try:
            return self.missing()
        except Exception as error:  # noqa: BLE001 - someone else's code; becomes the reason
            return f"the engine {self.name} can't say whether it is there: {type(error).__name__}: {error}"

    def _tensors(self, node: Node, dtypes: tuple[torch.dtype, ...] | None, context: LoweringContext) -> Support:
        for value in (node, *node.all_input_nodes):
            for leaf in tree_leaves(fake_value(value)):
                if not isinstance(leaf, torch.Tensor):
                    continue
                if leaf.layout is not torch.strided or leaf.is_quantized:
                    return self._refused(node, "it takes strided tensors alone", str(leaf.layout))
                if dtypes is not None and leaf.dtype not in dtypes:
                    shown = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
                    return self._refused(node, "it does not take the dtype", str(leaf.dtype), shown)
                if leaf.device.type != context.device.type:
                    there = str(context.device.type)
                    return self._refused(node, "its tensors are on two devices", str(leaf.device), there)
                # One of several results may be empty as the operator has nothing to say there.
                several = isinstance(fake_value(value), (tuple, list))
                if not self.empty and not several and any(type(size) is int and size == 0 for size in leaf.shape):
                    return self._refused(node, "it takes no tensors without elements", str(tuple(leaf.shape)))
        return None

    def _refused(self, node: Node, sentence: str, observed: str = "", needed: str = "") -> Reason:
        reason = self._reason("unsupported_op", sentence)
        return dataclasses.replace(
            reason, node=f"{node.name} ({op_name(node)})", source=source_line(node), observed=observed, needed=needed
        )

    def _reason(self, code: str, sentence: str, *, lever: str = "") -> Reason:
        if not sentence:
            raise EngineError(f"the engine {self.name} refuses without a reason")
        return Reason(code=code, by=self.name, sentence=sentence, lever=lever)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the strides of its shape, at an address that vector instructions take; a copy if it isn't so.

    Torch calls a tensor contiguous whatever the strides of its dimensions of size 1 are, and other libraries do not. A
    view may begin anywhere.
    """
    tensor = tensor.detach()  # a weight that is an input may be a parameter
    strides: list[int] = []
    step = 1
    for size in reversed(tensor.shape):
        strides.insert(0, step)
        step *= max(size, 1)
    if tensor.stride() != tuple(strides):
        tensor = tensor.contiguous().as_strided(tensor.shape, strides)
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor
