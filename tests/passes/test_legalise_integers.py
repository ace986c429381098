"""Integers on a device without int64: indices that come as inputs, writes to them, and Python's own operators."""

import pytest
import torch
import torch.nn.functional as F
from lacking import Lacking, legalised

NO_LONG = Lacking(unstored=(torch.int64,))
HOST = (torch.int64,)
x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
ids = torch.tensor([0, 2])
labels = torch.tensor([0, 1, 2, 3, 1])
some = torch.tensor([[0, 1, 2, 3]])

INPUTS = {
    "cross_entropy": (lambda i: F.cross_entropy(x, i), labels),
    "nll_loss": (lambda i: F.nll_loss(x, i), labels),
    "index_fill": (lambda i: x.index_fill(0, i, 1.0), ids),
    "index_copy": (lambda i: x.index_copy(0, i, x[:2] * 2), ids),
    "put": (lambda i: x.put(i, x[0, :2]), ids),
    "take": (lambda i: x.take(i), ids),
    "gather": (lambda i: x.gather(0, i), some),
    "scatter": (lambda i: x.scatter(0, i, 9.0), some),
    # A second run of the pass has something to do for the other operator, and leaves the index alone.
    "twice": (lambda i: (x.take(i), x.topk(2)[1], i + 1), ids),
    "and": (lambda i: (i & 1, i | 4, i ^ 1), ids),
    "nonzero": (lambda i: torch.nonzero(i).sum() + i, ids),
    "range of floats": (lambda i: torch.arange(-1.5, 3, 1.5, dtype=torch.int64) + i[0], ids),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_int64(name):
    function, given = INPUTS[name]
    mine, same = given.clone(), given.clone()
    compiled, backend = legalised(function, NO_LONG, host=HOST)
    found, expected = compiled(mine), function(same)
    pairs = [(found, expected)] if isinstance(found, torch.Tensor) else list(zip(found, expected, strict=True))
    for value, exact in pairs:
        wanted = torch.int32 if exact.dtype is torch.int64 else exact.dtype
        assert value.dtype is wanted
        torch.testing.assert_close(value, exact.to(wanted))
    assert mine.equal(given), "the input is only read"
    assert backend.modified


def test_an_input_of_int64_that_is_changed():
    def function(i):
        i.mul_(3)
        return i.sum()

    given = ids.clone()
    compiled, _ = legalised(function, NO_LONG, host=HOST)
    assert compiled(given).item() == 6
    assert given.equal(torch.tensor([0, 6]))
    assert given.dtype is torch.int64
    with pytest.raises(RuntimeError, match=r"does not fit int32"):
        compiled(torch.tensor([2**30, 1]))


def test_a_result_that_is_a_tuple_in_a_tuple():
    no_double = Lacking(unstored=(torch.float64,))
    values = torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    function = lambda v: torch.histogramdd(v, [2, 3])  # noqa: E731
    counts, edges = legalised(function, no_double, host=(torch.float64,))[0](values)
    expected, ends = function(values)
    torch.testing.assert_close(counts.double(), expected)
    for found, exact in zip(edges, ends, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)


def test_the_unfold_of_images_computes():
    stored = Lacking(uncomputed=(torch.bfloat16,))
    images = torch.randn(1, 2, 4, 4).bfloat16()
    compiled, backend = legalised(lambda v: F.unfold(v, 2), stored)
    assert compiled(images).equal(F.unfold(images, 2))
    assert torch.bfloat16 not in backend.computed
