import pytest

from omnicomp._torch.repairs.method_patch import Exchange


class Owner:
    def told(self) -> str:
        return "told"


def louder(original):
    return lambda self: original(self).upper()


def test_the_method_is_another_one_inside():
    exchange = Exchange(Owner, "told", louder)
    with exchange:
        assert Owner().told() == "TOLD"
    assert Owner().told() == "told"
    with pytest.raises(ZeroDivisionError), exchange:
        _ = 1 / 0
    assert Owner().told() == "told"


def test_who_leaves_last_puts_it_back_in_any_order():
    before, exchange = Owner.told, Exchange(Owner, "told", louder)
    exchange.__enter__()
    exchange.__enter__()
    exchange.__exit__(None, None, None)
    assert Owner().told() == "TOLD", "one is inside still"
    exchange.__exit__(None, None, None)
    assert Owner.told is before
