"""TensorRT by its contract: a stand-in for its package keeps to the documented calls, and runs models by ONNX Runtime.

What it proves is what is handed over, in which order, and what is made of each answer; not what TensorRT computes.
"""

import ctypes
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import omnicomp
from omnicomp.lowerings.engines import Clustering, lazy, resolve_engine, tensorrt
from omnicomp.lowerings.engines.store import store
from omnicomp.lowerings.engines.tensorrt import TensorRtEngine
from omnicomp.timeline import Ran, Retreat

pytestmark = pytest.mark.engine

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

TYPES = {1: "float32", 6: "int32", 7: "int64", 9: "bool", 10: "float16"}


class Parser:
    def __init__(self, network: dict[str, Any], logger: object) -> None:
        self.network, self.errors = network, list[str]()

    def parse(self, model: bytes) -> bool:
        parsed = onnx.load_model_from_string(model)
        kinds = {node.op_type for node in parsed.graph.node}
        self.errors = [f"no importer registered for op: {kind}" for kind in kinds & self.network["refused"]]
        self.network["model"] = model
        return not self.errors

    @property
    def num_errors(self) -> int:
        return len(self.errors)

    def get_error(self, index: int) -> Any:
        return types.SimpleNamespace(desc=lambda: self.errors[index])


class Config:
    def __init__(self) -> None:
        self.flags, self.limits = {"TF32"}, dict[str, int]()

    def clear_flag(self, flag: str) -> None:
        self.flags.discard(flag)

    def set_memory_pool_limit(self, pool: str, size: int) -> None:
        self.limits[pool] = size


class Context:
    def __init__(self, session: Any, owner: "StandIn") -> None:
        self.session, self.owner, self.addresses = session, owner, dict[str, int]()

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        self.owner.streams.append(stream)
        if self.owner.fails:
            return False
        given: dict[str, Any] = {}
        for port in self.session.get_inputs():
            dtype = {"float": "float32"}.get(port.type[7:-1], port.type[7:-1])
            empty = torch.empty(port.shape, dtype=getattr(torch, dtype))
            ctypes.memmove(empty.data_ptr(), self.addresses[port.name], empty.numel() * empty.element_size())
            given[port.name] = empty.numpy()
        for port, value in zip(self.session.get_outputs(), self.session.run(None, given), strict=True):
            ctypes.memmove(self.addresses[port.name], value.ctypes.data, value.nbytes)
        return True


class CudaEngine:
    def __init__(self, plan: bytes, owner: "StandIn") -> None:
        self.owner, self.session = owner, onnxruntime.InferenceSession(plan)
        self.outputs = {value.name: value.type.tensor_type for value in onnx.load_model_from_string(plan).graph.output}

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(size.dim_value for size in self.outputs[name].shape.dim)

    def get_tensor_dtype(self, name: str) -> str:
        return self.owner.lies or TYPES[self.outputs[name].elem_type]

    def create_execution_context(self) -> Context:
        self.owner.contexts += 1
        return Context(self.session, self.owner)


class StandIn(types.ModuleType):
    """The part of the package that is used, with notes on how it was."""

    def __init__(self) -> None:
        super().__init__("tensorrt")
        self.configs, self.refused, self.streams = list[Config](), set[str](), list[int]()
        self.fails, self.lies, self.builds, self.contexts, self.flags = False, "", True, 0, list[int]()
        owner = self

        class Builder:
            def __init__(self, logger: object) -> None:
                pass

            def create_network(self, flags: int) -> dict[str, Any]:
                owner.flags.append(flags)
                return {"refused": owner.refused}

            def create_builder_config(self) -> Config:
                owner.configs.append(Config())
                return owner.configs[-1]

            def build_serialized_network(self, network: dict[str, Any], config: Config) -> Any:
                return memoryview(network["model"]) if owner.builds else None

        class Runtime:
            def __init__(self, logger: object) -> None:
                pass

            def deserialize_cuda_engine(self, plan: bytes) -> CudaEngine:
                return CudaEngine(plan, owner)

        self.Builder, self.Runtime, self.OnnxParser = Builder, Runtime, Parser
        self.Logger = type("Logger", (), {"ERROR": 1, "__init__": lambda self, level: None})
        self.NetworkDefinitionCreationFlag = types.SimpleNamespace(STRONGLY_TYPED=1)
        self.MemoryPoolType = types.SimpleNamespace(WORKSPACE="workspace")
        self.BuilderFlag = types.SimpleNamespace(TF32="TF32")
        self.float32, self.float16, self.int32, self.int64, self.bool = (
            *("float32", "float16", "int32", "int64", "bool"),
        )


class Stream:
    cuda_stream = 7


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    made = StandIn()
    monkeypatch.setitem(sys.modules, "tensorrt", made)
    monkeypatch.setattr(TensorRtEngine, "clustering", Clustering(devices=("cpu",), dtypes=tuple(tensorrt._NAMES)))
    monkeypatch.setattr(TensorRtEngine, "missing", lambda self: "")
    monkeypatch.setattr(TensorRtEngine, "version", lambda self: "stand-in")
    monkeypatch.setattr(tensorrt, "_current_stream", lambda inputs: STREAM)
    monkeypatch.setattr(tensorrt, "_loggers", {})
    monkeypatch.setattr("omnicomp._torch.devices.precision.tf32_settings", lambda: ("none", "none"))
    resolve_engine.cache_clear()
    yield made
    resolve_engine.cache_clear()


