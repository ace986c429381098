"""Records are dataclasses: what the standard library's do is what is expected of them."""

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from omnicomp import records


@records.dataclass(frozen=True, kw_only=True)
class Point:
    """A record."""

    x: int
    y: float = 0.0
    names: list[str] = dataclasses.field(default_factory=list[str], compare=False)
    shown: str = dataclasses.field(default="", repr=False)


@records.dataclass(frozen=True, kw_only=True)
class Named(Point):
    name: str = "n"

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("no name")


@records.dataclass(frozen=True)
class Pair:
    first: Any
    second: Any = None


@records.dataclass(frozen=True)
class One:
    value: Any


@records.dataclass(frozen=True, eq=False, repr=False)
class Itself:
    value: int

    def __repr__(self) -> str:
        return "itself"


def test_fields_defaults_and_order() -> None:
    point = Point(x=1)
    assert vars(point) == {"x": 1, "y": 0.0, "names": [], "shown": ""}
    assert list(vars(Point(shown="s", x=2))) == [field.name for field in dataclasses.fields(Point)]
    assert point.names is not Point(x=1).names
    assert repr(point) == "Point(x=1, y=0.0, names=[])"
    assert dataclasses.asdict(Named(x=1)) == {"x": 1, "y": 0.0, "names": [], "shown": "", "name": "n"}
    assert dataclasses.replace(Named(x=1, name="m"), x=2) == Named(x=2, name="m")
    assert (Pair(1), Pair(1, second=2), Pair(second=2, first=1)) == (Pair(1, None), Pair(1, 2), Pair(1, 2))


def test_equality_and_hash_are_of_the_fields_that_are_compared() -> None:
    assert Point(x=1, names=["a"]) == Point(x=1)
    assert hash(Point(x=1, names=["a"])) == hash(Point(x=1))
    assert Point(x=1) != Point(x=2)
    assert Point(x=1) != Named(x=1)
    assert One(float("nan")) != One(float("nan"))
    same = float("nan")
    assert One(same) == One(same)  # as in a tuple
    assert Itself(1) != Itself(1)
    assert repr(Itself(1)) == "itself"
    around: list[Any] = []
    around.append(One(around))
    assert "..." in repr(around[0])


@pytest.mark.parametrize(
    "make",
    [
        lambda: Point(),
        lambda: Point(x=1, z=2),
        lambda: Point(1),
        lambda: Pair(1, 2, 3),
        lambda: Pair(1, first=1),
        lambda: Pair(second=1),
    ],
)
def test_wrong_arguments_are_refused(make: Any) -> None:
    with pytest.raises(TypeError):
        make()


def test_a_record_stays_as_it_is_and_can_be_copied() -> None:
    point = Named(x=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        point.x = 2  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        del point.x
    assert pickle.loads(pickle.dumps(point)) == copy.deepcopy(point) == point
    with pytest.raises(ValueError, match="no name"):
        Named(x=1, name="")


def test_other_dataclasses_are_left_to_the_standard_library() -> None:
    with pytest.raises(TypeError, match=r"dataclasses\.dataclass"):
        records.dataclass(frozen=False)
