"""The kernels of one call on CUDA, as torch's profiler sees them."""

import contextlib
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.autograd import DeviceType

from omnicomp.errors import harmless

T = TypeVar("T")


def kernels_of(call: Callable[[], T]) -> tuple[T, int, float]:
    """Call a function under the profiler, unless the program profiles already.

    Returns:
        What it returned; how many kernels, copies and fills it ran; the seconds that these took together.
    """
    count, seconds = 0, 0.0
    profile: torch.profiler.profile | None = None
    with contextlib.ExitStack() as stack:
        if not torch.autograd._profiler_enabled():
            with harmless("the kernels of a call"):
                wanted = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                profile = stack.enter_context(wanted)
        result = call()
        torch.cuda.synchronize()
    with harmless("the kernels of a call"):
        for event in profile.events() or () if profile is not None else ():
            if event.device_type == DeviceType.CUDA:
                count, seconds = count + 1, seconds + event.time_range.elapsed_us() / 1e6
    return result, count, seconds
