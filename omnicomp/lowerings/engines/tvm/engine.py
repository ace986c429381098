"""The engine: a subgraph becomes a Relax function for its sizes, compiled for this processor."""

import importlib.metadata
from collections.abc import Sequence
from typing import Any, Final

import torch

from omnicomp._torch.autograd.decompositions import decompositions_of
from omnicomp.analysis.nodes import fake_value
from omnicomp.lowerings.engines.base import Engine, EngineExecutable, Session
from omnicomp.lowerings.engines.clustering import Clustering
from omnicomp.lowerings.engines.conversion import convert, dtype_name, plain
from omnicomp.lowerings.engines.subgraph import Results, Subgraph
from omnicomp.lowerings.engines.tvm.library import Tvm, relax, tvm
from omnicomp.lowerings.engines.versions import missing_package

__all__ = ["TvmEngine"]

_PACKAGES: Final = {"apache-tvm": (0, 27)}
_INSTALL: Final = 'pip install "omnicomp[tvm]"'
_DTYPES: Final = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool)

# What torch makes of operators of the table. Nothing random is among them.
_DECOMPOSED: Final = (
    *("addmv", "addr", "celu", "glu", "log_sigmoid_forward", "_prelu_kernel", "hardshrink", "softshrink"),
    *("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "std_mean"),
    *("pixel_shuffle", "pixel_unshuffle", "binary_cross_entropy_with_logits", "_safe_softmax", "count_nonzero"),
)


class TvmEngine(Engine):
    """Compiles through Relax's default pipeline, without tuning. Inference on the CPU.

    A virtual machine keeps state between setting inputs and reading outputs, so each thread has one of its own. An
    index that is out of range raises nothing: the nearest is taken.
    """

    name = "tvm"
    clustering = Clustering(dtypes=_DTYPES)
    decompositions = decompositions_of(_DECOMPOSED)
    empty = False

    def missing(self) -> str:
        """TVM, or a newer one: Relax's classes get other names at most of its releases."""
        return missing_package(_PACKAGES, _INSTALL)

    def version(self) -> str:
        """TVM's version."""
        return importlib.metadata.version("apache-tvm")

    def compile(self, subgraph: Subgraph) -> EngineExecutable:
        """Convert the subgraph to Relax, and compile that.

        Raises:
            Exception: what TVM raises.
        """
        results = Results(subgraph)
        placeholders = subgraph.placeholders
        called = set(subgraph.inputs)
        order = [*subgraph.constants, *(index for index, node in enumerate(placeholders) if node in called)]
        builder = relax.BlockBuilder()
        variables: list[Any] = [None] * len(placeholders)
        for index in order:
            fake = fake_value(placeholders[index])
            kind = relax.TensorType(tuple(map(int, fake.shape)), dtype_name(fake.dtype))
            variables[index] = relax.Var(f"x{index}", kind)
        with builder.function("main", [variables[index] for index in order]):
            with builder.dataflow():
                values = convert(subgraph, self.operators, Tvm(), variables)
                made = builder.emit_output(relax.Tuple([values[node] for node in results.nodes]))
            builder.emit_func_output(made)
        # Of this processor: without its name code for the oldest one is generated.
        target = tvm.target.Target.from_device(tvm.cpu())
        executable = tvm.compile(builder.get(), target=target)
        constants = [_imported(value.detach().contiguous()) for value in subgraph.constants.values()]
        return _Executable(executable, constants, results)


class _Executable(EngineExecutable):
    """A compiled Relax module, with the weights, which are the memory of torch's."""

    def __init__(self, executable: Any, constants: Sequence[Any], results: Results) -> None:
        self._executable = executable
        self._constants = list(constants)
        self._results = results

    def session(self) -> Session:
        """A virtual machine for one thread."""
        run = relax.VirtualMachine(self._executable, tvm.cpu())["main"]
        constants, spread = self._constants, self._results.spread

        def call(inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
            made = run(*constants, *map(_imported, inputs))
            return spread([torch.from_dlpack(each) for each in made])

        return call


def _imported(tensor: torch.Tensor) -> Any:
    return tvm.runtime.from_dlpack(plain(tensor))
