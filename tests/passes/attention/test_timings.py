"""Kernels by timing: what wins, what is kept, and what is left to rules; on the CPU, with made-up times."""

import dataclasses
import json

import pytest
import torch
import torch.nn.attention
from fusion import Backend, compiled, inputs

from omnicomp._torch.autograd.attention import flash_implementation
from omnicomp._torch.autograd.sdpa_bench import Problem
from omnicomp.options.policy import Policy
from omnicomp.passes.attention import timings
from omnicomp.passes.attention.timings import STORE, UNFUSED, Budget, Timed, decide, problem_of
from omnicomp.timeline import Rewrite

PROBLEM = Problem(
    device=torch.device("cpu"),
    dtype=torch.bfloat16,
    query=((2, 4, 128, 64), (32768, 64, 256, 1)),
    key=((2, 4, 128, 64), (32768, 64, 256, 1)),
    value=((2, 4, 128, 64), (32768, 64, 256, 1)),
)
KERNELS = ("cudnn", "flash", "efficient")


class Timer:
    """Gives made-up times; a kernel that has none fails."""

    first = spared = 0.0
    has_room_for_scores = True
    made = 0

    def __init__(self, asked=(), *, plain=10.0, code=8.0, took=0.0, clock=None, **times):
        self.times, self.plain, self.code, self.took = times, plain, code, took
        self.asked, self.clock = list(asked), clock

    def __call__(self, problem):
        self.made += 1
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def kernel(self, name):
        self.asked.append(name)
        if self.clock is not None:
            self.clock.now += self.took
            self.first = self.took
        if name not in self.times:
            raise RuntimeError(f"no {name}\nand more")
        return self.times[name]

    def unfused(self):
        self.asked.append("eager")
        return self.plain

    def generated(self):
        self.asked.append("generated")
        if self.code is None:
            raise RuntimeError("no compiler")
        return self.code


class Clock:
    now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    timings.forget()
    monkeypatch.setattr(timings, "versions", lambda device: ("a device",))
    monkeypatch.setattr(timings, "measurable", lambda device: True)
    yield
    timings.forget()


def found(timer, kernels=KERNELS, problem=PROBLEM, seconds=2.0):
    return decide(problem, kernels, Budget(seconds), timer)


def test_the_fastest_wins_and_a_failure_is_out():
    timed = found(Timer(cudnn=3.0, efficient=1.0))
    assert timed.best == "efficient"
    assert timed.times == {"cudnn": 3.0, "efficient": 1.0, UNFUSED: 10.0}
    assert timed.failed == {"flash": "RuntimeError: no flash"}
    assert str(timed) == "efficient 1 ms, cudnn 3 ms, unfused 10 ms"


@pytest.mark.parametrize(("times", "best"), [((1.0, 0.98), "cudnn"), ((1.0, 0.9), "flash"), ((0.002, 0.0015), "cudnn")])
def test_what_is_as_fast_leaves_the_first(times, best):
    assert found(Timer(cudnn=times[0], flash=times[1])).best == best


def test_unfused_code_is_compiled_only_where_it_is_near():
    far = Timer(cudnn=1.0, plain=2.5)
    assert found(far).best == "cudnn"
    assert far.asked == [*KERNELS, "eager"]
    near = Timer(cudnn=1.0, plain=1.5, code=0.8)
    timed = found(near, ("cudnn",))
    assert near.asked == ["cudnn", "eager", "generated"]
    assert (timed.best, timed.times) == (UNFUSED, {"cudnn": 1.0, UNFUSED: 0.8})


def test_unfused_code_that_cannot_be_compiled_counts_as_eagers_operators():
    timed = found(Timer(cudnn=1.0, plain=1.5, code=None))
    assert (timed.best, timed.times[UNFUSED]) == ("cudnn", 1.5)
    assert timed.failed[UNFUSED] == "RuntimeError: no compiler"
    timer = Timer(cudnn=1.0, plain=0.9)
    assert found(timer, problem=dataclasses.replace(PROBLEM, dropout=0.1)).best == UNFUSED
    assert "generated" not in timer.asked


def test_a_call_with_a_fused_kernel_is_never_unfused():
    timer = Timer(cudnn=3.0, efficient=2.0, plain=1.0)
    timed = found(timer, problem=dataclasses.replace(PROBLEM, unfused=""))
    assert timer.asked == [*KERNELS]
    assert (timed.best, timed.times) == ("efficient", {"cudnn": 3.0, "efficient": 2.0})
    decomposed = found(Timer(cudnn=3.0, plain=1.0, code=1.0), problem=dataclasses.replace(PROBLEM, unfused="call"))
    assert decomposed.best == UNFUSED, "it is another question"


def test_where_every_kernel_fails_unfused_is_left():
    assert found(Timer(plain=1.0)).best == UNFUSED
    timer = Timer()
    timer.has_room_for_scores = False
    assert found(timer, problem=dataclasses.replace(PROBLEM, training=True)) is None


def test_it_is_timed_once_in_a_process_and_once_on_a_machine(monkeypatch):
    timer = Timer(cudnn=3.0, flash=1.0)
    first = found(timer)
    assert found(timer) is first
    timings.forget()
    assert found(timer) == first, "from disk"
    assert timer.made == 1
    other = dataclasses.replace(PROBLEM, training=True)
    found(timer, problem=other)
    monkeypatch.setattr(timings, "versions", lambda device: ("another device",))
    found(timer)
    assert timer.made == 3


def test_it_is_timed_again_with_another_flash_attention(monkeypatch):
    timer = Timer(cudnn=2.0, flash=3.0)
    assert flash_implementation() == ""
    assert found(timer).best == "cudnn"
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4", raising=False)
        assert flash_implementation() == "FA4"
        timer.times["flash"] = 1.0
        assert found(timer).best == "flash"
    assert found(timer).best == "cudnn"
    assert timer.made == 2


