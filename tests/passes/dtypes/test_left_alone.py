"""What the policy leaves as the user wrote it, and says so."""

import math

import pytest
import torch
from lowered import DTYPES, check, compiled, rand
from torch import nn
from torch.utils.checkpoint import checkpoint

from omnicomp.timeline import NearMiss, Rewrite


def test_float64_half_integers_and_complex_are_left_alone():
    def function(d, h, i, c):
        return d @ d, h @ h, i @ i, c @ c

    fn, backend = compiled(function)
    fn(rand(4, 4).double(), rand(4, 4).half(), torch.ones(4, 4, dtype=torch.long), torch.ones(4, 4, dtype=torch.cfloat))
    assert not backend.modified
    assert not backend.of(NearMiss)


def test_autocast_regions_are_left_alone():
    w = rand(8, 8)

    def function(x):
        y = x @ w
        with torch.autocast("cpu", torch.bfloat16):
            y = (y @ w) @ w
        with torch.autocast("cpu", enabled=False):
            z = x @ w
        return y, z, x @ w

    backend = check(function, rand(4, 8))
    assert len(backend.of(Rewrite)) == 2
    # One for each region, however many operators are in it.
    assert [m.reason.code for m in backend.of(NearMiss)] == ["option_ineffective"] * 2
    assert {m.reason.observed for m in backend.of(NearMiss)} == {"inside torch.autocast"}


def test_autocast_around_the_call():
    w = rand(8, 8)
    fn, backend = compiled(lambda x: checkpoint(lambda t: t @ w, x, use_reentrant=False))
    with torch.autocast("cpu", torch.bfloat16):
        assert fn(rand(4, 8)).dtype == torch.bfloat16
    assert not backend.modified
    (miss,) = backend.of(NearMiss)
    assert miss.reason.lever


def test_functorch_transforms_are_left_alone():
    w = rand(8, 8)
    backend = check(lambda x: torch.vmap(lambda t: t @ w)(x) @ w, rand(4, 8))
    assert len(backend.of(Rewrite)) == 1
    assert [m.reason.code for m in backend.of(NearMiss)] == ["match_ended"]


@pytest.mark.parametrize("policy", DTYPES)
def test_angles_stay_in_float32(policy):
    frequencies = 10000.0 ** -torch.linspace(0, 1, 16)
    w = rand(2, 16)

    def function(positions, x):
        angle = (frequencies[:, None] @ positions[None].float()).T
        both = torch.cat((angle, angle), -1)
        fourier = 200 * math.pi * (x @ w)
        return both.cos(), both.sin(), fourier.sin(), torch.einsum("i,j->ij", positions.float(), frequencies)

    args = torch.arange(4000, 4008), rand(8, 2)
    expected = function(*args)
    fn, backend = compiled(function, policy)
    for got, want in zip(fn(*args), expected, strict=True):
        torch.testing.assert_close(got, want)
    assert not backend.modified
    assert {m.reason.code for m in backend.of(NearMiss)} == {"not_equal"}


def test_bundled_operators_are_told():
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    backend = check(lambda x: layer(x, x, x)[0], rand(2, 4, 8))
    assert not backend.modified
    assert [m.reason.code for m in backend.of(NearMiss)] == ["unsupported_op"]


@pytest.mark.parametrize("cast", [lambda x: x.float(), lambda x: x.to(torch.float32).mT.contiguous().mT])
def test_what_the_user_casts_up_stays_in_float32(cast):
    backend = check(lambda x, w: cast(x) @ w, rand(4, 8).bfloat16(), rand(8, 8))
    assert not backend.modified
    assert [m.reason.code for m in backend.of(NearMiss)] == ["option_ineffective"]


WIDE = {
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.t() + torch.eye(4)),
    "inv": lambda x: torch.linalg.inv(x @ x.t() + torch.eye(4)),
    "svdvals": lambda x: torch.linalg.svdvals(x @ x),
    "cdist": lambda x: torch.cdist(x @ x, x),
}
if torch.__version__ >= (2, 13):  # before that, its check of an argument depends on data, and breaks the graph
    WIDE["quantile"] = lambda x: torch.quantile(x @ x, 0.5)


@pytest.mark.parametrize("name", WIDE)
def test_what_has_no_kernel_in_half_precision_stays(name):
    fn, backend = compiled(WIDE[name], policy={"ops": {"*": torch.bfloat16}})
    x = rand(4, 4)
    torch.testing.assert_close(fn(x), WIDE[name](x), rtol=0.1, atol=0.1)
    (miss,) = backend.of(NearMiss)
    assert (miss.reason.code, "no kernel" in miss.reason.sentence) == ("unsupported_op", True)
    assert backend.of(Rewrite), "the product before it is lowered"
