"""A step against a cache that is filled in part reads the filled part, with one graph for all positions."""

import math

import pytest
import torch
import torch.nn.functional as F
from fusion import Backend, compiled, fuse

from omnicomp.passes.attention import filled, targets
from omnicomp.passes.attention.few_queries import FEW_QUERIES
from omnicomp.passes.attention.filled import FILLED_KEYS, LAST_KEY

KEYS = 1024
LOWEST = torch.finfo(torch.float32).min
FILLED = "keys up to the last one seen"


def seen(position):
    return torch.arange(KEYS)[None, None, None] <= position


def attend(scores, v):
    return torch.softmax(scores, -1) @ v


STEPS = {
    "added": lambda q, k, v, p: attend(q @ k.mT * 0.125 + torch.where(seen(p), 0.0, LOWEST), v),
    "filled": lambda q, k, v, p: attend((q @ k.mT * 0.125).masked_fill(~seen(p), LOWEST), v),
    "infinite": lambda q, k, v, p: attend((q @ k.mT * 0.125).masked_fill(torch.arange(KEYS) > p, -math.inf), v),
    "called": lambda q, k, v, p: F.scaled_dot_product_attention(q, k, v, attn_mask=seen(p)),
}


def operands(*, queries=1, size=64, batch=1):
    return [torch.randn(batch, 2, n, size) for n in (queries, KEYS, KEYS)]


@pytest.mark.parametrize("name", STEPS)
def test_one_graph_reads_what_is_filled_at_each_position(name):
    q, k, v = operands()
    backend = Backend()
    step = compiled(STEPS[name], backend)
    for position in (3, 0, 600, KEYS - 1, KEYS + 7, -1):  # no key is left in the last
        torch.testing.assert_close(
            step(q, k, v, torch.tensor(position)), STEPS[name](q, k, v, torch.tensor(position)), equal_nan=True
        )
    assert FILLED in backend.rewrite().detail
    k[:, :, 10:] = v[:, :, 10:] = math.nan
    unwritten = step(q, k, v, torch.tensor(9))
    torch.testing.assert_close(unwritten, STEPS[name](q, k.nan_to_num(), v.nan_to_num(), torch.tensor(9)))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_that_come_in_show_the_last_key(dtype):
    """As transformers' `generate` hands them over: left padding in one sequence, which no row of another has."""
    mask = torch.arange(KEYS)[None, None, None].repeat(2, 1, 1, 1) <= 20
    mask[0, ..., :5] = False
    if dtype is not torch.bool:
        mask = torch.where(mask, 0.0, LOWEST)
    step = lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m)  # noqa: E731
    assert FILLED in fuse(step, *operands(batch=2), mask).rewrite().detail


def test_sites_that_share_a_mask_share_the_number():
    def layers(q, k, v, p):
        mask = torch.where(seen(p), 0.0, LOWEST)
        return attend(attend(q @ k.mT + mask, v) @ v.mT + mask, k)

    backend = fuse(layers, *operands(), torch.tensor(70))
    (module,) = backend.graphs
    assert len([node for node in module.graph.nodes if node.target is FILLED_KEYS]) == 1
    assert len(backend.attentions()) == 2


@pytest.mark.parametrize(
    ("step", "arguments"),
    [
        pytest.param(STEPS["added"], operands(queries=KEYS), id="as many queries as keys"),
        pytest.param(STEPS["added"], operands(size=16), id="little to read"),
        pytest.param(
            lambda q, k, v, p: STEPS["added"](q, k, v, 70), operands(), id="the mask is of indices, and so is static"
        ),
    ],
)
def test_what_would_not_pay_is_left(step, arguments):
    backend = Backend()
    compiled(step, backend)(*arguments, torch.tensor(70))
    assert not any(FILLED in event.detail for event in backend.timeline.events() if hasattr(event, "detail"))


@pytest.fixture
def gpu(monkeypatch):
    """The ways of a GPU; the operator computes its reference on the CPU."""
    monkeypatch.setattr(filled, "measured", lambda device: True)
    for module in (filled, targets):
        monkeypatch.setattr(module, "on_host", lambda site: False)


HALF = {
    "added": lambda q, k, v, p: attend(q @ k.mT * 0.125 + torch.where(seen(p), 0.0, LOWEST).to(q.dtype), v),
    "infinite": lambda q, k, v, p: attend((q @ k.mT * 0.125).masked_fill(torch.arange(KEYS) > p, -math.inf), v),
    "called": STEPS["called"],
}


@pytest.mark.parametrize("step", HALF.values(), ids=HALF)
def test_on_a_gpu_the_number_of_keys_stays_on_the_device(step, gpu):
    q, k, v = (tensor.bfloat16() for tensor in operands())
    backend = Backend()
    run = compiled(step, backend)
    for position in (3, 600, KEYS - 1):
        found, expected = (each(q, k, v, torch.tensor(position)) for each in (run, step))
        torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
    assert backend.rewrite().target == "omnicomp::attention_of_few_queries"
    (module,) = backend.graphs
    assert [node.target for node in module.graph.nodes].count(LAST_KEY) == 1
    assert not any(node.target is FILLED_KEYS for node in module.graph.nodes)


def test_the_operator_for_few_queries_is_described_as_it_computes():
    q, k, v = (tensor.bfloat16() for tensor in operands())
    arguments = (q, k, v, seen(9), torch.tensor(10), 0.125)
    torch.library.opcheck(FEW_QUERIES, arguments, test_utils=("test_schema", "test_faketensor"))
