"""A library that crashes, hangs or ends the process does so in another process, and the model is right."""

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_engines as fake
import pytest
import torch

import omnicomp
from omnicomp.lowerings.engines import Clustering, Subgraph, trial, trial_worker
from omnicomp.lowerings.engines.trial_process import NotStartedError, Worker, worker
from omnicomp.timeline import Ran, Reason, Retreat

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(trial.VARIABLE)
    trial.forget()
    yield
    trial.forget()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each task of the worker took."""
    found: list[float] = []
    ask = Worker.ask

    def timed(self: Worker, request: dict[str, Any], seconds: float) -> Any:
        start = time.perf_counter()
        try:
            return ask(self, request, seconds)
        finally:
            found.append(time.perf_counter() - start)

    monkeypatch.setattr(Worker, "ask", timed)
    return found


def function(x: torch.Tensor) -> torch.Tensor:
    return (torch.exp(x) + torch.sin(x * 2)).relu()


def check(name: str, **options: Any) -> tuple[list[Reason], list[Ran]]:
    """Compile and call; what retreated, and what ran."""
    torch.compiler.reset()
    omnicomp.timeline.clear()
    options = {"lowerings": [name, "eager"], **options}
    x = torch.randn(5, 6)
    assert torch.equal(torch.compile(function, backend="omni", options=options)(x), function(x))
    events = omnicomp.timeline.events()
    reasons = [event.reason for event in events if isinstance(event, Retreat)]
    return reasons, [event for event in events if isinstance(event, Ran)]


def verdicts() -> list[dict[str, Any]]:
    folder = Path(os.environ["OMNICOMP_CACHE_DIR"]) / "engine_trials"
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def test_one_that_is_fine_is_tried_once(monkeypatch: pytest.MonkeyPatch, asked: list[float]) -> None:
    fake.installed(monkeypatch, fake.Native)
    reasons, (ran,) = check("fake_native")
    assert reasons == []
    assert "from compiled, tried;" in ran.evidence
    assert [verdict["outcome"] for verdict in verdicts()] == ["fine"]

    fake.installed(monkeypatch, fake.Native)
    _, (ran,) = check("fake_native")
    assert "from compiled, tried before;" in ran.evidence
    trial.forget()  # as another process would find it
    fake.installed(monkeypatch, fake.Native)
    _, (ran,) = check("fake_native")
    assert "tried before" in ran.evidence
    assert len(asked) == 1


@pytest.mark.parametrize(("owner", "end"), [(fake.Aborts, "SIGABRT"), (fake.Segfaults, "SIGSEGV")])
def test_a_crash_costs_its_operator_alone(
    monkeypatch: pytest.MonkeyPatch, asked: list[float], owner: type[fake.Fake], end: str
) -> None:
    fake.installed(monkeypatch, owner)
    (reason,), ran = check(owner.name)
    assert reason.code == "engine_crashed"
    assert reason.by == owner.name
    assert f"the process that tried it died of {end}" in reason.sentence
    assert reason.node == "sin (aten.sin.default)"
    assert "test_trial.py" in reason.source
    assert [event.lowering for event in ran] == [owner.name, "eager", owner.name]
    (graph,) = omnicomp.audit().graphs
    assert any("died of" in str(placement.chain) for part in graph.parts for placement in part.declined)

    found, count = [verdict["outcome"] for verdict in verdicts()], len(asked)
    assert {"fine", "crashed"} == set(found)
    trial.forget()
    fake.installed(monkeypatch, owner)
    again, _ = check(owner.name)
    assert [each.code for each in again] == ["engine_crashed"]
    assert len(asked) == count  # all of it was known


def test_a_hang_is_ended_and_all_of_the_subgraph_goes_on(monkeypatch: pytest.MonkeyPatch, asked: list[float]) -> None:
    fake.installed(monkeypatch, fake.Hangs)
    (reason,), ran = check("fake_hangs", engines={"fake_hangs": {"trial_seconds": 1}})
    assert reason.code == "engine_crashed"
    assert "the process that tried it did not answer within 1 s" in reason.sentence
    assert [event.lowering for event in ran] == ["eager"]
    assert [verdict["outcome"] for verdict in verdicts()] == ["hung"]
    assert len(asked) == 1
    assert worker.pid is None


def test_one_that_ends_the_process_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    fake.installed(monkeypatch, fake.Exits)
    reasons, ran = check("fake_exits", max_builds=2)
    assert "ended with the exit status 3: fatal: no license" in reasons[0].sentence
    assert [event.lowering for event in ran] == ["eager"]


def test_an_end_from_outside_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may have been out of memory."""
    fake.installed(monkeypatch, fake.Killed)
    reasons, _ = check("fake_killed", max_builds=1)
    assert "died of SIGKILL" in reasons[0].sentence
    assert verdicts() == []


