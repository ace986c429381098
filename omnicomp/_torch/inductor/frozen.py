"""Inductor with weights built in: constants are folded, packed for the kernels of mkl and oneDNN, and fused with.

`torch.compile(..., options={"freezing": True})` has no effect, as Dynamo decides by the global config while it traces.
Here the weights are attributes of the graph that `compile_fx` gets, which is all that its freezing needs.
"""

import contextlib
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
import torch._inductor.config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from omnicomp._torch.inductor.compile_fx import observer_paused
from omnicomp._torch.repairs.decompositions import decompositions_mended
from omnicomp._torch.repairs.while_lowered import inductor_repaired


def inductor_settings() -> tuple[tuple[str, str], ...]:
    """Inductor's settings at this moment that decide on generated code, for a key."""
    return tuple(sorted((name, repr(value)) for name, value in torch._inductor.config.save_config_portable().items()))


@contextlib.contextmanager
def _modules_of_their_own() -> Generator[None]:
    """Let go of the generated modules that were loaded inside, which hold the constants.

    Inductor lists them for good, so that the memory would never be freed. The functions keep what they read.
    """
    known = set(map(id, PyCodeCache.modules))
    try:
        yield
    finally:
        shared = set(map(id, PyCodeCache.modules_no_attr.values()))
        for module in [each for each in PyCodeCache.modules if id(each) not in known and id(each) not in shared]:
            PyCodeCache.modules.remove(module)
            if sys.modules.get(module.__name__) is module:
                del sys.modules[module.__name__]


def compile_frozen(
    module: GraphModule, constants: Mapping[int, torch.Tensor], settings: Mapping[str, Any]
) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Compile a graph of fixed sizes with Inductor's freezing.

    Args:
        module: a functional graph of ATen operators that returns a tuple; it is changed.
        constants: tensors to build in, by position among the placeholders; the results are packed copies of them.
        settings: entries of Inductor's config beside `freezing`.

    Returns:
        A function of the list of the other inputs.

    Raises:
        InductorError: the graph can't be lowered or its code not compiled.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    for index, value in constants.items():
        name = f"constant_{index}"
        module.register_buffer(name, value)
        with module.graph.inserting_before(placeholders[index]):
            fetched = module.graph.get_attr(name)
        fetched.meta = {"val": placeholders[index].meta["val"]}
        placeholders[index].replace_all_uses_with(fetched)
        module.graph.erase_node(placeholders[index])
    module.recompile()
    left = [node.meta["val"] for index, node in enumerate(placeholders) if index not in constants]
    # A mode of its own: what compiles around this one has symbols and constants that are none of its business.
    mode = FakeTensorMode()
    with mode:
        inputs = [
            torch.empty_strided(tuple(map(int, v.shape)), tuple(map(int, v.stride())), dtype=v.dtype, device=v.device)
            for v in left
        ]
    patches = {**settings, "freezing": True}
    with (
        observer_paused(),
        inductor_repaired(),
        decompositions_mended(),
        torch._inductor.config.patch(patches),
        torch.no_grad(),
        _modules_of_their_own(),
    ):
        compiled: Any = compile_fx(module, inputs, config_patches={})
    return lambda arguments: compiled(*arguments)
