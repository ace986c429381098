"""The steps of a bring-up for each distinct call: captured, supported, lowered, built, ran, matched."""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.fx import Graph, GraphModule
from torch.utils._pytree import tree_leaves, tree_map

from omnicomp import timeline
from omnicomp._torch.devices.dispatcher import Standing, census, draws_random_numbers, is_required, kernel_of
from omnicomp.audit import audit
from omnicomp.devices import Device
from omnicomp.errors import first_line
from omnicomp.testing.bringup.calls import Call, Capture, Subject, capture, load
from omnicomp.testing.conformance.suite import ready
from omnicomp.testing.operators import Transfer, host
from omnicomp.timeline import Attempt, Ran, Retreat, Subgraph

STEPS: Final = ("captured", "supported", "lowered", "built", "ran", "matched")
# Another order of additions, in another kernel.
_TOLERANCE: Final = {torch.float32: 1e-3, torch.float64: 1e-6, torch.bfloat16: 3e-2, torch.float16: 5e-3}
_COULD_NOT_RUN: Final = re.compile(r"Could not run '([\w:.]+)'")
_UNINITIALISED: Final = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided")


def jobs(
    model: str, device: str, size: str = "tiny", training: bool = False, lowerings: Sequence[str] = (), setup: str = ""
) -> dict[str, Callable[[], dict[str, Any]]]:
    """The calls of a model as jobs, behind `capture`, which lists them, and before `model`, which runs it as a whole.

    Raises:
        OmnicompError: there is no such model or device.
    """
    target = ready(device, setup)
    subject = load(model, size, training=training)
    found = capture(subject, training=training)
    options = {"lowerings": list(lowerings)} if lowerings else {}
    made: dict[str, Callable[[], dict[str, Any]]] = {
        "capture": lambda: {**_listed(found), "census": census(target.type)}
    }
    for number, call in enumerate(found.calls):
        made[f"call {number}"] = lambda call=call: climb(target, call, options)
    made["model"] = lambda: _whole(target, subject, options, training=training)
    return made


def _listed(found: Capture) -> dict[str, Any]:
    names = ("name", "dtypes", "shapes", "count", "captured", "parts")
    calls = [{name: getattr(call, name) for name in names} for call in found.calls]
    return {"calls": calls, "graphs": found.graphs, "note": found.note}


def climb(device: Device, call: Call, options: Mapping[str, Any]) -> dict[str, Any]:
    """Take one call through the steps.

    Returns:
        For each of `STEPS` `yes`, `no` or an empty string where it was not reached; `kernel` (`native`, `composite`,
        `fallback`, `missing` or `wrong`: eager on the device), `needs` (the operators whose kernels decide, with their
        calls), `required` (those of them and the operator itself that torch has no kernel of for any device),
        `lowering` (what ran in the end) and `reason`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = _outcome(call, call.operator, call.args, call.kwargs)
        steps = dict.fromkeys(STEPS, "") | {"captured": "yes" if call.captured else "no"}
        eager = _eager(device, call, expected)
        bring = [name for name in {call.name: 0, **eager["needs"]} if is_required(name)]
        row = {"steps": steps, "lowering": "", "required": bring, **eager}
        lacking = _lacking(device, call, expected)
        if lacking:
            steps["supported"] = "no"
            return {**row, "reason": lacking}
        steps["supported"] = "yes" if eager["kernel"] != "missing" else ""
        compiled = _compiled(device, call, expected, options, steps)
        if steps["supported"] == "":
            # No kernel, but something may have made one.
            by_compiler = steps["ran"] == "yes" and compiled["lowering"] != "eager"
            steps["supported"] = "yes" if by_compiler else "no"
            if not by_compiler:
                steps |= dict.fromkeys(("lowered", "built", "ran", "matched"), "")
                return {**row, "reason": eager["reason"]}
        return {**row, **compiled, "reason": compiled["reason"] or eager["reason"]}


def _lacking(device: Device, call: Call, expected: Sequence[Any]) -> str:
    """Why the device can't hold a tensor of the call, where its list of dtypes is complete."""
    can = device.capabilities()
    if not can.exhaustive:
        return ""
    held = set(can.storage_dtypes)
    tensors = [leaf for leaf in tree_leaves((call.args, call.kwargs, expected)) if isinstance(leaf, torch.Tensor)]
    missing = sorted({str(tensor.dtype) for tensor in tensors if tensor.dtype not in held})
    return f"{device.type} holds no {', '.join(missing)}" if missing else ""


