import pytest

from omnicomp.errors import OmnicompError
from omnicomp.testing.named import find_function


def test_functions_are_found_in_files_and_modules(tmp_path):
    (tmp_path / "mine.py").write_text("def build():\n    return 7\n")
    assert find_function(f"{tmp_path}/mine.py:build")() == 7
    assert find_function("os.path:join")("a", "b") == "a/b"


def test_what_is_not_there_is_one_sentence(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    cases = {
        "build": "names no function",
        f"{tmp_path}/absent.py:build": "there is no file",
        f"{tmp_path}/broken.py:build": "ModuleNotFoundError",
        "nothing_of_that_name:build": "can't be imported",
        "os.path:nothing": "has no function 'nothing'",
    }
    for name, message in cases.items():
        with pytest.raises(OmnicompError, match=message):
            find_function(name)
