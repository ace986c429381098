"""Passes from outside: by entry point and by the option `passes`; their places, keys and failures."""

import dataclasses
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from recorded import events
from torch.fx import GraphModule

import omnicomp
from omnicomp import passes
from omnicomp.analysis.nodes import insert_call, op_name
from omnicomp.backend.capture import graph_digest, key_parts
from omnicomp.backend.options import policy_of
from omnicomp.devices import resolve_device
from omnicomp.errors import OptionError, PassError
from omnicomp.passes import Pass, PassContext, PassResult
from omnicomp.passes.registry import GROUP, ordered, plugins
from omnicomp.timeline import Option, PassRun, Retreat, Rewrite, current

EAGER = {"lowerings": ["eager"]}
SOURCE = '''
"""Squares as products."""
import dataclasses
from typing import ClassVar
import torch
from omnicomp.analysis.nodes import insert_call, op_name
from omnicomp.passes import Pass, PassResult

@dataclasses.dataclass(frozen=True)
class Square(Pass):
    """Writes a square as a product."""
    name: ClassVar[str] = "plugged_square"
    runs_before: ClassVar[str] = "dtype_policy"

    def applies(self, module, context):
        return True

    def run(self, module, context):
        found = [node for node in module.graph.nodes if op_name(node) == "Tensor.pow"]
        for node in found:
            product = insert_call(node, torch.mul, (node.args[0], node.args[0]))
            node.replace_all_uses_with(product)
            module.graph.erase_node(node)
            context.rewrite(self.name, "arithmetic", product, target="torch.mul")
        return PassResult(module, bool(found))
'''


@dataclasses.dataclass(frozen=True)
class Square(Pass):
    """Writes a square as a product, and does `then` to the graph."""

    name: ClassVar[str] = "square"
    runs_before: ClassVar[str] = "dtype_policy"
    factor: Any = 1
    then: Callable[[GraphModule], Any] | None = None

    def applies(self, module: GraphModule, context: PassContext) -> bool:
        return True

    def run(self, module: GraphModule, context: PassContext) -> Any:
        found = [node for node in module.graph.nodes if op_name(node) == "Tensor.pow"]
        for node in found:
            product = insert_call(node, torch.mul, (node.args[0], node.args[0]))
            node.replace_all_uses_with(product)
            module.graph.erase_node(node)
            context.rewrite(self.name, "arithmetic", product, target="torch.mul")
        given = self.then(module) if self.then is not None else None
        return PassResult(module, bool(found)) if given is None else given


def placed(name: str, *, after: str = "", before: str = "") -> Pass:
    members = {"name": name, "runs_after": after, "runs_before": before, "applies": lambda *_: False}
    return type("Placed", (Pass,), members)()


def function(x: torch.Tensor) -> torch.Tensor:
    return x.pow(2).sin() + 1


