"""Python processes for tests, forked from a server that has imported torch: without the seconds that this takes.

A process is clean as one just started is: nothing was compiled in it, and `omnicomp` was not imported. What torch reads
at its import (`PYTHONHASHSEED` and the like; logs are set up again) can't be changed any more, so a process whose
environment differs in such a variable is started afresh; so is every process of a torch that was built with CUDA.
Processes of one server share the seed of their hashes: a test about what another process finds in a cache passes
`fresh=True`.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
# Read when Python starts or torch is imported.
READ_AT_START = ("CUDA", "GOMP", "KMP", "LD_", "MKL", "OMP", "PYTHON", "PYTORCH", "TORCH", "TRITON")
READ_LATER = ("PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR")
OF_LOGS = ("TORCH_LOGS", "TORCH_LOGS_FORMAT", "TORCH_TRACE")  # read at the import, and again in a forked process


def python(
    *words: Any,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    timeout: float = 600,
    fresh: bool = False,
    check: bool = False,
    interpreter: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run Python as `subprocess.run([sys.executable, *words], capture_output=True, text=True)` does.

    Args:
        words: `-c` and a program, `-m` and a module, or a script; then the program's arguments.
        environment: what differs from this process' variables. Folders of `PYTHONPATH`, the package's if it names
            none, come before this process' ones.
        folder: where it runs; this process' folder if it is None.
        timeout: seconds until it is killed and `subprocess.TimeoutExpired` is raised.
        fresh: start an interpreter of its own.
        check: raise `AssertionError` with what it wrote to stderr, if it fails.
        interpreter: another environment's Python.
    """
    command = [str(word) for word in words]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
    variables["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    if fresh or interpreter or not _can_fork() or _startup(variables) != _startup(os.environ):
        done = subprocess.run(
            [interpreter or sys.executable, *command],
            env=variables,
            cwd=folder,
            timeout=timeout,
            capture_output=True,
            text=True,
            check=False,
        )
    else:
        done = _forked(command, variables, folder or Path.cwd(), timeout)
    assert not check or done.returncode == 0, done.stderr
    return done


def peaks_of_memory(function: str, arguments: Sequence[Any], *, setup: str) -> list[int]:
    """The most bytes that a function of one text allocates in Python, for each of some arguments.

    It is called in a process of its own, as `tracemalloc` counts what every thread allocates, and once before it is
    measured, for what is imported and cached once.
    """
    program = f"""
import sys, tracemalloc
{setup}
{function}(sys.argv[1])
for argument in sys.argv[1:]:
    tracemalloc.start()
    {function}(argument)
    print(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
"""
    return [int(line) for line in python("-c", program, *arguments, check=True).stdout.split()]


def _startup(variables: Mapping[str, str]) -> dict[str, str]:
    return {n: v for n, v in variables.items() if n.startswith(READ_AT_START) and n not in READ_LATER + OF_LOGS}


@functools.cache
def _can_fork() -> bool:
    if sys.platform != "linux":
        return False
    import torch

    # The autograd of a torch with CUDA starts threads with the first device, and none survives a fork.
    return torch.version.cuda is None


@functools.cache
def _server() -> socket.socket:
    """Start the server; it ends when this process does, as the socket is closed then."""
    ours, theirs = socket.socketpair()
    with theirs:
        program = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import processes; processes.serve()"
        subprocess.Popen([sys.executable, "-c", program], stdin=theirs.fileno())
    return ours


_starting = threading.Lock()


def _forked(command: list[str], variables: dict[str, str], folder: Path, timeout: float) -> Any:
    with _starting:
        server = _server()
    ours, theirs = socket.socketpair()
    with ours, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with theirs:
            socket.send_fds(server, [b"!"], [theirs.fileno(), out.fileno(), err.fileno()])
        with ours.makefile("rw", encoding="utf-8", errors="surrogateescape") as stream:
            json.dump({"command": command, "variables": variables, "folder": str(folder)}, stream)
            stream.write("\n")
            stream.flush()
            pid = int(stream.readline())
            ours.settimeout(timeout)
            try:
                status = int(stream.readline())
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(command, timeout) from None
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess([sys.executable, *command], os.waitstatus_to_exitcode(status), *texts)


def import_torch() -> None:
    """Import all of torch that a compilation needs, and let Dynamo not measure guards.

    For that it flushes the processor's caches, which takes half of the time of a tiny compilation.
    """
    import torch._dynamo.guards
    import torch._inductor.compile_fx

    torch._dynamo.guards.profile_guard_manager = lambda *args: 0.0


def serve() -> None:
    """Import what is slow, then fork for each request: a process that waits, and the one that it waits for."""
    import_torch()
    assert len(os.listdir("/proc/self/task")) == 1, "threads are not there any more behind a fork"
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    requests = socket.socket(fileno=0)
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1, 3)
        if not message:
            return
        if os.fork() == 0:
            requests.close()
            _wait_for_child(*descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _wait_for_child(connection: int, out: int, err: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with socket.socket(fileno=connection) as connected:
        stream = connected.makefile("rw", encoding="utf-8", errors="surrogateescape")
        request = json.loads(stream.readline())
        pid = os.fork()
        if pid == 0:
            stream.close()
            connected.close()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for descriptor, standard in ((out, 1), (err, 2)):
                os.dup2(descriptor, standard)
                os.close(descriptor)
            _exit_as_python_does(**request)
        stream.write(f"{pid}\n")
        stream.flush()
        stream.write(f"{os.waitpid(pid, 0)[1]}\n")
        with contextlib.suppress(BrokenPipeError):  # killed, as it took too long
            stream.flush()
        os._exit(0)


def _exit_as_python_does(command: list[str], variables: dict[str, str], folder: str) -> None:
    status = 0
    try:
        added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        rest = [entry for entry in sys.path if entry not in ("", str(Path(__file__).parent), *added)]
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(folder)
        sys.path[:] = [*filter(None, variables.get("PYTHONPATH", "").split(os.pathsep)), *rest]
        if any(name in variables for name in OF_LOGS):
            _set_up_logs()
        del sys.modules[__name__]
        _run(*command)
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
    except BaseException as error:
        status = 1
        traceback.print_exception(type(error), error, _of_the_program(error.__traceback__))
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status & 255)


def _set_up_logs() -> None:
    """What `import torch` does for them."""
    from torch._logging import _internal

    _internal.DEFAULT_FORMATTER = _internal._default_formatter()
    _internal.LOG_TRACE_HANDLER = None
    _internal._init_logs()


def _of_the_program(trace: Any) -> Any:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _run(how: str, *words: str) -> None:
    main = sys.modules["__main__"] = ModuleType("__main__")
    if how == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = list(words)
        runpy._run_module_as_main(words[0])
        return
    if how == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *words[1:]]
        source, name = words[0], "<string>"
    else:
        sys.path.insert(0, str(Path(how).resolve().parent))
        sys.argv = [how, *words]
        source, name = Path(how).read_text(), how
        main.__dict__["__file__"] = how
    main.__dict__["__builtins__"] = __builtins__
    exec(compile(source, name, "exec"), main.__dict__)
