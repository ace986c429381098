import operator

import fake_engines as fake
import pytest
import torch
from torch.fx import Graph, Node

from omnicomp.lowerings.engines import Engine, Operators

aten = torch.ops.aten


def test_a_declaration_is_found_by_its_overload() -> None:
    operators = Operators()
    operators.add(aten.relu.default, aten.add.Tensor, train=False, devices=("cpu",), dtypes=(torch.float32,))
    entry = operators.get(aten.relu.default)
    assert entry is not None
    assert (entry.target, entry.train, entry.devices, entry.dtypes) == (
        aten.relu.default, False, ("cpu",), (torch.float32,),
    )  # fmt: skip
    assert len(operators) == 2
    assert [each.target for each in operators] == [aten.relu.default, aten.add.Tensor]
    assert operators.get(aten.add.Scalar) is None
    assert operators.get(operator.getitem) is None


def test_a_later_declaration_replaces_an_earlier_one() -> None:
    operators = Operators()
    operators.add(aten.relu.default, train=False)
    operators.add(aten.relu.default)
    entry = operators.get(aten.relu.default)
    assert entry is not None
    assert entry.train
    assert len(operators) == 1


@pytest.mark.parametrize("target", [aten.relu, torch.relu, "aten.relu.default"])
def test_what_is_no_overload_is_refused(target: object) -> None:
    with pytest.raises(TypeError, match=r"is no overload; name one, such as torch\.ops\.aten\.relu\.default"):
        Operators().add(target)  # type: ignore[arg-type]


def test_the_decorator_leaves_the_function_as_it_was() -> None:
    class One(fake.Fake):
        name = "one"

    @One.op(aten.neg.default, aten.abs.default, check=lambda node: "never")
    def convert() -> int:
        return 3

    assert convert() == 3
    entry = One.operators.get(aten.abs.default)
    assert entry is not None
    assert entry.convert is convert
    assert entry.check is not None
    assert entry.check(Graph().placeholder("x")) == "never"


def test_an_engine_inherits_operators_and_keeps_its_own() -> None:
    class Parent(fake.Fake):
        name = "parent"

    Parent.op(aten.neg.default)(lambda: None)

    class Child(Parent):
        name = "child"

    Child.op(aten.abs.default)(lambda: None)
    Parent.op(aten.sign.default)(lambda: None)
    assert Child.operators.get(aten.neg.default) is not None
    assert Child.operators.get(aten.relu.default) is not None  # of Fake
    assert Parent.operators.get(aten.abs.default) is None
    assert Child.operators.get(aten.sign.default) is None  # declared after the class was made
    assert Engine.operators.get(aten.neg.default) is None
    assert isinstance(Graph().call_function(aten.neg.default), Node)
