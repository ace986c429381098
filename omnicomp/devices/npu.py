"""Ascend NPUs through torch_npu. Written to its interface, tested with a stand-in; it has not run on the hardware."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from omnicomp.devices.base import Capabilities, Device
from omnicomp.safety.privacy import logger

log = logger("omnicomp.devices")


class NpuDevice(Device):
    """An Ascend NPU, compiled for by torchair's graph mode; a subgraph that it refuses runs eager, with its reason."""

    type = "npu"

    def is_available(self) -> bool:
        """Whether torch_npu is there and sees a device; False, not an error, where CANN or the driver is missing."""
        return self._load() == ""

    def unavailable_reason(self) -> str:
        """What is missing."""
        return self._load()

    def capabilities(self) -> Capabilities:
        """What torch_npu tells of the current device."""
        npu = self._module()
        fast = (torch.float16, *((torch.bfloat16,) if npu.is_bf16_supported() else ()))
        floats = (torch.float32, *fast)
        return Capabilities(
            compute_dtypes=floats,
            storage_dtypes=(*floats, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
            fast_dtypes=fast,
            compiler="torchair graph mode",
            graph_mode=True,
            memory_bytes=int(npu.mem_get_info()[1]),
            device_count=npu.device_count(),
            name=npu.get_device_name(),
        )

    def compile_subgraph(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Sequence[Any]]:
        """Compile with torchair's own compiler of ATen graphs, `torchair.get_compiler`.

        Raises:
            NotImplementedError: torch_npu comes without torchair.
            Exception: what torchair raises for a graph that it can't convert.
        """
        importlib.import_module("torch_npu")  # puts torchair into sys.modules, loaded when it is first asked
        torchair = sys.modules.get("torchair")
        if torchair is None:
            raise NotImplementedError("torch_npu comes without torchair here: install a build with graph mode")
        compiled = torchair.get_compiler(torchair.CompilerConfig())(module, list(inputs))

        def call(arguments: list[Any]) -> Sequence[Any]:
            taken = tuple(arguments)
            arguments.clear()
            return compiled(*taken)

        return call

    def compiler_version(self) -> str:
        """The version of torch_npu, which torchair comes with."""
        return str(getattr(sys.modules.get("torch_npu"), "__version__", ""))

    def _load(self) -> str:
        """Import torch_npu, which registers the device type with torch; returns the missing package."""
        if "torch_npu" not in sys.modules and importlib.util.find_spec("torch_npu") is None:
            return "torch_npu is not installed: pip install torch_npu, of the version of torch"
        try:
            importlib.import_module("torch_npu")
            seen = bool(self._module() is not None and self._module().is_available())
        except Exception as error:  # another package's; its message is the answer
            log.debug("torch_npu can't be used", exc_info=True)
            said = str(error).strip().partition("\n")[0]
            return f"torch_npu can't be used: {type(error).__name__}: {said}; source CANN's set_env.sh first"
        return "" if seen else "torch_npu sees no NPU; check the driver with npu-smi info and ASCEND_RT_VISIBLE_DEVICES"
