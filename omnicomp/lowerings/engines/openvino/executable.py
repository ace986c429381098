"""Whether integers stay where OpenVINO's CPU plugin computes them exactly: it compares and sums them in float32.

What comes into a subgraph is asked at each call to be below a limit. From there on the largest value that an operator
can make of its operands is followed; where that is not known, or too large, the operator is not taken.
"""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from omnicomp._torch.symbols import known_range
from omnicomp.analysis.nodes import fake_value
from omnicomp.errors import EngineError
from omnicomp.lowerings.engines.base import EngineExecutable, Session
from omnicomp.lowerings.engines.checks import argument
from omnicomp.lowerings.engines.lazy import Lazy
from omnicomp.lowerings.engines.subgraph import Results, Subgraph

INTEGERS: Final = (torch.int64, torch.int32)

LIMIT: Final = 2**21
_MOST: Final = 2**24
_KEY: Final = "omnicomp_openvino_bound"

# What makes no larger numbers of its operands than they are.
_SAME: Final = frozenset(
    "view _unsafe_view reshape permute transpose t expand squeeze unsqueeze slice select cat stack split"
    " split_with_sizes unbind flip roll repeat clone alias detach lift_fresh_copy gather index index_select"
    " where maximum minimum amax amin clamp clamp_min clamp_max abs neg sign masked_fill tril triu"
    " constant_pad_nd scatter as_strided relu remainder fmod full full_like fill scalar_tensor"
    " new_full floor_divide bitwise_not diagonal getitem slice_scatter select_scatter embedding".split()
)
# Beside those of its operands, positions in them.
_SMALL: Final = frozenset(
    "argmax argmin zeros ones zeros_like ones_like new_zeros new_ones arange max min sort topk"
    " max_pool2d_with_indices max_pool3d_with_indices".split()
)
_SUMS: Final = frozenset("sum cumsum".split())


def exceeds(values: torch.Tensor) -> bool:
    """Whether an element of a tensor on the CPU is beyond the limit."""
    if not values.numel():
        return False
    least, most = torch.aminmax(values)
    return int(most) > LIMIT or int(least) < -LIMIT


def overflow(node: Node) -> str:
    """Why a node's integers may not be exact: one sentence; empty if they are, or if there are none."""
    if not any(isinstance(leaf, torch.Tensor) and leaf.dtype in INTEGERS for leaf in tree_leaves(fake_value(node))):
        return ""
    bound = _bound(node)
    if bound <= _MOST:
        return ""
    return "its integers may leave what float32 holds exactly, in which OpenVINO computes some of them"


def _bound(node: Node) -> float:
    found = node.meta.get(_KEY)
    if found is None:
        found = node.meta[_KEY] = _computed(node)
    return found


def _computed(node: Node) -> float:
    if node.op != "call_function":
        return LIMIT
    schema = getattr(node.target, "_schema", None)
    name = schema.name.partition("::")[2] if schema is not None else getattr(node.target, "__name__", "")
    operands = [_of(arg) for arg in tree_leaves((node.args, node.kwargs))]
    largest = max(operands, default=0)
    if name in _SAME:
        return largest
    if name in _SMALL:
        return max(largest, 1, *(_elements(arg) for arg in node.all_input_nodes))
    if name in _SUMS:
        return largest * _elements(node.all_input_nodes[0], argument(node, "dim"))
    if name == "_to_copy":
        return _converted(node)
    combined: Callable[..., float] | None = {"add": _sum, "sub": _sum, "rsub": _sum, "mul": _product}.get(name)
    return combined(node) if combined is not None else math.inf


def _of(value: Any) -> float:
    if isinstance(value, bool):
        return 1
    if isinstance(value, (int, float)):
        return abs(value)
    if isinstance(value, Node):
        fake = fake_value(value)
        if isinstance(fake, torch.SymInt):
            return _most(fake)
        if isinstance(fake, (int, float)):
            return abs(fake)
        dtypes = {leaf.dtype for leaf in tree_leaves(fake) if isinstance(leaf, torch.Tensor)}
        if dtypes <= {torch.bool}:
            return 1
        return _bound(value) if dtypes & {torch.int64, torch.int32} else 0
    return 0


def _most(size: Any) -> float:
    """The largest value of a symbolic size; the program would not fit into memory beyond the limit."""
    _, high = known_range(size, size.node.expr)
    return LIMIT if high is None else min(high, LIMIT)


def _elements(node: Node, dim: Any = None) -> float:
    """How many elements a tensor has, or those of its dimensions that are summed; none given stands for all."""
    fake = fake_value(node)
    if not isinstance(fake, torch.Tensor):
        return LIMIT
    dims = [dim] if isinstance(dim, int) else list(dim or range(fake.ndim))
    sizes = [fake.shape[each] for each in dims] if fake.ndim else []
    return math.prod(size if type(size) is int else _most(size) for size in sizes)


def _sum(node: Node) -> float:
    scale = node.kwargs.get("alpha", 1)
    return _of(node.args[0]) + _of(node.args[1]) * (abs(scale) if isinstance(scale, (int, float)) else math.inf)


def _product(node: Node) -> float:
    return _of(node.args[0]) * _of(node.args[1])


def _converted(node: Node) -> float:
    source = node.args[0]
    fake = fake_value(source) if isinstance(source, Node) else None
    if isinstance(fake, torch.Tensor) and not fake.dtype.is_floating_point:
        return _of(source)
    return math.inf


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
