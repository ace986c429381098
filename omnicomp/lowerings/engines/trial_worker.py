"""The process in which engines are tried: it compiles the subgraphs that it is sent, and runs each once."""

import contextlib
import importlib
import os
import pickle
import resource
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Final, NoReturn

import torch
from torch.fx import GraphModule

from omnicomp._torch.inductor.graph_text import load_constant
from omnicomp._torch.inductor.own_context import with_fixed_sizes
from omnicomp.devices import resolve_device
from omnicomp.lowerings.engines.base import Engine
from omnicomp.lowerings.engines.subgraph import Subgraph, with_plain_sizes

__all__ = ["made_up", "main", "run"]

_IDLE_SECONDS: Final = 60.0


def main(handle: int, parent: int) -> None:
    """Have requests answered by a forked process, and by another one when that dies.

    What was imported so far is not imported again for that, which takes seconds. No library of an engine is: those are
    imported behind the fork, as their threads would not survive it.

    Args:
        handle: file descriptor of the connection.
        parent: id of the process that asks.
    """
    connection = Connection(handle)
    while True:
        child = os.fork()
        if not child:
            _serve(connection)
        code = _end_of(child, parent)
        if code is None or code == 0:
            return
        connection.send(("died", code))


def _end_of(child: int, parent: int) -> int | None:
    """The exit status of the child; None if the parent is gone, and the child with it."""
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if os.getppid() != parent:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.02)


def _serve(connection: Connection) -> NoReturn:
    """Answer requests until there are none for a minute, or nobody is there to ask."""
    status = 0
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # that it may die is what it is for
    try:
        while connection.poll(_IDLE_SECONDS):
            data = connection.recv_bytes()
            connection.send("begun")
            connection.send(_answer(data))
    except EOFError:
        pass  # the parent has closed its end
    except BaseException:  # noqa: BLE001 - a forked process must not go on with what its parent was at
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)


def _answer(data: bytes) -> tuple[str, str]:
    try:
        return run(pickle.loads(data))
    except Exception as error:  # noqa: BLE001 - the answer
        return "raised", f"{type(error).__name__}: {error}"


def run(request: dict[str, Any]) -> tuple[str, str]:
    """Compile a subgraph and run it once.

    Args:
        request: `module` and `class` of the engine, `graph` as text, `inputs` as shapes, strides, dtypes and devices,
            positions of the `constants`, `device`, `threads` and `options`.

    Returns:
        `fine`; or `untried` and one sentence, if eager raises for all values that were made up.

    Raises:
        Exception: what the engine raises.
    """
    torch.set_num_threads(request["threads"])
    engine: Engine = getattr(importlib.import_module(request["module"]), request["class"])()
    with torch.no_grad():
        graph: GraphModule = load_constant({"graph": request["graph"]})
        values = _sane(graph, request["inputs"])
        if values is None:
            return "untried", "eager raises for all inputs that were made up"
        module = with_fixed_sizes(graph, values)
        with_plain_sizes(module)
        subgraph = Subgraph(
            module=module,
            constants={index: values[index] for index in request["constants"]},
            device=torch.device(request["device"]),
            threads=request["threads"],
            options=request["options"],
        )
        session = engine.compile(subgraph).session()
        position = {node: index for index, node in enumerate(subgraph.placeholders)}
        inputs = [values[position[node]] for node in subgraph.inputs]
        session([value.contiguous() if engine.contiguous else value for value in inputs])
        resolve_device(subgraph.device.type).synchronize()
    return "fine", ""


def _sane(graph: GraphModule, described: Sequence[Any]) -> list[Any] | None:
    """Inputs on which eager computes: integers are all one, or all zero where they would be indices out of range."""
    for integer in (1, 0):
        with contextlib.suppress(Exception):  # then these are no values for this graph
            graph(*[made_up(each, integer) for each in described])
            return [made_up(each, integer) for each in described]
    return None


def made_up(described: Any, integer: int) -> Any:
    """A tensor of some shape, strides, dtype and device: floating-point numbers from 0.1 to 1, integers all the same.

    What is no description of a tensor is returned as it is.
    """
    if not isinstance(described, dict):
        return described
    shape, stride, dtype = described["shape"], described["stride"], described["dtype"]
    reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
    random = torch.rand(reach, generator=torch.Generator().manual_seed(reach))
    if dtype == torch.bool:
        flat = random < 0.9
    elif dtype.is_floating_point or dtype.is_complex:
        flat = random.mul_(0.9).add_(0.1).to(dtype)
    else:
        flat = torch.full((reach,), integer, dtype=dtype)
    return flat.to(described["device"]).as_strided(shape, stride)
