"""Repairs of torch: what they write, when they apply, and that results, gradients and shapes are eager's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_code import captured, code
from torch import Tensor

from omnicomp._torch.repairs.needed import Needed
from omnicomp.devices import resolve_device
from omnicomp.passes.base import PassContext, run_pipeline
from omnicomp.passes.repairs import (
    Repair,
    RepairAssertions,
    RepairDropout,
    RepairFirstCall,
    RepairKeptSizes,
    RepairLosses,
    RepairOut,
    RepairReturnedInputs,
    RepairStrides,
    RepairTangents,
    RepairUint8Resize,
)
from omnicomp.timeline import PassRun, Retreat, Rewrite, Timeline, current

EAGER: Any = {"lowerings": ["eager"]}


def test_a_loss_whose_labels_end_is_made_of_other_operators() -> None:
    graph = captured(lambda x, y: F.multilabel_margin_loss(x, y), torch.ones(2, 4), torch.zeros(2, 4, dtype=torch.long))
    check_graph(
        RepairLosses(),
        graph,
        "multilabel_margin_loss = torch.nn.functional.multilabel_margin_loss(x, y)",
        "multilabel_margin_loss = omnicomp_passes_repairs_multilabel_margin_loss(x, y)",
    )


def test_the_builtin_loss_has_its_reduction_named() -> None:
    function = torch._C._nn.multilabel_margin_loss  # type: ignore[attr-defined]
    graph = captured(lambda x, y: function(x, y, 2), torch.ones(2, 4), torch.zeros(2, 4, dtype=torch.long))
    check_graph(
        RepairLosses(),
        graph,
        "multilabel_margin_loss = torch._C._nn.multilabel_margin_loss(x, y, 2)",
        "multilabel_margin_loss = omnicomp_passes_repairs_multilabel_margin_loss("
        "input = x, target = y, reduction =\n    'sum')",
    )


def test_the_loss_of_a_sample_gets_no_dimensions() -> None:
    graph = captured(lambda x, y: F.multi_margin_loss(x, y, reduction="none"), torch.ones(4), torch.tensor(1))
    check_graph(
        RepairLosses(),
        graph,
        "multi_margin_loss = torch.nn.functional.multi_margin_loss(x, y, reduction = 'none')",
        "multi_margin_loss = torch.nn.functional.multi_margin_loss(x, y, reduction = 'none')\n"
        "reshape = multi_margin_loss.reshape(())",
    )


def test_out_is_written_by_a_copy() -> None:
    graph = captured(lambda x, y: torch.linalg.matrix_rank(x, out=y), torch.eye(3), torch.tensor(0))
    check_graph(
        RepairOut(),
        graph,
        "linalg_matrix_rank = torch._C._linalg.linalg_matrix_rank(x, out = y)",
        "linalg_matrix_rank_1 = torch._C._linalg.linalg_matrix_rank(x)\ncopy_ = y.copy_(linalg_matrix_rank_1)",
    )


def test_an_operator_that_can_not_be_made_functional_is_written_by_a_copy() -> None:
    check_graph(
        RepairOut(),
        captured(lambda x: x.polygamma_(1), torch.ones(3)),
        "polygamma_ = x.polygamma_(1)",
        "clone = x.clone()\npolygamma = clone.polygamma(1)\ncopy_ = x.copy_(polygamma)",
    )


def test_results_that_eager_makes_contiguous_are_made_so() -> None:
    check_graph(
        RepairStrides(),
        captured(lambda x: F.logsigmoid(x), torch.ones(2, 3).mT),
        "log_sigmoid = torch._C._nn.log_sigmoid(x)",
        "log_sigmoid = torch._C._nn.log_sigmoid(x)\ncontiguous = log_sigmoid.contiguous()",
    )
    assert not RepairStrides().apply(captured(lambda x: F.logsigmoid(x), torch.ones(3, 2))).modified


@pytest.mark.parametrize(
    "function",
    [
        F.logsigmoid,
        lambda x: torch.complex(x, x).angle(),
        lambda x: x.take((x > 0).long()),
        lambda x: F.one_hot((x > 0).long(), 4),
        lambda x: F.rrelu(x, training=True),
        lambda x: 2**x,
        lambda x: torch.pow(2, x),
        lambda x: x**2,
        lambda x: F.rrelu(x * 1, inplace=True),
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: F.batch_norm(x[None], torch.zeros(5), torch.ones(5)),
        lambda x: F.batch_norm(x[:, None].mT, None, None, training=True),
        lambda x: F.batch_norm(x.flatten(1).t(), None, None, training=True),
    ],
)
def test_strides_are_eagers(function: Callable[[Tensor], Tensor]) -> None:
    torch.compiler.reset()
    x = torch.randn(3, 4, 5).permute(2, 0, 1)
    compiled = torch.compile(function, backend="omni", options={"lowerings": ["eager"], "on_error": "raise"})
    assert compiled(x).stride() == function(x).stride()


def test_dropout_that_drops_nothing_is_its_input() -> None:
    graph = captured(lambda x: F.dropout(x, 0.5, training=False) + 1, torch.ones(3))
    before = "dropout = torch.nn.functional.dropout(x, 0.5, training = False)\nadd = dropout + 1"
    check_graph(RepairDropout(), graph, before, "add = x + 1")


def test_an_assertion_gets_a_message() -> None:
    def function(x: Tensor) -> Tensor:
        torch._assert_async((x > 0).all())
        return x + 1

    check_graph(
        RepairAssertions(),
        captured(function, torch.ones(3)),
        "gt = x > 0\nall_1 = gt.all()\n_assert_async = torch._assert_async(all_1)\nadd = x + 1",
        "gt = x > 0\nall_1 = gt.all()\n_assert_async = torch._assert_async(all_1, 'Expected Tensor with single nonzero"
        " value, but got zero')\nadd = x + 1",
    )
    call = torch.compile(function, backend="omni", options={"lowerings": ["eager"]})
    with pytest.raises(RuntimeError, match="single nonzero value"):
        call(-torch.ones(3))


def check_graph(repair: Repair, graph: torch.fx.GraphModule, before: str, after: str) -> None:
    """A repair makes one graph of the other, counts the place, has no event for it, and finds nothing again."""
    assert code(graph).rpartition("\nreturn")[0] == before
    applied = repair.apply(graph)
    assert code(graph).rpartition("\nreturn")[0] == after
    assert applied.modified
    (run,) = [event for event in applied.events if isinstance(event, PassRun)]
    assert (run.rewrites, [event for event in applied.events if isinstance(event, Rewrite)]) == (1, [])
    if not isinstance(repair, RepairLosses):
        assert not repair.apply(graph).modified


@pytest.mark.parametrize(
    ("repair", "function", "met", "other"),
    [
        (RepairTangents(), lambda x: x.unfold(0, 2, 1), torch.ones(4), None),
        (RepairReturnedInputs(), lambda x: x.sin().add_(1), torch.ones(4), None),
        (
            RepairUint8Resize(),
            lambda x: torch.ops.aten.upsample_bilinear2d.default(x, (3, 3), False),
            torch.ones(1, 1, 5, 5, dtype=torch.uint8),
            torch.ones(1, 1, 5, 5),
        ),
        (
            RepairKeptSizes(),
            lambda x: F.interpolate(x, scale_factor=1.1),
            torch.ones(1, 1, 5, 5),
            torch.ones(1, 1, 5, 5, device="meta"),
        ),
    ],
)
def test_what_is_in_force_while_a_graph_is_traced(
    repair: Any, function: Callable[..., Any], met: Tensor, other: Tensor | None
) -> None:
    graph = captured(function, met)
    runs = [event for event in repair.apply(graph, training=True).events if isinstance(event, PassRun)]
    assert [(run.applied, run.modified, run.rewrites) for run in runs] == [(True, False, 1)]
    with repair.in_force():
        pass
    graph = captured(function, met if other is None else other)
    runs = [event for event in repair.apply(graph, training=False).events if isinstance(event, PassRun)]
    assert runs == []


@pytest.mark.parametrize(("dtype", "count"), [(torch.complex64, 1), (torch.float32, 0)])
def test_every_first_call_of_torchs_operators_is_repaired_and_counted_where_values_change(
    dtype: torch.dtype, count: int
) -> None:
    graph = captured(lambda x: torch.linalg.pinv(x), torch.eye(2, dtype=dtype))
    context = PassContext(graph_id="g0", device=resolve_device("cpu"), timeline=Timeline(), training=False)
    run_pipeline((RepairFirstCall(),), graph, context)
    assert len(context.traced_under) == 1
    assert [event.rewrites for event in context.timeline.events() if isinstance(event, PassRun)] == [count] * count


def test_a_repair_is_skipped_where_torch_does_not_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RepairDropout, "needed", Needed(first="2.0", fixed="2.1"))
    graph = torch.fx.symbolic_trace(lambda x: F.dropout(x, 0.5, training=False) + 1)
    assert not RepairDropout().apply(graph, (torch.ones(3),)).modified


def test_repairs_are_made_where_another_pass_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> bool:
        raise RuntimeError("planted")

    monkeypatch.setattr("omnicomp.passes.legalise.Legalise.applies", broken)
    compiled: Any = torch.compile(lambda x: F.dropout(x, 0.5, training=False).add_(1), backend="omni", options=EAGER)
    x = torch.zeros(3)
    compiled(x)
    assert x.tolist() == [1, 1, 1]
    assert {event.name: event.rewrites for event in current().events() if isinstance(event, PassRun)} == {
        "repair_dropout": 1
    }


LABELS = {
    "all labels": [[1, 2, 3, 0], [3, 2, 1, 0]],
    "ended": [[1, 2, -1, 0], [3, -1, 3, 0]],
    "none": [[-1, 1, 2, 3], [-1, -1, -1, -1]],
    "twice": [[1, 1, -1, 0], [0, 0, 0, -1]],
}


def check(function: Callable[..., Any], x: Tensor, *rest: Tensor, options: Any = EAGER) -> None:
    """Values, shapes and gradients of a compiled function against eager's."""
    compiled: Any = torch.compile(function, backend="omni", options=options, fullgraph=True)
    actual, expected = compiled(x, *rest), function(x, *rest)
    torch.testing.assert_close(actual, expected)
    assert actual.shape == expected.shape
    given = torch.linspace(1, 2, actual.numel()).reshape(actual.shape)
    gradients = [torch.autograd.grad(result, x, given)[0] for result in (actual, expected)]
    torch.testing.assert_close(*gradients)
    assert [event for event in current() if isinstance(event, Retreat)] == []


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", LABELS)
def test_multilabel_margin_loss(name: str, reduction: str, single: bool) -> None:
    labels = torch.tensor(LABELS[name])
    x = torch.randn(2, 4)
    if single:
        x, labels = x[0], labels[0]
    check(lambda x, t: F.multilabel_margin_loss(x, t, reduction=reduction), x.requires_grad_(), labels)