def test_what_raises_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake.installed(monkeypatch, fake.Picky)
    reasons, _ = check("fake_picky", max_builds=1)
    assert reasons[0].code == "cut_out"
    assert "ValueError: not this graph" in reasons[0].sentence
    assert engine.builds  # type: ignore[attr-defined] - it came to compile here, too
    assert verdicts() == []


def test_it_can_be_left_out(monkeypatch: pytest.MonkeyPatch, asked: list[float]) -> None:
    fake.installed(monkeypatch, fake.Native)
    _, (ran,) = check("fake_native", engines={"fake_native": {"trial": False}})
    assert "tried" not in ran.evidence
    monkeypatch.setenv(trial.VARIABLE, "0")
    fake.installed(monkeypatch, fake.Native)
    check("fake_native")
    monkeypatch.delenv(trial.VARIABLE)
    fake.installed(monkeypatch, fake.Training)  # is not native
    check("fake_training")
    assert asked == []


def test_verdicts_may_be_forgotten_or_off(monkeypatch: pytest.MonkeyPatch, asked: list[float]) -> None:
    fake.installed(monkeypatch, fake.Native)
    check("fake_native", verdicts="off")
    assert verdicts() == []
    for count in (2, 3):
        trial.forget()
        fake.installed(monkeypatch, fake.Native)
        check("fake_native", verdicts="forget")
        assert len(asked) == count
    assert len(verdicts()) == 1


def test_a_damaged_verdict_is_found_out_again(
    monkeypatch: pytest.MonkeyPatch, asked: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    fake.installed(monkeypatch, fake.Native)
    check("fake_native")
    (path,) = (Path(os.environ["OMNICOMP_CACHE_DIR"]) / "engine_trials").glob("*.json")
    for text in ("", "{}", '{"outcome": "great", "sentence": ""}', "[]"):
        path.write_text(text)
        trial.forget()
        fake.installed(monkeypatch, fake.Native)
        check("fake_native")
        assert "can't be read, so it is tried again" in caplog.text
    assert len(asked) == 5
    assert [verdict["outcome"] for verdict in verdicts()] == ["fine"]


def test_another_version_or_option_is_tried_again(monkeypatch: pytest.MonkeyPatch, asked: list[float]) -> None:
    fake.installed(monkeypatch, fake.Native)
    check("fake_native")
    check("fake_native", engines={"fake_native": {"workspace_bytes": 1000}})
    monkeypatch.setattr(fake.Native, "version", lambda self: "2.0")
    check("fake_native")
    assert len(asked) == 3


def test_a_class_that_nobody_can_import_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, asked: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    fake.installed(monkeypatch, fake.Native)
    monkeypatch.setattr(fake.Native, "__module__", "__main__")
    _, (ran,) = check("fake_native")
    assert "not tried: Native can't be imported by another process" in ran.evidence
    assert "is not tried apart" in caplog.text
    assert asked == []


def test_a_worker_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    worker.close()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    fake.installed(monkeypatch, fake.Native)
    _, (ran,) = check("fake_native")
    assert "not tried: /nowhere/python can't be started" in ran.evidence
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(NotStartedError, match="it says nothing"):
        Worker().ask({}, 1)


def test_a_worker_that_left_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    fake.installed(monkeypatch, fake.Native)
    check("fake_native")
    first = worker.pid
    assert first is not None
    os.killpg(first, 9)
    time.sleep(0.2)
    check("fake_native", engines={"fake_native": {"workspace_bytes": 1000}})
    assert worker.pid not in (None, first)


def test_weights_and_dynamic_sizes(monkeypatch: pytest.MonkeyPatch, asked: list[float]) -> None:
    """Weights don't travel, so that other weights need no other trial; a class of sizes does."""
    fake.installed(monkeypatch, fake.Native)
    options = {"lowerings": ["fake_native", "eager"], "on_error": "raise"}
    model = torch.nn.Linear(6, 3).eval()
    call = torch.compile(model, backend="omni", options=options)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(4, 6)
            torch.testing.assert_close(call(x), model(x))
            model.weight.add_(1)
    assert len(asked) == 1
    call = torch.compile(function, backend="omni", dynamic=True, options=options)
    for size in (2, 3, 2):
        x = torch.randn(size, 6)
        torch.testing.assert_close(call(x), function(x))
    assert len(asked) == 3


def test_symbolic_sizes_are_tried_as_they_were_seen(monkeypatch: pytest.MonkeyPatch, asked: list[float]) -> None:
    fake.installed(monkeypatch, fake.Native)
    options: dict[str, Any] = {"lowerings": ["fake_native", "eager"], "engines": {"fake_native": {"dynamic": "any"}}}

    def sized(x: torch.Tensor) -> torch.Tensor:
        return function(x) * x.shape[0]

    call = torch.compile(sized, backend="omni", dynamic=True, options=options)
    for size in (3, 5):
        x = torch.randn(size, 6)
        torch.testing.assert_close(call(x), sized(x))
    (ran,) = [event for event in omnicomp.timeline.events() if isinstance(event, Ran)]
    assert "from compiled, tried;" in ran.evidence
    assert len(asked) == 1


def test_a_crash_in_a_class_of_sizes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fake.installed(monkeypatch, fake.Aborts)
    options = {"lowerings": ["fake_aborts", "eager"]}
    call, x = torch.compile(function, backend="omni", dynamic=True, options=options), torch.randn(4, 6)
    torch.testing.assert_close(call(x), function(x))
    (retreat,) = [event for event in omnicomp.timeline.events() if isinstance(event, Retreat)]
    assert retreat.reason.code == "engine_crashed"
    assert (retreat.source_lowering, retreat.target_lowering) == ("fake_aborts", "eager")


# The worker.


def request(module: torch.fx.GraphModule, owner: type[fake.Fake] = fake.Native) -> dict[str, Any]:
    return trial._request(owner(), Subgraph(module=module, options=Clustering()))


def traced(function: Any, *inputs: Any) -> torch.fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="fake")(*inputs)


