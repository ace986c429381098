"""The C++ compiler that Inductor starts, ended with all that it started when the time of a build is up."""

import contextlib
import functools
import itertools
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from torch._inductor.exc import CppCompileError

from omnicomp._torch.inductor.build_clock import Meter, active, own

__all__ = ["run_compile_cmd"]

# How often the clock is read, and how long a compiler has to remove its temporary files.
_SLICE: Final = 0.1
_GRACE: Final = 2.0


def run_compile_cmd(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `cpp_builder._run_compile_cmd`, which starts the compiler and waits for it."""

    @functools.wraps(original)
    def run_compile_cmd(cmd_line: str, cwd: str) -> None:
        meter = active()
        if meter is None or os.name != "posix":
            return original(cmd_line, cwd)
        meter.check()
        command = shlex.split(cmd_line)
        # A process group of its own: a compiler is several processes.
        process = subprocess.Popen(
            command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            with contextlib.nullcontext() if own() is None else meter.phase("C++ compile"):
                output = _awaited(process, meter)
        except BaseException:
            _end(process)
            for target in _targets(command):
                Path(cwd, target).unlink(missing_ok=True)
            raise
        if process.returncode and sys.platform == "darwin":
            return original(cmd_line, cwd)  # its error says how to get OpenMP
        if process.returncode:
            raise CppCompileError(command, output.decode("utf-8", "replace"))
        return None

    return run_compile_cmd


def _awaited(process: "subprocess.Popen[bytes]", meter: Meter) -> bytes:
    """What a process wrote, once it ends; looks at the clock meanwhile."""
    while True:
        try:
            return process.communicate(timeout=_SLICE)[0]
        except subprocess.TimeoutExpired:
            meter.check()


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and what it started; first so that a compiler can remove its temporary files."""
    end = time.monotonic() + _GRACE
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < end and not _ended(process):
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _ended(process: "subprocess.Popen[bytes]") -> bool:
    if process.returncode is not None or not hasattr(os, "waitid"):
        return process.poll() is not None
    # It is left unreaped, so that its number stays its own until what it started is ended.
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _targets(command: list[str]) -> list[str]:
    return [after for option, after in itertools.pairwise(command) if option == "-o"]