def run(x: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    x = torch.linspace(-2, 2, 5) if x is None else x
    result = torch.compile(function, backend="omni", options={**EAGER, **options})(x)
    torch.testing.assert_close(result, function(x))
    return result


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs packages of one module with an entry point, and takes them away again."""

    names: list[str] = []

    def install(name: str, text: str, attribute: str = "Square", version: str = "1.0") -> None:
        (tmp_path / f"{name}.py").write_text(text)
        names.append(name)
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {name}:{attribute}\n")
        plugins.cache_clear()

    monkeypatch.syspath_prepend(tmp_path)
    yield install
    monkeypatch.undo()
    for name in names:
        sys.modules.pop(name, None)  # another test may have a module of that name
    plugins.cache_clear()


def test_a_pass_of_the_option_rewrites_and_is_reported_like_a_built_in_one() -> None:
    run(passes=[Square()])
    (graph,) = omnicomp.audit().graphs
    assert [rewrite.name for rewrite in graph.rewrites] == ["square"]
    ran = [item.name for item in graph.passes]
    assert ran[:4] == ["legalise", "attention_fusion", "square", "dtype_policy"]
    assert graph.passes[2].node_diff == {"Tensor.pow": -1, "torch.mul": 1}
    run(passes=[])
    assert len(events(Rewrite)) == 1
    run(passes=[Square()], disable_passes=["square"])
    assert len(events(Rewrite)) == 1


def test_gradients_flow_through_what_a_pass_put_in() -> None:
    x = torch.linspace(-2, 2, 5, requires_grad=True)
    run(x, passes=[Square()]).sum().backward()
    torch.testing.assert_close(x.grad, (2 * x * x.pow(2).cos()).detach())
    assert events(Rewrite)
    assert not events(Retreat)


def test_an_entry_point_is_found_and_runs(installed: Callable[..., None]) -> None:
    installed("omnicomp_test_squares", SOURCE)
    run()
    assert [event.name for event in events(Rewrite)] == ["plugged_square"]
    version, _ = key_parts(policy_of(None, None), resolve_device("cpu"))["pass plugged_square"]
    assert version == "omnicomp_test_squares 1.0"
    run(passes=[])
    run(disable_passes=["plugged_square"])
    assert len(events(Rewrite)) == 1
    run(passes=["plugged_square"])
    assert len(events(Rewrite)) == 2


@pytest.mark.parametrize(
    ("text", "attribute", "words"),
    [
        ("raise OSError('no driver\\nand more')", "Square", "OSError: no driver"),
        (SOURCE, "Missing", "AttributeError"),
        (SOURCE, "dataclasses", "is no omnicomp.passes.Pass"),
        (SOURCE.replace('"dtype_policy"', '"dtype_polcy"'), "Square", 'did you mean "dtype_policy"'),
        (SOURCE.replace('"plugged_square"', '"legalise"'), "Square", "has the name of another one"),
        (SOURCE.replace('"plugged_square"', "3"), "Square", "needs a `name`"),
        (SOURCE + "    cache: object = dataclasses.field(default_factory=object)\n", "Square", "has a value of type"),
    ],
    ids=["raises", "missing", "no pass", "anchor", "built in", "name", "identity"],
)
def test_an_entry_point_that_can_not_be_used_is_a_reason_and_the_compilation_goes_on(
    installed: Callable[..., None], caplog: pytest.LogCaptureFixture, text: str, attribute: str, words: str
) -> None:
    installed("omnicomp_test_broken", text, attribute)
    installed("omnicomp_test_squares", SOURCE.replace("plugged_square", "other_square"))
    with caplog.at_level(logging.WARNING, "omnicomp.passes"):
        run()
    assert [event.name for event in events(Rewrite)] == ["other_square"]
    (told,) = events(Option)
    assert told.key == f"entry point {GROUP}: omnicomp_test_broken"
    assert told.reason.by == "passes"
    assert len(told.reason.sentence.splitlines()) == 1
    assert re.search(words, told.reason.sentence)
    assert len([record for record in caplog.records if "omnicomp_test_broken" in record.getMessage()]) <= 1


def test_the_doctor_lists_what_is_installed_with_its_place_or_what_is_wrong_with_it(
    installed: Callable[..., None],
) -> None:
    doctor = pytest.importorskip("omnicomp.cli.doctor")
    installed("omnicomp_test_broken", "raise OSError('no driver')")
    installed("omnicomp_test_squares", SOURCE)
    found = {check.name: check for check in doctor.examine()}
    squares, broken = found["pass plugged_square"], found["pass omnicomp_test_broken"]
    assert squares.found == "omnicomp_test_squares 1.0; runs behind attention_fusion; Writes a square as a product."
    assert (broken.status, broken.found) == ("note", "omnicomp_test_broken 1.0; OSError: no driver")
    assert broken.todo


def test_of_two_entry_points_with_one_pass_the_second_is_a_reason(installed: Callable[..., None]) -> None:
    installed("omnicomp_test_a", SOURCE)
    installed("omnicomp_test_b", SOURCE)
    run()
    assert len(events(Rewrite)) == 1
    (told,) = events(Option)
    assert "omnicomp_test_b" in told.key
    assert "there already is a pass named 'plugged_square'" in told.reason.sentence
    with pytest.raises(OptionError, match="the pass 'omnicomp_test_b' can't be used: there already is"):
        policy_of(None, {"passes": ["omnicomp_test_b"]})


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ("square", "takes a list of passes"),
        (["squares"], "no package declares a pass named 'squares'; none is installed"),
        (["attention_fusion"], "is built in, and runs unless disable_passes names it"),
        ([Square], r"Square is a class; give an object of it, Square\(\)"),
        ([3], "a value of type int is no omnicomp.passes.Pass"),
        ([torch.sin], "sin is no omnicomp.passes.Pass"),
        ([Square(), Square()], "'square' has the name of another one"),
        ([placed("legalise")], "'legalise' has the name of another one"),
        ([placed("")], "needs a `name`"),
        ([placed("a b")], "needs a `name`"),
        ([placed("a", after="dtype_polici")], 'beside .dtype_polici., which is no other pass; did you mean "dtype_pol'),
        ([placed("a", after="a")], "which is no other pass"),
        ([placed("a", after="b"), placed("b", before="a")], "waits for itself: none of a, b"),
        ([placed("a", after="dtype_policy", before="attention_fusion")], "can't run behind 'dtype_policy' and before"),
        ([placed("a", after=3)], "runs_after of the pass 'a' is the name of another pass, not 3"),  # type: ignore[arg-type]
        ([Square(factor=torch.ones(2))], "has a value of type Tensor in 'factor', by which no cache"),
        ([Square(factor=[object()])], "has a value of type object in 'factor'"),
        ([Square(factor=(box := [1], box.append(box))[0])], "values within values without end"),  # type: ignore[func-returns-value]
    ],
)
def test_a_wrong_entry_of_the_option_is_answered_by_one_sentence(entries: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words) as caught:
        policy_of(None, {"passes": entries})
    assert len(str(caught.value).splitlines()) == 1


def test_a_pass_that_is_not_there_can_not_be_switched_off() -> None:
    with pytest.raises(OptionError, match=r'no pass named .atention_fusion.; did you mean "attention_fusion"'):
        policy_of(None, {"disable_passes": ["atention_fusion"]})
    policy_of(None, {"disable_passes": ["square", "repair_losses"], "passes": [Square()]})


def test_passes_stand_where_they_say() -> None:
    def order(*others: Pass) -> str:
        return " ".join(item.name for item in ordered((placed("x"), placed("y"), placed("x")), others))

    assert order(placed("a", before="x")) == "a x y x"
    assert order(placed("a", after="x")) == "x y x a"
    assert order(placed("a", after="y"), placed("b", after="y")) == "x y a b x"
    assert order(placed("a", before="y"), placed("b", before="y")) == "x a b y x"
    assert order(placed("a", after="b"), placed("b", before="y")) == "x b a y x"
    assert order(placed("a", after="y", before="b"), placed("b", after="y")) == "x y a b x"
    line = ordered(passes.PIPELINE, (placed("a"), placed("b")))
    assert [item.name for item in line[1:5]] == ["attention_fusion", "a", "b", "dtype_policy"]


def test_the_keys_of_caches_have_name_version_options_position_and_sources(
    installed: Callable[..., None], tmp_path: Path
) -> None:
    def key(item: Pass | None) -> str:
        return graph_digest(policy_of(None, {"passes": [] if item is None else [item]}), resolve_device("cpu"))

    @dataclasses.dataclass(frozen=True)
    class Later(Square):
        runs_before: ClassVar[str] = ""

    @dataclasses.dataclass(frozen=True)
    class Newer(Square):
        version: ClassVar[str] = "2"

    def closing(number: Any) -> Pass:
        class Closing(Square):
            def run(self, module: GraphModule, context: PassContext) -> PassResult:
                return PassResult(module, bool(number))

        return Closing()

    items = [None, Square(), Square(factor=2), Square(factor=2.0), Square(factor=torch.float16), Square(then=torch.sin)]
    items += [Square(factor=torch.bfloat16), Square(then=lambda _: None), Square(then=lambda _: 3), Later(), Newer()]
    items += [closing(0), closing(1)]
    assert len({key(item) for item in items}) == len(items)
    assert key(Square(factor={"a": (1, None)})) == key(Square(factor={"a": (1, None)}))
    assert key(closing(1)) == key(closing(1))
    with pytest.raises(OptionError, match="in 'run\\(\\)'"):
        key(closing(object()))

    installed("omnicomp_test_keyed", SOURCE)
    policy, device = policy_of(None, None), resolve_device("cpu")
    before = graph_digest(policy, device)
    with (tmp_path / "omnicomp_test_keyed.py").open("a") as file:
        file.write("# edited\n")
    assert graph_digest(policy, device) != before


def output(module: GraphModule) -> Any:
    return next(iter(reversed(module.graph.nodes)))


def rewire(module: GraphModule, target: Any, *args: Any) -> None:
    """Put a call around what the graph returns."""
    end = output(module)
    (value,) = end.args[0]
    end.args = ((insert_call(end, target, (value, *args)),),)


def undescribed(module: GraphModule) -> None:
    rewire(module, torch.neg)
    rewire(module, torch.neg)
    for node in output(module).args[0][0].all_input_nodes:
        del node.meta["example_value"]


def without_input(module: GraphModule) -> None:
    placeholder = next(iter(module.graph.nodes))
    module.register_buffer("made", torch.ones(5))
    with module.graph.inserting_after(placeholder):
        other = module.graph.get_attr("made")
    placeholder.replace_all_uses_with(other)
    module.graph.erase_node(placeholder)


def unordered(module: GraphModule) -> None:
    call = next(node for node in module.graph.nodes if node.op.startswith("call_"))
    call.args = (output(module).args[0][0],)


def raising(module: GraphModule) -> None:
    raise ValueError("half way\nthrough")


BAD = {
    "raises": (raising, "ValueError: half way"),
    "garbage": (lambda module: 3, "returned int; return PassResult"),
    "another graph": (lambda module: PassResult(GraphModule(module, module.graph), True), "in place"),
    "false claim": (lambda module: PassResult(module, False), "reported modified=False"),
    "broken": (unordered, "left a broken graph"),
    "dtype": (lambda module: rewire(module, torch.ops.aten.to.dtype, torch.float64), "changed output 0"),
    "shape": (lambda module: rewire(module, torch.unsqueeze, 0), r"to \(1, 5\)"),
    "strides": (lambda module: rewire(module, torch.Tensor.t), "changed the strides of output 0"),
    "number": (lambda module: setattr(output(module), "args", (output(module).args[0] * 2,)), "number of outputs"),
    "kind": (lambda module: setattr(output(module), "args", ((3,),)), "another kind of value"),
    "inputs": (without_input, "changed the inputs"),
    "fake values": (undescribed, "without a fake value"),
    "detached": (lambda module: rewire(module, torch.Tensor.detach), "without a gradient"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_pass_that_breaks_its_contract_costs_its_own_rewrites_alone(fault: str) -> None:
    then, words = BAD[fault]

    @dataclasses.dataclass(frozen=True)
    class Good(Square):
        name: ClassVar[str] = "good"
        runs_before: ClassVar[str] = "square"

        def run(self, module: GraphModule, context: PassContext) -> PassResult:
            node = next(node for node in module.graph.nodes if op_name(node) == "Tensor.sin")
            product = insert_call(node, torch.sin, node.args)
            node.replace_all_uses_with(product)
            module.graph.erase_node(node)
            context.rewrite(self.name, "spelling", product, target="torch.sin")
            return PassResult(module, True)

    x = torch.randn(5, 5) if fault == "strides" else torch.randn(5, requires_grad=fault == "detached")
    run(x, passes=[Square(then=then), Good()])
    (retreat,) = events(Retreat)
    assert (retreat.reason.code, retreat.reason.by) == ("pass_left_out", "square")
    assert re.search(words, retreat.reason.sentence), retreat.reason.sentence
    assert [event.name for event in events(Rewrite)] == ["good"]
    (ran,) = [event for event in events(PassRun) if event.name == "square"]
    assert not ran.applied
    assert ran.note
    torch.compiler.reset()
    with pytest.raises(Exception, match=words):
        run(x, passes=[Square(then=then)], on_error="raise")


def dropped(module: GraphModule) -> PassResult:
    """Leave out what writes to an input."""
    node = next(node for node in module.graph.nodes if op_name(node) == "Tensor.add_")
    node.replace_all_uses_with(node.args[0])
    module.graph.erase_node(node)
    return PassResult(module, True)


def unshared(module: GraphModule) -> PassResult:
    """Return an input in place of its copy."""
    node = next(node for node in module.graph.nodes if op_name(node) == "Tensor.clone")
    node.replace_all_uses_with(node.args[0])
    module.graph.erase_node(node)
    return PassResult(module, True)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("then", "words"), [(dropped, "writes to, from 0 to none"), (unshared, "in the same memory")])
def test_writes_to_inputs_and_shared_memory_stay_as_they_are(then: Any, words: str, training: bool) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.add_(1)
        return x * y, y.clone()

    x, y = torch.zeros(4), torch.ones(4, requires_grad=training)
    first, second = torch.compile(function, backend="omni", options={**EAGER, "passes": [Square(then=then)]})(x, y)
    assert (x == 1).all()
    assert (first == 1).all()
    assert second.data_ptr() != y.data_ptr()
    (retreat,) = events(Retreat)
    assert words in retreat.reason.sentence


def test_a_pass_whose_options_fail_is_left_out() -> None:
    @dataclasses.dataclass(frozen=True)
    class Rash(Square):
        def of(self, policy: Any) -> Any:
            return 1 / 0

    @dataclasses.dataclass(frozen=True)
    class Odd(Square):
        name: ClassVar[str] = "odd"

        def of(self, policy: Any) -> Any:
            return Square()

    run(passes=[Rash(), Odd()])
    found = {event.reason.by: event.reason.sentence for event in events(Retreat)}
    assert "ZeroDivisionError" in found["square"]
    assert "of its own kind" in found["odd"]


def test_a_built_in_pass_that_fails_behind_another_one_gets_the_graph_without_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @dataclasses.dataclass(frozen=True)
    class Picky(Square):
        name: ClassVar[str] = "picky"

        def run(self, module: GraphModule, context: PassContext) -> PassResult:
            if not any(op_name(node) == "Tensor.pow" for node in module.graph.nodes):
                raise KeyError("no power")
            return PassResult(module, False)

    built_in = passes.PIPELINE
    monkeypatch.setattr(passes, "PIPELINE", (*built_in, Picky()))
    run(passes=[Square()])
    (retreat,) = events(Retreat)
    assert retreat.reason.by == "square"
    assert "picky raised behind it: KeyError" in retreat.reason.sentence
    current().clear()
    # One that fails by itself is not another one's fault.
    monkeypatch.setattr(passes, "PIPELINE", (*built_in, Square(then=raising)))
    run(passes=[placed("quiet")])
    (retreat,) = events(Retreat)
    assert (retreat.reason.code, retreat.target_lowering) == ("capture_failed", "no passes")
    assert "the pass square raised" in retreat.reason.sentence


def test_a_pass_that_is_tried_alone_is_held_to_the_same() -> None:
    from torch.fx import symbolic_trace

    graph = symbolic_trace(lambda x: x.pow(2))
    with pytest.raises(PassError, match="returned str"):
        Square(then=lambda _: "done").apply(graph, (torch.ones(3),))
