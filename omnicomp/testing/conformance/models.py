"""Checks of models: a forward and a training step through omni on a device, against eager on the CPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from omnicomp import timeline
from omnicomp.audit import audit
from omnicomp.testing.conformance.base import (
    CheckFailed,
    CheckSkipped,
    Session,
    check,
    claimed_natively,
    expect,
    on_device,
)

__all__: list[str] = []


def _convolutional() -> tuple[nn.Module, dict[str, Any]]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip
    return model, {"input": torch.randn(2, 3, 12, 12)}


def _encoder() -> tuple[nn.Module, dict[str, Any]]:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(50, 32), layer), {"input": torch.randint(0, 50, (2, 9))}


def _recurrent() -> tuple[nn.Module, dict[str, Any]]:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(input)[0][:, -1])

    return Last(), {"input": torch.randn(2, 5, 6)}


def _real(name: str) -> Callable[[], tuple[nn.Module, dict[str, Any]]]:
    def build() -> tuple[nn.Module, dict[str, Any]]:
        from omnicomp.testing import models

        try:
            case = models.build(name)
        except ImportError as error:
            raise CheckSkipped(f"transformers is not installed ({error})") from error
        return case.model, case.inputs

    return build


_BUILDERS = {
    "convolutional": (_convolutional, True),
    "encoder": (_encoder, True),
    "recurrent": (_recurrent, False),
    **{name: (_real(name), False) for name in ("bert", "llama", "resnet", "unet")},
}


def _run(session: Session, build: Callable[[], tuple[nn.Module, dict[str, Any]]], *, training: bool) -> str:
    outcomes: list[dict[str, torch.Tensor]] = []
    model = nn.Module()
    reset = getattr(session.module, "reset_fallbacks", None)
    for there in (False, True):
        torch.manual_seed(0)
        model, inputs = build()
        model.train(training)
        call: Callable[..., Any] = model
        if there:
            session.device.to_device(model)
            inputs = session.device.to_device(inputs)
            torch.compiler.reset()
            timeline.clear()
            call = torch.compile(model, backend="omni")
            if reset is not None:
                reset()
        outcomes.append(_outcome(call, model, inputs, training=training))
    expected, actual = outcomes
    on_device(session, actual)
    for name, wanted in expected.items():
        try:
            session.close(actual[name], wanted, 2e-3)
        except AssertionError as error:
            raise CheckFailed(f"{name} differs from the CPU's: {' '.join(str(error).split())[:200]}") from error
    return _placed(session, captured=not any(isinstance(layer, nn.RNNBase) for layer in model.modules()))


def _outcome(call: Callable[..., Any], model: nn.Module, inputs: dict[str, Any], *, training: bool) -> dict[str, Any]:
    if not training:
        with torch.no_grad():
            return {"the result": _tensor(call(**inputs))}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss = _tensor(call(**inputs)).square().mean()
    loss.backward()
    optimizer.step()
    return {"the loss": loss.detach(), **model.state_dict()}


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else value.last_hidden_state


def _placed(session: Session, *, captured: bool) -> str:
    """See that all graphs were the device's, ran as planned, and that no kernel of the device's went to the CPU."""
    found = audit()
    # Dynamo leaves recurrent layers, and the function that calls one, to eager unless it is told otherwise.
    expect(found.graphs or not captured, "no graph reached omni")
    for graph in found.graphs:
        expect(graph.device == session.type, f"{graph.id} was compiled for {graph.device}")
    expect(not found.mismatches, f"not as planned: {', '.join(row.id for row in found.mismatches)}")
    moved = [f"{move.source_lowering} -> {move.target_lowering}: {move.reason.sentence}" for move in found.retreats]
    expect(not moved, f"a subgraph moved: {'; '.join(moved)}")
    counted = session.module.fallbacks() if hasattr(session.module, "fallbacks") else {}
    wrong = claimed_natively(session, counted)
    expect(not wrong, f"registered for {session.type}, and ran on the CPU: {', '.join(wrong)}")
    fell = f"; to the CPU: {', '.join(f'{name} x{count}' for name, count in counted.items())}" if counted else ""
    ran = (
        found.summary().removeprefix("omni: ") if found.graphs else "eager, as torch.compile takes no recurrent layers"
    )
    return ran + fell


def _declare(name: str, build: Callable[[], tuple[nn.Module, dict[str, Any]]], *, training: bool, quick: bool) -> None:
    kind = "training" if training else "forward"
    options = " --train" if training else ""
    todo = f"find the operator: omnicomp bringup MODEL --device NAME{options}"

    @check(f"models.{name}_{kind}", todo, quick=quick)
    def _model(session: Session) -> str:
        return _run(session, build, training=training)

    del _model


for _name, (_build, _quick) in _BUILDERS.items():
    _declare(_name, _build, training=False, quick=_quick)
    _declare(_name, _build, training=True, quick=_quick and _name == "encoder")