def _as_graph(call: Call, transfer: Transfer) -> tuple[GraphModule, list[torch.Tensor]]:
    """The call as a graph whose inputs are its tensors, and these; what else is in the arguments is brought over."""
    graph, tensors = Graph(), list[torch.Tensor]()

    def argument(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return transfer(leaf)
        tensors.append(leaf)
        return graph.placeholder(f"tensor_{len(tensors)}")

    args, kwargs = tree_map(argument, (tuple(call.args), dict(call.kwargs)))
    graph.output(graph.call_function(call.operator, args, kwargs))
    return GraphModule(torch.nn.Module(), graph), tensors


def _outcome(
    call: Call, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], device: str = "cpu"
) -> list[Any]:
    """What a call returns and what its tensors are afterwards, on the CPU; from arguments of its own."""
    args, kwargs = Transfer(device)((tuple(args), dict(kwargs)))
    torch.manual_seed(0)
    with torch.no_grad():
        result = function(*args, **kwargs)
    written = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return tree_leaves(host((result, written)))


def _eager(device: Device, call: Call, expected: Sequence[Any]) -> dict[str, Any]:
    """What the device itself makes of the call."""
    standing = kernel_of(call.name, device.type)
    module: Any = getattr(torch, device.type, None)
    counts = hasattr(module, "fallbacks") and hasattr(module, "reset_fallbacks")
    try:
        moved = Transfer(device.type)((call.args, call.kwargs))
        if counts:
            module.reset_fallbacks()
        torch.manual_seed(0)
        with torch.no_grad():
            result = call.operator(*moved[0], **moved[1])
        device.synchronize()
        fell = dict(module.fallbacks()) if counts else {}
        actual = tree_leaves(host((result, [leaf for leaf in tree_leaves(moved) if isinstance(leaf, torch.Tensor)])))
    except Exception as error:  # noqa: BLE001 - becomes the reason
        return _refused(standing, call, error)
    wrong = _difference(call, actual, expected)
    if wrong:
        return {"kernel": "wrong", "needs": {standing.writes: 1}, "reason": f"eager on the device: {wrong}"}
    if fell:
        return {"kernel": "fallback", "needs": fell, "reason": ""}
    if standing.kernel in ("missing", "fallback"):
        # It ran, so that something above the device's key composed it, or its fallback counts nothing.
        kernel = "fallback" if standing.kernel == "fallback" else "composite"
        return {"kernel": kernel, "needs": {standing.writes: 1} if kernel == "fallback" else {}, "reason": ""}
    return {"kernel": standing.kernel, "needs": {}, "reason": ""}


def _refused(standing: Standing, call: Call, error: Exception) -> dict[str, Any]:
    named = _COULD_NOT_RUN.search(str(error))
    needs = {named.group(1) if named else standing.writes: 1}
    kernel = "missing" if named or isinstance(error, NotImplementedError) else "wrong"
    return {"kernel": kernel, "needs": needs, "reason": f"eager on the device raises {first_line(error)}"}


def _compiled(
    device: Device, call: Call, expected: Sequence[Any], options: Mapping[str, Any], steps: dict[str, str]
) -> dict[str, Any]:
    """Compile the call by itself, and note how far it comes."""
    function, tensors = _as_graph(call, Transfer(device.type))
    torch.compiler.reset()
    timeline.clear()
    error: Exception | None = None
    actual: list[Any] = []
    try:
        settings: dict[str, Any] = {"options": dict(options)} if options else {}
        compiled = torch.compile(function, backend="omni", dynamic=False, **settings)
        actual = _outcome(call, compiled, tensors, {}, device.type)
    except Exception as raised:  # noqa: BLE001 - becomes the reason
        error = raised
    events = timeline.current().events()
    planned = [event.lowering for event in events if isinstance(event, Subgraph)]
    built = [event for event in events if isinstance(event, Attempt) and event.selected and event.ok]
    ran = [event.lowering for event in events if isinstance(event, Ran)]
    moves = [event for event in events if isinstance(event, Retreat)]
    why = "; ".join(f"{move.source_lowering} -> {move.target_lowering}: {move.reason.sentence}" for move in moves)
    steps["lowered"] = "yes" if planned or error is None else "no"
    steps["built"] = "no" if moves else "yes" if built or error is None else "no" if planned else ""
    if error is not None:
        steps["ran"] = "no" if built else ""
        return {"lowering": "", "reason": why or f"compiled: {first_line(error)}"}
    steps["ran"] = "yes"
    # A graph without operators, as of a `detach`, is no graph at all.
    lowering = ", ".join(dict.fromkeys(ran)) or ("none" if not planned else planned[-1])
    wrong = _difference(call, actual, expected)
    steps["matched"] = "no" if wrong else "yes"
    return {"lowering": lowering, "reason": wrong or why}


