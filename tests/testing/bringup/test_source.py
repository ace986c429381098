import pytest
import torch

from omnicomp.errors import OmnicompError
from omnicomp.testing.bringup.source import load

_FILE = """
import torch

def tensor():
    return torch.nn.Linear(2, 3), torch.ones(1, 2)

def several():
    return torch.nn.Bilinear(2, 2, 3), (torch.ones(1, 2), torch.ones(1, 2))

def named():
    return torch.nn.Linear(2, 3), {"input": torch.ones(1, 2)}

def nothing():
    return 3

def broken():
    raise ValueError("no weights")
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mine.py").write_text(_FILE)
    return f"{tmp_path}/mine.py"


@pytest.mark.parametrize("name", ["tensor", "several", "named"])
def test_a_function_gives_a_model_with_inputs(file, name):
    subject = load(f"{file}:{name}", training=True)
    assert subject.model.training
    result = subject.model(*subject.args, **subject.kwargs)
    assert result.shape == (1, 3)
    torch.testing.assert_close(subject.loss(result), result.square().mean())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("berd", 'did you mean "bert"'),
        ("mine.py:nothing", "has to return a module and its inputs, and returns a int"),
        ("mine.py:broken", "raises ValueError: no weights"),
        ("mine.py:absent", "has no function 'absent'"),
    ],
)
def test_bad_input_is_one_sentence(file, name, message):
    with pytest.raises(OmnicompError, match=message):
        load(name.replace("mine.py", file))


def test_an_unknown_size_is_one_sentence():
    with pytest.raises(OmnicompError, match="no size 'huge'"):
        load("bert", "huge")
