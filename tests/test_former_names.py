"""Modules that moved are importable by their former names for one release, with a warning."""

import importlib
import sys

import pytest

from omnicomp import _MOVED


@pytest.mark.parametrize("former", sorted(_MOVED))
def test_a_former_name_is_the_module_of_now(former: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, former, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{former} is {_MOVED[former]} now"):
        module = importlib.import_module(former)
    assert module is importlib.import_module(_MOVED[former])
    assert module.__spec__ is not None
    assert module.__spec__.name == _MOVED[former]


def test_modules_inside_of_a_package_that_moved_are_the_same_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "omnicomp.sim.build", raising=False)
    with pytest.warns(DeprecationWarning, match="omnicomp.sim.build is"):
        module = importlib.import_module("omnicomp.sim.build")
    assert module is importlib.import_module("omnicomp.devices.sim.build")


def test_other_names_are_refused_as_ever() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"omnicomp\.nowhere"):
        importlib.import_module("omnicomp.nowhere")