def test_integers_are_values_that_eager_takes() -> None:
    """Indices that are in range, and divisors that are not zero."""
    weight, index = torch.randn(1, 4), torch.zeros(3, dtype=torch.int64)
    looked_up = traced(lambda w, i: (aten.embedding.default(w, i),), weight, index)
    assert trial_worker.run(request(looked_up)) == ("fine", "")
    divided = traced(lambda x, y: (aten.remainder.Tensor(x, y),), index, index)
    assert trial_worker.run(request(divided)) == ("fine", "")
    both = traced(lambda w, x: (aten.embedding.default(w, aten.remainder.Tensor(x, x) + 1),), weight, index)
    assert trial_worker.run(request(both)) == ("untried", "eager raises for all inputs that were made up")


@pytest.mark.parametrize(
    "like",
    [
        torch.randn(4, 6).t(),
        torch.randn(0, 3),
        torch.randn(()),
        torch.randn(4, 1).expand(4, 5),
        torch.ones(3, dtype=torch.bool),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.float8_e4m3fn),
        torch.ones(3, dtype=torch.uint8),
    ],
    ids=lambda value: f"{value.dtype}{list(value.shape)}",
)
def test_a_tensor_that_is_made_up(like: torch.Tensor) -> None:
    made = trial_worker.made_up(trial._described(like), 1)
    assert (made.shape, made.stride(), made.dtype) == (like.shape, like.stride(), like.dtype)
    if made.dtype.is_floating_point:
        assert bool(((made.float() >= 0.1) & (made.float() <= 1)).all())
    assert torch.equal(made, trial_worker.made_up(trial._described(like), 1))


def test_what_takes_too_much_memory_is_not_tried() -> None:
    with torch._subclasses.FakeTensorMode():
        module = traced(lambda x: (x + 1,), torch.empty(2**40))
    with pytest.raises(omnicomp.errors.EngineError, match=r"it would take \d+ MiB, and \d+ are free"):
        request(module)


def test_the_worker_leaves_with_its_parent(tmp_path: Path) -> None:
    """Also where the parent is killed, and the worker hangs."""
    code = textwrap.dedent(
        """
        import sys, time
        import fake_engines as fake, pytest, torch
        from omnicomp.lowerings.engines.trial_process import worker
        patch = pytest.MonkeyPatch()
        fake.installed(patch, fake.Hangs)
        import threading
        def work():
            while worker.pid is None:
                time.sleep(0.05)
            time.sleep(6)
            print(worker.pid, flush=True)
        threading.Thread(target=work, daemon=True).start()
        options = {"lowerings": ["fake_hangs", "eager"]}
        torch.compile(lambda x: x.sin() + 1, backend="omni", options=options)(torch.ones(3))
        """
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMNICOMP_CACHE_DIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        group = int(parent.stdout.readline())
        os.killpg(group, 0)
        parent.kill()
    for _ in range(600):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("the worker is still there")
