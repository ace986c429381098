"""Packages: what is packaged computes what the model does, and what can't be is named before anything is built."""

import ast
import ctypes
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from processes import ROOT, python
from torch import Tensor, nn
from torch.fx import Interpreter

import omnicomp
from omnicomp._torch.inductor import aoti
from omnicomp.backend import package
from omnicomp.errors import SaveError
from omnicomp.timeline import Option, Speculation, current

pytestmark = pytest.mark.usefixtures("own_overrides")

EXAMPLE = ROOT / "examples" / "package"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = (self.linear(x) @ x.transpose(-1, -2) / 4).masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ torch.erfinv(x.tanh() * 0.5)


X, MASK = torch.ones(2, 8, 16), torch.ones(2, 8, 8, dtype=torch.bool)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that AOTInductor would build, and no build."""
    seen: list[Any] = []

    def build(module: Any, args: Any, kwargs: Any, options: Any, told: Any) -> list[Any]:
        seen.append((module, options))
        return []

    monkeypatch.setattr(aoti, "build", build)
    monkeypatch.setattr(aoti, "write", lambda path, files, texts: path.write_text(str(texts)))
    return seen


def test_attention_is_rewritten_as_for_torch_compile(built: list[Any], tmp_path: Path) -> None:
    model = Attention()
    path = omnicomp.package(model, (X, MASK), tmp_path / "model.pt2")
    [(module, _)] = built
    assert len(omnicomp.audit().sites.fused) == 1
    targets = {str(getattr(node.target, "__name__", node.target)) for node in module.graph.nodes}
    assert "scaled_dot_product_attention" in targets
    torch.testing.assert_close(module(X, MASK.tril()), model(X, MASK.tril()))
    assert "fused" in path.read_text()


def test_nothing_is_assumed_of_masks_and_that_is_said(built: list[Any], tmp_path: Path) -> None:
    class Padded(nn.Module):
        def forward(self, q: Tensor, mask: Tensor) -> Tensor:
            square = torch.ones(512, 512, dtype=torch.bool).tril() & mask[:, None, None, :].bool()
            return (q @ q.mT).masked_fill(~square, torch.finfo(q.dtype).min).softmax(-1) @ q

    omnicomp.package(Padded(), (torch.ones(2, 4, 512, 64), torch.ones(2, 512)), tmp_path / "model.pt2")
    told = [event for event in current() if isinstance(event, Speculation)]
    assert [(event.state, event.reason.by) for event in told if event.reason] == [("stopped", "package")]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lowerings": ["toy", "inductor"]}, "the engine 'toy'"),
        ({"lowerings": {"aten.erfinv": "eager"}}, "placement rules"),
        ({"lowerings": "measure"}, "lowerings='measure'"),
        ({"lowerings": ["eager"]}, "a graph without Inductor"),
        ({"verify": "first"}, "verify='first'"),
    ],
)
def test_an_option_that_has_no_room_in_a_package_is_named(
    options: dict[str, Any], named: str, built: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "omnicomp.backend.package.engines_of", lambda policy: [n for n in policy.lowerings if n == "toy"]
    )
    monkeypatch.setattr("omnicomp.options.policy.engine_names", lambda: ("toy",))
    with pytest.raises(SaveError, match=named):
        omnicomp.package(Attention(), (X, MASK), tmp_path / "model.pt2", options=options)
    assert not built


class Compiled(Exception):
    """AOTInductor was asked to build a graph."""


def part_of(monkeypatch: pytest.MonkeyPatch, model: nn.Module, path: Path, *args: Tensor, **more: Any) -> Any:
    """The graph that AOTInductor would get."""

    def built(part: Any, *_: Any, **__: Any) -> Any:
        raise Compiled(part)

    monkeypatch.setattr(aoti, "compile_fx_inner", built)
    with pytest.raises(SaveError) as caught:
        omnicomp.package(model, args, path / "model.pt2", **more)
    if not isinstance(caught.value.__cause__, Compiled):
        raise caught.value
    return caught.value.__cause__.args[0]


def called(part: Any) -> set[str]:
    return {str(node.target) for node in part.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_override_made_of_aten_operators_becomes_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dynamic: bool
) -> None:
    @omnicomp.override(op=torch.ops.aten.erfinv.default, name="my_erfinv")
    def my_erfinv(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        y.copy_(torch.special.ndtri((x + 1) / 2))
        return y.mul_(0.5**0.5)

    shapes = ({0: torch.export.Dim("batch", min=2, max=64)}, {0: torch.export.Dim("batch", min=2, max=64)})
    x = torch.rand(3, 8, 16) - 0.5
    part = part_of(
        monkeypatch, Attention(), tmp_path, x, MASK[:1].expand(3, 8, 8), dynamic_shapes=shapes if dynamic else None
    )
    assert "aten.erfinv.default" not in called(part)
    assert not any("omnicomp" in name for name in called(part))
    assert {"aten.special_ndtri.default", "aten.mul.Tensor"} <= called(part)
    model = Attention()
    if not dynamic:
        assert Interpreter(part).run(x, MASK[:1].expand(3, 8, 8))[0].shape == model(x, MASK[:1].expand(3, 8, 8)).shape


def test_the_override_of_a_module_becomes_what_it_is_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @omnicomp.override(module="linear", name="my_linear", reference=nn.functional.linear)
    def my_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return x @ weight.t() + bias

    model = Attention().eval()
    part = part_of(monkeypatch, model, tmp_path, X, MASK)
    assert not any("omnicomp" in name for name in called(part))
    torch.testing.assert_close(Interpreter(part).run(X, MASK)[0], model(X, MASK))


class Int8(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 128, (1024, 1024), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(1024, dtype=torch.bfloat16) * 0.01)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype)) * self.scale


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_override_of_omnis_own_becomes_aten_operators_for_fixed_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dynamic: bool
) -> None:
    model, x = Int8(), torch.randn(4, 1024, dtype=torch.bfloat16)
    shapes = ({0: torch.export.Dim("rows", min=2, max=64)},) if dynamic else None
    part = part_of(monkeypatch, model, tmp_path, x, dynamic_shapes=shapes)
    assert not any("omnicomp" in name for name in called(part))
    assert ("aten._weight_int8pack_mm.default" in called(part)) != dynamic
    told = [event.effective for event in current() if isinstance(event, Option)]
    assert told == (["without int8_linear"] if dynamic else [])
    if not dynamic:
        torch.testing.assert_close(Interpreter(part).run(x)[0], model(x), rtol=2**-6, atol=2**-6)


def test_an_override_of_omnis_own_that_a_package_can_not_call_is_told_and_becomes_its_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = nn.Module()
    router.forward = lambda x: tuple(torch.topk(x.softmax(-1), 4))  # type: ignore[method-assign]
    part = part_of(monkeypatch, router, tmp_path, torch.rand(4096, 64))
    assert "aten.topk.default" in called(part)
    assert not any("omnicomp" in name for name in called(part))
    [told] = [event for event in current() if isinstance(event, Option)]
    assert "softmax_topk" in told.reason.sentence


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (lambda x: torch.from_numpy(x.numpy()), ""),
        (lambda x: x * 2 if x.sum() > 0 else x, "can't be traced"),
        (lambda x: ctypes.string_at(x.data_ptr(), 4) and x, "the memory of a tensor"),
        (lambda x: x + torch.tensor([1.0]), "makes a tensor of Python's numbers"),
    ],
)
def test_an_override_in_python_is_named_before_anything_is_built(
    body: Any, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @omnicomp.override(op=torch.ops.aten.erfinv.default, name="my_erfinv")
    def my_erfinv(x: Tensor) -> Tensor:
        return body(x).clone()

    with pytest.raises(SaveError, match=rf"the override 'my_erfinv' takes .*erfinv.*{why}.*disable_overrides"):
        part_of(monkeypatch, Attention(), tmp_path, X, MASK, options={"verify": "off"})


def test_an_override_that_is_wrong_is_not_packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @omnicomp.override(op=torch.ops.aten.erfinv.default, name="my_erfinv")
    def my_erfinv(x: Tensor) -> Tensor:
        return x * 2

    with pytest.raises(SaveError, match=r"the override 'my_erfinv' is wrong at .*: .*at most"):
        part_of(monkeypatch, Attention(), tmp_path, X, MASK)


def test_operators_in_python_are_told_and_missing_ones_named_when_it_is_loaded(
    built: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @torch.library.custom_op("packaged::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    model = nn.Module()
    model.forward = lambda x: twice(x) + 1  # type: ignore[method-assign]
    monkeypatch.undo()
    part = part_of(monkeypatch, model, tmp_path, X)
    assert package._told_operators(part, resolved()) == ("packaged::twice",)
    assert any(isinstance(event, Option) and "packaged.twice" in event.reason.sentence for event in current())
    path = tmp_path / "other.pt2"
    path.write_text("")
    monkeypatch.setattr(aoti, "read_texts", lambda _: {"omnicomp_operators.txt": "packaged::twice packaged::none"})
    with pytest.raises(SaveError, match="calls packaged::none, which this process does not have"):
        omnicomp.load_package(path)


def resolved() -> Any:
    return types.SimpleNamespace(id="g0", device=types.SimpleNamespace(type="cpu"))


def test_a_model_that_export_can_not_capture_is_said_to_be_one(tmp_path: Path) -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if x.sum() > 0 else x

    with pytest.raises(SaveError, match=r"torch.export can't capture the model"):
        omnicomp.package(Branches(), (X,), tmp_path / "model.pt2")
    with pytest.raises(SaveError, match=r"ends in .pt2"):
        omnicomp.package(Branches(), (X,), tmp_path / "model")


def test_a_package_that_is_none_or_not_trusted_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(b"nothing")
    with pytest.raises(SaveError, match="can't be loaded"):
        omnicomp.load_package(path)
    with ZipFile(path, "w") as archive:
        archive.writestr("model/code.so", bytes(1000))
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)
    with pytest.raises(SaveError, match=r"model/code.so is damaged"):
        omnicomp.load_package(path)
    path.chmod(0o666)
    with pytest.raises(SaveError, match="other users may write"):
        omnicomp.load_package(path)


def test_a_processor_that_lacks_instructions_is_an_error(
    built: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "instructions", lambda: ("avx2", "vector_of_tomorrow"))
    monkeypatch.setattr(aoti, "read_texts", lambda path: ast.literal_eval(path.read_text()))
    path = omnicomp.package(torch.nn.Linear(2, 2).eval(), (torch.ones(1, 2),), tmp_path / "model.pt2")
    monkeypatch.setattr(package, "instructions", lambda: ("avx2",))
    with pytest.raises(SaveError, match="vector_of_tomorrow, and this one lacks them"):
        omnicomp.load_package(path)


def test_only_weights_that_belong_to_a_package_are_loaded_with_it(
    built: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a package that was there before are not, and without its own a package would end the process."""
    model, path = nn.Linear(2, 2).eval(), tmp_path / "model.pt2"
    got: list[dict[str, Tensor]] = []
    loaded = types.SimpleNamespace(
        get_constant_fqns=lambda: ["weight", "bias"], load_constants=lambda found, **_: got.append(found)
    )
    monkeypatch.setattr(aoti, "load", lambda *_: loaded)
    monkeypatch.setattr(aoti, "read_texts", lambda path: ast.literal_eval(path.read_text()))
    for weights in ("beside", "inside"):
        omnicomp.package(model, (torch.ones(1, 2),), path, weights=weights)
        omnicomp.load_package(path)
    [found] = got
    assert set(found) == {"weight", "bias"}
    omnicomp.package(model, (torch.ones(1, 2),), path, weights="beside")
    path.with_name("model.pt2.weights").unlink()
    with pytest.raises(SaveError, match=r"model\.pt2\.weights"):
        omnicomp.load_package(path)


