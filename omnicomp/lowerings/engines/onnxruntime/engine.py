"""A session of ONNX Runtime: made of a model and the weights, and called on torch's own memory."""

import dataclasses
import importlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import torch

from omnicomp._torch.autograd.decompose import decompositions_of
from omnicomp._torch.autograd.run_in_precision import on_real_tensors
from omnicomp.analysis.nodes import fake_value
from omnicomp.errors import EngineError
from omnicomp.lowerings.engines.base import Engine, EngineExecutable, RunOptions, Session
from omnicomp.lowerings.engines.clustering import Clustering
from omnicomp.lowerings.engines.lazy import missing_package
from omnicomp.lowerings.engines.onnxruntime.model import DTYPES, OPSET, Model, is_large, onnx_model
from omnicomp.lowerings.engines.operators import DECOMPOSITIONS
from omnicomp.lowerings.engines.subgraph import Subgraph

_ERRORS: Final = 3  # of the levels of its log


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnnxRuntimeRunOptions(RunOptions):
    """Those of the library, too."""

    # Of its `RunOptions.add_run_config_entry`: `{"memory.enable_memory_arena_shrinkage": "cpu:0"}`.
    entries: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])


class OnnxRuntimeExecutable(EngineExecutable):
    """A model that threads may run at the same time, each with a binding of its own."""

    def __init__(self, model: Model, subgraph: Subgraph) -> None:
        """Make the session, which optimises the model.

        Raises:
            EngineError: a result has another dtype or shape than torch's.
            Exception: what the library raises, for example for an operator that it has no kernel of for a dtype.
        """
        self._model = model
        large = {
            str(node.target): subgraph.constants[index].contiguous()
            for index, node in enumerate(subgraph.placeholders)
            if index in subgraph.constants and is_large(subgraph.constants[index])
        }
        self._session, self._held = _session(model.data, large, subgraph.threads)
        found = zip(model.results, subgraph.values, strict=True)
        distinct = {index: fake for index, fake in found if index is not None and fake is not None}
        fakes = [distinct[index] for index in range(len(distinct))]
        self._made = [(tuple(fake.shape), fake.dtype) for fake in fakes]
        self._names = [port.name for port in self._session.get_outputs()]
        self._inputs = [port.name for port in self._session.get_inputs()]
        expected = [(DTYPES[fake_value(node).dtype][1], list(fake_value(node).shape)) for node in subgraph.inputs]
        expected += [(DTYPES[dtype][1], list(shape)) for shape, dtype in self._made]
        for port, wanted in zip([*self._session.get_inputs(), *self._session.get_outputs()], expected, strict=True):
            if (port.type, list(port.shape)) != wanted:
                found = f"{port.type} of {list(port.shape)}"
                raise EngineError(f"{port.name} is {found} instead of {wanted[0]} of {wanted[1]}")

    def session(self) -> Session:
        """One binding of inputs and results."""
        return self.session_with(RunOptions())

    def session_with(self, options: RunOptions) -> Session:
        """The same, with entries of the library's own run options."""
        ran_with = _run_options(options)
        binding = self._session.io_binding()
        session, made, results = self._session, self._made, self._model.results
        inputs, names = self._inputs, self._names

        def run(given: Sequence[torch.Tensor]) -> Sequence[Any]:
            for name, value in zip(inputs, given, strict=True):
                binding.bind_input(name, "cpu", 0, DTYPES[value.dtype][0], value.shape, _address(value))
            # New memory each time: what a call returned belongs to the caller.
            values = [torch.empty(shape, dtype=dtype) for shape, dtype in made]
            for name, value in zip(names, values, strict=True):
                binding.bind_output(name, "cpu", 0, DTYPES[value.dtype][0], value.shape, _address(value))
            session.run_with_iobinding(binding, ran_with)
            return [None if index is None else values[index] for index in results]

        return run

    def dumps(self) -> bytes:
        """The model without the large weights."""
        return json.dumps(self._model.results).encode() + b"\n" + self._model.data

    @property
    def description(self) -> str:
        """Where it runs."""
        return "CPUExecutionProvider"


def _run_options(options: RunOptions) -> Any:
    entries = options.entries if isinstance(options, OnnxRuntimeRunOptions) else {}
    if not entries:
        return None
    made = importlib.import_module("onnxruntime").RunOptions()
    for name, value in entries.items():
        made.add_run_config_entry(name, value)
    return made


def loaded(data: bytes, subgraph: Subgraph) -> OnnxRuntimeExecutable:
    """What was dumped, with the weights of a subgraph of the same content."""
    head, _, body = data.partition(b"\n")
    return OnnxRuntimeExecutable(Model(body, tuple(json.loads(head))), subgraph)


# Where an empty tensor is: nothing is read or written there, but it is refused where there is no address.
with on_real_tensors():  # a compilation may be the first to import this, with fake tensors
    _EMPTY: Final = torch.zeros(1, dtype=torch.int64)


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() or _EMPTY.data_ptr()


def _session(data: bytes, weights: Mapping[str, torch.Tensor], threads: int) -> tuple[Any, list[Any]]:
    """A session, and what has to live as long as it does."""
    library = importlib.import_module("onnxruntime")
    options = library.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _ERRORS
    # Threads that wait for work by spinning would take the processor from torch's.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    held = [library.OrtValue.ortvalue_from_numpy(value.numpy()) for value in weights.values()]
    if weights:
        options.add_external_initializers(list(weights), held)
    return library.InferenceSession(data, options, providers=["CPUExecutionProvider"]), held


# What torch makes of operators of the table. Nothing random is among them.
_DECOMPOSED: Final = (
    *("smooth_l1_loss", "huber_loss", "hardshrink", "softshrink", "square", "nan_to_num"),
    *("rsub", "var", "std", "var_mean", "std_mean", "index_add", "index_copy", "aminmax", "rot90"),
    *("_safe_softmax", "_fused_rms_norm", "_weight_norm_interface", "_adaptive_avg_pool2d", "eye"),
    *("isfinite", "positive"),
)

_OWN: Final = {target: DECOMPOSITIONS[target] for target in (torch.ops.aten.log_sigmoid_forward.default,)}
_PACKAGES: Final = {"onnxruntime": (1, 22), "onnx": (1, 17), "onnxscript": (0, 5)}
_INSTALL: Final = 'pip install "omnicomp[onnx]"'


class OnnxRuntimeEngine(Engine):
    """ONNX Runtime on the CPU, for inference."""

    name = "onnxruntime"
    clustering = Clustering(dtypes=tuple(DTYPES))
    run_options = OnnxRuntimeRunOptions()
    decompositions: ClassVar = {**decompositions_of(_DECOMPOSED), **_OWN}

    def missing(self) -> str:
        """Which package is not there, or too old."""
        return missing_package(_PACKAGES, _INSTALL)

    def version(self) -> str:
        """Versions of the runtime, of what writes models for it, and of the operator set."""
        versions = [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES]
        return ", ".join([*versions, f"opset {OPSET}"]).removeprefix("onnxruntime ")

    def compile(self, subgraph: Subgraph) -> EngineExecutable:
        """Write the model and make a session of it."""
        return OnnxRuntimeExecutable(onnx_model(subgraph), subgraph)

    def loads(self, data: bytes, subgraph: Subgraph) -> EngineExecutable:
        """The model of `OnnxRuntimeExecutable.dumps`, with the weights of this process."""
        return loaded(data, subgraph)
