"""Compile a small model with attention into a package, and print what `run.cpp` has to print for it.

python make.py model.pt2
"""

import sys

import torch
from torch import Tensor, nn

import omnicomp


class Model(nn.Module):
    """Hand-written attention over a sequence of any length, and a linear layer."""

    def __init__(self) -> None:
        """Make the layer."""
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        scores = self.linear(x) @ x.transpose(-1, -2) / 4
        return scores.softmax(-1) @ x


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Model().eval()
    length = torch.export.Dim("length", min=2, max=64)
    path = omnicomp.package(model, (torch.randn(2, 8, 16),), sys.argv[1], dynamic_shapes=({1: length},))
    print(omnicomp.load_package(path).audit)
    x = torch.linspace(-1, 1, 2 * 11 * 16).reshape(2, 11, 16)
    with torch.no_grad():
        print(f"{model(x).square().sum().item():.4f}")
