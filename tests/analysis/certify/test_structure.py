import torch
from torch.fx import symbolic_trace

from omnicomp.analysis.certify import structure


def same(before, after) -> bool:
    return structure.same(symbolic_trace(before), symbolic_trace(after))


def test_what_is_computed_again_is_the_same_and_another_number_is_not():
    def once(x):
        y = x.exp()
        return y * y

    assert same(once, lambda x: x.exp() * x.exp())
    assert not same(lambda x: x + 1, lambda x: x + 1.0)
    assert not same(lambda x, y: x - y, lambda x, y: y - x)


def test_draws_and_writes_keep_their_order():
    def twice(x):
        return torch.rand_like(x) + torch.rand_like(x)

    def once(x):
        y = torch.rand_like(x)
        return y + y

    assert same(twice, twice)
    assert not same(twice, once)
    assert not same(lambda x: (x.exp(), x.add_(1)), lambda x: (x.add_(1), x.exp())[::-1])
