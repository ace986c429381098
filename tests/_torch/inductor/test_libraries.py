"""Libraries of Inductor's are written under another name, and there as a whole or not at all."""

from pathlib import Path

import pytest
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
