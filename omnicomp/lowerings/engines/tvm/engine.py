"""Functions that take the place of the importer's own, where it or Relax does not compute what torch does.

TVM's maximum and minimum drop NaN, which torch's keep, and its orders do not know it. An index
that is out of range reads memory of others.
"""

import importlib
import importlib.metadata
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule

from omnicomp._torch.exported import exported
from omnicomp.analysis.nodes import fake_value
from omnicomp.errors import EngineError
from omnicomp.lowerings.engines.base import Engine, EngineExecutable, Session, aligned
from omnicomp.lowerings.engines.canonical import canonical
from omnicomp.lowerings.engines.checks import argument
from omnicomp.lowerings.engines.clustering import Clustering
from omnicomp.lowerings.engines.lazy import Lazy, missing_package
from omnicomp.lowerings.engines.subgraph import Results, Subgraph, with_constants

relax: Final[Any] = Lazy("tvm.relax")
op: Final[Any] = Lazy("tvm.relax.op")
nn: Final[Any] = Lazy("tvm.relax.op.nn")


class _Call:
    """A node that is converted: its arguments as Relax's values, and its expressions as variables."""

    def __init__(self, node: Any, importer: Any) -> None:
        self.node, self._importer = node, importer
        self.like = fake_value(node)
        self.x = importer._retrieve_args(node.args[0])

    def __getitem__(self, name: str) -> Any:
        return self._importer._retrieve_args(argument(self.node, name))

    def emit(self, expression: Any) -> Any:
        """The expression as a variable, whose type is known from here on."""
        return self._importer.block_builder.emit(expression)

    def const(self, value: Any, like: Any = None) -> Any:
        """A constant of the dtype of a variable."""
        return relax.const(value, _dtype(self.x if like is None else like))


def _dims(x: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in x.ty.shape)


def _dtype(x: Any) -> str:
    return str(x.ty.dtype)


def _floats(x: Any) -> bool:
    return _dtype(x).startswith("float")


def _product(call: _Call) -> Any:
    return op.matmul(call.x, call["mat2"])


def _full(call: _Call) -> Any:
    """TVM's own takes no infinite number."""
    value = relax.const(call["fill_value"], str(call.like.dtype).removeprefix("torch."))
    return op.broadcast_to(value, tuple(map(int, call.like.shape))) if call.like.dim() else value


def _equal(call: _Call) -> Any:
    """TVM takes a value to equal itself, which NaN doesn't."""
    x, y = call.x, call["other"]
    return op.logical_not(op.isnan(x)) if _floats(x) and x.same_as(y) else op.equal(x, y)


def _not_equal(call: _Call) -> Any:
    """TVM takes NaN to differ from nothing."""
    x, y = call.x, call["other"]
    y = y if isinstance(y, relax.Expr) else call.const(y)
    if not _floats(x):
        return op.not_equal(x, y)
    missing = op.isnan(x) if x.same_as(y) else op.logical_or(op.isnan(x), op.isnan(y))
    return op.logical_or(missing, op.not_equal(x, y))


def _missing(call: _Call, along: Any, keepdim: bool) -> Any:
    """Whether there is a NaN along dimensions."""
    marks = call.emit(op.astype(op.isnan(call.x), "int32"))
    return op.greater(op.max(marks, along, keepdim), relax.const(0, "int32"))


def _extreme(largest: bool) -> Callable[[_Call], Any]:
    """NaN if there is one."""

    def convert(call: _Call) -> Any:
        x, along, keepdim = call.x, call["dim"], bool(call["keepdim"])
        if not _dims(x):
            return x
        found = (op.max if largest else op.min)(x, along or None, keepdim)
        return op.where(_missing(call, along or None, keepdim), call.const(math.nan), found) if _floats(x) else found

    return convert


def _place(largest: bool) -> Callable[[_Call], Any]:
    """Where the first extreme is; the first NaN, if there is one."""

    def convert(call: _Call) -> Any:
        x, along, keepdim = call.x, call["dim"], call["keepdim"]
        if not _dims(x):
            return op.zeros((), "int64")
        found = (op.argmax if largest else op.argmin)(x, along, keepdim)
        if not _floats(x):
            return found
        marks = call.emit(op.astype(op.isnan(x), "int32"))
        return op.where(_missing(call, along, keepdim), op.argmax(marks, along, keepdim), found)

    return convert


