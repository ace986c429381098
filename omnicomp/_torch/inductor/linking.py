"""What C++ kernels are linked against: the names of torch's libraries, in the place of these.

The linker reads all symbols of torch's libraries, which takes it a third of the time of building a kernel, to note that
they are needed. Libraries without symbols that have the same names tell it as much. The process that loads a kernel has
torch's libraries already, where its symbols are found.
"""

import ctypes
import os
import shlex
import subprocess
import threading
from pathlib import Path
from typing import Final

from omnicomp._torch.inductor import store
from omnicomp.errors import first_line
from omnicomp.safety.privacy import logger

log = logger("omnicomp.linking")

_LIBRARIES: Final = ("torch", "torch_cpu", "torch_python")


def linked(libraries: str, compiler: str) -> str:
    """The compiler's arguments that name libraries, with torch's by name alone, where that is possible.

    Args:
        libraries: the arguments, as `-ltorch_cpu -lgomp`.
        compiler: its command.
    """
    given = libraries.split()
    own = [name for name in _LIBRARIES if f"-l{name}" in given]
    folder = store.folder() / "linking"
    if not own or not all(_named(name, compiler, folder) for name in own):
        return libraries
    # The linker would leave out what it finds no symbol in.
    kept = ["-Wl,--push-state,--no-as-needed", *(f"-l:{_file(name)}" for name in own), "-Wl,--pop-state"]
    others = [each for each in given if each.removeprefix("-l") not in own]
    return " ".join([f"-L{shlex.quote(str(folder))}", *kept, *others, ""])


def _file(name: str) -> str:
    return f"lib{name}.so"


def _named(name: str, compiler: str, folder: Path) -> bool:
    """Whether there is a library of a name without symbols, which may be made now, and torch's has that name."""
    path = folder / _file(name)
    try:
        ctypes.CDLL(path.name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)  # as the loader will look for it
        if not path.exists():
            store.make_folder(folder)
            made = f"{path}.{os.getpid()}.{threading.get_ident()}.tmp"
            soname = f"-Wl,-soname,{path.name}"
            command = [compiler, "-shared", "-nostdlib", "-x", "c", os.devnull, soname, "-o", made]
            subprocess.run(command, check=True, capture_output=True)
            os.replace(made, path)
        for each in (path, folder):
            store.check_trusted(each.lstat(), each)
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("omni: kernels are linked against %s itself: %s", path.name, first_line(error))
        return False
    return True
