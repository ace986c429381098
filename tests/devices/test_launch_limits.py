"""Launch limits in the source that Inductor generates for a device; tests/gpu/test_launch_limits.py launches it."""

import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.config
from registered import NAME, OTHER, device_module
from registered import clean as clean
from torch._inductor.codegen.triton import TritonKernel, TritonScheduling
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_heuristics
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from omnicomp._torch.devices.launch_limits import LIMITS, limited, limited_grid, rounded
from omnicomp._torch.inductor import cpp
from omnicomp.devices.inductor import DeviceSpec, LaunchLimits, register

NEEDED = (0, 1, 47, 48, 49, 95, 96, 97, 480, 481)
BY_48 = {0: 0, 1: 1, 47: 47, 48: 48, 49: 96, 95: 96, 96: 96, 97: 144, 480: 480, 481: 528}


def test_small_grids_stay_and_large_ones_are_rounded_up() -> None:
    assert {programs: rounded(programs, 48, 48) for programs in NEEDED} == BY_48
    assert [rounded(programs, None, 8) for programs in (0, 1, 8, 9)] == [0, 8, 8, 16]
    assert [rounded(programs, None, None) for programs in NEEDED] == list(NEEDED)


def test_without_a_multiple_a_large_grid_is_refused() -> None:
    assert rounded(48, 48, None) == 48
    with pytest.raises(RuntimeError, match=r"needs 49 programs in one dimension.* at most 48"):
        rounded(49, 48, None)


def grid(inner: Any, mode: str = "python", **limits: int | None) -> Any:
    meta = {LIMITS: {"max_grid": None, "grid_multiple": None, **limits}}
    made: Any = limited_grid(inner)(inductor_meta=meta, mode=mode)  # type: ignore[arg-type]
    made.generate({"XBLOCK": 64, "YBLOCK": 1})
    return made


def test_each_dimension_of_the_grid_is_rounded() -> None:
    made = grid(triton_heuristics.Grid2D, max_grid=48, grid_multiple=48)
    for programs in NEEDED:
        assert made.eval_slow({"xnumel": programs * 64, "ynumel": programs}) == (BY_48[programs], BY_48[programs], 1)
    overflow = grid(triton_heuristics.Grid2DWithYZOverflow, max_grid=48, grid_multiple=48)
    x, y, z = overflow.eval_slow({"xnumel": 64, "ynumel": 70000})
    assert (x, y % 48, z) == (1, 0, 2)
    assert y * z >= 70000


def test_a_grid_that_is_too_large_is_refused_at_its_launch() -> None:
    made = grid(triton_heuristics.Grid1D, max_grid=48)
    assert made.eval_slow({"xnumel": 48 * 64}) == (48, 1, 1)
    with pytest.raises(RuntimeError, match="49 programs"):
        made.eval_slow({"xnumel": 48 * 64 + 1})


@pytest.mark.inductor
def test_the_same_in_cpp() -> None:
    made = grid(triton_heuristics.Grid1D, "cpp", max_grid=48, grid_multiple=48)
    body = " ".join(made.prefix)
    strict = grid(triton_heuristics.Grid1D, "cpp", max_grid=48)
    library = cpp.load(
        "#include <cstdint>\n#include <stdexcept>\n"
        f'extern "C" int64_t rounded(int64_t xnumel) {{ {body} return {made.x_grid}; }}\n'
        f'extern "C" int64_t strict(int64_t xnumel) {{ try {{ {" ".join(strict.prefix)} return {strict.x_grid}; }} '
        "catch (const std::runtime_error&) { return -1; } }\n"
    )
    assert {programs: library.rounded(programs * 64) for programs in NEEDED} == BY_48
    assert [library.strict(programs * 64) for programs in (48, 49)] == [48, -1]


@pytest.mark.parametrize("name", ["CooperativeReductionGrid", "SplitScanGrid", "MixOrderReductionGrid"])
def test_grids_that_count_their_programs_are_refused(name: str) -> None:
    with pytest.raises(NotImplementedError, match=name):
        limited_grid(getattr(triton_heuristics, name))