def _sort(call: _Call) -> Any:
    """NaN is larger than all others."""
    x, dim, descending = call.x, call["dim"], call["descending"]
    if not _dims(x):
        return relax.Tuple([x, call.emit(op.zeros((), "int64"))])
    dim %= len(_dims(x))
    order = op.argsort(x, dim, descending, "int64")
    if _floats(x):
        missing = call.emit(op.isnan(x))
        known = call.emit(op.where(missing, call.const(math.inf), x))
        order = call.emit(op.argsort(known, dim, descending, "int64"))
        marks = call.emit(op.gather_elements(op.astype(missing, "int32"), order, dim))
        order = op.gather_elements(order, op.argsort(marks, dim, descending, "int64"), dim)
    order = call.emit(order)
    return relax.Tuple([call.emit(op.gather_elements(x, order, dim)), order])


def _within(call: _Call, index: Any, size: int) -> Any:
    """Indices from the end as ones from the beginning; what is out of range must not be read, and is the nearest."""
    zero, last = call.const(0, index), call.const(size - 1, index)
    wrapped = call.emit(op.where(op.less(index, zero), op.add(index, call.const(size, index)), index))
    return call.emit(op.minimum(op.maximum(wrapped, zero), last))


def _index_select(call: _Call) -> Any:
    dim, index = call["dim"], call["index"]
    return op.take(call.x, _within(call, index, _dims(call.x)[dim]), dim % len(_dims(call.x)), "clip")


def _embedding(call: _Call) -> Any:
    return op.take(call.x, _within(call, call["indices"], _dims(call.x)[0]), 0, "clip")


def _index(call: _Call) -> Any:
    sizes = zip(call["indices"], _dims(call.x), strict=False)
    return op.index_tensor(call.x, [_within(call, each, size) for each, size in sizes])


def _gather(call: _Call) -> Any:
    dim = call["dim"]
    return op.gather_elements(call.x, _within(call, call["index"], _dims(call.x)[dim]), dim % len(_dims(call.x)))


def _scatter(how: str) -> Callable[[_Call], Any]:
    def convert(call: _Call) -> Any:
        x, dim, index = call.x, call["dim"], call["index"]
        source = call.const(call["value"]) if call["src"] is None else call["src"]
        sizes, rank = _dims(index), len(_dims(x))
        if not _dims(source):
            source = op.broadcast_to(source, sizes)
        elif _dims(source) != sizes:
            source = op.strided_slice(source, list(range(rank)), [0] * rank, sizes, [1] * rank)
        within = _within(call, index, _dims(x)[dim])
        return op.scatter_elements(x, within, call.emit(source), dim % rank, how)

    return convert


def _max_pool(call: _Call) -> Any:
    """The values; NaN where there is one in the window."""
    kernel, stride, padding, dilation = (_pair(call[name]) for name in ("kernel_size", "stride", "padding", "dilation"))
    settings = (kernel, stride or kernel, padding * 2, dilation, call["ceil_mode"])
    shape = tuple(map(int, call.like[0].shape))
    planes = call.emit(op.reshape(call.x, (1, *_dims(call.x)))) if len(shape) == 3 else call.x
    made = nn.max_pool2d(planes, *settings)
    if _floats(call.x):
        found = nn.max_pool2d(op.astype(op.isnan(planes), "float32"), *settings)
        made = op.where(op.greater(found, relax.const(0, "float32")), call.const(math.nan), made)
    return relax.Tuple([call.emit(op.reshape(made, shape)), call.emit(op.zeros(shape, "int64"))])


def _pair(values: Sequence[int]) -> tuple[int, ...]:
    return (values[0], values[-1]) if values else ()


_CONVERTERS: Final[dict[str, Callable[[_Call], Any]]] = {
    "full.default": _full,
    "mm.default": _product,
    "bmm.default": _product,
    "eq.Tensor": _equal,
    "ne.Tensor": _not_equal,
    "ne.Scalar": _not_equal,
    "amax.default": _extreme(largest=True),
    "amin.default": _extreme(largest=False),
    "argmax.default": _place(largest=True),
    "argmin.default": _place(largest=False),
    "sort.default": _sort,
    "index_select.default": _index_select,
    "embedding.default": _embedding,
    "index.Tensor": _index,
    "gather.default": _gather,
    "scatter.src": _scatter("update"),
    "scatter.value": _scatter("update"),
    "scatter_add.default": _scatter("add"),
    "max_pool2d_with_indices.default": _max_pool,
}


def _called(convert: Callable[[_Call], Any]) -> Callable[[Any, Any], Any]:
    def call(node: Any, importer: Any) -> Any:
        made = _Call(node, importer)
        return made.emit(convert(made))

    return call