def _difference(call: Call, actual: Sequence[Any], expected: Sequence[Any]) -> str:
    if len(actual) != len(expected):
        return f"{len(actual)} results instead of {len(expected)}"
    valued = not draws_random_numbers(call.operator) and call.name.partition(".")[0] not in _UNINITIALISED
    for place, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
        if not isinstance(wanted, torch.Tensor):
            if type(got) is not type(wanted) or (valued and got != wanted):
                return f"result {place} is {got!r} instead of {wanted!r}"
            continue
        if (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
            return f"result {place} is {tuple(got.shape)} {got.dtype} instead of {tuple(wanted.shape)} {wanted.dtype}"
        if valued:
            bound = _TOLERANCE.get(wanted.dtype, 1e-3 if wanted.is_complex() else 0.0)
            try:
                torch.testing.assert_close(got, wanted, atol=bound, rtol=bound, equal_nan=True)
            except AssertionError as error:
                return f"result {place}: {' '.join(str(error).split())[:200]}"
    return ""


def _whole(device: Device, subject: Subject, options: Mapping[str, Any], *, training: bool) -> dict[str, Any]:
    """The model as a whole under omni on the device, against eager on the CPU."""
    state = {name: value.clone() for name, value in subject.model.state_dict().items()}
    expected = _results(subject, subject.model, subject.args, subject.kwargs, training=training)
    # A training step writes to buffers, such as the running statistics of a batch norm.
    subject.model.load_state_dict(state)
    device.to_device(subject.model)
    args, kwargs = Transfer(device.type)((subject.args, dict(subject.kwargs)))
    module: Any = getattr(torch, device.type, None)
    if hasattr(module, "reset_fallbacks"):
        module.reset_fallbacks()
    torch.compiler.reset()
    timeline.clear()
    settings: dict[str, Any] = {"options": dict(options)} if options else {}
    try:
        compiled = torch.compile(subject.model, backend="omni", **settings)
        actual = _results(subject, compiled, args, kwargs, training=training)
    except Exception as error:  # noqa: BLE001 - becomes the reason
        return {"matched": False, "reason": first_line(error), "summary": "", "fallbacks": {}}
    fell = dict(module.fallbacks()) if hasattr(module, "fallbacks") else {}
    summary = audit().summary().removeprefix("omni: ")
    for name, wanted in expected.items():
        try:
            torch.testing.assert_close(actual[name], wanted, atol=2e-3, rtol=2e-3, equal_nan=True)
        except AssertionError as error:
            reason = f"{name}: {' '.join(str(error).split())[:200]}"
            return {"matched": False, "reason": reason, "summary": summary, "fallbacks": fell}
    return {"matched": True, "reason": "", "summary": summary, "fallbacks": fell}


def _results(
    subject: Subject, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, training: bool
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    if not training:
        with torch.no_grad():
            result = call(*args, **kwargs)
        plain = dict(result) if isinstance(result, Mapping) else result
        leaves = [leaf for leaf in tree_leaves(plain) if isinstance(leaf, torch.Tensor)]
        return {f"result {place}": leaf.detach().cpu() for place, leaf in enumerate(leaves)}
    subject.model.zero_grad()
    loss = subject.loss(call(*args, **kwargs))
    loss.backward()
    found = {"the loss": loss.detach().cpu()}
    for name, parameter in subject.model.named_parameters():
        if parameter.grad is not None:
            found[f"the gradient of {name}"] = parameter.grad.detach().cpu().clone()
    found |= {f"the buffer {name}": value.detach().cpu().clone() for name, value in subject.model.named_buffers()}
    subject.model.zero_grad()
    return found
