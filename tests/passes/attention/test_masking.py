"""What masks hide, read from programs: names, what is proved, and which masks are the same."""

import math

import pytest
import torch
from fusion import inputs
from traced import capture, site_of

from omnicomp.passes.attention.candidates import candidates
from omnicomp.passes.attention.form import dense_form
from omnicomp.passes.attention.masking import mask_key, read_masking
from omnicomp.passes.attention.match import match
from omnicomp.passes.attention.reader import Reader

Q, K, V, _ = inputs(queries=8)
PADDING = torch.ones(2, 8, dtype=torch.long)
LOWEST = torch.finfo(torch.float32).min


def rows():
    return torch.arange(8)[:, None]


def columns():
    return torch.arange(8)


def masking(scores, *more):
    site, _, reader = site_of(lambda q, k, v, *a: scores(q @ k.mT, *a).softmax(-1) @ v, Q, K, V, *more)
    return read_masking(site, dense_form(site, reader), reader)


CAUSAL = {
    "tril": lambda s: s.masked_fill(torch.tril(torch.ones(8, 8)) == 0, -math.inf),
    "triu": lambda s: s.masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), LOWEST),
    "added": lambda s: s + torch.full((8, 8), -math.inf).triu(1),
    "minimum": lambda s: s + torch.triu(torch.full((8, 8), LOWEST), diagonal=1),
    "where": lambda s: torch.where(rows() >= columns(), s, -1e30),
    "logarithm": lambda s: s + torch.log(torch.tril(torch.ones(8, 8))),
    "sentinel": lambda s: s + (1.0 - torch.tril(torch.ones(8, 8))) * -1e9,
    "rounded": lambda s: s + torch.where(rows() < columns(), LOWEST, 0.0).to(torch.bfloat16),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_in_every_spelling(name):
    found = masking(CAUSAL[name])
    assert found.is_causal
    assert not found.is_full
    assert found.mask.rows_nonempty
    assert found.name == "causal"


@pytest.mark.parametrize(
    ("scores", "name"),
    [
        (lambda s: s, ""),
        (lambda s: s + torch.zeros(8, 8), "none"),
        (lambda s: s.masked_fill((rows() - columns()).abs() > 2, LOWEST), "window of 2 on both sides"),
        (lambda s: s.masked_fill(columns() > rows() + 1, LOWEST), "causal, offset 1"),
        (lambda s: s.masked_fill(rows() // 4 != columns() // 4, LOWEST), "chunked by 4"),
        (lambda s: s + torch.where(rows() > columns(), 0.5, 0.0), "bias"),
    ],
)
def test_index_masks_are_named(scores, name):
    assert masking(scores).name == name


def test_padding_hides_and_is_not_trusted():
    found = masking(lambda s, p: s + (1.0 - p[:, None, None].bool().float()) * LOWEST, PADDING)
    assert found.mask.depends_on_data
    assert not found.is_full
    assert not found.mask.rows_nonempty
    assert found.finite
    both = masking(lambda s, p: CAUSAL["tril"](s) + (1.0 - p[:, None, None].bool().float()) * LOWEST, PADDING)
    assert "causal" in both.name
    assert not both.is_causal
    assert not both.finite


def test_a_mask_passed_in_is_a_bias():
    numbers = masking(lambda s, p: s + (1.0 - p[:, None, None].float()) * LOWEST, PADDING)
    assert numbers.name == "bias", "integers need not be zero or one"
    found = masking(lambda s, m: s + m, torch.zeros(8, 8))
    assert found.mask is None
    assert found.name == "bias"
    assert not found.is_causal


TABLE = torch.nn.Parameter(torch.randn(15, 4))


def table():
    return TABLE[(rows() - columns()) + 7].permute(2, 0, 1)[None]


BESIDE_A_BIAS = {
    "where": lambda s: s + torch.where(rows() >= columns(), table(), LOWEST),
    "turned": lambda s: s + torch.where(rows() < columns(), LOWEST, table()),
    "filled": lambda s: s + table().masked_fill(rows() < columns(), -math.inf),
    "sum": lambda s: s + (table() + torch.where(rows() < columns(), LOWEST, 0.0)),
    "in a sum": lambda s: s + (torch.where(rows() >= columns(), table(), LOWEST) + 0.5),
}


@pytest.mark.parametrize("name", BESIDE_A_BIAS)
def test_a_mask_beside_a_learned_bias_is_read_apart(name):
    found = masking(BESIDE_A_BIAS[name])
    assert found.name == "causal and bias"
    assert len(found.biases) == 1
    assert not found.is_causal
    assert found.rows_nonempty


def test_a_bias_that_may_hide_keys_leaves_rows_open():
    given = torch.zeros(2, 4, 8, 8)
    assert masking(lambda s, b: s + torch.where(rows() >= columns(), b, LOWEST), given).name == "causal and bias"
    for bias in (lambda b: torch.where(rows() >= columns(), b, LOWEST), lambda b: b):
        assert not masking(lambda s, b, bias=bias: s + bias(b), given).rows_nonempty
    seen = masking(lambda s: s + torch.where(rows() >= 0, table(), LOWEST))
    assert (seen.name, seen.is_full, seen.rows_nonempty) == ("bias", True, True)
    offset = masking(lambda s: s + torch.where(rows() > columns(), table(), LOWEST))
    assert offset.name == "causal, offset -1 and bias"
    assert not offset.rows_nonempty
    lifted = masking(lambda s, b: s + (b + torch.where(rows() < columns(), -1e9, 0.0)), given)
    assert lifted.name == "bias", "an input may lift what is not lower"


def test_twice_a_minimum_is_not_finite():
    found = masking(lambda s: CAUSAL["minimum"](CAUSAL["minimum"](s)))
    assert found.is_causal
    assert not found.finite
    assert masking(lambda s: CAUSAL["where"](CAUSAL["triu"](s))).finite


def test_layers_with_the_same_mask_have_one_key():
    def function(q, k, v, p):
        for layer in range(3):
            hidden = p[:, None, None] == 0 if layer < 2 else p[:, None, None] == 1
            q = (q @ k.mT).masked_fill(hidden, LOWEST).masked_fill(columns() > rows(), LOWEST).softmax(-1) @ v
        return q

    backend, reader = capture(function, Q, K, V, PADDING), Reader()
    sites = [match(*found, backend.trace, reader) for found in candidates(backend.trace, backend.module.graph)]
    for site in sites:
        site.steps = [
            type(step)(reader.expand(step.condition), step.value) if hasattr(step, "condition") else step
            for step in site.steps
        ]
    keys = [mask_key(site, dense_form(site, reader)) for site in sites]
    assert keys[0] == keys[1]
    assert keys[0] != keys[2]
