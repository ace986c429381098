import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from processes import python

import omnicomp.devices.sim
from omnicomp.devices.sim import build
from omnicomp.errors import DeviceError


def test_enabling_twice_is_enabling_once(sim: Any) -> None:
    assert omnicomp.devices.sim.enable() is omnicomp.devices.sim.enable() is sim
    assert omnicomp.devices.sim.is_enabled()
    assert omnicomp.devices.sim.unavailable_reason() == ""


def test_what_is_built_depends_on_sources_and_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = build.build_folder()
    monkeypatch.setenv("CXX", "cc")
    assert build.build_folder() != first
    monkeypatch.delenv("CXX")
    (tmp_path / "kernel.cpp").write_text("// another")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build.build_folder() != first
    assert build.build_folder().is_relative_to(tmp_path.parent.parent)


def test_a_missing_compiler_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMNICOMP_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(build.sysconfig, "get_path", lambda name: "")
    with pytest.raises(DeviceError, match=r"no C\+\+ compiler: 'no-such-c.*no ninja.*omnicomp\[sim\]"):
        build.load_driver()


def test_a_compiler_s_error_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "all.cpp").write_text("#error this can't be compiled")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setenv("OMNICOMP_CACHE_DIR", str(tmp_path / "cache"))
    lines: list[str] = []
    with pytest.raises(DeviceError, match="this can't be compiled"):
        build.load_driver(lines.append)
    assert len(lines) == 1
    assert "building the simulated device" in lines[0]
    assert not build.is_built()


def test_a_folder_that_can_t_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("OMNICOMP_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(DeviceError, match="OMNICOMP_CACHE_DIR"):
        build.load_driver()


def test_two_processes_build_one_driver(tmp_path: Path) -> None:
    """On a driver of one small file, so that it takes seconds."""
    source = (
        "#include <Python.h>\n#define J(a, b) a##b\n#define I(n) J(PyInit_, n)\nstatic PyModuleDef d{"
        'PyModuleDef_HEAD_INIT, "d", nullptr, -1, nullptr};\n'
        "PyMODINIT_FUNC I(TORCH_EXTENSION_NAME)() { return PyModule_Create(&d); }\n"
    )
    (tmp_path / "all.cpp").write_text(source)
    program = (
        "import sys; from pathlib import Path; from omnicomp.devices.sim import build; build.SOURCES = "
        "Path(sys.argv[1]);"
        "build.load_driver(lambda line: print(line)); print(build.is_built())"
    )
    environment = {"OMNICOMP_CACHE_DIR": str(tmp_path / "cache")}
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(python, "-c", program, tmp_path, environment=environment, check=True) for _ in range(2)]
    said = [each.result().stdout.splitlines() for each in made]
    assert sorted(len(lines) for lines in said) == [1, 3]  # one of them says what it builds and how long it took


def test_importing_builds_nothing_and_another_device_from_outside_keeps_its_place(
    in_process: Any, tmp_path: Path
) -> None:
    program = (
        "import torch, omnicomp.devices.sim, omnicomp.devices; print(omnicomp.devices.sim.is_enabled(), hasattr(torch, "
        "'sim'))\n"
        "torch.utils.rename_privateuse1_backend('other')\n"
        "try: omnicomp.devices.sim.enable(inductor=False)\nexcept Exception as error: print(type(error).__name__, "
        "error)"
    )
    result = in_process(program, OMNICOMP_CACHE_DIR=str(tmp_path / "none"))
    first, second = result.stdout.splitlines()
    assert first == "False False"
    assert second.startswith("DeviceError")
    assert "'other'" in second
    assert not (tmp_path / "none").exists()


def test_settings_come_from_the_environment(in_process: Any) -> None:
    program = (
        "import omnicomp.devices.sim; s = omnicomp.devices.sim.enable(inductor=False); "
        "print(s.device_count(), s.mem_get_info(3))"
    )
    result = in_process(program, OMNICOMP_SIM_DEVICES="4", OMNICOMP_SIM_MEMORY=str(2**24))
    assert result.stdout.strip() == f"4 ({2**24}, {2**24})", result.stderr
    wrong = in_process(program, OMNICOMP_SIM_DEVICES="many")
    assert "OMNICOMP_SIM_DEVICES has to be a number, not many" in wrong.stderr


def _torch_s_build(monkeypatch: pytest.MonkeyPatch, folder: Path, act: Callable[[], object]) -> None:
    """Let torch "build" the driver at once, and do something meanwhile."""

    def load(**_: Any) -> None:
        act()
        build._library(folder).write_bytes(b"")

    monkeypatch.setattr("torch.utils.cpp_extension.load", load)
    monkeypatch.setattr(build, "missing", lambda: ())


def test_what_another_thread_sets_of_the_environment_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SET_MEANWHILE", raising=False)
    before = os.environ["PATH"]
    _torch_s_build(monkeypatch, tmp_path, lambda: monkeypatch.setenv("SET_MEANWHILE", "1"))
    build._build(tmp_path, lambda _: None)
    assert os.environ["SET_MEANWHILE"] == "1"
    assert os.environ["PATH"] == before


@pytest.mark.parametrize("name", ["", "driver"])
def test_a_driver_that_others_may_have_written_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setenv("OMNICOMP_CACHE_DIR", str(tmp_path))
    folder = build.build_folder()
    folder.mkdir(parents=True)
    (folder / "complete").touch()
    build._library(folder).touch()
    (build._library(folder) if name else folder).chmod(0o777)
    with pytest.raises(DeviceError, match=r"other users may write .* not trusted"):
        build.load_driver()
