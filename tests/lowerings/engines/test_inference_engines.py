"""What OpenVINO and ONNX Runtime have in common: inputs of any layout, threads, weights, sizes, the disk, models."""

import copy
import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_cases import VIEWS, close, network, results_stay, threads_share
from recorded import ran
from torch import Tensor, nn

import omnicomp
from omnicomp.lowerings.engines import lazy, resolve_engine
from omnicomp.lowerings.engines.store import store
from omnicomp.timeline import Ran, Retreat

pytestmark = pytest.mark.engine

EXTRAS = {"openvino": "openvino", "onnxruntime": "onnx"}


@pytest.fixture(params=EXTRAS)
def name(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param)
    return request.param


def compiled(name: str, function: Any, **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="omni", options={"lowerings": [name, "eager"], **options})


def retreats() -> list[str]:
    return [str(event.reason) for event in omnicomp.timeline.events() if isinstance(event, Retreat)]


def test_a_network_runs_whole(name: str) -> None:
    model, x = network(), torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        close(compiled(name, model)(x), model(x))
    assert ran() == {name}
    assert not retreats()


@pytest.mark.parametrize("form", [form for form in VIEWS if form != "of an odd stride"])
def test_any_view_is_taken_and_left_as_it_is(name: str, form: str) -> None:
    def function(x: Tensor) -> Tensor:
        return torch.tanh(x * 2) + x.exp()

    x = VIEWS[form]()
    before = x.clone()
    torch.testing.assert_close(compiled(name, function)(x), function(x))
    assert torch.equal(x, before)
    refused = name == "openvino" and not x.numel()
    assert ran() == {"eager" if refused else name}
    assert not retreats()


def test_inputs_and_weights_that_are_results_are_copied(name: str) -> None:
    """The libraries leave the memory of such a result unwritten, or write what was there to the input."""
    weight = nn.Parameter(torch.randn(4))

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return x.clone(), (x + 1).view(2, 2), weight.clone(), x.view(2, 2).clone(), x.clone() * 2, torch.ones(3)

    call = compiled(name, function)
    for _ in range(3):
        x = torch.randn(4)
        kept = x.clone()
        with torch.no_grad():
            results = call(x)
        for actual, expected in zip(results, function(kept), strict=True):
            assert torch.equal(actual, expected)
        assert torch.equal(x, kept)
    assert not retreats()


def test_what_attends_to_nothing_is_zero(name: str) -> None:
    q = torch.randn(2, 2, 5, 8)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[1, :, 2:] = False

    def function(q: Tensor, mask: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask) + 1

    call = compiled(name, function)
    for given in (torch.ones_like(mask), mask):
        close(call(q, given), function(q, given))
    assert ran() == {name}
    assert not retreats()


def test_results_belong_to_the_caller(name: str) -> None:
    results_stay(functools.partial(compiled, name))


def test_threads_share_an_executable(name: str) -> None:
    threads_share(functools.partial(compiled, name))
    assert not retreats()


def test_a_weight_that_changes_in_place_is_never_stale(name: str) -> None:
    model, x = nn.Linear(48, 48), torch.randn(2, 48)
    call = compiled(name, model)
    with torch.no_grad():
        for factor in (1, 3, -2, 0.5, 2, 7):
            model.weight.mul_(factor)
            close(call(x), model(x))
        model.load_state_dict({"weight": torch.randn(48, 48), "bias": torch.randn(48)})
        close(call(x), model(x))
        model.weight.data.zero_()
        close(call(x), model(x))
    assert name in ran()


def test_each_class_of_sizes_is_built(name: str) -> None:
    call = compiled(name, lambda x: torch.softmax(x, -1) @ x.t())
    for rows in (3, 5, 9, 3, 1):
        x = torch.randn(rows, 7)
        close(call(x), torch.softmax(x, -1) @ x.t())
    assert not retreats()


def test_random_numbers_are_drawn_by_torch(name: str) -> None:
    call = compiled(name, lambda x: torch.rand_like(x) + x * 2, fallback_random=True)
    x = torch.zeros(64)
    torch.manual_seed(3)
    actual = call(x)
    torch.manual_seed(3)
    assert torch.equal(actual, torch.rand_like(x))


