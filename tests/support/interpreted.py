"""Kernels of Triton here: on a GPU, or on tensors of the CPU by its interpreter (`TRITON_INTERPRET=1`)."""

import functools
from typing import Any

import pytest
import torch


def device() -> str:
    """The device whose tensors the kernels take; skips the test where there is none."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return "cuda"
    from triton import knobs  # pyright: ignore[reportMissingImports]

    if not knobs.runtime.interpret:
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    _mend()
    return "cpu"


@functools.cache
def _mend() -> None:
    """Mend Triton's interpreter (3.5, 3.6): bounds of loops under numpy 2.4; products of bfloat16, kept as uint16."""
    import numpy  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
    from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

    patch: Any = interpreter._patch_lang_tensor
    dot: Any = interpreter.InterpreterBuilder.create_dot

    def patched(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar is not tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(numpy.uint32) << 16).view(numpy.float32), tl.float32)

    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest)
