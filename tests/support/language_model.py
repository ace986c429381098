"""A small language model over characters, and its training on a text: the same run for the same seed, in any dtype."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

TEXT = Path(__file__).parents[1] / "data" / "paradise_lost.txt"
LENGTH = 64
BATCH = 8
STEPS = 200


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and beside a residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """From `[batch, length, width]` to the same."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class LanguageModel(nn.Module):
    """A decoder; with `checkpointed`, the activations of each block are computed again in the backward."""

    def __init__(
        self, characters: int, *, width: int = 96, heads: int = 4, layers: int = 3, checkpointed: bool = False
    ) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.token, self.position = nn.Embedding(characters, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of `targets` given `ids`, both int64 `[batch, length]`, in nats."""
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def load_text() -> tuple[Tensor, int]:
    """The text as int64 ids of its characters, and how many characters there are."""
    text = TEXT.read_text(encoding="ascii")
    characters = {c: i for i, c in enumerate(sorted(set(text)))}
    return torch.tensor([characters[c] for c in text]), len(characters)


def train(
    model: LanguageModel,
    loss: Callable[[Tensor, Tensor], Tensor],
    text: Tensor,
    seed: int,
    *,
    steps: int = STEPS,
    rate: float = 2e-3,
) -> Tensor:
    """Train `model` anew by AdamW.

    Args:
        model: its parameters are drawn anew from `seed`, in place.
        loss: the model, or what it was compiled to.
        text: ids of characters.
        seed: of the parameters and of the order of the text.
        steps: how many.
        rate: the learning rate, which rises for the first 20 steps.

    Returns:
        The loss of each step before it, float64 `[steps]`.
    """
    torch.manual_seed(seed)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding, nn.LayerNorm)):
            module.reset_parameters()
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    curve: list[float] = []
    for step in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator)
        windows = torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()])
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20)
        value = loss(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        curve.append(value.item())
    return torch.tensor(curve, dtype=torch.float64)
