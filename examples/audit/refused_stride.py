"""A hand-written kernel that is registered and never runs: what reaches it lies in memory otherwise than it wants.

    omnicomp run --timeline run.jsonl examples/audit/refused_stride.py
    omnicomp audit run.jsonl

The audit names the line, what is wrong with it, and what to change.
"""

import torch
from torch import Tensor, nn

import omnicomp
from omnicomp.timeline import Reason


def _check(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Reason | None:
    if x.stride(dim) == 1:
        return None
    return Reason(
        code="override_refused",
        by="row_cumsum",
        sentence="row_cumsum reads rows whose elements lie side by side",
        observed=f"stride {x.stride(dim)} in dimension {dim} of a tensor with strides {tuple(x.stride())}",
        needed=f"stride 1 in dimension {dim}",
        lever="call .contiguous() on the input of cumsum, or sum along another dimension",
    )


@omnicomp.override(op=torch.ops.aten.cumsum.default, devices=("cpu",), dtypes=(torch.float32,), check=_check)
def row_cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Cumulative sums of rows, by NumPy."""
    result = torch.from_numpy(x.numpy().cumsum(axis=dim))
    return result if dtype is None else result.to(dtype)


class Decay(nn.Module):
    """Sums over time what a layer computes."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.gate = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to (batch, width, time)."""
        by_channel = self.gate(x).transpose(1, 2)
        return torch.cumsum(by_channel, -1)


def main() -> None:
    """Compile the model and call it once."""
    torch.manual_seed(0)
    model = torch.compile(Decay())
    with torch.no_grad():
        print(f"the sum is {model(torch.ones(2, 8, 16)).sum():.2f}")


if __name__ == "__main__":
    main()
