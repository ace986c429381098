"""A small language model learns a text in bfloat16 as well as in float32.

The model is a decoder of 0.36 million parameters over the characters of *Paradise Lost*; it is trained for 200 steps of
512 characters. The criterion, for the same seed of parameters and of the order of the text:

- at the end: the mean loss of the last 50 steps, averaged over the seeds, is off by less than the standard error of
  float32's own mean over three seeds;
- all along: the mean loss of each window of 25 steps is off by less than the standard error of that mean, which the
  differences between consecutive steps tell: `std(difference) / sqrt(2) / sqrt(25)`.

So a run is within the noise if one could not tell it from float32's by its losses. That the criterion can tell is
tested by a run with a learning rate that is 30 % lower.
"""

import functools
import math
from collections.abc import Iterator

import pytest
import torch
from language_model import LENGTH, STEPS, LanguageModel, load_text, train
from torch import Tensor

import omnicomp
from omnicomp.timeline import Rewrite

SEEDS = (0, 1, 2)
LAST = 50
WINDOW = 25

pytestmark = pytest.mark.model


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices of 96 columns gain little by a second thread, and a machine that others use makes it wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def text() -> tuple[Tensor, int]:
    return load_text()


def curves(policy: str, seeds: tuple[int, ...], *, checkpointed: bool = False, rate: float = 2e-3) -> Tensor:
    """The losses of the model trained under a dtype policy, float64 `[seeds, steps]`; compiled once for all seeds."""
    torch.compiler.reset()
    ids, characters = text()
    model = LanguageModel(characters, checkpointed=checkpointed)
    options = {"dtype_policy": policy, "lowerings": ["eager"]}
    compiled = torch.compile(model, backend="omni", options=options, fullgraph=True)
    return torch.stack([train(model, compiled, ids, seed, rate=rate) for seed in seeds])


@functools.cache
def reference() -> Tensor:
    """float32's curves, shared by the tests."""
    return curves("keep", SEEDS)


def beyond_noise(found: Tensor, expected: Tensor) -> list[str]:
    """What tells the curves from float32's of the same seeds; empty if they are within the noise."""
    every = reference()
    ends = every[:, -LAST:].mean(1)
    limit = (ends.std() / math.sqrt(len(SEEDS))).item()
    end = (found - expected)[:, -LAST:].mean().abs().item()
    problems = [f"the end is off by {end:.4f}, and the standard error is {limit:.4f}"] if end >= limit else []
    steps = expected.diff(dim=1).unfold(1, WINDOW - 1, WINDOW).std(2) / math.sqrt(2 * WINDOW)
    off = (found - expected).unfold(1, WINDOW, WINDOW).mean(2).abs()
    for seed, window in (off >= steps).nonzero().tolist():
        error = f"off by {off[seed, window]:.4f}, and the standard error is {steps[seed, window]:.4f}"
        problems.append(f"seed {seed}, steps from {window * WINDOW}: {error}")
    return problems


def test_the_text_is_what_it_should_be() -> None:
    ids, characters = text()
    assert len(ids) > 400_000
    assert 60 < characters < 100
    parameters = sum(p.numel() for p in LanguageModel(characters).parameters())
    assert 300_000 < parameters < 1_000_000
    assert len(ids) > LENGTH


@pytest.mark.slow
def test_float32_learns() -> None:
    every = reference()
    assert every.shape == (len(SEEDS), STEPS)
    assert bool((every[:, 0] > 4.2).all())  # of a uniform guess: log(75) = 4.3
    assert bool((every[:, -LAST:].mean(1) < 2.7).all())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seeds", "checkpointed"),
    [(SEEDS[1:2], True), pytest.param(SEEDS, False, marks=pytest.mark.long)],
    ids=["a seed, checkpointed", "all seeds"],
)
def test_bfloat16_is_within_the_noise_of_float32(seeds: tuple[int, ...], checkpointed: bool) -> None:
    found = curves("bf16", seeds, checkpointed=checkpointed)
    lowered = [e for e in omnicomp.timeline.events() if isinstance(e, Rewrite) and e.target == "bfloat16"]
    assert len(lowered) >= 12  # the products of three blocks
    expected = reference()[list(seeds)]
    assert not found.equal(expected)
    assert beyond_noise(found, expected) == []


@pytest.mark.slow
def test_the_criterion_tells_a_lower_learning_rate() -> None:
    found = curves("keep", SEEDS[:1], rate=1.4e-3)
    assert beyond_noise(found, reference()[:1]) != []
