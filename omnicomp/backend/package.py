"""Packages: a model compiled ahead of time, which runs without Python's compiler, in Python or in C++.

`torch.export` captures the model, omni's passes rewrite the graph as for `torch.compile`, and AOTInductor makes a
library of it. The audit is in the package. What only Python can run is refused by name before anything is built.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves

from omnicomp._torch.autograd.overrides import body_of, is_python
from omnicomp._torch.autograd.run_in_precision import on_real_tensors
from omnicomp._torch.devices.dispatcher import is_registered, qualified_name
from omnicomp._torch.fx import copy_module
from omnicomp._torch.inductor import aoti, store
from omnicomp._torch.inductor.inlined import InlineError, has_symbolic_sizes, inline, lint
from omnicomp._torch.repairs import checked_sizes, folded_nans
from omnicomp._torch.repairs.decompositions import decompositions_mended
from omnicomp._torch.repairs.rounded_casts import casts_kept
from omnicomp._torch.repairs.written_while_read import sources_kept
from omnicomp._torch.user_code import called_operator
from omnicomp.analysis.accuracy import PRECISIONS, copy_of
from omnicomp.analysis.nodes import all_nodes, op_name, source_line, submodules
from omnicomp.audit import Audit, build
from omnicomp.audit.views.jsonform import from_json
from omnicomp.backend.artefacts import instructions
from omnicomp.backend.block_overrides import override_blocks
from omnicomp.backend.capture import CapturedGraph, capture_graph
from omnicomp.backend.options import policy_of
from omnicomp.backend.outcome import ending
from omnicomp.backend.package_inputs import check_inputs, describe_inputs
from omnicomp.backend.run_passes import run_passes
from omnicomp.builder.placement import place
from omnicomp.builder.record import PartRecord
from omnicomp.errors import LoweringError, OmnicompError, SaveError, first_line
from omnicomp.lowerings import MAIN
from omnicomp.lowerings.override import PlannedCall, planned_call
from omnicomp.lowerings.overrides.registry import Override
from omnicomp.lowerings.overrides.rewrite import apply_overrides
from omnicomp.options.policy import VERIFYING, Policy, engines_of
from omnicomp.runtime.override_check import try_forward
from omnicomp.runtime.tf32 import uses_tf32
from omnicomp.safety.privacy import logger
from omnicomp.timeline import Artefacts, Option, Reason, Speculation, current

log = logger("omnicomp")

_AUDIT: Final = "omnicomp_audit.json"
_INSTRUCTIONS: Final = "omnicomp_instructions.txt"
_OPERATORS: Final = "omnicomp_operators.txt"
_INPUTS: Final = "omnicomp_inputs.json"
_WHERE: Final = "omnicomp_weights.txt"
_WEIGHTS: Final = ("inside", "beside")


class Package:
    """A model that was compiled ahead of time.

    Attributes:
        audit: what was planned for it when it was built; None if the package is another compiler's.
    """

    def __init__(self, model: Any, audit: Audit | None) -> None:
        """Wrap what torch's loader made."""
        self._model, self.audit = model, audit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self._model(*args, **kwargs)


