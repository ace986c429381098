"""After `torch.compiler.reset()` parameters are torch's alone."""

import inspect

import torch

import omnicomp.backend  # noqa: F401 - which replaces something already


def test_parameters_are_not_observed_after_a_reset() -> None:
    model = torch.nn.Linear(4, 4).eval()
    options = {"lowerings": ["eager"], "dtype_policy": "bf16"}
    with torch.no_grad():
        torch.compile(model, backend="omni", options=options)(torch.randn(2, 4))
    assert inspect.getattr_static(torch.nn.Parameter, "data") is not inspect.getattr_static(torch.Tensor, "data")
    torch.compiler.reset()
    assert "data" not in vars(torch.nn.Parameter)
    assert torch._foreach_zero_.__module__ != "omnicomp._torch.parameters"
