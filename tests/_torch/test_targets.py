"""Functions of torch are known by where they are found."""

import types

import pytest
import torch

from omnicomp._torch.targets import find_target, is_torchs, name_target


def test_a_function_of_pybind11_is_torchs_however_it_is_qualified(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(name: str) -> types.FunctionType:
        function = types.FunctionType((lambda: None).__code__, {}, name)
        function.__module__, function.__qualname__ = "torch._C", f"PyCapsule.{name}"
        return function

    there, elsewhere = made("of_pybind"), made("elsewhere")
    monkeypatch.setattr(torch._C, "of_pybind", there, raising=False)
    assert is_torchs(there)
    assert find_target(name_target(there) or ()) is there
    assert not is_torchs(elsewhere)
