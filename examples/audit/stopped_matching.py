"""An attention that was fused until somebody tidied it up: now its weights are kept, for a plot.

    omnicomp run --timeline before.jsonl examples/audit/stopped_matching.py --before
    omnicomp run --timeline after.jsonl examples/audit/stopped_matching.py
    omnicomp diff before.jsonl after.jsonl

The difference names the pass, and the audit the line and what to change.
"""

import sys

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """Self-attention with its parts written out; maps (batch, time, width) to the same."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of (batch, heads, time, width of a head)."""
        batch, time, _ = x.shape
        return self.qkv(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        q, k, v = self.split(x)
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        attended = torch.softmax(scores, -1) @ v
        return self.out(attended.transpose(1, 2).flatten(2))


class Refactored(Attention):
    """The same in steps that have names."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        """How much each token looks at each other one."""
        return torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, -1)

    def forward(self, x: Tensor) -> Tensor:
        """Attend, and keep the mean of the weights over the heads."""
        q, k, v = self.split(x)
        weights = self.weights(q, k)
        self.seen = weights.mean(1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a feed-forward network; maps (batch, time, width) to the same."""

    def __init__(self, attention: nn.Module, width: int) -> None:
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Both, each around a residual."""
        x = x + self.attention(self.norms[0](x))
        return x + self.feed(self.norms[1](x))


def main() -> None:
    """Compile the block as it was before or after the refactoring, and call it once."""
    torch.manual_seed(0)
    before = "--before" in sys.argv
    model = torch.compile(Block(Attention(32) if before else Refactored(32), 32))
    with torch.no_grad():
        model(torch.randn(2, 16, 32))
    print("before the refactoring" if before else "after the refactoring")


if __name__ == "__main__":
    main()