STREAM = Stream()


def compiled(function: Any, **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="omni", options={"lowerings": ["tensorrt", "eager"], **options})


def ran() -> list[str]:
    return [event.lowering for event in omnicomp.timeline.events() if isinstance(event, Ran)]


def reasons() -> str:
    events = omnicomp.timeline.events()
    return " ".join(event.reason.sentence for event in events if isinstance(event, Retreat) and event.reason)


def test_without_the_package_or_a_device_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TensorRtEngine()

    def version(name: str) -> str:
        if name == "tensorrt":
            raise lazy.importlib.metadata.PackageNotFoundError(name)
        return "99"

    monkeypatch.setattr(lazy.importlib.metadata, "version", version)
    lazy._missing.cache_clear()
    assert engine.missing() == 'tensorrt is not installed: pip install "omnicomp[tensorrt]"'
    monkeypatch.setattr(lazy.importlib.metadata, "version", lambda name: "8.6.1" if name == "tensorrt" else "99")
    lazy._missing.cache_clear()
    assert "tensorrt 8.6.1 is too old, 10 or newer" in engine.missing()
    monkeypatch.setattr(lazy.importlib.metadata, "version", lambda name: "99")
    monkeypatch.setattr(tensorrt, "_has_device", lambda: False)
    lazy._missing.cache_clear()
    assert engine.missing() == "TensorRT needs a CUDA device, and torch sees none"
    lazy._missing.cache_clear()


def test_where_it_is_missing_the_model_runs_all_the_same() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    if not TensorRtEngine().missing():
        pytest.skip("TensorRT is installed")
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(x), model(x))
    assert ran() == ["eager"]


def test_a_network_is_handed_over_whole_with_its_weights(trt: StandIn) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 300), nn.Softmax(-1)).eval()
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        call = compiled(model)
        for _ in range(2):
            torch.testing.assert_close(call(x), model(x), rtol=1e-4, atol=1e-5)
    assert ran() == ["tensorrt"]
    assert not reasons()
    assert trt.flags == [1 << 1]
    assert trt.configs[0].flags == set()  # TF32 is off, as it is in torch
    assert set(trt.streams) == {Stream.cuda_stream}


def test_several_results_keep_their_order_and_are_the_callers(trt: StandIn) -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (x + 1).relu(), y * 2, x, (x + 1).relu()

    call = compiled(function)
    x, y = torch.randn(3, 4), torch.arange(5)
    first = call(x, y)
    kept = [value.clone() for value in first]
    call(x + 1, y + 1)
    for value, before, expected in zip(first, kept, function(x, y), strict=True):
        assert torch.equal(value, before)
        torch.testing.assert_close(value, expected)


def test_what_its_reader_of_models_refuses_goes_to_the_next(trt: StandIn) -> None:
    trt.refused = {"Tanh"}
    x = torch.randn(3, 4)
    torch.testing.assert_close(compiled(lambda x: (x * 2).tanh() + 1)(x), (x * 2).tanh() + 1)
    assert "no importer registered for op: Tanh" in reasons()


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [("builds", False, "TensorRT built nothing"), ("lies", "float16", "TensorRT makes float16 of (3, 4) instead of")],
)
def test_what_it_does_wrong_in_building_is_a_reason(trt: StandIn, attribute: str, value: Any, words: str) -> None:
    setattr(trt, attribute, value)
    x = torch.randn(3, 4)
    torch.testing.assert_close(compiled(lambda x: x.exp() + 1)(x), x.exp() + 1)
    assert words in reasons()


def test_a_failure_at_a_call_is_a_reason(trt: StandIn) -> None:
    x = torch.randn(3, 4)
    call = compiled(lambda x: x.exp() + 1)
    call(x)
    trt.fails = True
    torch.testing.assert_close(call(x), x.exp() + 1)
    assert "failed to run its plan" in reasons()


def test_a_limit_of_memory_is_handed_on(trt: StandIn) -> None:
    compiled(lambda x: x.exp() + 1, engines={"tensorrt": {"workspace_bytes": 1 << 20}})(torch.randn(3))
    assert trt.configs[0].limits == {"workspace": 1 << 20}


def test_a_plan_comes_from_the_disk(trt: StandIn) -> None:
    x = torch.randn(3, 4)
    expected = compiled(lambda x: x.exp() + 1)(x)
    torch.compiler.reset()
    omnicomp.timeline.clear()
    store.clear()
    trt.builds = False
    assert torch.equal(compiled(lambda x: x.exp() + 1)(x), expected)
    assert ran() == ["tensorrt"]


def test_a_weight_that_changes_in_place_is_never_stale(trt: StandIn) -> None:
    model, x = nn.Linear(40, 40), torch.randn(2, 40)
    call = compiled(model)
    with torch.no_grad():
        for factor in (1, 3, -2, 0.5, 2):
            model.weight.mul_(factor)
            torch.testing.assert_close(call(x), model(x), rtol=1e-4, atol=1e-5)


def test_double_precision_is_refused(trt: StandIn) -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(compiled(lambda x: x.exp() + 1)(x), x.exp() + 1)
    assert ran() == ["eager"]
