"""TensorRT as an engine: by its Python package and its reader of ONNX models, for inference on CUDA.

It is written to the documented interface of TensorRT 10 and 11 and has not run on hardware yet: the tests put a
stand-in in the package's place.
"""

import importlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from omnicomp.errors import EngineError
from omnicomp.lowerings.engines.base import Engine, EngineExecutable, Session
from omnicomp.lowerings.engines.clustering import Clustering
from omnicomp.lowerings.engines.lazy import missing_package
from omnicomp.lowerings.engines.onnxruntime import OnnxRuntimeEngine
from omnicomp.lowerings.engines.onnxruntime.model import onnx_model
from omnicomp.lowerings.engines.subgraph import Subgraph

_PACKAGES: Final = {"tensorrt": (10,), "onnx": (1, 17), "onnxscript": (0, 5)}
_INSTALL: Final = 'pip install "omnicomp[tensorrt]"'
# What TensorRT calls a dtype of torch's.
_NAMES: Final = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.bool: "bool",
}
_LARGEST: Final = 2**31 - 2**20  # of a protocol buffer, less what is not weights


class TensorRtEngine(Engine):
    """TensorRT for inference on CUDA. It takes what the engine `onnxruntime` has a form of, in the dtypes it has.

    Networks are strongly typed: what is computed in float32 stays so, and uses TF32 only where torch is set to.
    """

    name = "tensorrt"
    clustering = Clustering(devices=("cuda",), dtypes=tuple(_NAMES))
    copies = True
    decompositions = OnnxRuntimeEngine.decompositions
    empty = False

    def missing(self) -> str:
        """Which package is not there or too old, or that there is no CUDA device."""
        sentence = missing_package(_PACKAGES, _INSTALL)
        return sentence or ("" if _has_device() else "TensorRT needs a CUDA device, and torch sees none")

    def version(self) -> str:
        """Its version, the device, for which alone a plan is good, and how float32 is multiplied."""
        from omnicomp._torch.devices.precision import tf32_settings

        parts = [importlib.metadata.version("tensorrt"), torch.cuda.get_device_name(), *map(str, tf32_settings())]
        return " ".join(parts)

    def compile(self, subgraph: Subgraph) -> EngineExecutable:
        """Write an ONNX model with the weights in it, and build a plan of it.

        Raises:
            EngineError: TensorRT does not take the model, or makes nothing of it; with what it says.
            Exception: what the exporter of ONNX models raises.
        """
        weights = {
            str(node.target): subgraph.constants[index]
            for index, node in enumerate(subgraph.placeholders)
            if index in subgraph.constants
        }
        values = [value for value in subgraph.values if value is not None]
        made = onnx_model(subgraph)
        model, inputs, outputs = _with_weights(made.data, weights)
        plan = _built(model, subgraph.options.workspace_bytes)
        distinct = dict(zip([index for index in made.results if index is not None], values, strict=True))
        head = {
            "results": list(made.results),
            "inputs": inputs,
            "outputs": [
                [name, list(map(int, distinct[index].shape)), _NAMES[distinct[index].dtype]]
                for index, name in enumerate(outputs)
            ],
        }
        return _Executable(head, plan)

    def loads(self, data: bytes, subgraph: Subgraph) -> EngineExecutable:
        """From a plan; its weights are those of a subgraph of the same content."""
        head, _, plan = data.partition(b"\n")
        return _Executable(json.loads(head), plan)


for _entry in OnnxRuntimeEngine.operators:
    _dtypes = tuple(dtype for dtype in _entry.dtypes or tuple(_NAMES) if dtype in _NAMES)
    TensorRtEngine.operators.add(_entry.target, convert=_entry.convert, train=False, dtypes=_dtypes, check=_entry.check)


