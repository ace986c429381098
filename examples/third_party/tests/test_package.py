"""Each of the four is found by its entry point, does its work, and is shown in the audit."""

import pytest
import torch
from omnicomp_numpy.overrides import MAX_ROW

import omnicomp
from omnicomp.devices import resolve_device
from omnicomp.lowerings.engines import resolve_engine


@pytest.fixture(autouse=True)
def clean():
    torch.compiler.reset()
    omnicomp.timeline.clear()
    torch.manual_seed(0)


def compiled(function, *lowerings):
    return torch.compile(function, backend="omni", options={"lowerings": list(lowerings)})


def test_the_doctor_lists_all_four():
    from omnicomp.cli.doctor import examine

    found = {(check.name, check.status): check.found for check in examine()}
    assert found["pass rsqrt", "ok"].startswith("omnicomp-numpy 0.1.0; runs behind attention_fusion")
    assert ("override numpy_cumsum", "ok") in found
    assert ("engine numpy", "ok") in found
    assert ("device npy", "ok") in found


def ran():
    """The lowerings of the subgraphs, as they ran."""
    return [row.ran for row in omnicomp.audit().subgraphs]


def test_the_pass_rewrites_and_its_gradient_is_right():
    def function(x):
        return (1 / torch.sqrt(x)).sum() + (1 / x.sqrt()).sum()

    x = (torch.rand(5) + 0.1).requires_grad_()
    result = compiled(function, "eager")(x)
    torch.testing.assert_close(result, function(x))
    torch.testing.assert_close(torch.autograd.grad(result, x), torch.autograd.grad(function(x), x))
    (graph,) = omnicomp.audit().graphs
    assert [rewrite.name for rewrite in graph.rewrites] == ["rsqrt"] * 2
    assert next(run for run in graph.passes if run.name == "rsqrt").node_diff["torch.rsqrt"] == 2


@pytest.mark.parametrize(
    "function", [lambda x: 2 / torch.sqrt(x), lambda x: 1 / (x + 1), lambda x: 1 / x.half().sqrt()]
)
def test_the_pass_leaves_what_is_not_its_own(function):
    x = torch.rand(5) + 0.1
    torch.testing.assert_close(compiled(function, "eager")(x), function(x))
    assert omnicomp.audit().graphs[0].rewrites == ()


def test_the_override_runs_and_refuses_long_rows():
    call = compiled(lambda x: x.exp().cumsum(-1), "override", "eager")
    x = torch.randn(4, 8)
    torch.testing.assert_close(call(x), x.exp().cumsum(-1))
    assert set(ran()) == {"override", "eager"}
    assert "numpy_cumsum" in omnicomp.audit().to_text()
    omnicomp.timeline.clear()
    long = torch.randn(2, MAX_ROW + 1)
    torch.testing.assert_close(call(long), long.exp().cumsum(-1))
    assert set(ran()) == {"eager"}


def test_the_engine_runs_a_model():
    assert resolve_engine("numpy").missing() == ""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
    call = compiled(model, "numpy", "eager")
    with torch.no_grad():
        for size in (4, 5, 1):
            x = torch.randn(size, 6)
            torch.testing.assert_close(call(x), model(x))
    assert set(ran()) == {"numpy"}
    assert "steps of NumPy" in omnicomp.audit().to_text()


def test_the_device_compiles_for_itself():
    assert resolve_device("npy").lowerings == ("override", "device", "eager")

    def function(x, w):
        return torch.relu(torch.mm(x, w) + x).sin() * 2

    x, w = torch.randn(4, 4), torch.randn(4, 4)
    on_device = torch.compile(function, backend="omni")(x.to("npy"), w.to("npy"))
    assert on_device.device.type == "npy"
    torch.testing.assert_close(on_device.cpu(), function(x, w))
    (graph,) = omnicomp.audit().graphs
    assert graph.device == "npy"
    assert ran() == ["device"]
