"""Checks of compilation: Inductor's registration, and that what is compiled equals eager and runs on the device."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from omnicomp import timeline
from omnicomp._torch.dynamo import registrations
from omnicomp._torch.fx import traced_call
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


def one_graph(session: Session) -> tuple[GraphModule, list[Any], list[torch.Tensor], torch.Tensor]:
    """A graph of `sin(x * y + 1)`, its fake inputs, real ones on the device, and the result on the CPU."""
    x, y = torch.linspace(-1, 1, 12).reshape(3, 4), torch.linspace(0, 2, 4)

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.sin(x * y + 1),)

    inputs = [session.on(x), session.on(y)]
    module, fakes = traced_call(function, inputs)
    return module, fakes, inputs, function(x, y)[0]


@check(
    "inductor.registration",
    "register it with omnicomp.devices.inductor.register, or let capabilities().inductor be False",
)
def _registration(session: Session) -> str:
    if not session.device.capabilities().inductor:
        raise CheckSkipped("capabilities() claims no Inductor")
    if not session.is_host:
        from omnicomp.devices.inductor import registration

        for piece in registration(session.type):
            expect(piece.ok, f"{piece.name}: {piece.found}", piece.lever)
    found = registrations.inductor_registrations(session.type)
    absent = [name for name, value in found.items() if not value]
    expect(not absent, f"not registered: {', '.join(absent)}")
    return ", ".join(f"{name} {value.rsplit('.', 1)[-1]}" for name, value in found.items())


class _Block(nn.Module):
    """A normalised residual block: matrix products, a softmax, a norm and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.second(torch.nn.functional.gelu(self.first(self.norm(x))))
        return torch.softmax(x, -1)


def _block() -> tuple[_Block, torch.Tensor]:
    torch.manual_seed(0)
    return _Block().eval(), torch.randn(6, 16)


def _compiled(
    session: Session, backend: str, function: Callable[..., Any], inputs: Sequence[Any], **options: Any
) -> Any:
    torch.compiler.reset()
    timeline.clear()
    return torch.compile(function, backend=backend, **options)(*inputs)


def _equals_eager(session: Session, backend: str, **options: Any) -> None:
    model, x = _block()
    with torch.no_grad():
        wanted = model(x)
        got = _compiled(session, backend, model.to(session.type), [session.on(x)], **options)
    on_device(session, got)
    session.close(got, wanted, 1e-3)


def _needs_inductor(session: Session) -> None:
    if "inductor" not in session.device.lowerings:
        raise CheckSkipped("Inductor is not registered for it")


@check("inductor.forward", "see which piece of the registration fails: omnicomp doctor --device NAME")
def _inductor_forward(session: Session) -> str:
    _needs_inductor(session)
    _equals_eager(session, "inductor")
    return "equals eager on the CPU"


@check("omni.forward", "read omnicomp.audit() of the call for the reason")
def _omni_forward(session: Session) -> str:
    _equals_eager(session, "omni")
    return _ran_as_planned(session)


@check("omni.eager", "see that each operator of the graph runs in eager on the device")
def _omni_eager(session: Session) -> str:
    _equals_eager(session, "omni", options={"lowerings": ["eager"]})
    return _ran_as_planned(session)


def _ran_as_planned(session: Session) -> str:
    found = audit()
    expect(found.graphs, "no graph reached omni")
    for graph in found.graphs:
        expect(graph.device == session.type, f"{graph.id} was compiled for {graph.device}")
    wrong = ", ".join(row.id for row in found.mismatches)
    expect(not wrong, f"not as planned: {wrong}")
    moved = [f"{move.source_lowering} -> {move.target_lowering}: {move.reason.sentence}" for move in found.retreats]
    expect(not moved, f"a subgraph moved: {'; '.join(moved)}")
    return found.summary().removeprefix("omni: ")


@check("omni.dynamic_shapes", "see that generated code takes sizes as arguments")
def _omni_dynamic(session: Session) -> str:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2 + 1, -1).sum(0)

    torch.compiler.reset()
    timeline.clear()
    compiled = torch.compile(function, backend="omni", dynamic=True)
    for rows in (3, 7, 12):
        x = torch.randn(rows, rows + 2)
        session.close(compiled(session.on(x)), function(x), 1e-4)
    captured = len(audit().graphs)
    expect(captured == 1, f"three sizes made {captured} graphs")
    return "three sizes, one graph"


@check("omni.training_step", "compare the gradients of its parameters one by one: omnicomp bringup --train")
def _omni_training(session: Session) -> str:
    model, x = _block()
    wanted = _step(model, model, x)
    model, x = _block()
    model.to(session.type)
    torch.compiler.reset()
    timeline.clear()
    got = _step(torch.compile(model, backend="omni"), model, session.on(x))
    for name, value in wanted.items():
        session.close(got[name], value, 1e-3, name)
    return _ran_as_planned(session)


def _step(call: Callable[..., Any], model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Parameters after a step of AdamW, gradients before it, and the loss; all on the CPU."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = call(x)[:, :3].log().mean()
    loss.backward()
    values = {f"gradient of {name}": p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    values |= {name: p.detach().cpu() for name, p in model.named_parameters()}
    return {"loss": loss.detach().cpu(), **values}


@check("omni.placement", "find out why a kernel of the device's own copies to the CPU")
def _omni_placement(session: Session) -> str:
    """What the device has a kernel for runs there: nothing of it is counted as a fallback."""
    fallbacks = session.require("fallbacks")
    session.require("reset_fallbacks")()
    model, x = _block()
    with torch.no_grad():
        _compiled(session, "omni", model.to(session.type), [session.on(x)], options={"lowerings": ["eager"]})
    counted = fallbacks()
    wrong = claimed_natively(session, counted)
    if wrong:
        raise CheckFailed(f"registered for {session.type}, and ran on the CPU: {', '.join(wrong)}")
    return f"to the CPU: {', '.join(counted)}" if counted else "nothing went to the CPU"
