"""A compiled model of OpenVINO, called on torch's own memory by one request a thread."""

import json
from collections.abc import Sequence
from typing import Any, Final

import torch

from omnicomp.analysis.nodes import fake_value
from omnicomp.errors import EngineError
from omnicomp.lowerings.engines.base import EngineExecutable, Session
from omnicomp.lowerings.engines.lazy import Lazy
from omnicomp.lowerings.engines.openvino.bounds import INTEGERS, LIMIT, exceeds
from omnicomp.lowerings.engines.subgraph import Results, Subgraph

__all__ = ["OpenVinoExecutable", "shared", "type_of"]

openvino: Final[Any] = Lazy("openvino")

_NAMES: Final[dict[torch.dtype, str]] = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float64: "f64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "boolean",
}


class OpenVinoExecutable(EngineExecutable):
    """A compiled model. Threads share it, and have a request each, as a request keeps inputs and results."""

    def __init__(
        self,
        compiled: Any,
        results: Results,
        places: tuple[Sequence[int], Sequence[int | None]],
        subgraph: Subgraph,
        held: object,
    ) -> None:
        """Keep a model.

        Args:
            compiled: the model; its outputs are the computed ones of `results`, in order. None if nothing is computed.
            results: what the subgraph returns.
            places: which input of a call each of the model's is, and for each of the results which input it is, or
                None if it is computed.
            subgraph: what it was compiled of.
            held: keeps the tensors whose memory is the model's constants.

        Raises:
            EngineError: a result has another dtype or shape than torch's, or a weight is too large an integer.
        """
        self._compiled, self._results, self._held = compiled, results, held
        self._taken, self._given = list(places[0]), list(places[1])
        made = [(tuple(fake_value(node).shape), fake_value(node).dtype) for node in results.nodes]
        self._made = [fact for fact, place in zip(made, self._given, strict=True) if place is None]
        ports = [] if compiled is None else compiled.outputs
        for port, (shape, dtype) in zip(ports, self._made, strict=True):
            if port.get_element_type() != type_of(dtype) or tuple(port.get_shape()) != shape:
                found = f"{port.get_element_type()} of {port.get_shape()}"
                raise EngineError(f"a result is {found}, not {dtype} of {shape}")
        self._wide = [index for index, node in enumerate(subgraph.inputs) if fake_value(node).dtype in INTEGERS]
        if any(value.dtype in INTEGERS and exceeds(value) for value in subgraph.constants.values()):
            raise EngineError(f"integers of a weight are beyond ±{LIMIT}, and may not stay exact")

    def session(self) -> Session:
        """A request."""
        made, results, given, wide, taken = self._made, self._results, self._given, self._wide, self._taken
        if self._compiled is None:
            return lambda inputs: results.spread([inputs[place].clone() for place in given if place is not None])
        request = self._compiled.create_infer_request()
        copies = any(place is not None for place in given)

        def run(inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
            for index in wide:
                if exceeds(inputs[index]):
                    raise EngineError(
                        f"integers of an input are beyond ±{LIMIT}, which OpenVINO may not compute exactly"
                    )
            for port, index in enumerate(taken):
                request.set_input_tensor(port, shared(inputs[index]))
            # New memory each time: a request would write its own results over those of the call before.
            values = [torch.empty(shape, dtype=dtype) for shape, dtype in made]
            for index, value in enumerate(values):
                request.set_output_tensor(index, shared(value))
            request.infer()
            if copies:
                computed = iter(values)
                values = [next(computed) if place is None else inputs[place].clone() for place in given]
            return results.spread(values)

        return run

    def dumps(self) -> bytes | None:
        """The compiled model with its weights."""
        if self._compiled is None:
            return None
        return json.dumps([self._taken, self._given]).encode() + b"\n" + self._compiled.export_model().getvalue()

    @property
    def description(self) -> str:
        """The precision in which it computes."""
        if self._compiled is None:
            return "copies alone"
        return f"CPU, {self._compiled.get_property('INFERENCE_PRECISION_HINT').get_type_name()}"


def type_of(dtype: torch.dtype) -> Any:
    """OpenVINO's element type for a dtype.

    Raises:
        EngineError: it has none.
    """
    if dtype not in _NAMES:
        raise EngineError(f"OpenVINO has no element type for {dtype}")
    return getattr(openvino.Type, _NAMES[dtype])


def shared(tensor: torch.Tensor) -> Any:
    """The memory of a contiguous tensor on the CPU as OpenVINO's tensor, which does not keep it alive."""
    if tensor.dtype is torch.bfloat16:
        return openvino.Tensor(tensor.view(torch.uint16).numpy(), list(tensor.shape), openvino.Type.bf16)
    return openvino.Tensor(tensor.numpy(), shared_memory=True)
