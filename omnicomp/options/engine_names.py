"""The names of engines, known without importing any of them: an option is checked before a library is loaded."""

import functools
import importlib.metadata
from typing import Final

__all__ = ["BUILT_IN", "GROUP", "engine_names"]

GROUP: Final = "omnicomp.engines"

BUILT_IN: Final[dict[str, str]] = {
    "frozen": "omnicomp.lowerings.engines.frozen:FrozenInductor",
    "toy": "omnicomp.lowerings.engines.toy:ToyEngine",
    "openvino": "omnicomp.lowerings.engines.openvino:OpenVinoEngine",
    "onnxruntime": "omnicomp.lowerings.engines.onnxruntime:OnnxRuntimeEngine",
    "xla": "omnicomp.lowerings.engines.xla:XlaEngine",
    "tvm": "omnicomp.lowerings.engines.tvm:TvmEngine",
    "tensorrt": "omnicomp.lowerings.engines.tensorrt:TensorRtEngine",
}
"""Those that come with omnicomp, also where it runs from a checkout that was never installed."""


@functools.cache
def engine_names() -> tuple[str, ...]:
    """Those of `BUILT_IN`, then those that installed packages declare by the entry-point group `omnicomp.engines`."""
    found = (entry.name for entry in importlib.metadata.entry_points(group=GROUP))
    return tuple(dict.fromkeys([*BUILT_IN, *found]))
