"""The measured product: real numbers, kept in the process and on disk, and no trace in the user's program."""

import json

import pytest
import torch

from omnicomp._torch.inductor.store import folder
from omnicomp.passes.dtypes import resolve


@pytest.fixture(autouse=True)
def fresh():
    resolve.forget()
    yield
    resolve.forget()


def test_it_is_measured_once_and_kept(monkeypatch):
    first = resolve.measured(torch.bfloat16)
    assert first.wide_ms > 0
    assert first.low_ms > 0
    assert first.ratio == first.wide_ms / first.low_ms
    assert f"{first.low_ms:.2f} ms in bfloat16" in str(first)
    monkeypatch.setattr(resolve, "_measure", lambda *args: pytest.fail("measured again"))
    assert resolve.measured(torch.bfloat16) is first
    resolve.forget()
    assert resolve.measured(torch.bfloat16) == first, "from disk"


def test_a_damaged_file_is_measured_anew():
    resolve.measured(torch.bfloat16)
    (path,) = (folder() / "speeds").glob("*.json")
    for text in ("{", "[]", json.dumps({"dtype": "bfloat16"})):
        path.write_text(text)
        resolve.forget()
        assert resolve.measured(torch.bfloat16).low_ms > 0
    assert json.loads(path.read_text())["value"]["dtype"] == "bfloat16"


def test_another_number_of_threads_is_another_measurement():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert resolve.measured(torch.bfloat16).threads == 1
        torch.set_num_threads(2)
        assert resolve.measured(torch.bfloat16).threads == 2
    finally:
        torch.set_num_threads(before)


def test_it_leaves_the_users_state_alone():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert resolve.measured(torch.bfloat16).wide_ms > 0
    assert torch.equal(torch.get_rng_state(), state)


def test_it_can_be_measured_while_dynamo_compiles():
    seen = []

    def backend(module, inputs):
        seen.append(resolve.measured(torch.bfloat16))
        return module.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert seen[0].low_ms > 0
