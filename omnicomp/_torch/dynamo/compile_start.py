"""When Dynamo begins to trace a frame for a backend.

Dynamo has callbacks for the start of a compilation, which do not say what backend it is for: the call that runs them
does. A backend itself is called when the trace is over.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._dynamo import callback_handler, convert_frame


def on_start(backend: Callable[..., Any], begin: Callable[[str | None, Mapping[str, Any] | None], None]) -> None:
    """Have a function called whenever Dynamo begins to compile for a backend.

    Args:
        backend: what `torch.compile` was given, or what that names.
        begin: gets `torch.compile`'s mode and options. It must not raise.
    """

    def started(_: Any) -> None:
        asked = _compiled_for()
        if isinstance(asked, torch._TorchCompileWrapper) and asked.compiler_fn is backend:
            begin(asked.kwargs.get("mode"), asked.kwargs.get("options"))

    callback_handler.register_start_callback(started)


def _compiled_for() -> Any:
    """What `torch.compile` made of a backend, its mode and its options; None if no frame is being compiled."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not convert_frame._compile.__code__:
        frame = frame.f_back
    found: Any = frame.f_locals.get("compiler_fn") if frame is not None else None
    while hasattr(found, "_torchdynamo_orig_backend"):
        found = found._torchdynamo_orig_backend
    return found
