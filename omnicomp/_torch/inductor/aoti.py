"""AOTInductor: an exported program becomes a graph for the passes, then the files of a package, then a function."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from zipfile import BadZipFile, ZipFile

import torch
from torch._C._aoti import AOTIModelPackageLoader
from torch._export.utils import _compiling_state_context
from torch._inductor.compile_fx import _aoti_flatten_inputs, compile_fx_aot, compile_fx_inner
from torch.export import ExportedProgram
from torch.export._tree_utils import reorder_kwargs
from torch.export.pt2_archive._package import AOTICompiledModel, PT2ArchiveReader, _load_extra_files, package_pt2
from torch.fx import GraphModule
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_loads

from omnicomp._torch.autograd.mutations import separate_outputs
from omnicomp._torch.fx import describe
from omnicomp._torch.inductor.compile_fx import observer_paused
from omnicomp._torch.repairs.while_lowered import inductor_repaired

_MODEL: Final = "model"


def graph_of(program: ExportedProgram) -> tuple[GraphModule, list[Any]]:
    """The graph of a program with its parameters as attributes, and the fake inputs of its placeholders."""
    module: Any = program.module(check_guards=False) if "check_guards" in _options(program.module) else program.module()
    guards = next(iter(module.graph.find_nodes(op="call_module", target="_guards_fn")), None)
    if guards is not None:  # checks of inputs that are no tensors can't be compiled
        module.graph.erase_node(guards)
        delattr(module, "_guards_fn")
        module.recompile()
    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]
    inputs = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    describe(module, inputs)
    return module, inputs


def _options(function: Callable[..., Any]) -> Sequence[str]:
    return function.__code__.co_varnames  # type: ignore[attr-defined]


def build(
    module: GraphModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    seen: Callable[[GraphModule, Sequence[Any]], None],
) -> list[Any]:
    """Build a graph by Inductor, for a package; returns what `write` takes.

    Args:
        module: the graph, with the calling convention that export gave it.
        args: example inputs.
        kwargs: likewise, by name.
        options: Inductor's config.
        seen: gets the graph behind autograd and the example inputs before Inductor does, and may change the graph;
            what it raises ends the build.
    """

    def inner_compile(part: GraphModule, part_inputs: Sequence[Any], **more: Any) -> Any:
        seen(part, flat)
        separate_outputs(part.graph)
        with observer_paused(), inductor_repaired():
            return compile_fx_inner(part, part_inputs, **more)

    given: Any = {**options, "aot_inductor.package": True}
    flat, patches = _aoti_flatten_inputs(module, args, dict(kwargs), options=given)
    with _compiling_state_context():
        files: Any = compile_fx_aot(module, list(flat), inner_compile=inner_compile, config_patches=patches)  # type: ignore[arg-type]
    return files


def write(path: Path, files: list[Any], extra: Mapping[str, str]) -> None:
    """Write a package with the files of one model, and texts beside it."""
    package_pt2(os.fspath(path), aoti_files={_MODEL: files}, extra_files=dict(extra))


def read_texts(path: Path) -> dict[str, str]:
    """The texts in a package beside the model.

    Raises:
        BadZipFile: a byte of the package is another one than was written; torch's reader does not look.
    """
    with ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise BadZipFile(f"{damaged} is damaged")
    with PT2ArchiveReader(os.fspath(path)) as archive:
        return _load_extra_files(archive, archive.get_file_names())


class _Checking(AOTICompiledModel):
    """A model that sees its inputs first: the code takes inputs of any sizes and strides."""

    def __init__(self, loader: AOTIModelPackageLoader, check: Callable[[Sequence[Any]], None]) -> None:
        super().__init__(loader)
        self._check = check
        self._in, self._out = map(treespec_loads, loader.get_call_spec())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        leaves, spec = tree_flatten((args, reorder_kwargs(kwargs, self._in)))
        if spec != self._in:
            raise ValueError(f"the package takes inputs as {self._in}, and got {spec}")
        self._check(leaves)
        results = self.loader.boxed_run([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        return tree_unflatten(results, self._out)


def load(path: Path, device_index: int, check: Callable[[Sequence[Any]], None] | None) -> AOTICompiledModel:
    """The model of a package, which can be called; `check` gets the leaves of its inputs before each call."""
    # Not by `load_pt2`: to warn of a package from another processor, it asks the C++ compiler what this one can do.
    loader = AOTIModelPackageLoader(os.fspath(path), _MODEL, False, 1, device_index)
    return AOTICompiledModel(loader) if check is None else _Checking(loader, check)


def ranges_of(program: ExportedProgram) -> dict[str, tuple[int, int | None]]:
    """The least and the largest value of each symbol; the largest is None if there is none."""
    found: dict[Any, Any] = program.range_constraints
    return {
        str(symbol): (int(each.lower), int(each.upper) if each.upper.is_Integer else None)
        for symbol, each in found.items()
        if each.lower.is_Integer
    }


def exported(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> ExportedProgram:
    """The program of a model for inference."""
    with torch.no_grad():
        return torch.export.export(model, args, dict(kwargs), dynamic_shapes=dynamic_shapes)


def constants_of(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Parameters, buffers and constants of a program, by name."""
    found: dict[str, Any] = {**program.state_dict, **program.constants}
    return {name: value.detach() for name, value in found.items() if isinstance(value, torch.Tensor)}
