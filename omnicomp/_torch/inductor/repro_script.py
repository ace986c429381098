"""Reproduction scripts: a graph that Inductor fails on, written and read in the form of torch's own repro tools."""

import io
import runpy
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import torch
import torch._inductor.config
from torch._dynamo.debug_utils import InputReader
from torch._dynamo.repro.after_aot import save_graph_repro
from torch._library.custom_ops import OPDEFS
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from omnicomp._torch.fx import copy_module
from omnicomp.safety.escapes import one_line
from omnicomp.safety.privacy import cleaner

_WRITABLE: Final = (bool, int, float, str, type(None))
_OWN: Final = ("aten", "prim", "inductor", "higher_order", "_", "c10d", "mkldnn", "quantized", "rngprims", "symm_mem")


_WHOLE: Final = """if __name__ == '__main__':
    from copy import deepcopy
    from torch._dynamo.debug_utils import InputReader
    reader = InputReader()
    load_args(reader)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(mod)(*deepcopy(reader.args)), mod(*reader.args))
"""


def script_of(
    module: GraphModule, inputs: Iterable[Any], title: str, *, values: bool = False, whole: bool = False
) -> str:
    """The text of a script that compiles a graph with Inductor, on random inputs and without data of the user's.

    Args:
        module: the graph.
        inputs: fake tensors and symbolic sizes of its placeholders.
        title: the first line.
        values: whether results are compared with eager's.
        whole: whether that is done by `torch.compile`, all of whose passes run then.

    Raises:
        Exception: the graph can't be written down.
    """
    made = copy_module(module)
    for node in made.graph.find_nodes(op="get_attr"):
        value = getattr(made, str(node.target), None)
        if isinstance(value, torch.Tensor):
            # Torch writes small constants with their values.
            setattr(made, str(node.target), torch.ones_like(value))
    text = io.StringIO()
    text.writelines(f"{line}\n" for line in (f"# {one_line(title)}", *_imports(made)))
    with torch._inductor.config.patch(_defaults_of_the_unwritable()):
        save_graph_repro(text, made, list(inputs), "inductor", accuracy=values)
    script = cleaner().secrets(text.getvalue())
    if whole:
        script = script.partition("if __name__ ==")[0] + _WHOLE
    compile(script, "<script>", "exec")
    return script + "\n"


def load_script(path: Path) -> tuple[GraphModule, list[Any]]:
    """The graph of a script, with fake values on its nodes, and random inputs.

    Raises:
        LookupError: the file is no such script.
        Exception: what running the file raises.
    """
    found = runpy.run_path(str(path), run_name="omnicomp_repro")
    missing = [name for name in ("mod", "load_args") if name not in found]
    if missing:
        raise LookupError(f"it has no {missing[0]}")
    reader = InputReader()
    found["load_args"](reader)
    mode = "symbolic" if any(type(value) is int for value in reader.args) else "fake"
    return make_fx(found["mod"], tracing_mode=mode)(*reader.args), reader.args


def settings() -> dict[str, Any]:
    """Inductor's settings that differ from torch's defaults now."""
    config: Any = torch._inductor.config
    return {name: getattr(config, name) for name in config._config if not config._is_default(name)}


def changed_settings(values: dict[str, Any]) -> AbstractContextManager[Any]:
    """Inside, Inductor's settings are those that `settings` returned."""
    return torch._inductor.config.patch(values)


def without_cache() -> AbstractContextManager[Any]:
    """Inside, Inductor neither reads nor writes its cache of graphs."""
    return torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False)


def _defaults_of_the_unwritable() -> dict[str, Any]:
    """The defaults of settings whose values are no text in a script, such as a custom partitioner."""
    config: Any = torch._inductor.config
    return {name: config._config[name].default for name, value in settings().items() if not _is_writable(value)}


def _is_writable(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_writable, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_writable(item) for key, item in value.items())
    return isinstance(value, _WRITABLE)


def _imports(module: GraphModule) -> list[str]:
    """Lines that import what registers custom operators of a graph."""
    lines: dict[str, None] = {}
    for target in (node.target for node in module.graph.nodes if node.op == "call_function"):
        if isinstance(target, torch._ops.OpOverload) and not target.namespace.startswith(_OWN):
            definition = OPDEFS.get(target._schema.name)
            name = getattr(getattr(definition, "_init_fn", None), "__module__", "__main__")
            line = f"import {name}" if name != "__main__" else f"# Import what registers {target._schema.name} here."
            lines[line] = None
    return sorted(lines)
