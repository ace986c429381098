"""What the first C++ build of a cache folder waits for, begun in a thread while its graph is on the way to Inductor.

Inductor compiles a test for each vector instruction set of the processor, one after another, when it generates the
first kernel, and precompiles its header when it builds that. It holds a file lock meanwhile, and takes what is there
already, so that it takes what was begun here, or waits for the rest.
"""

import contextvars
import os
import signal
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch._inductor.config
from torch._inductor import cpu_vec_isa
from torch._inductor.async_compile import get_compile_threads
from torch._inductor.codecache import CppPythonBindingsCodeCache

from omnicomp._torch.inductor import libraries
from omnicomp.errors import first_line
from omnicomp.safety.privacy import logger

log = logger("omnicomp.first_build")

_begun = threading.Event()


def begin(options: Mapping[str, Any]) -> None:
    """Begin it, once a process, if nothing was built in the cache folder and Inductor may use more than one thread.

    The thread runs only Inductor's own code, and the program does not end before it: nothing is left half done.

    Args:
        options: Inductor's, of a graph on the CPU.
    """
    config: Any = torch._inductor.config
    others = any(name.startswith(("cpp", "compile_threads")) for name in options)  # the thread does not see them
    if _begun.is_set() or others or config.cpu_backend != "cpp" or get_compile_threads() <= 1:
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
        supported = cpu_vec_isa.x86_isa_checker()
        sets = [each for each in cpu_vec_isa.supported_vec_isa_list if set(str(each).split()).issubset(supported)]
        # A test that is interrupted from a terminal would stand as failed, and the process go on without vectors.
        with ThreadPoolExecutor(min(len(sets), os.cpu_count() or 1) or 1, initializer=_ignore_interrupts) as pool:
            for task in [pool.submit(contextvars.copy_context().run, bool, each) for each in sets]:
                task.result()
        if threading.main_thread().is_alive():
            CppPythonBindingsCodeCache.load_async("")  # precompiles the header, and builds nothing until it is called
    except Exception as error:  # noqa: BLE001 - the build that needs it meets the same, and says so
        log.debug("omni: what the first build needs could not be made: %s", first_line(error))


def _ignore_interrupts() -> None:
    """Keep interrupts from the processes that this thread will start."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
