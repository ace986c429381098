import pytest

from omnicomp.errors import OptionError
from omnicomp.options.policy import parse


def test_eagers_numerics_ask_inductor_for_its_rounding_and_compare_first_calls() -> None:
    policy = parse(None, {"numerics": "eager"})
    assert policy.inductor["emulate_precision_casts"] is True
    assert policy.inductor["fallback_random"] is True
    assert policy.lowerings == ("inductor", "eager")
    assert policy.verify == "first"
    usual = parse(None, {})
    assert (usual.verify, usual.lowerings[0]) == ("overrides", "override")


def test_what_the_user_says_is_kept() -> None:
    asked = {"emulate_precision_casts": False, "lowerings": {"aten.erf": "override"}, "verify": "off"}
    policy = parse(None, {"numerics": "eager", **asked})
    assert policy.inductor["emulate_precision_casts"] is False
    assert policy.rules[-1].selector == "aten.erf"
    assert (policy.verify, policy.lowerings) == ("off", ("inductor", "eager"))


@pytest.mark.parametrize("beside", [{"dtype_policy": "bf16"}, {"lowerings": "measure"}, {"background": True}])
def test_what_gives_other_values_is_refused_beside_it(beside: dict[str, object]) -> None:
    with pytest.raises(OptionError, match="leave one of them out"):
        parse(None, {"numerics": "eager", **beside})
