"""Inductor's C++ compiler driver: a plain C++ source becomes a loaded library, cached by its content and flags."""

import ctypes

from torch._inductor.codecache import CppCodeCache


def load(source: str, *, extra_flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Compile a C++ source and load it.

    The compiler, the instruction set and the OpenMP library are the ones that Inductor takes for its own CPU kernels,
    so that both share one thread pool. The binary is kept in Inductor's cache folder: the second process to ask for the
    same source with the same flags only loads it. Safe to call from several threads and processes.

    Args:
        source: a C++ file that includes nothing of torch and exports functions as `extern "C"`.
        extra_flags: put behind Inductor's own flags, so that they win; spelt as for the compiler (`-funroll-loops`).

    Returns:
        The library.

    Raises:
        Exception: there is no compiler, it refused the source, or the library can't be loaded; torch raises several
            types that have no common base.
    """
    return CppCodeCache.load(source, extra_flags=extra_flags)
