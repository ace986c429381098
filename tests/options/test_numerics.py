import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from omnicomp.options.eager_operators import EAGER_OPERATORS
from omnicomp.options.policy import parse


def test_eagers_rounding_is_asked_of_inductor_unless_the_user_says_otherwise() -> None:
    policy = parse(None, {"numerics": "eager"})
    assert policy.inductor["emulate_precision_casts"] is True
    assert {rule.selector for rule in policy.rules} == set(EAGER_OPERATORS)
    assert parse(None, {"numerics": "eager", "emulate_precision_casts": False}).inductor == {
        **policy.inductor,
        "emulate_precision_casts": False,
    }
    assert not parse(None, {}).rules


def test_a_rule_of_the_user_comes_after_the_list() -> None:
    policy = parse(None, {"numerics": "eager", "lowerings": {"aten.erf": "inductor"}})
    assert policy.rules[-1].selector == "aten.erf"


def halves(x: Tensor) -> list[Tensor]:
    square = x * x
    return [square, square / x, torch.isinf(square), F.gelu(x) * 1.5 / 3 + torch.erf(x)]


@pytest.mark.inductor
def test_half_precision_is_eagers_bit_for_bit() -> None:
    x = torch.linspace(-300, 300, 64, dtype=torch.float16)
    compiled = torch.compile(halves, backend="omni", options={"numerics": "eager"})
    torch.testing.assert_close(compiled(x), halves(x), rtol=0, atol=0, equal_nan=True)
