"""The engine: TVM's importer of exported programs makes a Relax function of a subgraph, for its sizes."""

import importlib
import importlib.metadata
import operator
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule

from omnicomp._torch.exported import exported
from omnicomp.errors import EngineError
from omnicomp.lowerings.engines.base import Engine, EngineExecutable, Session, aligned
from omnicomp.lowerings.engines.canonical import canonical
from omnicomp.lowerings.engines.clustering import Clustering
from omnicomp.lowerings.engines.lazy import Lazy
from omnicomp.lowerings.engines.subgraph import Results, Subgraph, with_constants
from omnicomp.lowerings.engines.tvm.converters import CONVERTERS
from omnicomp.lowerings.engines.versions import missing_package

__all__ = ["TvmEngine"]

_PACKAGES: Final = {"apache-tvm": (0, 27)}
_INSTALL: Final = 'pip install "omnicomp[tvm]"'
_DTYPES: Final = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool)

tvm: Final[Any] = Lazy("tvm")
relax: Final[Any] = Lazy("tvm.relax")


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
