"""Kernels are linked against names: the loader finds torch's symbols in what the process has."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor import cpp_builder

from omnicomp._torch.inductor import libraries, linking

pytestmark = [
    pytest.mark.inductor,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere libraries are linked in another way"),
]


def test_a_library_without_symbols_is_needed_and_torchs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMNICOMP_CACHE_DIR", str(tmp_path / "a folder"))
    compiler = cpp_builder.get_cpp_compiler()
    source, made = tmp_path / "code.c", tmp_path / "code.so"
    source.write_text(
        'extern int at_parallel(void) __asm__("_ZN2at15get_num_threadsEv"); int threads() { return at_parallel(); }'
    )
    line = linking.linked("-ltorch_cpu -lm ", compiler)
    assert "-l:libtorch_cpu.so" in line
    assert "-lm" in line
    assert "-ltorch_cpu" not in line.split()
    subprocess.run(f"{compiler} -x c -shared -fPIC {source} -o {made} {line}", shell=True, check=True)
    assert ctypes.CDLL(str(made)).threads() == torch.get_num_threads()
    # Without torch in the process it is not found.
    alone = subprocess.run([sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(made)!r})"], capture_output=True)
    assert b"libtorch_cpu.so" in alone.stderr


def test_what_cannot_be_named_is_linked_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMNICOMP_CACHE_DIR", str(tmp_path))
    assert linking.linked("-lgomp ", "g++") == "-lgomp "
    assert linking.linked("-ltorch_cpu ", "no compiler at all") == "-ltorch_cpu "
    monkeypatch.setattr(linking, "_LIBRARIES", ("torch_of_another_name",))
    assert linking.linked("-ltorch_of_another_name ", "g++") == "-ltorch_of_another_name "


def test_kernels_are_linked_so_and_also_when_the_folder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    libraries.watch()
    monkeypatch.setenv("OMNICOMP_CACHE_DIR", str(tmp_path))
    seen: list[str] = []
    run = cpp_builder.run_compile_cmd
    monkeypatch.setattr(cpp_builder, "run_compile_cmd", lambda line, cwd: seen.append(line) or run(line, cwd=cwd))
    with torch._inductor.utils.fresh_inductor_cache():
        for factor in (2.0, 3.0):
            shutil.rmtree(tmp_path / "linking", ignore_errors=True)
            compiled = torch.compile(lambda x, factor=factor: (x.exp() * factor).sum(-1), backend="omni")
            x = torch.randn(8, 16)
            torch.testing.assert_close(compiled(x), (x.exp() * factor).sum(-1))
    assert sum("-l:libtorch_cpu.so" in line for line in seen) == 2
