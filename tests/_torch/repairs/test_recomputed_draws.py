"""A checkpointed part that runs eager drops in its backward what it dropped in its result."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from omnicomp import timeline


def _dropped(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x.sin(), 0.5)


def _nested(x: Tensor) -> Tensor:
    return checkpoint(_dropped, _dropped(x), use_reentrant=False)


def _kept() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.sin.default])


@pytest.mark.parametrize("part", [_dropped, _nested])
@pytest.mark.parametrize("context", [{}, {"context_fn": _kept}], ids=["plain", "selective"])
def test_gradients_and_random_numbers_are_eagers(part: Any, context: dict[str, Any]) -> None:
    def program(x: Tensor) -> Tensor:
        return checkpoint(part, x, use_reentrant=False, **context)

    def results(function: Any) -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.ones(64, requires_grad=True)
        y = function(x)
        y.sum().backward()
        return [y.detach(), x.grad, torch.rand(4)]  # pyright: ignore[reportReturnType]

    torch.compiler.reset()
    compiled = torch.compile(program, backend="omni", options={"autograd": "eager"})
    for expected, found in zip(results(program), results(compiled), strict=True):
        assert torch.equal(expected, found)
    assert any(
        isinstance(e, timeline.Retreat) and e.reason.code == "eager_autograd" for e in timeline.current().events()
    )


def _drops_the_same(program: Any, **how: Any) -> bool:
    torch.compiler.reset()
    x = torch.ones(64, requires_grad=True)
    torch.manual_seed(0)
    y = torch.compile(program, **how)(x)
    y.sum().backward()
    return torch.equal(y != 0, x.grad != 0)  # pyright: ignore[reportOptionalOperand]


def test_torch_needs_the_repair() -> None:
    def program(x: Tensor) -> Tensor:
        return checkpoint(_dropped, x, use_reentrant=False, context_fn=_kept)

    assert not _drops_the_same(program, backend="eager")


def test_the_program_may_ask_for_other_numbers() -> None:
    def program(x: Tensor) -> Tensor:
        return checkpoint(_dropped, x, use_reentrant=False, preserve_rng_state=False)

    assert not _drops_the_same(program, backend="omni", options={"autograd": "eager"})
