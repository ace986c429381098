import dataclasses
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import python

from omnicomp._torch.dynamo import registrations
from omnicomp.cli import doctor
from omnicomp.cli.doctor import Check, examine
from omnicomp.devices.cpu import CpuDevice
from omnicomp.devices.cuda import CudaDevice
from omnicomp.devices.inductor import Piece, registration
from omnicomp.devices.sim.build import build_folder

Command = Callable[..., tuple[int, str, str]]
# The folder that the simulated device is built in, before a test has one of its own.
SHARED = {"OMNICOMP_CACHE_DIR": str(build_folder().parents[1])}


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_cpu(omnicomp: Command) -> None:
    code, out, err = omnicomp("doctor", "--device", "cpu", "--json")
    data = json.loads(out)
    checks = {check["name"]: check for check in data["checks"]}
    assert err == ""
    assert code == (0 if data["ok"] else 1)
    assert checks["device cpu"]["status"] == "ok"
    assert "attention kernels: flash" in checks["device cpu"]["found"]
    assert checks["inductor on cpu"]["status"] == "ok"
    assert checks["torch"]["found"] == torch.__version__
    assert checks["engine toy"]["status"] == "ok"
    assert "device cuda" not in checks


def test_text_has_one_line_a_check(omnicomp: Command) -> None:
    _, out, _ = omnicomp("doctor")
    lines = [line for line in out.splitlines() if not line.startswith(" ")]
    assert all(line.split()[0] in ("ok", "note", "missing") for line in lines)
    assert all("->" in line for line in out.splitlines() if line.startswith(" "))


def test_an_unknown_device_is_one_sentence(omnicomp: Command) -> None:
    code, out, err = omnicomp("doctor", "--device", "cdua")
    assert (code, out) == (2, "")
    assert err.startswith("omnicomp: error: unknown device 'cdua'; known devices are cpu, cuda, ")
    assert err.endswith('; did you mean "cuda"?\n')


def test_a_device_that_is_not_there_is_missing_only_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert by_name(examine())["device cuda"].status == "note"
    check = by_name(examine("cuda"))["device cuda"]
    assert check.status == "missing"
    assert check.todo


def test_one_device_is_reported_piece_by_piece() -> None:
    checks = by_name(examine("cpu"))
    pieces = [name.removeprefix("cpu ") for name in checks if name.startswith("cpu ")]
    assert pieces == [piece.name for piece in registration("cpu")]
    assert checks["cpu op overrides"].status == "ok"
    assert not any(name.startswith("cpu ") for name in by_name(examine()))


def test_each_missing_piece_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "device count": ("there is no device", "see that the driver finds a device"),
        "op overrides": ("no DeviceOpOverrides is registered", "register it with op_overrides"),
        "triton backend": ("the package triton is not installed", "install triton"),
    }
    pieces = tuple(Piece(name=name, ok=False, found=what, lever=lever) for name, (what, lever) in found.items())
    monkeypatch.setattr("omnicomp.devices.inductor.registration", lambda name: pieces)

    def seen() -> dict[str, tuple[str, str, str]]:
        checks = by_name(examine("cpu"))
        return {
            name: (checks[f"cpu {name}"].status, checks[f"cpu {name}"].found, checks[f"cpu {name}"].todo)
            for name in found
        }

    assert seen() == {name: ("missing", *texts) for name, texts in found.items()}
    # Where nothing compiles for it, Inductor's pieces are no fault.
    can = dataclasses.replace(CpuDevice().capabilities(), inductor=False)
    monkeypatch.setattr(CpuDevice, "capabilities", lambda self: can)
    assert seen() == {name: ("missing" if name == "device count" else "note", *texts) for name, texts in found.items()}


def test_capabilities_that_raise_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: CpuDevice) -> None:
        raise AttributeError("no attribute 'lowerngs'")

    monkeypatch.setattr(CpuDevice, "capabilities", broken)
    found = by_name(examine("cpu"))["device cpu"]
    assert found.status == "missing"
    assert found.found == "CpuDevice.capabilities() raises AttributeError: no attribute 'lowerngs'"


def test_a_device_that_torch_knows_and_omnicomp_does_not() -> None:
    checks = by_name(examine("xla"))
    assert checks["device xla"].status == "missing"
    assert checks["device xla"].found == "torch knows it, and omnicomp has no contract for it"
    assert "omnicomp.devices" in checks["device xla"].todo
    assert checks["xla device type"].status == "ok"
    assert checks["xla device module"].status == "missing"


