"""Declaring overrides, and putting them into graphs."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import events

import omnicomp
from omnicomp.backend.options import policy_of
from omnicomp.errors import OptionError, OverrideError
from omnicomp.lowerings.overrides.registry import GROUP, broken, digest, registered, select, unregister
from omnicomp.timeline import Option, Placement, Ran, Reason, Subgraph

NAME = "test_override"


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    if any(item.name == NAME for item in registered()):
        unregister(NAME)


def declare(calls: list[str], **options) -> None:
    @omnicomp.override(op=torch.ops.aten.digamma.default, name=NAME, **options)
    def fast_digamma(x: torch.Tensor) -> torch.Tensor:
        """A digamma of our own."""
        calls.append(str(x.dtype))
        return torch.special.digamma(x)


def test_two_of_one_name_are_an_error() -> None:
    declare([])
    with pytest.raises(OverrideError, match=f"already is an override named '{NAME}'"):
        declare([])


def test_functions_of_one_text_differ_by_what_they_close_over() -> None:
    """Else code that was compiled for one would be taken for the other."""

    def declared(factor: float, *, check: Any = None) -> str:
        @omnicomp.override(op=torch.ops.aten.digamma.default, name=NAME, check=check)
        def own(x: torch.Tensor) -> torch.Tensor:
            return torch.special.digamma(x) * factor

        found = next(item.digest for item in registered() if item.name == NAME)
        unregister(NAME)
        return found

    assert declared(1.0) == declared(1.0) != declared(2.0)
    # What has no value that can be told, such as a list, counts by its type: equal in every process.
    assert declared([]) == declared([1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "exactly one"),
        ({"op": torch.ops.aten.sin.default, "module": "MLP"}, "exactly one"),
        ({"op": torch.ops.aten.sin.default, "reference": 3}, "takes a function"),
        ({"op": torch.ops.aten.sin.default, "training": "sometimes"}, "'forward only'"),
        ({"op": torch.ops.aten.sin.default, "training": False}, "'forward only'"),
        ({"op": torch.ops.aten.sin.default, "priority": "high"}, "whole number"),
        ({"op": torch.ops.aten.sin.default, "mutates": ["x"]}, "schema says nothing"),
        ({"op": torch.ops.aten.sin.default, "backward": torch.cos}, "belongs to an override with module="),
        ({"module": "MLP", "backward": torch.cos, "training": "forward only"}, "may be used in training"),
        ({"module": "MLP", "setup_context": torch.cos}, "prepares backward="),
        ({"module": "MLP"}, "give reference="),
        ({"module": "MLP", "reference": torch.sin}, "can't be made an operator"),
        ({"module": 3}, "a class of modules"),
        ({"module": int}, "a class of modules"),
        ({"module": ""}, "a class of modules"),
        ({"op": torch.sin}, "operator overload"),
        ({"op": torch.ops.aten.add_.Tensor}, "changes its inputs"),
        ({"reference": torch.sin}, "example="),
        ({"op": torch.ops.aten.sin.default, "devices": "cpu"}, "takes device types"),
        ({"op": torch.ops.aten.sin.default, "dtypes": ("float32",)}, "takes dtypes"),
        ({"op": torch.ops.aten.sin.default, "dtypes": torch.float32}, "takes dtypes"),
        ({"op": torch.ops.aten.sin.default, "check": True}, "check= takes a function"),
        ({"op": torch.ops.aten.cumsum.default}, "does not take the arguments of aten::cumsum"),
    ],
)
def test_a_wrong_declaration_is_answered_by_one_sentence(options: dict, words: str) -> None:
    with pytest.raises(OverrideError, match=words):
        omnicomp.override(name=NAME, **options)(lambda x: x)
    assert all(item.name != NAME for item in registered())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"check": lambda x: x.no_such_field}, "the check of the override test_override raised: "),
        ({"check": lambda x: True}, "returned neither None nor a Reason"),
        ({"devices": ("cpuu",)}, "has no kernel for these arguments"),
    ],
)
def test_a_declaration_that_is_wrong_in_a_call_costs_that_operator_alone(options: dict, words: str) -> None:
    declare([], **options)
    x = torch.rand(5) + 1
    compiled = torch.compile(
        lambda x: torch.digamma(x) * 2, backend="omni", options={"lowerings": ["override", "eager"], "summary": False}
    )
    torch.testing.assert_close(compiled(x), torch.digamma(x) * 2)
    (fallback,) = omnicomp.audit().fallbacks
    assert fallback.op == "aten.digamma.default"
    assert words in fallback.reasons[0].sentence


def test_a_function_without_a_module_can_be_an_override() -> None:
    names = {"torch": torch}
    exec("def own(x):\n    return torch.special.digamma(x)", names)
    omnicomp.override(op=torch.ops.aten.digamma.default, name=NAME)(names["own"])
    x = torch.rand(5) + 1
    compiled = torch.compile(torch.digamma, backend="omni", options={"lowerings": ["override", "eager"]})
    torch.testing.assert_close(compiled(x), torch.digamma(x))
    assert omnicomp.audit().shares == {"override": 1.0}


def test_an_operator_is_replaced_and_the_override_runs() -> None:
    calls: list[str] = []
    declare(calls, devices=("cpu",), dtypes=(torch.float32,))
    x = torch.rand(5) + 1
    compiled = torch.compile(
        lambda x: torch.digamma(x) * 2, backend="omni", options={"lowerings": ["override", "eager"]}
    )
    torch.testing.assert_close(compiled(x), torch.digamma(x) * 2)
    assert calls == ["torch.float32"]
    assert [e.lowering for e in events(Ran)] == ["override", "eager"]
    assert "fast_digamma" in events(Ran)[0].evidence


def test_gradients_flow_through_an_overridden_operator() -> None:
    calls: list[str] = []
    declare(calls)
    x = (torch.rand(5) + 1).requires_grad_()
    compiled = torch.compile(lambda x: torch.digamma(x), backend="omni", options={"lowerings": ["override", "eager"]})
    compiled(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.special.polygamma(1, x.detach()))
    assert calls


def test_a_refusal_names_what_was_seen_and_needed() -> None:
    declare([], dtypes=(torch.float64,))
    compiled = torch.compile(
        lambda x: torch.digamma(x) * 2, backend="omni", options={"lowerings": ["override", "eager"]}
    )
    compiled(torch.rand(5) + 1)
    (declined,) = events(Placement)[0].declined
    (reason,) = declined.chain
    assert (reason.code, reason.by) == ("override_refused", NAME)
    assert "torch.float32" in reason.observed
    assert "torch.float64" in reason.needed
    assert reason.source.startswith(__file__)


def test_a_checker_decides() -> None:
    def check(x: torch.Tensor) -> Reason | None:
        return None if x.shape[0] > 100 else Reason(code="override_refused", sentence="too short", observed="5")

    calls: list[str] = []
    declare(calls, check=check)
    compiled = torch.compile(lambda x: torch.digamma(x), backend="omni", options={"lowerings": ["override", "eager"]})
    compiled(torch.rand(5) + 1)
    assert calls == []
    compiled(torch.rand(500) + 1)
    assert len(calls) == 1


def test_an_override_can_be_switched_off() -> None:
    calls: list[str] = []
    declare(calls)
    options = {"lowerings": ["override", "eager"], "disable_overrides": [NAME]}
    torch.compile(torch.digamma, backend="omni", options=options)(torch.rand(5) + 1)
    assert calls == []


@pytest.mark.parametrize(("training", "runs"), [(None, True), (True, True), ("forward only", False)])
def test_an_operator_is_replaced_in_training_unless_it_is_declared_not_to_be(training: Any, runs: bool) -> None:
    calls: list[str] = []
    declare(calls, training=training)
    x = (torch.rand(5) + 1).requires_grad_()
    options = {"lowerings": ["override", "eager"]}
    compiled = torch.compile(lambda x: torch.digamma(x), backend="omni", options=options)
    compiled(x).sum().backward()
    assert bool(calls) == runs
    reasons = [reason for e in events(Placement) for node in e.declined for reason in node.chain]
    assert [reason.observed for reason in reasons] == ([] if runs else ["forward only"])
    with torch.no_grad():
        compiled(x)
    assert calls


def test_the_higher_priority_is_asked_first_and_what_it_refuses_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []

    def declared(name: str, **options: Any) -> None:
        @omnicomp.override(op=torch.ops.aten.digamma.default, name=name, **options)
        def kernel(x: torch.Tensor) -> torch.Tensor:
            calls.append(name)
            return torch.special.digamma(x)

    try:
        declared("first")
        declared("second")
        declared("high", priority=1, dtypes=[torch.float64])
        options = {"lowerings": ["override", "eager"]}
        compiled = torch.compile(lambda x: torch.digamma(x), backend="omni", options=options)
        with caplog.at_level(logging.INFO, "omnicomp.overrides"):
            compiled(torch.rand(5) + 1)
            compiled(torch.rand(5).double() + 1)
        assert calls == ["first", "high"]
        assert "goes to the override first, registered before second of equal priority" in caplog.text
    finally:
        for name in ("first", "second", "high"):
            unregister(name)


def test_only_the_overrides_that_are_named_are_taken() -> None:
    calls: list[str] = []
    declare(calls)
    function = next(item for item in registered() if item.name == NAME).function
    x = torch.rand(5) + 1
    for chosen, expected in (([], 0), (["softmax_topk"], 0), ([NAME], 1), ([function], 2), ([__name__], 3)):
        torch.compiler.reset()
        options = {"lowerings": ["override", "eager"], "overrides": chosen}
        torch.compile(torch.digamma, backend="omni", options=options)(x)
        assert len(calls) == expected


def test_a_module_is_imported_for_its_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "omnicomp_test_kernels").mkdir()
    (tmp_path / "omnicomp_test_kernels" / "__init__.py").touch()
    (tmp_path / "omnicomp_test_kernels" / "good.py").write_text(
        "import omnicomp, torch\n"
        f"@omnicomp.override(op=torch.ops.aten.digamma.default, name={NAME!r})\n"
        "def kernel(x):\n    return torch.special.digamma(x)\n"
    )
    (tmp_path / "omnicomp_test_kernels" / "bad.py").write_text("import omnicomp_test_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert select(["omnicomp_test_kernels.good"]) == (NAME,)
    assert select(["omnicomp_test_kernels"]) == (NAME,)
    with pytest.raises(OptionError, match=r"'omnicomp_test_kernels\.bad' can't be imported: ModuleNotFoundError"):
        policy_of(None, {"overrides": ["omnicomp_test_kernels.bad"]})


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("softmax_topkk", 'no override named .softmax_topkk.; did you mean "softmax_topk"'),
        ("omnicomp_missing.kernels", "no override named"),
        ("not a name", "known ones are .*softmax_topk"),
        (torch.sin, "sin is not an override; decorate it"),
        ("json", "the module 'json' declares no override"),
    ],
)
def test_an_unknown_override_is_answered_by_one_sentence(entry: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        policy_of(None, {"overrides": [entry]})


def test_the_option_takes_a_list() -> None:
    with pytest.raises(OptionError, match="takes a list of overrides"):
        policy_of(None, {"overrides": "softmax_topk"})


def test_the_caches_keys_follow_the_choice() -> None:
    every = digest((), None)
    shipped = [item.name for item in registered()]
    assert digest((), []) == digest(shipped, None) != every
    assert digest((), shipped) == every
    declare([])
    with_one = digest((), None)
    assert with_one != every
    unregister(NAME)
    declare([], priority=3)
    assert digest((), None) not in (every, with_one), "the order in which overrides are asked is part of the key"
    key = policy_of(None, {"overrides": ["softmax_topk"]}).digest_parts()
    assert key["overrides"] == ("softmax_topk",)
    assert policy_of(None, None).digest_parts()["overrides"] is None


def plugin(folder: Path, name: str, text: str) -> None:
    """A distribution with an entry point for overrides."""
    (folder / f"{name}.py").write_text(text)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name.replace('_', '-')} = {name}\n")


def test_plugins_are_found_and_a_broken_one_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plugin(
        tmp_path,
        "omnicomp_test_plugin",
        "import omnicomp, torch\n"
        f"@omnicomp.override(op=torch.ops.aten.digamma.default, name={NAME!r})\n"
        "def kernel(x):\n    return torch.special.digamma(x)\n",
    )
    plugin(tmp_path, "omnicomp_test_no_driver", "raise OSError('no driver\\nand more')\n")
    monkeypatch.syspath_prepend(tmp_path)
    broken.cache_clear()
    try:
        x = torch.rand(5) + 1
        options = {"lowerings": ["override", "eager"]}
        torch.testing.assert_close(torch.compile(torch.digamma, backend="omni", options=options)(x), torch.digamma(x))
        assert [e.lowering for e in events(Ran)] == ["override"]
        (option,) = events(Option)
        assert option.key == f"entry point {GROUP}: omnicomp-test-no-driver"
        assert (option.reason.code, option.effective) == ("option_ineffective", "none")
        assert option.reason.sentence.endswith("OSError: no driver")
        assert "omnicomp-test-no-driver can't be loaded" in caplog.text
        with pytest.raises(OptionError, match="plugin of that name can't be loaded: OSError: no driver"):
            policy_of(None, {"overrides": ["omnicomp-test-no-driver"]})
    finally:
        monkeypatch.undo()
        broken.cache_clear()


def test_a_pattern_is_for_inference_unless_it_is_declared_for_training(monkeypatch: pytest.MonkeyPatch) -> None:
    library = torch.library.Library("omnicomp_test_pattern", "FRAGMENT")
    library.define("scaled_sinh(Tensor x) -> Tensor")
    library.impl("scaled_sinh", lambda x: torch.sinh(x) * 3, "CompositeExplicitAutograd")
    library._register_fake("scaled_sinh", torch.empty_like)

    def declared(training: Any) -> None:
        @omnicomp.override(
            name=NAME,
            reference=lambda x: torch.sinh(x) * 3,
            example=lambda: (torch.rand(4, 4),),
            operators=[torch.ops.omnicomp_test_pattern.scaled_sinh.default],
            training=training,
        )
        def scaled_sinh(x: torch.Tensor) -> torch.Tensor:
            return torch.ops.omnicomp_test_pattern.scaled_sinh(x)

    def gradient(function: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.linspace(-1, 1, 5).requires_grad_()
        out = function(x)
        out.sum().backward()
        assert x.grad is not None
        return out.detach(), x.grad

    def function(x: torch.Tensor) -> torch.Tensor:
        return (torch.sinh(x) * 3).exp()

    for training, lowerings in ((None, set()), (True, {"override"})):
        torch.compiler.reset()
        omnicomp.timeline.clear()
        declared(training)
        compiled = torch.compile(function, backend="omni", options={"lowerings": ["override", "eager"]})
        torch.testing.assert_close(gradient(compiled), gradient(function))
        assert {e.lowering for e in events(Ran) if e.part == "forward"} == {"eager", *lowerings}
        reasons = [reason for e in events(Placement) for node in e.declined for reason in node.chain]
        assert [reason.observed for reason in reasons] == ([] if training else ["forward only"])
        unregister(NAME)


def test_a_pattern_must_not_change_its_inputs() -> None:
    library = torch.library.Library("omnicomp_test_pattern", "FRAGMENT")
    library.define("changes(Tensor(a!) x) -> ()")
    with pytest.raises(OverrideError, match="changes its argument x"):
        omnicomp.override(
            name=NAME,
            reference=lambda x: x.sinh(),
            example=lambda: (torch.rand(4),),
            operators=[torch.ops.omnicomp_test_pattern.changes.default],
        )(lambda x: x)


@pytest.mark.inductor
def test_an_override_stays_inside_inductors_graph() -> None:
    calls: list[str] = []
    declare(calls)
    x = torch.rand(5) + 1
    compiled = torch.compile(lambda x: (torch.digamma(x.sin() + 2) * 2).cos(), backend="omni")
    torch.testing.assert_close(compiled(x), (torch.digamma(x.sin() + 2) * 2).cos())
    assert len(calls) == 1
    planned = {e.subgraph.partition(".")[2]: e.lowering for e in events(Subgraph)}
    assert planned == {"inference.0": "inductor", f"inference.0/{NAME}": "override"}
    ran = {e.subgraph.partition(".")[2]: e for e in events(Ran)}
    assert ran[f"inference.0/{NAME}"].lowering == "override"
    assert any(NAME in kernel for kernel in ran["inference.0"].kernels)
    by_module = {e["module"].partition(".")[2]: e for e in omnicomp.timeline.backend_timeline()}
    levels = {a["level"]: a for a in by_module[f"inference.0/{NAME}"]["attempts"]}
    assert levels["kernel_override"]["selected"]
    assert not levels["compile"]["selected"]


@pytest.mark.inductor
def test_a_pattern_is_replaced_in_inference() -> None:
    library = torch.library.Library("omnicomp_test", "FRAGMENT")
    library.define("scaled_tanh(Tensor x) -> Tensor")
    library.impl("scaled_tanh", lambda x: torch.tanh(x) * 3 + 1, "CompositeExplicitAutograd")
    library._register_fake("scaled_tanh", torch.empty_like)

    @omnicomp.override(
        name=NAME,
        reference=lambda x: torch.tanh(x) * 3 + 1,
        example=lambda: (torch.rand(4, 4),),
        operators=[torch.ops.omnicomp_test.scaled_tanh.default],
    )
    def scaled_tanh(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.omnicomp_test.scaled_tanh(x)

    x = torch.rand(6, 5)
    with torch.no_grad():
        compiled = torch.compile(lambda x: (torch.tanh(x.sin()) * 3 + 1).cos(), backend="omni")
        torch.testing.assert_close(compiled(x), (torch.tanh(x.sin()) * 3 + 1).cos())
    assert [e.lowering for e in events(Subgraph)] == ["inductor", "override"]
    assert {e.lowering for e in events(Ran)} == {"inductor", "override"}
