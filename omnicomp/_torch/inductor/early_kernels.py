"""C++ kernels that are compiled while Inductor generates the rest of their graph.

Inductor compiles all kernels of a graph when it runs the module that it generated. Here a kernel is submitted as soon
as it is defined, by the line that defines it in that module: the module finds it among those that are under way.
"""

from typing import Any, Final

from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codegen.wrapper import PythonWrapperCodegen

from omnicomp.errors import first_line
from omnicomp.safety.privacy import logger

log = logger("omnicomp.early_kernels")

_DEFINES: Final = "async_compile.cpp_pybinding("


def watch() -> None:
    """Have kernels submitted when they are defined; once a process."""
    if not hasattr(_submitting, "before"):
        _submitting.before = PythonWrapperCodegen.define_kernel  # type: ignore[attr-defined]
        PythonWrapperCodegen.define_kernel = _submitting  # type: ignore[method-assign]


def _submitting(self: PythonWrapperCodegen, kernel_name: str, kernel_body: str, *args: Any, **kwargs: Any) -> None:
    _submitting.before(self, kernel_name, kernel_body, *args, **kwargs)  # type: ignore[attr-defined]
    if kernel_body.startswith(_DEFINES) and get_compile_threads() > 1:
        try:
            eval(kernel_body, {"async_compile": AsyncCompile()})  # the line of the generated module
        except Exception as error:  # noqa: BLE001 - the generated module meets the same
            log.debug("omni: the kernel %s was not compiled early: %s", kernel_name, first_line(error))
