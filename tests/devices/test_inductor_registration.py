"""A device is registered with Inductor from one declaration; what is missing is named, all at once."""

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from registered import NAME, device_module
from registered import clean as clean
from torch._inductor.codecache import compiled_fx_graph_hash
from torch._inductor.codegen import common
from torch._inductor.codegen.cpp_wrapper_gpu import CppWrapperGpu
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen, SubgraphPythonWrapperCodegen

from omnicomp._torch.devices.codegen import DeviceCppScheduling, DeviceWrapper, python_wrapper
from omnicomp._torch.inductor.versions import compilers
from omnicomp.devices.inductor import DeviceSpec, LaunchLimits, RegistrationError, register, registration
from omnicomp.devices.inductor.report import CPP_MEMBERS, Piece
from omnicomp.errors import DeviceError

pytestmark = pytest.mark.usefixtures("clean")
PROPERTIES = {"multi_processor_count": 4}


def spec(**others: Any) -> DeviceSpec:
    declared: dict[str, Any] = {
        "name": NAME,
        "module": device_module(),
        "scheduling": "cpp",
        "properties": PROPERTIES,
        **others,
    }
    return DeviceSpec(**declared)


def problems(**others: Any) -> tuple[str, ...]:
    before = dict(common.device_codegens)
    with pytest.raises(RegistrationError) as caught:
        register(spec(**others))
    assert common.device_codegens == before  # it looked before it registered
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return caught.value.problems


def test_one_declaration_registers_every_piece() -> None:
    lacking = {piece.name for piece in registration(NAME) if not piece.ok}
    assert lacking == {
        *("device module", "device count", "op overrides", "scheduling", "python wrapper", "c++ wrapper", "fx wrapper"),
        *("interface", "device properties"),
    }
    register(spec())
    assert [piece for piece in registration(NAME) if not piece.ok] == []
    assert getattr(torch, NAME).device_count() == 1


@pytest.mark.parametrize(
    ("piece", "registry", "key"),
    [
        ("op overrides", "device_op_overrides_dict", NAME),
        ("scheduling", "device_codegens", NAME),
        ("cache key", "custom_backend_passes", NAME),
    ],
)
def test_the_report_names_the_piece_that_went_missing(piece: str, registry: str, key: str) -> None:
    register(spec())
    del getattr(common, registry)[key]
    lacking = [each for each in registration(NAME) if not each.ok]
    assert piece in {each.name for each in lacking}
    assert all(each.lever for each in lacking)
    if piece != "scheduling":
        assert len(lacking) == 1


def test_torchs_functions_that_choose_triton_need_it() -> None:
    def look(name: str) -> Piece:
        return next(piece for piece in registration(name) if piece.name == "triton backend")

    there = importlib.util.find_spec("triton") is not None
    for name in ("cuda", "xpu", "mtia"):
        assert look(name).found != "not needed"
        assert there or look(name).lever.startswith("install triton")
    assert look("cpu").found == look("mps").found == "not needed"
    register(spec())
    common.device_codegens[NAME].scheduling = lambda scheduler: TritonScheduling(scheduler)
    assert look(NAME).found != "not needed"
    (wrong,) = (piece for piece in registration(NAME) if piece.name == "scheduling")
    assert not wrong.ok
    assert "torch asserts for maia that it is a class" in wrong.found


def test_a_module_with_functions_where_inductor_takes_classes() -> None:
    found = problems(module=device_module(PythonWrapperCodegen=lambda: PythonWrapperCodegen))
    assert len(found) == 1
    assert "PythonWrapperCodegen must be a class, got function" in found[0]


def test_everything_that_is_wrong_is_named_at_once() -> None:
    module = device_module()
    del module.synchronize
    found = problems(
        module=module,
        scheduling=lambda scheduler: {},
        wrapper=lambda: PythonWrapperCodegen,
        fx_wrapper=dict,
        op_overrides={"synchronise": "pass"},
        config={"loop_reindexing_after_fuson": False},
        launch=LaunchLimits(max_grid=0, num_warps=3),
    )
    text = "\n".join(found)
    assert len(found) == 9
    for expected in (
        "torch.maia has no synchronize()",
        "with None to ask for features; it returns a dict",
        "wrapper must be a class, got function",
        "fx_wrapper: dict is no subclass",
        "has no 'synchronise'; did you mean",
        "no setting 'loop_reindexing_after_fuson'",
        "launch: limits apply to Triton's kernels",
        "launch.max_grid is a positive number, not 0",
        "launch.num_warps is a power of two",
    ):
        assert expected in text, expected


def test_a_function_that_chooses_what_generates_kernels() -> None:
    class Other(DeviceCppScheduling):
        pass

    chosen: list[type] = [DeviceCppScheduling]
    register(spec(scheduling=lambda scheduler: chosen[0](scheduler)))
    found = {piece.name: piece.found for piece in registration(NAME) if piece.ok}
    assert found["scheduling"].startswith("omnicomp._torch.devices.codegen.DeviceCppScheduling, made by ")
    assert found["triton backend"] == "not needed"
    assert len(found) == len(registration(NAME))
    keys: list[Any] = []
    for each in (DeviceCppScheduling, Other, DeviceCppScheduling):
        chosen[0] = each
        assert isinstance(common.device_codegens[NAME].scheduling(None), each)
        keys.append(common.custom_backend_passes[NAME].uuid())  # type: ignore[union-attr]
    assert keys[0] == keys[2] != keys[1]


def test_a_function_that_is_no_choice() -> None:
    def asks(scheduler: Any) -> Any:
        return scheduler.get_backend()

    (found,) = problems(scheduling=asks)
    assert "with None it raises AttributeError: 'NoneType'" in found
    (found,) = problems(scheduling=lambda scheduler: DeviceCppScheduling(scheduler), triton_backend="hip")
    assert found.startswith("triton_backend: it becomes part of a class")


