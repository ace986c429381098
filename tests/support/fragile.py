"""An operator that raises on request: in compiled code alone, or wherever it is called."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from omnicomp._torch import user_code

MESSAGE = "planted failure of a call"


class Fragile:
    """When calls of `fragile` raise.

    Attributes:
        part: which of them, `forward` or `backward`.
        when: at the `first` call, at all `later` ones, `always`, or never, if it is empty.
        compiled: whether only calls from code that Inductor generated do.
        raised: how often one did.
    """

    def __init__(self) -> None:
        """Nothing raises."""
        self.set("", "")

    def set(self, part: str, when: str, *, compiled: bool = False) -> None:
        """Choose, and count anew."""
        self.part, self.when, self.compiled, self.calls, self.raised = part, when, compiled, 0, 0

    def call(self, part: str) -> None:
        """Note a call, which may raise."""
        if part != self.part or (self.compiled and not _from_generated_code()):
            return
        self.calls += 1
        if self.when == "always" or (self.when and (self.calls == 1) == (self.when == "first")):
            self.raised += 1
            raise RuntimeError(f"{MESSAGE}: {part}")


def _from_generated_code() -> bool:
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "call" and "empty_strided_cpu" in frame.f_globals:
            return True
        frame = frame.f_back
    return False


schedule = Fragile()


def a_compilers(monkeypatch: pytest.MonkeyPatch, namespace: str = "omnicomp_tests") -> None:
    """Let the operators of a namespace stand for kernels that omni chose; else they are the program's own."""
    monkeypatch.setattr(user_code, "OURS", user_code.OURS | {namespace})


@torch.library.custom_op("omnicomp_tests::fragile", mutates_args=())
def fragile(x: Tensor, part: str) -> Tensor:
    """Three times `x`, in the forward and in the backward."""
    schedule.call(part)
    return x * 3


fragile.register_fake(lambda x, part: torch.empty_like(x))
fragile.register_autograd(lambda ctx, grad: (fragile(grad, "backward"), None))


def program(x: Tensor) -> Tensor:
    """Code before and behind it, whose backward keeps what was saved for it."""
    return fragile(x.sin(), "forward").exp()


def step(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Result and gradient of a call."""
    x = torch.linspace(-1, 1, 5).requires_grad_()
    result = function(x)
    (grad,) = torch.autograd.grad(result.sum(), x)
    return result.detach(), grad
