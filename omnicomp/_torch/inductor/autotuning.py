"""Whether Inductor measures choices while it builds, how to build without that, and whether a failure came of it."""

import contextlib
from collections.abc import Callable
from typing import Any, Final

import torch
import torch._inductor.config
from torch._inductor import select_algorithm
from torch._inductor.select_algorithm import NoValidChoicesError

from omnicomp._torch.inductor.failures import chain

__all__ = ["failure_of_autotuning", "not_kept", "without_autotuning"]

_TUNING: Final = (
    "max_autotune",
    "max_autotune_gemm",
    "max_autotune_pointwise",
    "benchmark_fusion",
    "benchmark_combo_kernel",
)


def without_autotuning() -> contextlib.AbstractContextManager[Any]:
    """Inside, Inductor takes what it would take without measuring."""
    config = torch._inductor.config
    return config.patch({name: False for name in _TUNING if hasattr(config, name)})  # type: ignore[attr-defined]


def failure_of_autotuning(error: BaseException) -> BaseException | None:
    """What made a build fail, if no choice could be measured, or memory ran out while one was; None otherwise."""
    if not any(getattr(torch._inductor.config, name, False) for name in _TUNING):
        return None
    for each in chain(error):
        if isinstance(each, NoValidChoicesError):
            return each
        if isinstance(each, (MemoryError, torch.OutOfMemoryError)):
            frame = each.__traceback__
            while frame is not None:
                if frame.tb_frame.f_globals.get("__name__") == select_algorithm.__name__:
                    return each
                frame = frame.tb_next
    return None


def not_kept(compiled: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A part that AOTAutograd's cache does not store, as it is not what its key stands for.

    That cache stores what has a key. Torch 2.11 asks whether there is such an attribute, whatever its value.
    """

    def call(inputs: list[Any]) -> Any:
        return compiled(inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