class _Executable(EngineExecutable):
    """A plan, which threads may run at the same time, each in a context of its own."""

    def __init__(self, head: Mapping[str, Any], plan: bytes) -> None:
        trt = _library()
        self._head, self._plan = dict(head), plan
        self._runtime = trt.Runtime(_logger())
        self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise EngineError("TensorRT can't read its own plan")
        by_name = {name: dtype for dtype, name in _NAMES.items()}
        self._outputs: list[tuple[str, tuple[int, ...], torch.dtype]] = []
        for name, shape, dtype in head["outputs"]:
            found = tuple(self._engine.get_tensor_shape(name)), self._engine.get_tensor_dtype(name)
            if found != (tuple(shape), getattr(trt, dtype)):
                raise EngineError(f"TensorRT makes {found[1]} of {found[0]} instead of {dtype} of {tuple(shape)}")
            self._outputs.append((name, tuple(shape), by_name[dtype]))

    def session(self) -> Session:
        """A context with the memory that a call needs."""
        context = self._engine.create_execution_context()
        if context is None:
            raise EngineError("TensorRT has no memory for another context")
        return _Context(context, self._head["inputs"], self._outputs, self._head["results"])

    def dumps(self) -> bytes:
        """The plan, and what is to be known of it."""
        return json.dumps(self._head).encode() + b"\n" + self._plan

    @property
    def description(self) -> str:
        """What the plan needs."""
        return f"a plan of {len(self._plan)} bytes"

    @property
    def workspace_bytes(self) -> int:
        """Memory of a context."""
        return int(getattr(self._engine, "device_memory_size_v2", 0))


class _Context:
    """What one thread calls."""

    def __init__(
        self,
        context: Any,
        inputs: Sequence[str],
        outputs: Sequence[tuple[str, tuple[int, ...], torch.dtype]],
        results: Sequence[int | None],
    ) -> None:
        self._context, self._inputs, self._outputs, self._results = context, inputs, outputs, results
        self._stream: Any = None

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        """Run on the current stream."""
        stream = _current_stream(inputs)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)  # the memory of the context is in use there
        self._stream = stream
        device = inputs[0].device if inputs else torch.device("cuda")
        # New memory each time: what a call returned belongs to the caller.
        values = [torch.empty(shape, dtype=dtype, device=device) for _, shape, dtype in self._outputs]
        names = [*self._inputs, *(name for name, _, _ in self._outputs)]
        for name, value in zip(names, [*inputs, *values], strict=True):
            if not self._context.set_tensor_address(name, value.data_ptr()):
                raise EngineError(f"TensorRT does not take the memory of {name}")
        if not self._context.execute_async_v3(stream.cuda_stream):
            raise EngineError("TensorRT failed to run its plan")
        return [None if index is None else values[index] for index in self._results]


def _built(model: bytes, workspace: int | None) -> bytes:
    """The plan of an ONNX model.

    Raises:
        EngineError: it can't be read or built.
    """
    from omnicomp._torch.devices.precision import tf32_settings

    trt = _library()
    builder = trt.Builder(_logger())
    # Of version 11 on all networks are strongly typed, and the flag may be gone.
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if flag is None else 1 << int(flag))
    parser = trt.OnnxParser(network, _logger())
    if not parser.parse(model):
        errors = [str(parser.get_error(index).desc()) for index in range(parser.num_errors)]
        raise EngineError(f"TensorRT does not take the model: {'; '.join(errors) or 'it does not say why'}")
    config = builder.create_builder_config()
    if workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace)
    if "tf32" not in tf32_settings():
        config.clear_flag(trt.BuilderFlag.TF32)  # it is set if nobody says otherwise
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise EngineError("TensorRT built nothing of the model; its log on the terminal says more")
    return bytes(plan)


def _with_weights(data: bytes, weights: Mapping[str, torch.Tensor]) -> tuple[bytes, list[str], list[str]]:
    """A model with all of its weights in it, and the names of its inputs and results.

    Raises:
        EngineError: it would be larger than a model in one piece can be.
    """
    onnx = importlib.import_module("onnx")
    model = onnx.load_model_from_string(data)
    total = sum(value.numel() * value.element_size() for value in weights.values())
    if total > _LARGEST:
        raise EngineError(f"its weights take {total} bytes, and an ONNX model in one piece has less than 2 GiB")
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            value = weights[tensor.name].detach().cpu().contiguous()
            tensor.raw_data = value.numpy().tobytes()
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    inputs = [value.name for value in model.graph.input]
    return model.SerializeToString(), inputs, [value.name for value in model.graph.output]


def _library() -> Any:
    return importlib.import_module("tensorrt")


_loggers: Final[dict[str, Any]] = {}


def _logger() -> Any:
    """One of the process: TensorRT keeps the first that it gets."""
    trt = _library()
    return _loggers.setdefault("one", trt.Logger(trt.Logger.ERROR)) if not _loggers else _loggers["one"]


def _has_device() -> bool:
    return torch.cuda.is_available()


def _current_stream(inputs: Sequence[torch.Tensor]) -> Any:
    return torch.cuda.current_stream(inputs[0].device if inputs else None)