def test_what_is_known_costs_no_budget():
    timer = Timer(cudnn=3.0, flash=1.0)
    first = found(timer)
    budget = Budget(1.0)
    budget.spend(2.0)
    assert decide(PROBLEM, KERNELS, budget, timer) == first
    assert budget.seconds == -1.0
    assert decide(dataclasses.replace(PROBLEM, training=True), KERNELS, budget, timer) is None


def test_the_first_process_that_stores_decides():
    class Slow(Timer):
        def kernel(self, name):  # meanwhile another process is through
            (key,) = {timings._key(PROBLEM, KERNELS)}
            STORE.settle(key, Timed(best="flash", times={"flash": 1.0}))
            return super().kernel(name)

    assert found(Slow(cudnn=1.0, flash=3.0)).best == "flash"


def test_a_damaged_file_is_measured_anew():
    found(Timer(cudnn=1.0))
    (path,) = STORE.folder.glob("*.json")
    for value in ("{", json.dumps({"schema": 1, "key": path.stem, "value": {"best": "cudnn", "times": {}}})):
        path.write_text(value)
        timings.forget()
        assert found(Timer(flash=1.0)).best == "flash"
    assert json.loads(path.read_text())["value"]["best"] == "flash"


def test_out_of_time(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timings, "time", clock)
    budget = Budget(2.0)
    timer = Timer(cudnn=3.0, flash=1.0, efficient=2.0, took=2.5, clock=clock)
    assert decide(PROBLEM, KERNELS, budget, timer) is None
    # The first call of the best so far is one that the program is spared.
    assert timer.asked == ["cudnn", "flash"]
    assert budget.seconds == -3.0


def test_what_time_ran_out_for_stays_by_rule_until_there_is_more_of_it(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timings, "time", clock)
    slow, quick = Timer(cudnn=3.0, flash=1.0, took=2.5, clock=clock), Timer(cudnn=3.0, flash=1.0)
    budget = Budget(2.0)
    assert decide(PROBLEM, KERNELS, budget, slow) is None
    none_left = dataclasses.replace(PROBLEM, training=True)
    assert decide(none_left, KERNELS, budget, slow) is None
    timings.forget()  # as in another process
    assert found(quick) is None
    assert found(quick, problem=none_left) is None
    assert not quick.made
    assert found(quick, seconds=3.0).best == "flash"
    assert found(quick).best == "flash"
    assert quick.made == 1


def test_without_a_kernel_there_is_nothing_to_time():
    timer = Timer(plain=1.0)
    assert found(timer, ()) is None
    assert (timer.made, list(STORE.folder.glob("*"))) == (0, [])


def test_what_each_process_does_once_costs_nothing(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timings, "time", clock)
    timer = Timer(cudnn=1.0, flash=2.0, plain=9.0, took=1.5, clock=clock)
    timer.spared = 1.0
    budget = Budget(2.0)
    assert decide(PROBLEM, ("cudnn", "flash"), budget, timer).best == "cudnn"
    assert budget.seconds == 2.0 - (2 * 1.5 - 1.5 - 1.0)


def test_the_first_call_of_the_winner_costs_nothing(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timings, "time", clock)
    budget = Budget(2.0)
    timed = decide(PROBLEM, ("cudnn",), budget, Timer(cudnn=1.0, plain=9.0, took=1.5, clock=clock))
    assert timed.best == "cudnn"
    assert budget.seconds == 2.0


def test_symbolic_sizes_count_as_the_next_power_of_two():
    def backend(module, values):
        held = [node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")]
        (x,) = (value for value in held if isinstance(value, torch.Tensor))
        same = {"is_causal": False, "grouped": False, "dropout": 0.0, "training": False}
        found.append(problem_of((x, x, x), None, x.dtype, **same).query)
        return module.forward

    found = []
    x = torch.randn(2, 100, 4, 64).transpose(1, 2)
    torch._dynamo.mark_dynamic(x, 2)
    torch.compile(lambda x: x + 1, backend=backend)(x)
    assert found == [((2, 4, 128, 64), (32768, 64, 256, 1))]


def attend(q, k, v):
    return torch.softmax(q @ k.mT, -1) @ v


@pytest.fixture
def timer(monkeypatch):
    made = Timer(flash=1.0)
    monkeypatch.setattr("omnicomp._torch.autograd.sdpa_bench.Bench", made)
    return made


def test_the_report_has_the_times(timer):
    backend = Backend(policy=Policy(check_passes=True, attention_seconds=1.0))
    compiled(lambda q, k, v: attend(attend(q, k, v), k, v), backend)(*inputs(queries=8)[:3])
    rewrites = backend.of(Rewrite)
    assert [event.timed for event in rewrites] == [{"flash": 1.0, UNFUSED: 10.0}] * 2
    assert timer.made == 1


def test_what_is_faster_unfused_is_left_alone(timer):
    timer.code = 0.5
    timer.plain = 0.7
    backend = Backend(policy=Policy(check_passes=True, attention_seconds=1.0))
    compiled(attend, backend)(*inputs()[:3])
    reason = backend.miss()
    assert (reason.code, reason.observed) == ("not_profitable", "unfused 0.5 ms, flash 1 ms")


def test_rules_decide_where_it_is_switched_off(timer):
    backend = Backend(policy=Policy(check_passes=True, attention_seconds=0.0))
    compiled(attend, backend)(*inputs()[:3])
    assert backend.rewrite().timed == {}
    assert timer.made == 0
