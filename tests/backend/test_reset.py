"""After `torch.compiler.reset()` torch is as it was."""

import inspect

import torch
import torch.fx._symbolic_trace as symbolic_trace

import omnicomp.backend  # noqa: F401 - which replaces something already


def test_nothing_of_torch_is_replaced_after_a_reset() -> None:
    model = torch.nn.Linear(4, 4).eval()
    options = {"lowerings": ["eager"], "dtype_policy": "bf16"}
    with torch.no_grad():
        torch.compile(model, backend="omni", options=options)(torch.randn(2, 4))
    assert inspect.getattr_static(torch.nn.Parameter, "data") is not inspect.getattr_static(torch.Tensor, "data")
    torch.compiler.reset()
    assert "data" not in vars(torch.nn.Parameter)
    assert symbolic_trace.is_fx_symbolic_tracing.__module__ == "torch.fx._symbolic_trace"
    assert not hasattr(symbolic_trace.is_fx_symbolic_tracing, "__wrapped__")
    assert torch._foreach_zero_.__module__ != "omnicomp._torch.parameters"