def package(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    path: str | os.PathLike[str],
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    weights: str = "inside",
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Path:
    """Compile a model for inference into one file, which `load_package` and torch's C++ loader run.

    Args:
        model: the module.
        args: example inputs.
        path: of the package; its name ends in `.pt2`.
        kwargs: example inputs by name.
        dynamic_shapes: which sizes vary, as `torch.export.export` takes it.
        weights: `inside` of the package, or `beside` it in a file of that name with `.weights` behind it, which can be
            replaced; a C++ program gives those to the loader itself.
        mode: as `torch.compile` takes it.
        options: likewise.

    Returns:
        The path.

    Raises:
        OptionError: an option is wrong.
        SaveError: something of the model, or of the options, can't be packaged; the message names it.
    """
    path = Path(path)
    if path.suffix != ".pt2" or weights not in _WEIGHTS:
        raise SaveError("a package is a file whose name ends in .pt2, and weights is 'inside' or 'beside'")
    if not path.absolute().parent.is_dir():
        raise SaveError(f"{path} can't be written: {path.parent} is no folder")
    policy = policy_of(mode, options)
    _check(policy)
    try:
        program = aoti.exported(model, args, kwargs or {}, dynamic_shapes)
    except Exception as error:
        raise SaveError(f"torch.export can't capture the model, so it is not packaged: {first_line(error)}") from error
    began = len(current())
    with torch.no_grad(), ending() as end:
        end.state = "saved"
        module, inputs = aoti.graph_of(program)
        described = describe_inputs(inputs, aoti.ranges_of(program))
        graph = capture_graph(module, inputs, policy, options)
        end.graph = graph.id
        graph = override_blocks(module, graph)
        _tell_assumptions(module, graph, tree_leaves((args, dict(kwargs or {}))))
        passed = run_passes(module, graph, speculate=False, inputs=inputs)
        graph.publish(passed.events)
        files, operators = _built(passed.module, passed.in_force, args, kwargs or {}, graph, weights)
    report = build(event for event in current().events()[began:] if event.graph == graph.id)
    try:
        texts = {
            _AUDIT: report.to_json(),
            _INSTRUCTIONS: " ".join(instructions()),
            _OPERATORS: " ".join(operators),
            _INPUTS: described,
            _WHERE: weights,
        }
        aoti.write(path, files, texts)
        if weights == "beside":
            torch.save(aoti.constants_of(program), _beside(path))
    except (OSError, RuntimeError) as error:
        raise SaveError(f"{path} can't be written: {first_line(error)}") from error
    current().append(Artefacts(path=str(path), state="saved", counts={"package": 1}, bytes=path.stat().st_size))
    return path


def load_package(path: str | os.PathLike[str], *, device_index: int = -1) -> Package:
    """The model of a package; nothing is compiled.

    A package is machine code: load it as you would install a package.

    Args:
        path: of the package.
        device_index: the accelerator to run it on.

    Raises:
        SaveError: it can't be read, others may have written to it, or it was made for a processor that has instructions
            which this one lacks.
    """
    path = Path(path)
    try:
        store.check_trusted(path.stat(), path, group=False)
        texts = aoti.read_texts(path)
        lacking = sorted(set(texts.get(_INSTRUCTIONS, "").split()) - set(instructions()))
        if lacking:
            raise SaveError(
                f"{path} was made for a processor that has {', '.join(lacking[:8])}, and this one lacks them; "
                "make the package on this kind of machine"
            )
        missing = [name for name in texts.get(_OPERATORS, "").split() if not is_registered(name)]
        if missing:
            raise SaveError(
                f"{path} calls {', '.join(missing)}, which this process does not have: load the library or import the "
                "module that registers it first"
            )
        check = partial(check_inputs, json.loads(texts[_INPUTS])) if _INPUTS in texts else None
        model: Any = aoti.load(path, device_index, check)
        audit = Audit.of(from_json(texts[_AUDIT], str(path))) if _AUDIT in texts else None
        if texts.get(_WHERE) == "beside":
            store.check_trusted(_beside(path).stat(), _beside(path), group=False)
            wanted = set(model.get_constant_fqns())
            found = torch.load(_beside(path), weights_only=True, mmap=True)
            model.load_constants({k: v for k, v in found.items() if k in wanted}, check_full_update=True)
    except OmnicompError:
        raise
    except Exception as error:
        raise SaveError(f"{path} can't be loaded: {first_line(error)}") from error
    current().append(Artefacts(path=str(path), state="loaded", counts={"package": 1}, bytes=path.stat().st_size))
    return Package(model, audit)


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.weights")


def _check(policy: Policy) -> None:
    """Refuse options whose work is done around the compiled code, or by other compilers.

    Raises:
        SaveError: there is one.
    """
    engines = engines_of(policy)
    refused: dict[str, bool] = {
        f"the engine {engines[0]!r}; leave it out of the option lowerings" if engines else "": bool(engines),
        "placement rules; leave out the mapping in the option lowerings": bool(policy.rules),
        f"lowerings={policy.choose!r}; name the lowerings": policy.choose != "off",
        "a graph without Inductor; name inductor in the option lowerings": "inductor" not in policy.lowerings,
        "numerics='eager', whose first calls are compared; leave it out": policy.numerics == "eager",
        f"verify={policy.verify!r}; leave it out": policy.verify in VERIFYING,
        "the option dtype_error; name operators in a DtypePolicy": policy.dtype_error is not None,
    }
    for what, found in refused.items():
        if found:
            raise SaveError(f"a package has no room for {what}")


def _put_overrides(part: GraphModule, graph: CapturedGraph, inputs: Sequence[Any]) -> tuple[str, ...]:
    """Put what overrides compute into a graph behind autograd, which Python is not behind of any more.

    An override in C++ is called; one that is made of ATen operators becomes these. It is compared with its reference
    before, on the example inputs. One of omni's own, which the user did not ask for, becomes its reference otherwise.

    Returns:
        The names of operators outside of torch that the graph calls.

    Raises:
        SaveError: an override is wrong, or is Python that is not made of ATen operators.
    """
    context = graph.context("inference", {})
    apply_overrides(part, context, {node: () for node in part.graph.nodes if node.op == "call_function"})
    calls = [(each, node) for each in (part, *submodules(part)) for node in list(each.graph.nodes)]
    planned = {node: call for _, node in calls if (call := planned_call(node, "")) is not None}
    wrong = _compare(part, planned, graph, inputs) if planned and graph.policy.verify != "off" else {}
    for module, node in calls:
        call = planned.get(node)
        if call is None or not is_python(call.operator, graph.device.type):
            continue
        try:
            _put_override(node, call, graph, wrong.get(node, ""))
        except InlineError as error:
            where = f"{node.name} ({op_name(node)}) at {source_line(node) or 'its place'}"
            raise SaveError(
                f"the override {call.item.name!r} takes {where}, and is Python, which a package can't call, and which "
                f"can't be put into the graph: {error}. Register its operator in C++, or leave it out with "
                f"options={{'disable_overrides': [{call.item.name!r}]}}"
            ) from error
        lint(module)
    return _told_operators(part, graph)


def _is_own(item: Override) -> bool:
    """Whether an override is omni's, so that nobody asked for it by name."""
    return str(item.function.__module__).startswith("omnicomp.")


def _put_override(node: Node, call: PlannedCall, graph: CapturedGraph, wrong: str) -> None:
    body, name = body_of(call.operator, graph.device.type), call.item.name
    own = call.truth if _is_own(call.item) else None
    try:
        if wrong or body is None or node.target is not call.operator:
            raise InlineError(wrong or ("it writes to an argument" if body else "its function is not known"))
        if own is not None and has_symbolic_sizes(node):  # what it asks of them would bind the package
            raise InlineError("it is another computation for other sizes, and these vary")
        inline(node, body)
    except InlineError as error:
        if own is None:
            raise
        sentence = f"the package has the reference of the override {name!r} at {node.name}: {error}"
        reason = Reason(code="option_ineffective", by="package", sentence=sentence)
        inline(node, own)
        current().append(
            Option(graph=graph.id, key="package", requested=name, effective=f"without {name}", reason=reason)
        )


class _Comparing(Interpreter):
    """Runs a graph on real inputs, and compares each override in it with its reference."""

    def __init__(self, part: GraphModule, planned: Mapping[Node, PlannedCall], graph: CapturedGraph) -> None:
        super().__init__(part)
        self._planned, self._graph = planned, graph
        self.wrong: dict[Node, str] = {}
        """Calls of omni's own, and what is wrong with them."""

    def run_node(self, n: Node) -> Any:
        """Run a node.

        Raises:
            SaveError: it is a user's override that is wrong.
        """
        call = self._planned.get(n)
        if call is None or call.truth is None or n.target is not call.operator:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        precision = PRECISIONS[self._graph.policy.reference]
        trial = try_forward(call.item, call.truth, call.operator, tuple(args), dict(kwargs), precision)
        if trial.state == "wrong" and _is_own(call.item):
            self.wrong[n] = trial.detail
            return call.truth(*args, **kwargs)
        if trial.state == "wrong":
            raise SaveError(
                f"the override {call.item.name!r} is wrong at {n.name}, so it is not packaged: {trial.detail} "
                f"({trial.needed}); mend it, or leave it out with options={{'disable_overrides': [{call.item.name!r}]}}"
            )
        return trial.results


def _compare(
    part: GraphModule, planned: Mapping[Node, PlannedCall], graph: CapturedGraph, inputs: Sequence[Any]
) -> dict[Node, str]:
    comparing = _Comparing(part, planned, graph)
    if len(part.graph.find_nodes(op="placeholder")) == len(inputs):
        with on_real_tensors():
            comparing.run(*map(copy_of, inputs))
    return comparing.wrong


def _told_operators(part: GraphModule, graph: CapturedGraph) -> tuple[str, ...]:
    """The operators of the program, and of overrides in C++; those in Python are told, as C++ has none of them."""
    nodes = (node for node in all_nodes(part) if node.op == "call_function")
    overloads = dict.fromkeys(operator for node in nodes if (operator := called_operator(node)) is not None)
    for operator in overloads:
        if is_python(operator, graph.device.type):
            reason = Reason(
                code="option_ineffective",
                by="package",
                sentence=f"{operator} is Python: the package runs in a Python process that registers it, not in C++",
                lever="register its kernel in C++ (TORCH_LIBRARY_IMPL)",
            )
            log.warning("omni: %s", reason.sentence)
            current().append(
                Option(graph=graph.id, key="package", requested="without Python", effective="with it", reason=reason)
            )
    return tuple(map(qualified_name, overloads))


def _tell_assumptions(module: GraphModule, graph: CapturedGraph, inputs: Sequence[Any]) -> None:
    """Record what `torch.compile` would have assumed of the values of masks, and compiled variants for."""
    if not graph.policy.speculate:
        return
    found = run_passes(copy_module(module), graph, speculate=True, inputs=inputs).assumptions
    if found:
        sentence = "; ".join(item.sentence for item in found)
        reason = Reason(
            code="not_checkable",
            by="package",
            sentence=f"a package assumes nothing of its inputs; torch.compile assumes {sentence}",
            lever="leave a mask out where it hides nothing, or make it inside of the model from sizes",
        )
        current().append(
            Speculation(graph=graph.id, state="stopped", variant="general", sentence=sentence, reason=reason)
        )


def _built(
    module: GraphModule,
    in_force: Callable[[], Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    graph: CapturedGraph,
    weights: str,
) -> tuple[list[Any], tuple[str, ...]]:
    policy = graph.policy
    context = graph.context("inference", {})
    if uses_tf32(policy.dtype_policy, graph.device):
        raise SaveError("a package has no room for TF32; set torch.backends where it runs")

    records: list[PartRecord] = []
    operators: list[str] = []

    def seen(part: GraphModule, inputs: Sequence[Any]) -> None:
        operators.extend(_put_overrides(part, graph, inputs))
        if checked_sizes.NEEDED.here:
            checked_sizes.check_sizes(part.graph)
        records.append(PartRecord(part, place(part, [MAIN], context, {}), (), context, [MAIN.name]))

    options = {
        **folded_nans.config_patches(policy.inductor),
        "aot_inductor.package_constants_in_so": weights == "inside",
    }
    try:
        with in_force(), decompositions_mended(), casts_kept(), sources_kept():
            begun = time.perf_counter()
            files = aoti.build(module, args, kwargs, options, seen)
    except SaveError:
        raise
    except LoweringError as error:
        raise SaveError(f"{graph.id} can't be packaged, as a part of it would run eager: {error}") from error
    except Exception as error:
        raise SaveError(f"AOTInductor can't build {graph.id}: {first_line(error)}") from error
    for record in records:
        record.emit(time.perf_counter() - begun, "")
    return files, tuple(dict.fromkeys(operators))
