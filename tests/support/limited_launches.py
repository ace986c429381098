"""A program for a machine with a GPU: prints how kernels of CUDA and of a device with limits were launched.

The device with limits is `gxu` of `borrowed`, with the GPU's memory; its kernels are compiled by Triton for the GPU.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import borrowed
import torch
import torch._inductor.config

from omnicomp.devices.inductor import DeviceSpec, LaunchLimits, register

# One divides into blocks evenly, where Inductor leaves masks out, and one does not.
SIZES = (1024 * 97, 1024 * 97 + 5)
ROWS = (1000, 700)


def pointwise(x: torch.Tensor) -> torch.Tensor:
    return (x * 2 + 1).relu()


def reduction(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum(-1)


def launches(function: Callable[..., Any], x: torch.Tensor) -> tuple[torch.Tensor, list[list[list[int]]]]:
    """What a function returns, and grid and block of each Triton kernel that the driver launched in its second call."""
    torch.compiler.reset()
    compiled = torch.compile(function, dynamic=False)
    compiled(x)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        result = compiled(x)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = [event["args"] for event in events if event.get("cat") == "kernel" and "triton" in event["name"]]
    return result, [[kernel["grid"], kernel["block"]] for kernel in kernels]


def main() -> None:
    cases = [(pointwise, torch.randn(size, device="cuda")) for size in SIZES]
    cases.append((reduction, torch.randn(ROWS, device="cuda")))
    before = [launches(function, x)[1] for function, x in cases]
    borrowed.enable("cuda")
    found = torch.cuda.get_device_properties(0)
    register(
        DeviceSpec(
            name=borrowed.NAME,
            scheduling="triton",
            triton_backend="cuda",
            op_overrides={
                "import_get_raw_stream_as": "from torch._C import _cuda_getCurrentRawStream as {name}",
                "set_device": "torch.cuda.set_device({device_idx})",
                "synchronize": "torch.cuda.synchronize()",
                "device_guard": "torch.cuda._DeviceGuard({device_idx})",
            },
            properties={
                "multi_processor_count": found.multi_processor_count,
                "cc": found.major * 10 + found.minor,
                "major": found.major,
                "regs_per_multiprocessor": found.regs_per_multiprocessor,
                "max_threads_per_multi_processor": found.max_threads_per_multi_processor,
            },
            launch=LaunchLimits(max_grid=48, grid_multiple=48, num_warps=1, warp_size=32),
        )
    )
    limited, errors = [], []
    for function, x in cases:
        result, kernels = launches(function, borrowed.borrow(x))
        limited.append(kernels)
        errors.append((borrowed.lent(result) - function(x)).abs().max().item())
    after = [launches(function, x)[1] for function, x in cases]
    holds = borrowed.guards_hold()
    json.dump({"before": before, "limited": limited, "errors": errors, "after": after, "guards": holds}, sys.stdout)


if __name__ == "__main__":
    torch._inductor.config.force_disable_caches = True
    torch._inductor.config.triton.autotune_pointwise = False  # what is fastest may be another size the next time
    main()
