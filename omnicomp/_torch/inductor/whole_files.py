"""Compiled libraries that appear in the cache folder as a whole.

The C++ compiler writes a library where Inductor looks for it, and Inductor takes every file that is there for a whole
one. A process that is killed at that moment leaves a piece of one, on which all later processes fail to load the graph
("file too short"). `tests/backend/test_background_processes.py` kills builds, with torch 2.11 to 2.13.
"""

import contextlib
import os
from collections.abc import Generator
from typing import Any
from unittest import mock

import torch._inductor.config
from torch._inductor.cpp_builder import CppBuilder


@contextlib.contextmanager
def built_alone(device: str) -> Generator[None]:
    """Inside, libraries are built in this process, and moved to their place when they are whole.

    Args:
        device: type of the device; on others than the CPU the kernels are built by Triton, which does so itself.
    """
    build = CppBuilder.build

    def build_aside(self: Any) -> None:
        target, output = self._target_file, self._output
        aside = f"{target}.{os.getpid()}.tmp"
        self._output = output.replace(target, aside)
        try:
            build(self)
            if self._output != output:
                os.replace(aside, target)
        finally:
            self._output = output

    threads = {"compile_threads": 1} if device == "cpu" else {}
    with mock.patch.object(CppBuilder, "build", build_aside), torch._inductor.config.patch(threads):
        yield
