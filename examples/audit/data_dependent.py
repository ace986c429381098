"""A model that one line cuts into pieces: how many tokens a layer keeps depends on their values.

    omnicomp run --timeline run.jsonl examples/audit/data_dependent.py
    omnicomp audit run.jsonl

The audit names the line, what is wrong with it, and what to change.
"""

import torch
from torch import Tensor, nn


class Pruner(nn.Module):
    """Drops the tokens that a small network finds unimportant."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.score = nn.Linear(width, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Keep some of the tokens: (tokens, width) to (fewer tokens, width)."""
        important = self.score(tokens).squeeze(-1) > 0
        return tokens[important]


class Model(nn.Module):
    """Two linear layers with the pruner between them."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.pruner = Pruner(width)
        self.second = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (tokens, width) to (fewer tokens, width)."""
        tokens = self.first(tokens).relu()
        tokens = self.pruner(tokens)
        return self.second(tokens).relu()


def main() -> None:
    """Compile the model and call it once."""
    torch.manual_seed(0)
    model = torch.compile(Model())
    with torch.no_grad():
        print(f"{len(model(torch.randn(64, 32)))} of 64 tokens are left")


if __name__ == "__main__":
    main()
