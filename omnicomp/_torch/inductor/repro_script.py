"""Scripts that bring a graph to Inductor again: their text, settings that are not torch's, modules with operators."""

from collections.abc import Iterable
from typing import Any, Final

import torch
import torch._inductor.config
from torch._higher_order_ops.triton_kernel_wrap import TritonKernelWrapperFunctional, TritonKernelWrapperMutation
from torch._library.custom_ops import OPDEFS

from omnicomp._torch.inductor.compile_fx import config_keys

__all__ = [
    "BUILD",
    "COMPARE",
    "TEMPLATE",
    "changed_settings",
    "has_user_kernels",
    "modules_of",
    "settings_now",
    "size_now",
]

_PLAIN: Final = (bool, int, float, str, type(None))
_OWN: Final = ("aten", "prim", "inductor", "higher_order", "_", "c10d", "mkldnn", "quantized", "rngprims", "symm_mem")


# The text of a script; braces that are doubled stay.
TEMPLATE: Final = '''\
"""{title}

With torch {version}: {error}

Ends with status 1 if that is still so, and with 0 if not. `omnicomp bisect` runs it and looks for less that fails.
"""

import contextlib
import math
import operator
import sys
import traceback
from math import inf, nan

import torch
import torch._inductor.config
import torch._inductor.inductor_prims
from torch import device
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx_inner
from torch.fx.experimental.proxy_tensor import make_fx
{imports}
DYNAMIC = {dynamic}
IS_BACKWARD = {backward}
VALUES = {values}
SETTINGS = {settings}


def tensor(size, stride, offset, dtype, device):
    """Random floating-point numbers, zeros otherwise."""
    room = 1 + offset + sum((n - 1) * abs(s) for n, s in zip(size, stride)) if 0 not in size else offset
    flat = torch.zeros(room, dtype=dtype, device=device)
    if dtype.is_floating_point or dtype.is_complex:
        flat.copy_(torch.randn(room, dtype=torch.complex64 if dtype.is_complex else torch.float32))
    return torch.as_strided(flat, size, stride, offset)


{classes}
def inputs():
    torch.manual_seed(0)
    return [
{inputs}    ]


def trace(values):
    """The graph with fake values, and those of its inputs, as Inductor gets them."""
    graph = make_fx(Repro(), tracing_mode="symbolic" if DYNAMIC else "fake")(*values)
    nodes = graph.graph.find_nodes(op="placeholder")
    return graph, [node.meta.setdefault("val", value) for node, value in zip(nodes, values)]


def build(graph, fakes):
    """What Inductor makes of a graph; raises if it can't."""
    mode = next((fake.fake_mode for fake in fakes if isinstance(fake, torch.Tensor)), None)
    options = {{name: value for name, value in SETTINGS.items() if hasattr(torch._inductor.config, name)}}
    options["fx_graph_cache"] = False
    with torch._inductor.config.patch(options), tracing(TracingContext(mode)), mode or contextlib.nullcontext():
        return compile_fx_inner(graph, fakes, is_backward=IS_BACKWARD, is_inference=not IS_BACKWARD)


def main():
    try:
        {main}
    except Exception:
        traceback.print_exc()
        print("It still fails.", file=sys.stderr)
        return 1
    print("It works.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
'''

BUILD: Final = "build(*trace(inputs()))"
COMPARE: Final = """values = inputs()
        compiled = build(*trace(values))
        wide = [v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in values]
        eager, exact = Repro()(*values), Repro()(*wide)
        found = compiled(list(values))
        for index, (got, own, true) in enumerate(zip(found, eager, exact)):
            error, allowed = ((value.double() - true.double()).norm() for value in (got, own))
            if not error <= 4 * allowed + 1e-3 * true.double().norm():
                raise ValueError(f"result {index} is off by {float(error):.3g}, eager's by {float(allowed):.3g}")"""


def settings_now() -> dict[str, Any]:
    """Inductor's settings that differ from torch's defaults at this moment."""
    config: Any = torch._inductor.config
    current = config.get_config_copy()
    return {key: current[key] for key in config_keys() if not config._is_default(key)}


def changed_settings() -> dict[str, Any]:
    """Those of them that can be written down: numbers, texts, and lists and dictionaries of such."""
    return {key: value for key, value in settings_now().items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return isinstance(value, _PLAIN)


def has_user_kernels(targets: Iterable[Any]) -> bool:
    """Whether a graph calls Triton kernels of the user's, which live in a table of the process."""
    return any(isinstance(t, (TritonKernelWrapperFunctional, TritonKernelWrapperMutation)) for t in targets)


def modules_of(targets: Iterable[Any]) -> tuple[list[str], list[str]]:
    """Where the operators of a graph come from that are not torch's.

    Returns:
        Modules to import, and operators of which none is known that registers them.
    """
    modules: set[str] = set()
    unknown: set[str] = set()
    for target in targets:
        if not isinstance(target, torch._ops.OpOverload) or target.namespace.startswith(_OWN):
            continue
        definition = OPDEFS.get(target._schema.name)
        module = getattr(getattr(definition, "_init_fn", None), "__module__", "")
        if module and module != "__main__":
            modules.add(module)
        else:
            unknown.add(target._schema.name)
    return sorted(modules), sorted(unknown)


def size_now(value: Any) -> int | None:
    """A size as it was when the graph was traced; None if that depends on data. Adds no guard."""
    if not isinstance(value, torch.SymInt):
        return int(value)
    hint = value.node.hint if value.node.has_hint() else None
    return None if hint is None else int(hint)