def test_a_folder_that_is_not_there_is_named_before_anything_is_captured(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="is no folder"):
        omnicomp.package(nn.Linear(2, 2), (X,), tmp_path / "none" / "model.pt2")


BESIDE = """
import sys, torch, omnicomp
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).eval()
x = torch.randn(3, 8)
if sys.argv[1] == "save":
    omnicomp.package(model, (x,), sys.argv[2], weights="beside")
else:
    loaded = omnicomp.load_package(sys.argv[2])
    assert "inductor" in loaded.audit.to_text()
    with torch.no_grad(): torch.testing.assert_close(loaded(x), model(x))
    for wrong in ((x[:2],), (torch.randn(8, 3).t(),), (x, x), ()):
        try: loaded(*wrong)
        except ValueError: continue
        raise AssertionError(wrong)
    assert not torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"]
    print("equal")
"""


@pytest.mark.slow
@pytest.mark.inductor
def test_weights_beside_a_package_are_loaded_with_it_without_a_compiler(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    (tmp_path / "bin").mkdir()
    python("-c", BESIDE, "save", path, check=True)
    assert (tmp_path / "model.pt2.weights").exists()
    environment = {"PATH": str(tmp_path / "bin"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    assert "equal" in python("-c", BESIDE, "load", path, environment=environment, fresh=True, check=True).stdout


OVERRIDDEN = """
import sys, torch, omnicomp
from torch import nn
from torch.utils.cpp_extension import load_inline
SOURCE = '''
#include <torch/library.h>
#include <ATen/core/Tensor.h>
at::Tensor cubed(const at::Tensor& x) { return x.pow(3); }
TORCH_LIBRARY(packaged_in_cpp, m) { m.def("cubed(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(packaged_in_cpp, CPU, m) { m.impl("cubed", &cubed); }
'''
load_inline("packaged_in_cpp", SOURCE, is_python_module=False, no_implicit_headers=True, build_directory=sys.argv[3])
torch.library.register_fake("packaged_in_cpp::cubed")(torch.empty_like)
x = torch.rand(3, 8) - 0.5
class Model(nn.Module):
    def forward(self, x):
        return torch.ops.packaged_in_cpp.cubed(torch.erfinv(x))
if sys.argv[1] == "save":
    @omnicomp.override(op=torch.ops.aten.erfinv.default, name="my_erfinv")
    def my_erfinv(x):
        return torch.special.ndtri((x + 1) / 2) * 0.5**0.5
    omnicomp.package(Model(), (x,), sys.argv[2])
else:
    loaded = omnicomp.load_package(sys.argv[2])
    torch.testing.assert_close(loaded(x), torch.erfinv(x) ** 3)
    print("equal")
"""


@pytest.mark.slow
@pytest.mark.inductor
def test_an_operator_in_cpp_and_an_override_run_without_their_python(tmp_path: Path) -> None:
    path, folder = tmp_path / "model.pt2", tmp_path / "library"
    folder.mkdir()
    python("-c", OVERRIDDEN, "save", path, folder, check=True)
    assert "equal" in python("-c", OVERRIDDEN, "load", path, folder, fresh=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.inductor
def test_a_program_in_cpp_runs_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON", sys.executable)
    made = python(EXAMPLE / "make.py", tmp_path / "model.pt2", check=True).stdout
    assert "attention 1 of 1 site fused" in made
    subprocess.run([EXAMPLE / "build.sh", tmp_path / "run"], check=True, timeout=300)
    ran = subprocess.run([tmp_path / "run", tmp_path / "model.pt2"], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == made.split()[-1:]
