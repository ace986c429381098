"""Scripts that show what Inductor fails on: the smallest graph, with inputs like the real ones and no data of theirs.

Such a script needs torch alone, and the packages whose operators are in the graph.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node

from omnicomp._torch.inductor import repro_script
from omnicomp.analysis.nodes import op_name
from omnicomp.store import folder, write_whole

__all__ = ["FOLDER", "script_of", "write_script"]

FOLDER: Final = "repro"


def script_of(
    module: GraphModule, inputs: Sequence[Any], error: str, *, backward: bool = False, values: bool = False
) -> str:
    """The text of a script, or an empty text if a graph can't be written down.

    Args:
        module: the graph; it returns a tuple.
        inputs: fake tensors and symbolic sizes of its placeholders.
        error: what it fails with.
        backward: whether it is one of a backward.
        values: whether it computes something wrong; otherwise it can't be built.
    """
    targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
    lines = [_input(value) for value in inputs]
    if repro_script.has_user_kernels(targets) or None in lines:
        return ""
    modules, unknown = repro_script.modules_of(targets)
    imports = [f"import {name}" for name in modules]
    imports += [f"# Import what registers {name} here." for name in unknown]
    names = ", ".join(sorted({op_name(node) for node in module.graph.nodes if node.op == "call_function"}))
    what = "computes something else than eager for" if values else "can't build"
    return repro_script.TEMPLATE.format(
        title=_plain(f"Inductor {what} {names}."[:100]),
        version=torch.__version__,
        error=_plain(error),
        imports="".join(f"{line}\n" for line in imports),
        dynamic=any(_is_symbolic(value) for value in inputs),
        backward=backward,
        values=values,
        settings=repro_script.changed_settings(),
        classes=_classes(module, "Repro"),
        inputs="".join(f"        {line}\n" for line in lines),
        main=repro_script.COMPARE if values else repro_script.BUILD,
    )


def write_script(
    module: GraphModule, inputs: Sequence[Any], error: str, *, backward: bool = False, values: bool = False
) -> Path | None:
    """Write the script of a graph into the cache folder; None if it can't be written down.

    Args:
        module: the graph; it returns a tuple.
        inputs: fake tensors and symbolic sizes of its placeholders.
        error: what it fails with.
        backward: whether it is one of a backward.
        values: whether it computes something wrong; otherwise it can't be built.

    Raises:
        OSError: the folder can't be written to.
    """
    text = script_of(module, inputs, error, backward=backward, values=values)
    if not text:
        return None
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    name = re.sub(r"\W+", "_", op_name(calls[-1])) if calls else "graph"
    path = folder() / FOLDER / f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
    if not path.exists():
        write_whole(path, text)
    return path


def _plain(text: str) -> str:
    """Text that can stand in a docstring."""
    return text.replace("\\", "/").replace('"""', "'''")


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride()))
    return isinstance(value, (torch.SymInt, torch.SymFloat))


def _input(value: Any) -> str | None:
    """The expression of an input; None if there is none."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_nested:
            return None
        numbers = [repro_script.size_now(each) for each in (*value.shape, *value.stride(), value.storage_offset())]
        if None in numbers:
            return None
        rank = value.dim()
        size, stride, offset = tuple(numbers[:rank]), tuple(numbers[rank:-1]), numbers[-1]
        return f'tensor({size}, {stride}, {offset}, {value.dtype}, "{value.device}"),'
    if isinstance(value, (int, torch.SymInt)):
        number = repro_script.size_now(value)
        return None if number is None else f"{number},"
    return f"{value!r}," if isinstance(value, (float, type(None))) else None


def _classes(module: GraphModule, name: str) -> str:
    """A class for a graph, and for each that its higher-order operators call."""
    made, fields = "", ""
    for node in module.graph.find_nodes(op="get_attr"):
        target = str(node.target)
        line = _field(module, node, f"{name}_{target}")
        if f"self.{target} =" in fields:
            continue
        value = getattr(module, target, None)
        if isinstance(value, GraphModule):
            made += _classes(value, f"{name}_{target}")
        fields += f"        self.{target} = {line}\n"
    code = module.code.strip().replace("\n", "\n    ")
    init = f"    def __init__(self):\n        super().__init__()\n{fields}\n" if fields else ""
    return f"{made}class {name}(torch.nn.Module):\n{init}    {code}\n\n\n".replace("    \n", "\n")


def _field(module: GraphModule, node: Node, name: str) -> str:
    value = getattr(module, str(node.target), None)
    if isinstance(value, GraphModule):
        return f"{name}()"
    if isinstance(value, torch.Tensor):
        made = _input(value.detach())
        return (made or "None,").rstrip(",")
    return repr(value)