def test_a_wrapper_that_inductor_would_never_make() -> None:
    mine = type("Mine", (PythonWrapperCodegen,), {})
    (found,) = problems(wrapper=mine)
    assert "Mine has no create() of its own" in found


def test_a_gpus_cpp_wrapper_needs_its_texts() -> None:
    mine = type("Mine", (CppWrapperGpu,), {"create": classmethod(lambda cls, *args: cls())})
    found = problems(cpp_wrapper=mine, op_overrides={"cpp_kernel_type": "void*"})
    lacking = {problem.split()[1] for problem in found}
    assert lacking == set(CPP_MEMBERS) - {"cpp_kernel_type"}


def test_triton_needs_a_stream() -> None:
    (found,) = problems(scheduling="triton")
    assert "import_get_raw_stream_as is missing" in found


def test_an_unknown_device_type_says_what_to_do() -> None:
    with pytest.raises(RegistrationError, match=r"torch knows no device type 'nowhere'"):
        register(DeviceSpec(name="nowhere", scheduling="cpp"))


def test_texts_of_a_device() -> None:
    register(spec(op_overrides={"set_device": "use({device_idx})", "synchronize": lambda: "wait()"}))
    overrides = common.get_device_op_overrides(NAME)
    assert isinstance(overrides, common.DeviceOpOverrides)
    assert (overrides.set_device(3), overrides.synchronize()) == ("use(3)", "wait()")
    scope: dict[str, Any] = {}
    exec(overrides.import_get_raw_stream_as("get_raw_stream"), scope)
    assert scope["get_raw_stream"](1) == 0


def test_a_text_that_was_not_given_is_an_error_by_its_name() -> None:
    register(spec())
    overrides = common.get_device_op_overrides(NAME)
    members = [name for name in vars(common.DeviceOpOverrides) if not name.startswith("_")]
    assert set(members) <= set(dir(overrides))
    with pytest.raises(DeviceError, match="needs the text cpp_stream_guard of the device 'maia'"):
        overrides.cpp_stream_guard()


def test_without_a_cpp_wrapper_the_error_says_so() -> None:
    register(spec())
    wrapper: Any = common.get_wrapper_codegen_for_device(NAME, cpp_wrapper=True)
    with pytest.raises(DeviceError, match="neither cpp_wrapper nor AOTInductor"):
        wrapper.create(False, None, None)


def test_a_wrapper_of_ones_own_writes_subgraphs_too() -> None:
    mine = type("Mine", (DeviceWrapper,), {"note": "mine"})
    register(spec(wrapper=mine, kernel_call="torch.maia.launch"))
    wrapper: Any = common.get_wrapper_codegen_for_device(NAME)
    for each in (wrapper, wrapper.subgraph):
        assert (each.note, each.launch, each.device_type) == ("mine", "torch.maia.launch", NAME)
    assert issubclass(wrapper.subgraph, SubgraphPythonWrapperCodegen)
    assert wrapper.supports_caching


def test_cuda_and_cpu_are_as_before() -> None:
    common.get_device_op_overrides("cpu")
    before = {name: common.device_codegens[name] for name in ("cpu", "cuda", "xpu")}
    texts = {name: common.device_op_overrides_dict[name] for name in ("cpu", "cuda", "xpu")}
    register(spec())
    assert {name: common.device_codegens[name] for name in before} == before
    assert {name: common.device_op_overrides_dict[name] for name in texts} == texts


# ---- cache keys ------------------------------------------------------------------------------------------------------


def uuid(**others: Any) -> str:
    if hasattr(torch, NAME):
        others = {"module": None, **others}
    register(spec(**others))
    return str(common.custom_backend_passes[NAME].uuid())  # type: ignore[union-attr]


def test_what_generates_code_is_in_the_key() -> None:
    first = uuid()
    assert uuid() == first
    others = [
        uuid(kernel_call="torch.maia.launch"),
        uuid(op_overrides={"synchronize": "wait()"}),
        uuid(config={"max_fusion_size": 3}),
        uuid(custom_pass=lambda graph: None),
        uuid(wrapper=python_wrapper(NAME, "elsewhere")),
    ]
    assert len({first, *others}) == 6


def test_an_edited_class_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    source = (
        "from omnicomp._torch.devices.codegen import DeviceWrapper\n\n\nclass Mine(DeviceWrapper):\n    launch = {!r}\n"
    )

    def written(text: str) -> Any:
        (tmp_path / "mine.py").write_text(text)
        module = types.ModuleType("mine")
        module.__file__ = str(tmp_path / "mine.py")
        exec(compile(text, module.__file__, "exec"), vars(module))
        monkeypatch.setitem(sys.modules, "mine", module)
        return module.Mine

    first = uuid(wrapper=written(source.format("one")))
    assert uuid(wrapper=written(source.format("one"))) == first
    assert uuid(wrapper=written(source.format("two"))) != first
    helper = f"{source.format('one')}\n\ndef helper():\n    return 1\n"
    assert uuid(wrapper=written(helper)) != first


def test_inductors_key_has_it() -> None:
    graph = torch.fx.symbolic_trace(lambda x: x + 1)

    def key() -> str:
        return compiled_fx_graph_hash(graph, [torch.ones(2)], {}, [])[0]

    register(spec())
    first = key()
    assert key() == first
    register(spec(module=None, kernel_call="torch.maia.launch"))
    assert key() != first


def test_verdicts_on_inductor_know_the_devices_code() -> None:
    register(spec())
    first = compilers(NAME)
    assert compilers(NAME) == first
    register(spec(module=None, kernel_call="torch.maia.launch"))
    assert compilers(NAME) != first