def test_multilabel_margin_loss_has_no_gradient_where_a_margin_is_met_exactly() -> None:
    check(F.multilabel_margin_loss, torch.tensor([1.0, 0.0, 3.0], requires_grad=True), torch.tensor([0, -1, -1]))


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_the_builtin_and_the_module(reduction: int) -> None:
    labels, x = torch.tensor(LABELS["ended"]), torch.randn(2, 4, requires_grad=True)
    module = torch.nn.MultiLabelMarginLoss(reduction=("none", "mean", "sum")[reduction])
    builtin: Any = torch._C._nn.multilabel_margin_loss  # type: ignore[attr-defined]
    check(lambda x, t: builtin(x, t, reduction) + module(x, t), x, labels)


def test_a_single_class_without_dimensions() -> None:
    check(F.multilabel_margin_loss, torch.tensor(0.3, requires_grad=True), torch.tensor(0))


def test_deprecated_arguments() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    check(lambda x, t: F.multilabel_margin_loss(x, t, None, False), x, torch.tensor(LABELS["ended"]))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_multi_margin_loss_of_a_single_sample(reduction: str) -> None:
    x = torch.randn(4, requires_grad=True)
    check(lambda x, t: F.multi_margin_loss(x, t, reduction=reduction) * 2, x, torch.tensor(2))
    check(lambda x, t: F.multi_margin_loss(x, target=t, reduction=reduction), x, torch.tensor([2]))


@pytest.mark.inductor
def test_under_inductor() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    check(F.multilabel_margin_loss, x, torch.tensor(LABELS["ended"]), options=None)


@pytest.mark.parametrize("certify", ["new", "always"])
def test_certificates_take_no_repair_back(certify: str) -> None:
    x = torch.randn(2, 4, requires_grad=True)
    check(F.multilabel_margin_loss, x, torch.tensor(LABELS["ended"]), options={**EAGER, "certify": certify})
