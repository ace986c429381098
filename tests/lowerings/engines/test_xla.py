"""XLA through JAX: memory, dtypes of 64 bits, gradients, threads, weights, sizes, the disk."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_cases import VIEWS, network, threads_share
from recorded import ran, retreats
from torch import Tensor, nn

import omnicomp
from omnicomp.lowerings.engines import resolve_engine
from omnicomp.lowerings.engines.store import store
from omnicomp.lowerings.engines.xla.engine import imported
from omnicomp.lowerings.engines.xla.forms import FORMS
from omnicomp.timeline import Placement, Ran

pytestmark = pytest.mark.engine

jax = pytest.importorskip("jax")


def compiled(function: Any, **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="omni", options={"lowerings": ["xla", "eager"], **options})


def declined() -> str:
    events = omnicomp.timeline.events()
    chains = [node.chain for event in events if isinstance(event, Placement) for node in event.declined]
    return " ".join(reason.sentence for chain in chains for reason in chain)


def test_a_network_runs_whole() -> None:
    model, x = network(), torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(x), model(x), rtol=1e-4, atol=1e-5)
    assert ran() == {"xla"}
    assert not retreats()


@pytest.mark.parametrize("name", VIEWS)
def test_any_view_is_taken(name: str) -> None:
    def function(x: Tensor) -> Tensor:
        return torch.tanh(x * 2) + x.sum()

    x = VIEWS[name]()
    torch.testing.assert_close(compiled(function)(x), function(x))
    assert ran() == {"xla"}
    assert not retreats()


def test_inputs_are_not_copied_and_results_are_the_callers() -> None:
    x = torch.randn(64)
    assert imported(x).unsafe_buffer_pointer() == x.data_ptr()
    strided = torch.randn(8, 8)[:, ::2]
    assert torch.equal(torch.from_dlpack(imported(strided)), strided)

    call = compiled(lambda x: (x * 2, x.view(8, 8), x * 2))
    first = call(x)
    kept = [value.clone() for value in first]
    for value in call(torch.randn(64)):
        value.zero_()
    assert all(torch.equal(now, before) for now, before in zip(first, kept, strict=True))
    first[0].zero_()
    assert torch.equal(first[2], kept[2])
    assert torch.equal(call(x)[0], kept[0])


def test_a_program_is_for_row_major_inputs_and_gets_them() -> None:
    """What JAX compiles raises for another layout, and what it imports without a copy may have one."""
    x = torch.randn(3, 1).as_strided((3, 1), (1, 3))
    program = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((3, 1), "float32")).compile()
    with pytest.raises(ValueError, match="layouts"):
        program(jax.dlpack.from_dlpack(x))
    assert torch.equal(torch.from_dlpack(program(imported(x))), x + 1)


def test_64_bits_are_kept_and_jax_stays_as_the_user_has_it() -> None:
    before = jax.config.jax_enable_x64
    assert not before
    big = torch.tensor([2**40, 3], dtype=torch.int64)
    fine = torch.tensor([1 + 1e-12, 2.0], dtype=torch.float64)

    def function(big: Tensor, fine: Tensor) -> tuple[Tensor, Tensor]:
        return big + 1, fine * 3

    for actual, expected in zip(compiled(function)(big, fine), function(big, fine), strict=True):
        assert torch.equal(actual, expected)
    assert ran() == {"xla"}
    assert jax.config.jax_enable_x64 == before
    assert jax.numpy.arange(3).dtype == "int32"


def test_settings_of_the_users_do_not_reach_the_program() -> None:
    names = ("jax_numpy_dtype_promotion", "jax_numpy_rank_promotion", "jax_debug_nans")
    before = {name: getattr(jax.config, name) for name in names}
    try:
        for name, value in zip(names, ("strict", "raise", True), strict=True):
            jax.config.update(name, value)
        x, y = torch.tensor([0.0, -1.0]), torch.arange(6).view(3, 2)
        call = compiled(lambda x, y: (x.log() + y, (x > 0) & (y > 1)))
        assert torch.equal(call(x, y)[0].isnan(), (x.log() + y).isnan())
        assert not retreats()
        assert jax.config.jax_numpy_dtype_promotion == "strict"
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_training_step_has_eagers_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    model = network().to(dtype).train()
    model[1].eval()  # statistics that are not followed
    x = torch.randn(4, 3, 16, 16, dtype=dtype, requires_grad=True)
    target = torch.randint(0, 5, (4,))

    def step(model: Callable[[Tensor], Tensor]) -> list[Tensor]:
        loss = F.cross_entropy(model(x).float(), target)
        return [loss.detach(), *torch.autograd.grad(loss, [x, *owner.parameters()])]

    owner = model
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 2e-2}
    for actual, expected in zip(step(compiled(model)), step(model), strict=True):
        torch.testing.assert_close(actual, expected, **tolerance)
    assert ran() == {"xla"}


def test_batch_norm_in_training_follows_its_statistics() -> None:
    torch.manual_seed(1)
    eager, model = (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU()) for _ in range(2))
    model.load_state_dict(eager.state_dict())
    call = compiled(model)
    for _ in range(3):
        x = torch.randn(2, 3, 8, 8)
        got, expected = call(x).square().mean(), eager(x).square().mean()
        torch.testing.assert_close(got, expected)
        got.backward()
        expected.backward()
    for actual, wanted in zip(model.state_dict().values(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)
    assert "xla" in ran()


def test_a_weight_that_changes_in_place_is_never_stale() -> None:
    model, x = nn.Linear(8, 8), torch.randn(2, 8)
    call = compiled(model)
    with torch.no_grad():
        for factor in (1, 3, -2, 0.5, 2, 7):
            model.weight.mul_(factor)
            torch.testing.assert_close(call(x), model(x))
        model.load_state_dict({"weight": torch.randn(8, 8), "bias": torch.randn(8)})
        torch.testing.assert_close(call(x), model(x))
        model.weight.data.zero_()
        torch.testing.assert_close(call(x), model(x))


def test_equal_weights_share_a_program_until_one_changes() -> None:
    first = nn.Linear(64, 64)
    second = nn.Linear(64, 64)
    second.load_state_dict(first.state_dict())
    x = torch.randn(4, 64)
    calls = [compiled(lambda x: first(x)), compiled(lambda x: second(x))]
    with torch.no_grad():
        for call in calls:
            call(x)
        evidence = [event.evidence for event in omnicomp.timeline.events() if isinstance(event, Ran)]
        assert "from memory" in evidence[1]
        first.weight.mul_(3)
        for call, model in zip(calls, (first, second), strict=True):
            torch.testing.assert_close(call(x), model(x), rtol=1e-4, atol=1e-5)


def test_weights_that_are_inputs_may_be_parameters() -> None:
    models, x = [nn.Linear(8, 8) for _ in range(2)], torch.randn(2, 8)
    calls = [compiled(model) for model in models]
    with torch.no_grad():
        for factor in (1, 2, 3, 4, 5, 6):
            for call, model in zip(calls, models, strict=True):
                model.weight.mul_(factor)
                torch.testing.assert_close(call(x), model(x), rtol=1e-4, atol=1e-5)
    assert ran() == {"xla"}
    assert not [event for event in retreats() if event.target_lowering == "eager"]


def test_threads_share_a_program() -> None:
    threads_share(compiled)
    assert not retreats()


def test_each_class_of_sizes_has_its_program() -> None:
    call = compiled(lambda x: torch.softmax(x, -1) @ x.t())
    for rows in (3, 5, 9, 3, 1):
        x = torch.randn(rows, 7)
        torch.testing.assert_close(call(x), torch.softmax(x, -1) @ x.t())
    assert not retreats()


@pytest.mark.parametrize(
    "function",
    [lambda x: torch.rand_like(x) + x, lambda x: F.dropout(x, 0.5), lambda x: torch.bernoulli(x.sigmoid())],
    ids=["rand_like", "dropout", "bernoulli"],
)
def test_random_operators_are_refused_and_draw_eagers_numbers(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(64)
    call = compiled(function)
    torch.manual_seed(3)
    expected = function(x)
    torch.manual_seed(3)
    assert torch.equal(call(x), expected)
    assert "it has no form of the operator" in declined()


def test_masks_of_unknown_size_are_refused() -> None:
    x = torch.randn(9)
    assert torch.equal(compiled(lambda x: x[x > 0] * 2)(x), x[x > 0] * 2)
    assert not retreats()


def test_a_program_comes_from_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = resolve_engine("xla")
    model, x = network(), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = compiled(model)(x)
        torch.compiler.reset()
        omnicomp.timeline.clear()
        store.clear()
        monkeypatch.setattr(type(engine), "compile", lambda self, subgraph: pytest.fail("it is compiled again"))
        assert torch.equal(compiled(model)(x), expected)
    (event,) = (event for event in omnicomp.timeline.events() if isinstance(event, Ran))
    assert "from disk" in event.evidence


def test_a_wrong_form_is_found_out_by_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMS, torch.ops.prims.tanh.default, lambda x, like: x * 2)
    x = torch.randn(16)
    torch.testing.assert_close(compiled(lambda x: x.tanh() + 1)(x), x.tanh() + 1)
    assert retreats()


def test_a_form_of_a_wrong_shape_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMS, torch.ops.prims.tanh.default, lambda x, like: x[:1])
    x = torch.randn(16)
    torch.testing.assert_close(compiled(lambda x: x.tanh() + 1)(x), x.tanh() + 1)
    assert any("made the shape (1,) instead of (16,)" in event.reason.sentence for event in retreats() if event.reason)


def test_memory_beyond_the_limit_is_refused() -> None:
    x = torch.randn(64, 64)
    call = compiled(lambda x: torch.softmax(x @ x, -1) @ x, engines={"xla": {"workspace_bytes": 1}})
    torch.testing.assert_close(call(x), torch.softmax(x @ x, -1) @ x)
    assert any("beside inputs and outputs" in event.reason.sentence for event in retreats() if event.reason)


def test_a_missing_or_old_jax_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from omnicomp.lowerings.engines import lazy

    engine = resolve_engine("xla")
    for found, words in (("0.4.30", "jax 0.4.30 is too old"), (None, "jax is not installed")):

        def version(name: str, found: str | None = found) -> str:
            if found is None:
                raise lazy.importlib.metadata.PackageNotFoundError(name)
            return found

        lazy._missing.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(lazy.importlib.metadata, "version", version)
            assert words in engine.missing()
            assert "omnicomp[xla]" in engine.missing()
        lazy._missing.cache_clear()
    assert engine.missing() == ""
