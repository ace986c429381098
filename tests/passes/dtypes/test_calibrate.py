"""Bounded error: what is kept wide, and that nothing but the calibration's finding is left behind."""

import json
from pathlib import Path

import pytest
import torch
from processes import python
from torch import nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from omnicomp import passes
from omnicomp._torch.inductor.store import folder
from omnicomp.analysis.nodes import op_name
from omnicomp.passes.assumptions import Assumption, assumption
from omnicomp.passes.base import Pass, PassContext, PassResult
from omnicomp.passes.dtype_policy import DtypePass
from omnicomp.passes.dtypes import calibrate
from omnicomp.passes.dtypes.calibrate import search
from omnicomp.timeline import Calibration, NearMiss, Option, Rewrite, current

EAGER = {"lowerings": ["eager"], "dtype_policy": "bf16"}
CAUSE = "error_bound"


class Cancelling(nn.Module):
    """Five products, of which the third loses nearly all digits: its columns cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(32, 32) for _ in range(3))
        half = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
        # Every operand is rounded on its own, so that what should cancel does not.
        self.register_buffer("high", 300 * torch.cat([half, half]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.relu(self.first(x)))
        twice = torch.cat([x[:, :16], -x[:, :16] * 1.001], 1)
        return self.last(x) + twice @ self.high @ torch.eye(32)


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMNICOMP_CACHE_DIR", str(tmp_path / "cache"))
    torch.manual_seed(0)
    calibrate.clear()
    torch.compiler.reset()
    yield
    calibrate.clear()


def run(function, *args, **options):
    """What a compiled function returns, and the events of its compilation."""
    torch.compiler.reset()
    known = len(current().events())
    with torch.no_grad():
        result = torch.compile(function, backend="omni", options={**EAGER, **options})(*args)
    return result, current().events()[known:]


def only(events, kind):
    return [event for event in events if isinstance(event, kind)]


def kept(events) -> list[str]:
    return [event.node for event in only(events, NearMiss) if event.reason.code == CAUSE]


def distance(value: torch.Tensor, true: torch.Tensor) -> float:
    return float(((value.double() - true).norm() / true.norm()).detach())


def test_the_harmful_product_alone_is_kept() -> None:
    model, x = Cancelling(), torch.randn(64, 32)
    result, events = run(model, x, dtype_error=1e-2)
    (event,) = only(events, Calibration)
    assert event.state == "measured"
    assert event.lowered == 5
    assert event.before > 1e-2 >= event.after
    assert event.runs <= 3 + 5 + 1 + 3
    assert kept(events) == ["matmul"]
    (miss,) = [e for e in only(events, NearMiss) if e.reason.code == CAUSE]
    assert "alone" in miss.reason.observed
    assert "of its own result" in miss.reason.observed
    assert miss.reason.needed == "at most 1.0e-02"
    assert len(only(events, Rewrite)) == 4
    assert torch.isfinite(result).all()


def test_what_is_measured_is_what_runs() -> None:
    model, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)), torch.randn(16, 32)
    with torch.no_grad():
        true = model.double()(x.double())
    result, events = run(model.float(), x, dtype_error=1e-1)
    (event,) = only(events, Calibration)
    assert event.runs == 2  # the reference, and all lowered
    assert event.before == event.after == pytest.approx(distance(result, true), rel=1e-3)
    assert not kept(events)
    result, events = run(model, x, dtype_error=event.before * 0.9)
    (tighter,) = only(events, Calibration)
    assert 1 <= tighter.kept <= 2
    assert distance(result, true) <= tighter.bound
    assert tighter.after == pytest.approx(distance(result, true), rel=1e-3)


def test_a_bound_that_nothing_meets_is_told() -> None:
    model, x = nn.Linear(32, 32), torch.randn(4, 32)
    result, events = run(model, x, dtype_error=1e-12)
    (event,) = only(events, Calibration)
    assert event.after == event.wide > 1e-12
    assert kept(events) == ["linear"]
    (option,) = [e for e in only(events, Option) if e.key == "dtype_error"]
    assert option.effective == "nothing lowered"
    torch.testing.assert_close(result, model(x))


def test_inputs_and_random_numbers_are_left_alone() -> None:
    weight = nn.Parameter(torch.randn(8, 8))

    def function(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.add_(1)
        x.mul_(2)
        return torch.dropout(x @ weight, 0.5, True) + torch.rand(8) + state

    x, state = torch.randn(4, 8), torch.zeros(8)
    torch.manual_seed(3)
    own, counted = x.clone(), state.clone()
    with torch.no_grad():
        expected = function(own, counted)
    torch.manual_seed(3)
    result, events = run(function, x, state, dtype_error=5e-2)
    (event,) = only(events, Calibration)
    assert event.state == "measured"
    assert 0 < event.before < 2e-2  # the same was dropped in every precision
    torch.testing.assert_close(x, own)
    torch.testing.assert_close(state, counted)
    torch.testing.assert_close(result, expected, rtol=5e-2, atol=5e-2)
    after = torch.rand(4)
    torch.manual_seed(3)
    with torch.no_grad():
        function(own, counted)
    assert torch.equal(after, torch.rand(4))


def test_running_statistics_are_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
    x, norm = torch.randn(2, 3, 8, 8), model[1]
    assert isinstance(norm, nn.BatchNorm2d)
    _, events = run(model, x, dtype_error=1e-6)
    assert only(events, Calibration)[0].kept == 1
    assert norm.num_batches_tracked == 1
    with torch.no_grad():
        mean = model[0](x).mean((0, 2, 3))
    torch.testing.assert_close(norm.running_mean, 0.1 * mean)


def test_operators_inside_a_checkpoint_are_kept_too() -> None:
    model, x = Cancelling(), torch.randn(64, 32, requires_grad=True)
    torch.compiler.reset()
    known = len(current().events())
    function = torch.compile(
        lambda x: checkpoint(model, x, use_reentrant=False) * 2, backend="omni", options={**EAGER, "dtype_error": 1e-2}
    )
    function(x).sum().backward()
    events = current().events()[known:]
    (event,) = only(events, Calibration)
    assert (event.lowered, event.kept) == (5, 1)
    assert len(only(events, Rewrite)) == 4
    assert x.grad is not None


def test_symbolic_sizes_take_those_of_the_first_call() -> None:
    model = Cancelling()
    function = torch.compile(model, backend="omni", dynamic=True, options={**EAGER, "dtype_error": 1e-2})
    known = len(current().events())
    with torch.no_grad():
        function(torch.randn(64, 32))
        function(torch.randn(48, 32))
    (event,) = only(current().events()[known:], Calibration)
    assert (event.state, event.kept) == ("measured", 1)


def test_autocast_and_casts_are_widened_in_the_reference() -> None:
    model = nn.Linear(16, 16)

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ x
        return model(y.float()) + model(x)

    _, events = run(function, torch.randn(16, 16), dtype_error=1e-4)
    (event,) = only(events, Calibration)
    assert event.wide > 1e-4  # what the user computes in bfloat16 is an error of the graph as it is written


def test_it_is_known_the_second_time() -> None:
    model, x = Cancelling(), torch.randn(64, 32)
    _, first = run(model, x, dtype_error=1e-2)
    calibrate.clear()  # as another process would find it
    _, second = run(model, x, dtype_error=1e-2)
    (event,) = only(second, Calibration)
    assert (event.state, event.runs) == ("known", 0)
    assert kept(second) == kept(first)
    _, third = run(model, x, dtype_error=1e-2, verdicts="forget")
    assert only(third, Calibration)[0].state == "measured"
    assert kept(third) == kept(first)
    _, fourth = run(model, x, dtype_error=2e-2)
    assert only(fourth, Calibration)[0].state == "measured"


def test_it_is_deterministic() -> None:
    model, x = Cancelling(), torch.randn(64, 32)
    found = [run(model, x, dtype_error=4e-3, verdicts="off")[1] for _ in range(2)]
    assert not (folder() / calibrate.CACHE).exists()
    assert {only(events, Calibration)[0].state for events in found} == {"measured"}
    assert kept(found[0]) == kept(found[1])
    assert [only(events, Calibration)[0].after for events in found].count(only(found[0], Calibration)[0].after) == 2


def test_a_damaged_file_is_replaced() -> None:
    model, x = Cancelling(), torch.randn(64, 32)
    run(model, x, dtype_error=1e-2)
    calibrate.clear()
    (path,) = (folder() / calibrate.CACHE).glob("*.json")
    path.write_text('{"schema": 1}')
    _, events = run(model, x, dtype_error=1e-2)
    (event,) = only(events, Calibration)
    assert event.state == "measured"
    assert "is of another version; it was calibrated afresh" in event.note
    assert calibrate.STORE.read(path.stem)[0].kept


class AssumesMask(Pass):
    """Assumes that the mask of a `masked_fill` is full, and makes nothing of it."""

    name = "assumes_mask"

    def applies(self, module: GraphModule, context: PassContext) -> bool:
        return context.speculate

    def run(self, module: GraphModule, context: PassContext) -> PassResult:
        (node,) = (n for n in module.graph.nodes if op_name(n) == "Tensor.masked_fill")
        (mask,) = node.args[1].args
        assert context.root is not None
        found = assumption(context.root, mask, sentence="the mask is full", saves="nothing")
        assert isinstance(found, Assumption)
        context.assume(found)
        return PassResult(module, False)


def test_a_variant_that_is_built_later_was_calibrated_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "PIPELINE", (AssumesMask(), DtypePass()))
    model = nn.Linear(4, 4)

    def function(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(x).masked_fill(~(mask[:, None] != 0), -1.0).cumsum(-1)

    compiled = torch.compile(function, backend="omni", options={**EAGER, "dtype_error": 1e-6, "verdicts": "off"})
    known, x = len(current().events()), torch.randn(3, 4)
    with torch.no_grad():
        for mask in (torch.ones(3, dtype=torch.long), torch.tensor([1, 1, 0])):
            torch.testing.assert_close(compiled(x, mask), function(x, mask))
    found = only(current().events()[known:], Calibration)
    assert [event.state for event in found] == ["measured", "measured"]
    assert found[1].graph == f"{found[0].graph}:general"


PROGRAM = """
import json, sys, torch
sys.path[:0] = sys.argv[1:]
from test_calibrate import Cancelling, kept, only, run
from omnicomp.timeline import Calibration
torch.manual_seed(0)
model, x = Cancelling(), torch.randn(64, 32)
_, events = run(model, x, dtype_error=1e-2)
(event,) = only(events, Calibration)
print(json.dumps([event.state, event.before, event.after, kept(events)]))
"""


def test_another_process_knows_it() -> None:
    folders = (Path(__file__).parent, Path(__file__).parents[2] / "support")
    made = [python("-c", PROGRAM, *folders, fresh=fresh, check=True) for fresh in (False, True)]
    first, second = (json.loads(done.stdout.splitlines()[-1]) for done in made)
    assert first[0] == "measured"
    assert second == ["known", *first[1:]]


def test_a_sample_takes_the_place_of_the_inputs() -> None:
    model = Cancelling()
    seen: list[str] = []

    def sample(names, inputs):
        seen.extend(names)
        return [torch.zeros_like(v) if v.shape == (64, 32) else v for v in inputs]

    # Zeros leave only the biases, which round once.
    _, events = run(model, torch.randn(64, 32), dtype_error=1e-2, dtype_sample=sample)
    assert only(events, Calibration)[0].state == "measured"
    assert seen
    _, events = run(model, torch.randn(64, 32), dtype_error=1e-2, dtype_sample=lambda names, inputs: inputs[1:])
    (event,) = only(events, Calibration)
    assert event.state == "refused"
    assert event.reason is not None
    assert "dtype_sample gave" in event.reason.sentence
    assert len(kept(events)) == event.lowered == 5
    assert not only(events, Rewrite)


def test_another_sample_is_measured_anew() -> None:
    def times(factor):
        return lambda names, inputs: [v * factor if v.shape == (8, 32) else v for v in inputs]

    model, x = nn.Linear(32, 32, bias=False), torch.randn(8, 32)

    def state(sample) -> str:
        _, events = run(model, x, dtype_error=1e-1, dtype_sample=sample)
        return only(events, Calibration)[0].state

    assert [state(times(1.0)), state(times(1.0)), state(times(2.0))] == ["measured", "known", "measured"]
    assert state(lambda names, inputs: [v + 0 for v in inputs]) == "measured"
    assert state(lambda names, inputs: [v + 1 for v in inputs]) == "measured"


def _search(harm: dict[int, float], count: int, bound: float):
    sites = {(0, f"n{i}"): "bfloat16" for i in range(count)}
    runs = 0

    def measure(wide):
        nonlocal runs
        runs += 1
        return sum(harm.get(int(name[1:]), 1e-5) for _, name in sites if (0, name) not in wide)

    found = search(sites, bound, measure=measure, wide=lambda: 0.0, local=dict)
    return [name for _, name, _, _ in found.kept], runs


@pytest.mark.parametrize("count", [2, 30, 500])
def test_the_search_finds_the_worst_in_few_runs(count: int) -> None:
    harmful = {0: 0.5, count - 1: 0.4}
    names, runs = _search(harmful, count, 0.1)
    assert set(names) == {"n0", f"n{count - 1}"}
    assert runs <= 51 + count.bit_length()


def test_the_search_keeps_the_most_harmful_first() -> None:
    names, _ = _search({3: 0.3, 5: 0.2, 7: 0.1}, 10, 0.15)
    assert names == ["n3", "n5"]