def test_a_loaded_kernel_has_the_warps_and_the_target() -> None:
    configs = [types.SimpleNamespace(kwargs={"XBLOCK": 128}, num_warps=warps, num_stages=1) for warps in (4, 8)]
    kernel = types.SimpleNamespace(
        configs=configs,
        inductor_meta={"coordinate_descent_tuning": True},
        triton_meta={"device_type": NAME},
        device_props=triton_heuristics.DeviceProperties(type=NAME, index=0, multi_processor_count=1, cc=90),
    )
    with mock.patch.object(triton_heuristics, "unique_configs", lambda found: found[:1]):
        assert limited(num_warps=1, target="cuda")(kernel) is kernel
    assert [config.num_warps for config in kernel.configs] == [1]
    assert (kernel.device_props.type, kernel.triton_meta["device_type"]) == ("cuda", "cuda")
    assert kernel.inductor_meta == {}


# ---- generated source ------------------------------------------------------------------------------------------------


class _Generated(Exception):
    pass


def source(function: Callable[..., Any], *shape: int, device: str) -> str:
    """What Inductor generates for a function of one tensor; nothing is compiled or run."""
    found: list[str] = []

    def save(code: str) -> None:
        found.append(code)
        raise _Generated

    with FakeTensorMode():
        x = torch.empty(shape, device=f"{device}:0")
        graph = make_fx(function)(x)
        with (
            mock.patch("torch.utils._triton.triton_hash_with_backend", return_value=""),
            mock.patch.object(GraphLowering, "save_output_code", staticmethod(save)),
            torch._inductor.config.patch(force_disable_caches=True),
            pytest.raises(Exception, match="_Generated"),
        ):
            compile_fx_inner(graph, [x])
    return found[0]


def declared(name: str, **others: Any) -> DeviceSpec:
    stream = {"import_get_raw_stream_as": "from streams import current as {name}"}
    properties = {"multi_processor_count": 24, "cc": 1}
    module = None if hasattr(torch, name) else device_module()
    return DeviceSpec(
        name=name, module=module, scheduling="triton", op_overrides=stream, properties=properties, **others
    )


@pytest.fixture
def devices(clean: None) -> None:
    """One device with limits, and one without."""
    register(declared(NAME, launch=LaunchLimits(max_grid=48, grid_multiple=48, num_warps=1, warp_size=64)))
    register(declared(OTHER))


def pointwise(x: torch.Tensor) -> Any:
    return ((x + 1).relu(),)


def reduction(x: torch.Tensor) -> Any:
    return (x.sum(-1),)


@pytest.mark.usefixtures("devices")
def test_the_kernels_of_the_device_carry_their_limits() -> None:
    code = source(pointwise, 4096 * 97, device=NAME)
    assert "@omnicomp._torch.devices.launch_limits.limited(num_warps=1" in code
    assert "'grid_type': 'OmnicompGrid1D'" in code
    assert "'omnicomp_limits': {'max_grid': 48, 'grid_multiple': 48}" in code
    assert "warp_size=64" in code
    assert "device='maia:0'" in code
    assert "from streams import current as get_raw_stream" in code


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    ("function", "shape"), [(pointwise, (4096 * 64,)), (reduction, (4096, 64)), (reduction, (4096, 9999))]
)
def test_programs_beyond_the_work_are_masked_off(function: Any, shape: tuple[int, ...]) -> None:
    assert "xmask = xindex < xnumel" in source(function, *shape, device=NAME)
    assert "xmask = xindex < xnumel" not in source(function, *shape, device=OTHER)  # the blocks divide it evenly


@pytest.mark.usefixtures("devices")
def test_another_device_of_the_same_process_is_launched_as_ever() -> None:
    code = source(pointwise, 4096 * 97, device=OTHER)
    assert "'grid_type': 'Grid1D'" in code
    assert "omnicomp" not in code
    assert TritonScheduling.kernel_type is TritonKernel
    assert LIMITS not in TritonKernel.inductor_meta_common.__code__.co_consts
