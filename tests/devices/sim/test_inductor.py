"""Inductor's C++ kernels run on the simulated device's own memory, by plain Inductor and by omni."""

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code

import omnicomp
from omnicomp._torch.devices.codegen import python_wrapper
from omnicomp.devices import resolve_device
from omnicomp.devices.inductor import DeviceCppScheduling, DeviceSpec, register, registration
from omnicomp.devices.sim import inductor

pytestmark = pytest.mark.inductor
PROGRAM = Path(__file__).parents[2] / "support" / "sim_programs.py"
COPIES = ("h2d_copies", "h2d_bytes", "d2h_copies", "d2h_bytes", "fallbacks")


def small(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sum(0) + 1


def test_generated_kernels_run_where_the_host_may_not_touch_the_memory(in_process: Any) -> None:
    program = (
        f"import runpy, sys; sys.argv = ['', 'inductor', 'omni']; runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"
    )
    result = in_process(program, OMNICOMP_SIM_PROTECT="1", PYTHONPATH=str(PROGRAM.parents[2]))
    assert result.returncode == 0, result.stderr[-4000:]
    reports = json.loads(result.stdout.splitlines()[-1])
    assert list(reports) == ["inductor", "omni"]
    for report in reports.values():
        ran = set(report.pop("ran", ["inductor"]))
        assert ran == {"inductor"}
        assert {name: case["error"] for name, case in report.items() if case["error"] > 1e-5} == {}
        for name in ("pointwise", "indexed", "second"):
            counted = report[name]["counters"]
            assert counted["launches"] > 0, name
            assert not set(counted) & set(COPIES), (name, counted)
        assert (report["pointwise"]["device"], report["second"]["device"]) == ("sim:0", "sim:1")
        assert report["branches"]["counters"]["launches"] > 0
        assert report["dynamic"]["frames"] == 1
        assert report["training"]["counters"]["launches"] > 0


@pytest.mark.slow
def test_without_the_launch_the_memory_is_out_of_reach(in_process: Any) -> None:
    program = (
        "import torch, omnicomp.devices.sim; from omnicomp.devices.inductor import DeviceSpec, register;"
        "omnicomp.devices.sim.enable(inductor=False); register(DeviceSpec(name='sim', scheduling='cpp'));"
        "print(torch.compile(lambda x: (x * 2).sum(0) + 1)(torch.ones(8, 8, device='sim')).sum().item())"
    )
    protected = in_process(program, OMNICOMP_SIM_PROTECT="1")
    assert protected.returncode == -signal.SIGSEGV
    assert "the host touched the device's memory" in protected.stderr


def test_the_code_launches_kernels_and_allocates_on_the_planned_device(sim: Any) -> None:
    x = torch.randn(8, 8)
    found, (code,) = run_and_get_code(torch.compile(small), x.to("sim:1"))
    torch.testing.assert_close(found.cpu(), small(x))
    body = code[code.index("def call(") :]
    assert "torch.sim.launch(cpp_fused" in body
    assert "device='sim:1'" in body
    assert ".cpu(" not in body
    assert "copy" not in body


def test_the_contract_has_inductor_once_it_is_registered(sim: Any) -> None:
    assert [piece for piece in registration("sim") if not piece.ok] == []
    device = resolve_device("sim")
    assert "inductor" in device.lowerings
    assert device.capabilities().inductor


def test_omni_runs_it_with_inductor_on_the_device(sim: Any) -> None:
    x = torch.randn(8, 8)
    found = torch.compile(small, backend="omni")(x.to("sim"))
    torch.testing.assert_close(found.cpu(), small(x))
    (graph,) = omnicomp.audit().graphs
    assert graph.device == "sim"
    assert [row.ran for row in omnicomp.audit().subgraphs] == ["inductor"]


class Asks(CustomGraphPass):
    """Notes a setting while a graph is compiled."""

    def __init__(self, noted: list[bool]) -> None:
        self.noted = noted

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.noted.append(torch._inductor.config.loop_ordering_after_fusion)

    def uuid(self) -> str:
        return "asks"


def test_settings_of_the_device_hold_for_its_graphs_alone(sim: Any) -> None:
    noted: list[bool] = []
    settings = {"post_grad_custom_post_pass": Asks(noted), "force_disable_caches": True}
    assert torch._inductor.config.loop_ordering_after_fusion
    with torch._inductor.config.patch(settings):
        torch.compile(small)(torch.ones(8, 8))
        torch.compile(small)(torch.ones(8, 8, device="sim"))
        torch.compile(small)(torch.ones(9, 9))
    assert noted == [True, False, True]
    assert torch._inductor.config.loop_ordering_after_fusion


def test_an_edited_wrapper_is_compiled_anew(sim: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    seen: list[dict[str, int]] = []

    def compile_with(launch: str) -> None:
        torch.compiler.reset()
        counters.clear()
        register(DeviceSpec(name="sim", scheduling="cpp", wrapper=python_wrapper("sim", launch)))
        torch.compile(small)(torch.ones(8, 8, device="sim"))
        found = {**counters["inductor"], **counters["aot_autograd"]}
        seen.append({name: count for name, count in found.items() if name.endswith(("cache_hit", "cache_miss"))})

    try:
        for launch in ("torch.sim.launch", "torch.sim.launch", "(torch.sim.launch)"):  # other code, the same call
            compile_with(launch)
    finally:
        inductor.enable()
    hit, miss = ({f"{cache}_cache_{verdict}": 1 for cache in ("fxgraph", "autograd")} for verdict in ("hit", "miss"))
    assert seen == [miss, hit, miss]


def test_a_function_chooses_what_generates_kernels(sim: Any) -> None:
    made: list[bool] = []

    def scheduling(scheduler: Any) -> DeviceCppScheduling:
        made.append(scheduler is not None)
        return DeviceCppScheduling(scheduler)

    register(dataclasses.replace(inductor.SPEC, scheduling=scheduling))
    try:
        x = torch.randn(8, 8)
        compiled = torch.compile(small, backend="omni", options={"on_error": "raise"})
        torch.testing.assert_close(compiled(x.to("sim")).cpu(), small(x))
    finally:
        inductor.enable()
    assert True in made
    assert {row.ran for row in omnicomp.audit().subgraphs} == {"inductor"}


NO_CPP = "the device 'sim' has no C\\+\\+ wrapper, so neither cpp_wrapper nor AOTInductor can be used"


def test_the_cpp_wrapper_is_an_error_that_says_so(sim: Any) -> None:
    compiled = torch.compile(small, options={"cpp_wrapper": True})
    with pytest.raises(Exception, match=NO_CPP):
        compiled(torch.ones(8, 8, device="sim"))


def test_aot_inductor_is_an_error_that_says_so(sim: Any) -> None:
    module = torch.nn.Linear(8, 8).to("sim")
    exported = torch.export.export(module, (torch.ones(8, 8, device="sim"),))
    with pytest.raises(Exception, match=NO_CPP):
        torch._inductor.aoti_compile_and_package(exported)


def test_omni_runs_eager_where_a_cpp_wrapper_is_asked_for(sim: Any) -> None:
    x = torch.randn(8, 8)
    found = torch.compile(small, backend="omni", options={"cpp_wrapper": True})(x.to("sim"))
    torch.testing.assert_close(found.cpu(), small(x))
    rows = omnicomp.audit().subgraphs
    assert [row.ran for row in rows] == ["eager"]
    assert any("has no C++ wrapper" in str(attempt.reason) for row in rows for attempt in row.attempts)