def test_a_training_step_is_not_for_it(name: str) -> None:
    model, x = nn.Linear(8, 8), torch.randn(2, 8)
    compiled(name, model)(x).sum().backward()
    assert name not in ran()
    assert model.weight.grad is not None
    close(model.weight.grad, x.sum(0).expand(8, 8))


def test_another_process_takes_it_from_the_disk(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnicomp._torch.inductor.store.folder", lambda: tmp_path)
    engine = resolve_engine(name)
    model, x = network(), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = compiled(name, model)(x)
        torch.compiler.reset()
        omnicomp.timeline.clear()
        store.clear()
        monkeypatch.setattr(type(engine), "compile", lambda self, subgraph: pytest.fail("it is compiled again"))
        assert torch.equal(compiled(name, model)(x), expected)
    (event,) = (event for event in omnicomp.timeline.events() if isinstance(event, Ran))
    assert "from disk" in event.evidence


def test_a_failure_of_the_library_moves_the_subgraph_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, subgraph: Any) -> Any:
        raise RuntimeError("the library is out of order")

    monkeypatch.setattr(type(resolve_engine(name)), "compile", fails)
    x = torch.randn(5)
    torch.testing.assert_close(compiled(name, lambda x: x.exp() + 1)(x), x.exp() + 1)
    assert name not in ran()
    assert any("the library is out of order" in reason for reason in retreats())


def test_a_missing_or_old_library_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = resolve_engine(name)
    assert engine.missing() == ""
    for found, words in (("0.1", f"{name} 0.1 is too old"), (None, f"{name} is not installed")):

        def version(package: str, found: str | None = found) -> str:
            if found is None:
                raise importlib.metadata.PackageNotFoundError(package)
            return found

        lazy._missing.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(lazy.importlib.metadata, "version", version)
            assert words in engine.missing()
            assert f"omnicomp[{EXTRAS[name]}]" in engine.missing()
        lazy._missing.cache_clear()


def _bert() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=100
    )
    ids, mask = torch.randint(0, 100, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    return BertModel(config), {"input_ids": ids, "attention_mask": mask}


def _vit() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        num_hidden_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=16,
        patch_size=8,
    )
    return ViTModel(config), {"pixel_values": torch.randn(2, 3, 16, 16)}


def _resnet() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import ResNetConfig, ResNetModel

    config = ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], layer_type="bottleneck")
    return ResNetModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


def _mobilenet() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import MobileNetV1Config, MobileNetV1Model

    return MobileNetV1Model(MobileNetV1Config(depth_multiplier=0.125)), {"pixel_values": torch.randn(1, 3, 32, 32)}


@pytest.mark.model
@pytest.mark.parametrize("model", [_bert, _vit, _resnet, _mobilenet], ids=lambda each: each.__name__[1:])
def test_a_model_is_one_subgraph(name: str, model: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    module, inputs = model()
    module.eval()
    with torch.no_grad():
        expected = module(**inputs).last_hidden_state
        torch.testing.assert_close(
            compiled(name, module)(**inputs).last_hidden_state,
            expected,
            rtol=1e-3,
            atol=1e-4 * float(expected.abs().max()),
        )
    pieces = [event for event in omnicomp.timeline.events() if isinstance(event, Ran)]
    assert [event.lowering for event in pieces] == [name]
    assert not retreats()


def test_an_equal_model_does_not_read_the_memory_of_another_one(name: str) -> None:
    """As a copy that is kept while the first is trained."""
    first = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    second, x = copy.deepcopy(first), torch.randn(3, 64)
    with torch.no_grad():
        close(compiled(name, first)(x), first(x))
        for weight in first.parameters():
            weight.mul_(3)
        call = compiled(name, second)
        close(call(x), second(x))
        for weight in first.parameters():
            weight.add_(1)
        close(call(x), second(x))
    assert ran() == {name}
    assert not retreats()


def test_a_weight_that_an_array_wrote_to_and_that_is_gone(name: str) -> None:
    model, x = network(), torch.randn(4, 3, 16, 16)
    call = compiled(name, model)
    with torch.no_grad():
        close(call(x), model(x))
        model[5].weight.detach().numpy()[...] *= 3  # type: ignore[index]
        close(call(x), model(x))
        close(call(x), model(x))
