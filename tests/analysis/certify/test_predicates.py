"""Masks that are equal for all sizes, and such that are equal at small ones alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from omnicomp.analysis.certify import predicates

Predicate = Callable[[Any, Any], Any]


def graph(seen: Callable[[Any], Any]) -> torch.fx.GraphModule:
    """The graph of Dynamo for a square matrix of which a mask is taken, with sizes that are symbols."""
    found: list[torch.fx.GraphModule] = []

    def masked(x: Any) -> Any:
        return torch.where(seen(x.shape[-1]), x, 0.0)

    def keep(module: torch.fx.GraphModule, _: Any) -> Any:
        found.append(module)
        return module.forward

    torch.compiler.reset()
    torch.compile(masked, backend=keep, dynamic=True, fullgraph=True)(torch.zeros(8, 8))
    return found[0]


def of(predicate: Predicate) -> Callable[[Any], Any]:
    """A mask by a predicate of row and column."""
    return lambda n: predicate(torch.arange(n)[:, None], torch.arange(n).unsqueeze(0))


EQUAL: dict[str, tuple[Any, Any]] = {
    "strict": (of(lambda q, k: k < q + 1), of(lambda q, k: k <= q)),
    "negation": (of(lambda q, k: k <= q), of(lambda q, k: ~(q < k))),
    "complement": (of(lambda q, k: k <= q), of(lambda q, k: k > q)),
    "window": (of(lambda q, k: (k <= q) & (q - k < 5000)), of(lambda q, k: ~((k > q) | (k + 5000 <= q)))),
    "blocks": (of(lambda q, k: q // 64 == k // 64), of(lambda q, k: (q - q % 64 <= k) & (k < q - q % 64 + 64))),
    "xor": (of(lambda q, k: (k < 9) ^ (k < 30)), of(lambda q, k: (k >= 9) & (k < 30))),
    "triangle": (of(lambda q, k: k <= q + 2), lambda n: torch.ones(n, n, dtype=torch.bool).tril(2)),
    "from behind": (of(lambda q, k: k >= q), lambda n: torch.arange(n)[None] >= torch.arange(n)[:, None]),
    "transposed": (of(lambda q, k: k <= q), lambda n: torch.ones(n, n, dtype=torch.bool).triu().transpose(0, 1)),
    "what all see, gathered": (
        of(lambda q, k: (k <= q) & torch.ones(9, dtype=torch.bool)[k % 9].flip(1)),
        of(lambda q, k: k <= q),
    ),
    "absolute value": (of(lambda q, k: abs(q - k) < 700), of(lambda q, k: (q - k < 700) & (k - q < 700))),
    "outside": (of(lambda q, k: abs(q - k) > 700), of(lambda q, k: (q - k > 700) | (k - q > 700))),
    "one row": (lambda n: of(lambda q, k: k <= q)(n).select(0, 3), lambda n: torch.arange(n) <= 3),
    "all": (of(lambda q, k: k >= 0), lambda n: torch.ones(n, n, dtype=torch.bool)),
    "rows that see a key": (
        of(lambda q, k: (k + 9 <= q).any(-1, keepdim=True) | (q < 0)),
        of(lambda q, k: (k < q - 8).any(-1, keepdim=True) | (q < 0)),
    ),
    "a vector that is turned": (
        lambda n: (torch.arange(3, n + 3).float() * 0.5)[:, None] > 1,
        lambda n: (torch.arange(n)[:, None] + 3).float() * 0.5 > 1,
    ),
    "sizes": (lambda n: torch.arange(n) < n - 7, lambda n: torch.arange(n) + 7 < n),
    "diagonal of sizes": (
        lambda n: torch.ones(n, n, dtype=torch.bool).tril(n - 3),
        lambda n: torch.arange(n)[None] <= torch.arange(n)[:, None] + n - 3,
    ),
}
OTHER: dict[str, tuple[Any, Any]] = {
    "window of one more": (of(lambda q, k: q - k < 5000), of(lambda q, k: q - k <= 5000)),
    "no window": (of(lambda q, k: (k <= q) & (q - k < 5000)), of(lambda q, k: k <= q)),
    "blocks of half the size": (of(lambda q, k: q // 64 == k // 64), of(lambda q, k: q // 32 == k // 32)),
    "blocks that begin later": (of(lambda q, k: q // 64 == k // 64), of(lambda q, k: (q + 1) // 64 == (k + 1) // 64)),
    "transposed": (of(lambda q, k: k <= q), of(lambda q, k: q <= k)),
    "absolute value": (of(lambda q, k: abs(q - k) < 700), of(lambda q, k: (q - k < 700) & (k - q < 701))),
    "outside": (of(lambda q, k: abs(q - k) > 700), of(lambda q, k: (q - k > 700) & (k - q > 700))),
    "another row": (lambda n: of(lambda q, k: k <= q)(n).select(0, 3), lambda n: torch.arange(n) <= 4),
    "all but one": (of(lambda q, k: k >= 1), lambda n: torch.ones(n, n, dtype=torch.bool)),
    "rows that see a key": (
        of(lambda q, k: (k + 9 <= q).any(-1, keepdim=True) | (q < 0)),
        of(lambda q, k: (k < q - 9).any(-1, keepdim=True) | (q < 0)),
    ),
    "a vector that begins later": (
        lambda n: (torch.arange(3, n + 3).float() * 0.5)[:, None] > 1,
        lambda n: (torch.arange(n)[:, None] + 4).float() * 0.5 > 1,
    ),
    "written": (of(lambda q, k: k <= q), of(lambda q, k: (k <= q).logical_not_())),
    "sizes": (lambda n: torch.arange(n) < n - 7, lambda n: torch.arange(n) < n - 8),
    "diagonal of sizes": (
        lambda n: torch.ones(n, n, dtype=torch.bool).tril(n - 3),
        lambda n: torch.ones(n, n, dtype=torch.bool).tril(n - 4),
    ),
    "one place": (lambda n: torch.arange(n)[2:3] < torch.arange(n), lambda n: torch.arange(n) + 2 < torch.arange(n)),
    "a product": (of(lambda q, k: q * k < 90), of(lambda q, k: k * q < 91)),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_masks_are_proved_for_all_sizes(name: str) -> None:
    """By elimination, whatever the numbers are."""
    found, words = predicates.compared(*map(graph, EQUAL[name]))
    assert found, words


@pytest.mark.parametrize("name", OTHER)
def test_other_masks_are_not(name: str) -> None:
    """Those that differ behind a number, and those that have no formula."""
    found, _ = predicates.compared(*map(graph, OTHER[name]))
    assert found is False
