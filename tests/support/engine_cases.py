"""What every engine owes its callers: inputs of any layout, results that stay theirs, threads, a network."""

from collections.abc import Callable
from typing import Any

import torch
from concurrency import in_threads
from torch import Tensor, nn

VIEWS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(6, 4).t(),
    "strided": lambda: torch.randn(4, 12)[:, ::2],
    "not aligned": lambda: torch.randn(50)[3:27].view(4, 6),
    "expanded": lambda: torch.randn(4, 1).expand(4, 6),
    "of an odd stride": lambda: torch.randn(24).as_strided((4, 1, 6), (6, 2, 1)),
    "empty": lambda: torch.randn(0, 6),
    "zero-dimensional": lambda: torch.tensor(1.5),
    "negated": lambda: torch.randn(4, 6, dtype=torch.complex64).conj().imag,
}


def close(actual: Tensor, expected: Tensor) -> None:
    """Equal within what libraries sum in another order."""
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def network() -> nn.Module:
    """Convolution, pooling, norms and layers, for inference; takes (N, 3, 16, 16)."""
    layers = [nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(72, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 5)).eval()


def results_stay(compiled: Callable[..., Any], *, distinct: bool = True) -> None:
    """Later calls write to no result of an earlier one; if `distinct`, equal results share no memory either."""
    call = compiled(lambda x: (x * 2, x.view(8, 8) + 1, x * 2))
    x = torch.randn(64)
    first = call(x)
    kept = [value.clone() for value in first]
    for value in call(torch.randn(64)):
        value.zero_()
    assert all(torch.equal(now, before) for now, before in zip(first, kept, strict=True))
    if distinct:
        first[0].zero_()
        assert torch.equal(first[2], kept[2])
    assert torch.equal(call(x)[0], kept[0])


def threads_share(compiled: Callable[..., Any]) -> None:
    """Eight threads call what was built for the first of them, each with inputs of its own."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    call = compiled(model)
    inputs = [torch.randn(16, 32) for _ in range(8)]

    def work(index: int) -> None:
        with torch.no_grad():
            expected = model(inputs[index])
            for _ in range(40):
                close(call(inputs[index]), expected)

    with torch.no_grad():
        call(inputs[0])
    in_threads(work)
