"""Libraries of Inductor's are written under another name, and there as a whole or not at all."""

from pathlib import Path

import pytest
from torch._inductor import codecache
from torch._inductor.cpp_builder import CppBuilder, CppOptions
from torch._inductor.exc import CppCompileError

from omnicomp._torch.inductor import libraries


@pytest.mark.parametrize("right", [True, False])
def test_a_library_is_there_as_a_whole_or_not_at_all(
    right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries.watch()
    source = tmp_path / "code.cpp"
    source.write_text("int one() { return 1; }" if right else "no code")
    builder = CppBuilder("code", str(source), CppOptions(compile_only=True), str(tmp_path))
    command = builder.get_command_line()
    if right:
        builder.build()
    else:
        with pytest.raises(CppCompileError):
            builder.build()
    assert Path(builder.get_target_file_path()).exists() == right
    assert not list(tmp_path.glob("*.tmp"))
    assert builder.get_command_line() == command


@pytest.mark.inductor
def test_a_library_that_was_built_here_is_loaded_before_a_compiler_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries.watch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    code = 'extern "C" int kernel() { return 7; }'
    name = libraries.identity(codecache.CppCodeCache, code, None, "cpu", ())
    load = codecache.CppCodeCache.load_async(code)
    assert libraries.INDEX.read(name)[0] is None  # it may be half written
    assert load().kernel() == 7
    assert libraries.INDEX.read(name)[0]
    codecache.CppCodeCache.cache_clear()
    monkeypatch.setattr(codecache, "pick_vec_isa", None)
    monkeypatch.setattr(codecache, "CppBuilder", None)
    assert codecache.CppCodeCache.load(code).kernel() == 7
    (tmp_path / str(libraries.INDEX.read(name)[0])).unlink()
    with pytest.raises(TypeError):
        codecache.CppCodeCache.load(code + " ")
    assert libraries._known(codecache.CppCodeCache, name) is None
