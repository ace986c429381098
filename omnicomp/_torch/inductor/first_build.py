"""What the first build waits for, begun while Dynamo traces its graph, or when the graph is there.

On a GPU these are the processes that compile Triton's kernels. They take seconds to start, and what Inductor generates
until then is compiled in the program's own process, one kernel after another. On the CPU it is done in a thread:
Inductor compiles a test for the vector instruction set of the processor when it generates the first kernel, and
precompiles its header when it builds that. It holds a file lock meanwhile, and takes what is there already, so that it
takes what was begun here, or waits for the rest.
"""

import contextvars
import signal
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch._inductor.config
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

from omnicomp._torch.inductor import libraries
from omnicomp._torch.inductor.vec_isa import isas_of_processor
from omnicomp.errors import first_line
from omnicomp.safety.privacy import logger

log = logger("omnicomp.first_build")

_begun = threading.Event()


def likely_device() -> str:
    """The type of the device that a graph will be on, as far as that can be known before it is traced; "" if it can't.

    A program that has not used its GPU has no tensor there.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return "cpu"
    if accelerator.type not in ("cuda", "xpu"):
        return ""
    return accelerator.type if torch.get_device_module(accelerator).is_initialized() else "cpu"


def begin(device: str, options: Mapping[str, Any]) -> None:
    """Begin it, once a process, if Inductor may use more than one thread, and on the CPU if its cache folder is empty.

    The thread runs only Inductor's own code, and the program does not end before it: nothing is left half done.

    Args:
        device: the type of the device that a graph is on.
        options: Inductor's, of that graph.
    """
    config: Any = torch._inductor.config
    if device == "cuda":
        # Triton keeps the version of the first assembler that it meets, and names cached kernels by it. Processes that
        # compile kernels take torch's, where torch has one, so no kernel of ours may be compiled by Triton's before.
        _set_triton_ptxas_path()
    if any(name.startswith(("cpp", "compile_threads")) for name in options):  # neither a thread nor a process sees them
        return
    if device in ("cuda", "xpu"):
        AsyncCompile.wakeup()  # as `compile_fx` does, in front of AOTAutograd
        return
    if device != "cpu" or _begun.is_set() or config.cpu_backend != "cpp" or get_compile_threads() <= 1:
        return
    if sys.platform != "linux":  # elsewhere a library may be there by half
        return
    _begun.set()
    if libraries.INDEX.folder.exists():
        return
    try:
        threading.Thread(target=contextvars.copy_context().run, args=(_prepare,), name="omnicomp-first-build").start()
    except RuntimeError as error:  # no more threads, or the interpreter is about to end
        log.debug("omni: the first build was not begun early: %s", first_line(error))


def _prepare() -> None:
    try:
        # A test that is interrupted from a terminal would stand as failed, and the process go on without vectors.
        with ThreadPoolExecutor(1, initializer=_ignore_interrupts) as pool:
            pool.submit(contextvars.copy_context().run, bool, isas_of_processor()).result()
        if threading.main_thread().is_alive():
            CppPythonBindingsCodeCache.load_async("")  # precompiles the header, and builds nothing until it is called
    except Exception as error:  # noqa: BLE001 - the build that needs it meets the same, and says so
        log.debug("omni: what the first build needs could not be made: %s", first_line(error))


def _ignore_interrupts() -> None:
    """Keep interrupts from the processes that this thread will start."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