def test_cpp_kernels_need_a_compiler_and_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whatever device they are."""
    can = dataclasses.replace(CpuDevice().capabilities(), inductor=True, compiler="C++")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(CudaDevice, "is_available", lambda self: True)
    monkeypatch.setattr(CudaDevice, "capabilities", lambda self: can)
    assert not doctor._uses(("cuda",), triton=True)
    assert doctor._uses(("cuda",), triton=False)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registrations, "cpp_compiler", lambda: "")
    assert by_name(examine("cpu"))["C++ compiler"].status == "missing"
    monkeypatch.setattr(registrations, "cpp_compiler", lambda: "no-such-compiler")
    check = by_name(examine("cpu"))["C++ compiler"]
    assert check.status == "missing"
    assert "does not run" in check.found


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registrations, "cpp_compiler", lambda: "false")
    assert by_name(examine("cpu"))["C++ compiler"].status == "missing"


def test_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    assert by_name(examine("cpu"))["torch"].status == "missing"


def test_an_unwritable_timeline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, omnicomp: Command) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OMNICOMP_TIMELINE", str(tmp_path / "file" / "t.jsonl"))
    code, out, _ = omnicomp("doctor", "--device", "cpu")
    assert code == 1
    assert "missing timeline" in out
    monkeypatch.setenv("OMNICOMP_TIMELINE", str(tmp_path / "t-%p.jsonl"))
    assert by_name(examine("cpu"))["timeline"].status == "ok"
    assert {path.name for path in tmp_path.iterdir()} - {"omnicomp"} == {"file"}, "beside the cache"


@pytest.mark.parametrize("name", ["pipe", "a\0b", "~nobody-of-that-name/t.jsonl"])
def test_a_timeline_that_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    path = name if name.startswith("~") else f"{tmp_path}/{name}"
    monkeypatch.setattr(os, "environ", {**os.environ, "OMNICOMP_TIMELINE": path})  # which refuses a NUL by itself
    (check,) = doctor._timeline()
    assert check.status == "missing"
    assert check.found.isprintable()


def test_a_cache_that_others_may_write_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setattr(doctor, "cache_dir", lambda: str(tmp_path))
    found = [check for check in doctor._cache() if check.status == "note"]
    assert [f"other users may write to {tmp_path}" in check.found for check in found] == [True]


def test_an_unwritable_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(doctor, "cache_dir", lambda: str(tmp_path / "file" / "cache"))
    assert by_name(examine("cpu"))["cache"].status == "missing"


def test_a_second_package_that_claims_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("omni", "other:omni", "torch_dynamo_backends")
    original = importlib.metadata.entry_points

    def claimed(**params: str) -> list[importlib.metadata.EntryPoint]:
        found = list(original(**params))
        return [*found, entry] if params.get("group") == "torch_dynamo_backends" else found

    monkeypatch.setattr(importlib.metadata, "entry_points", claimed)
    check = by_name(examine("cpu"))['backend "omni"']
    assert check.status == "note"
    assert "other:omni" in check.found


def test_a_second_copy_of_the_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import omnicomp

    (tmp_path / "passes").symlink_to(Path(omnicomp.__file__).parent / "passes")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    checks = by_name(list(doctor._clash()))
    assert list(checks) == ["module passes"]
    monkeypatch.setattr(sys, "path", [])
    assert list(doctor._clash()) == []


def test_what_inductor_knows_of_devices() -> None:
    found = registrations.inductor_registrations("cpu")
    assert list(found) == ["scheduling", "wrapper", "op overrides", "interface"]
    assert all(found.values())
    assert not any(registrations.inductor_registrations("no_such_device").values())


def test_backends() -> None:
    assert "inductor" in registrations.backend_names()
    assert registrations.default_backend() == "inductor"


def test_python_m() -> None:
    assert python("-m", "omnicomp", "--version", fresh=True, check=True).stdout.startswith("omnicomp ")


@pytest.mark.slow  # the next test is its twin, without a process and a build
def test_the_simulated_device_is_enabled_to_be_checked() -> None:
    done = python("-m", "omnicomp", "doctor", "--device", "sim", "--json", environment=SHARED)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["device sim"]["status"] == "ok", done.stderr
    assert {check["status"] for name, check in checks.items() if name.startswith("sim ")} == {"ok"}
    assert checks["sim device module"]["found"] == "torch.sim"
    assert done.returncode == (0 if json.loads(done.stdout)["ok"] else 1)


def test_the_simulated_device_is_enabled_for_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    enabled: list[str] = []
    monkeypatch.setattr("omnicomp.devices.sim.enable", lambda: enabled.append("sim"))
    monkeypatch.setattr("omnicomp.devices.sim.build.is_built", lambda: False)
    monkeypatch.setattr("omnicomp.devices.sim.build.missing", lambda: ["a C++ compiler"])
    for device in (None, "cpu", "sim"):
        doctor.enable_simulated(device)
    assert not enabled, "nothing is built where it can't be"
    monkeypatch.setattr("omnicomp.devices.sim.build.missing", lambda: [])
    doctor.enable_simulated("sim:1")
    assert enabled == ["sim"]