CONVERTERS: Final = {name: _called(convert) for name, convert in _CONVERTERS.items()} | {
    "prod.dim_int": lambda node, importer: importer._prod(node),
}
"""By the name of an operator in the importer's map."""


_PACKAGES: Final = {"apache-tvm": (0, 27)}
_INSTALL: Final = 'pip install "omnicomp[tvm]"'
_DTYPES: Final = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool)

tvm: Final[Any] = Lazy("tvm")


class TvmEngine(Engine):
    """Compiles through Relax's default pipeline, without tuning. Inference on the CPU.

    A virtual machine keeps state between setting inputs and reading outputs, so each thread has one of its own. An
    index that is out of range raises nothing: the nearest is taken.

    """

    name = "tvm"
    clustering = Clustering(dtypes=_DTYPES)
    empty = False

    def missing(self) -> str:
        """TVM, or a newer one: Relax's classes get other names at most of its releases."""
        return missing_package(_PACKAGES, _INSTALL)

    def version(self) -> str:
        """TVM's version."""
        return importlib.metadata.version("apache-tvm")

    def compile(self, subgraph: Subgraph) -> EngineExecutable:
        """Import the subgraph, and compile that.

        Raises:
            EngineError: a result does not have torch's shape or dtype.
            Exception: what TVM raises.
        """
        results = Results(subgraph)
        names = [str(node.target) for node in subgraph.inputs]
        module = with_constants(subgraph)
        canonical(module.graph)
        constants = _with_placeholders(module)
        taken = [names.index(str(node.target)) for node in module.graph.find_nodes(op="placeholder")[len(constants) :]]
        frontend = importlib.import_module("tvm.relax.frontend.torch")
        program = exported(module)
        imported = frontend.from_exported_program(program, run_ep_decomposition=False, custom_convert_map=CONVERTERS)
        _check(imported["main"].ret_ty.fields, program)
        # Of this processor: without its name code for the oldest one is generated.
        target = tvm.target.Target.from_device(tvm.cpu())
        return _Executable(tvm.compile(imported, target=target), constants, taken, results)


def _with_placeholders(module: GraphModule) -> list[Any]:
    """Make the first placeholders of a graph's attributes; their values."""
    found: list[Any] = []
    first = next(node for node in module.graph.nodes if node.op != "get_attr")
    for node in module.graph.find_nodes(op="get_attr"):
        with module.graph.inserting_before(first):
            given = module.graph.placeholder(f"fixed_{len(found)}")
        given.meta.update(node.meta)
        found.append(_imported(operator.attrgetter(str(node.target))(module)))
        node.replace_all_uses_with(given)
        module.graph.erase_node(node)
    module.recompile()
    return found


def _check(types: Sequence[Any], program: Any) -> None:
    made: Any = next(iter(reversed(program.graph.nodes))).args[0]
    for found, node in zip(types, made, strict=True):
        fake = node.meta["val"]
        shape, dtype = tuple(map(int, found.shape)), str(found.dtype)
        if (shape, dtype) != (tuple(fake.shape), str(fake.dtype).removeprefix("torch.")):
            raise EngineError(f"TVM makes {dtype} of {shape} instead of {fake.dtype} of {tuple(fake.shape)}")


class _Executable(EngineExecutable):
    """A compiled Relax module, with the weights, which are the memory of torch's."""

    def __init__(self, executable: Any, constants: Sequence[Any], taken: Sequence[int], results: Results) -> None:
        self._executable, self._constants = executable, list(constants)
        self._taken, self._results = list(taken), results

    def session(self) -> Session:
        """A virtual machine for one thread."""
        run = relax.VirtualMachine(self._executable, tvm.cpu())["main"]
        constants, taken, spread = self._constants, self._taken, self._results.spread
        fixed = [torch.from_dlpack(each).data_ptr() for each in constants]

        def call(inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
            made = [torch.from_dlpack(each) for each in run(*constants, *(_imported(inputs[each]) for each in taken))]
            used = {*fixed, *(inputs[each].data_ptr() for each in taken)}
            for index, value in enumerate(made):
                if value.data_ptr() in used:  # a view, which has to have memory of its own
                    made[index] = value.clone()
                used.add(value.data_ptr())
            return spread(made)

        return call


def _imported(tensor: torch.Tensor) -> Any:
    return tvm.runtime.from_dlpack(aligned(tensor))
