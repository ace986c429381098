import io
from typing import Any

import pytest
import torch
from torch import nn


def saved(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


@pytest.mark.parametrize("location", [None, "cpu", "sim:1", "sim"])
def test_a_tensor_comes_back_where_it_is_asked_for(sim: Any, location: str | None) -> None:
    x = torch.randn(3, 4, device="sim:0")
    found = torch.load(saved({"x": x, "view": x.t()[1:]}), map_location=location, weights_only=True)
    assert found["x"].device == torch.device(location or "sim:0") if location != "sim" else torch.device("sim", 0)
    assert torch.equal(found["x"].cpu(), x.cpu())
    assert found["view"].untyped_storage().data_ptr() == found["x"].untyped_storage().data_ptr()


def test_what_the_host_saved_is_loaded_onto_the_device(sim: Any) -> None:
    model = nn.Linear(3, 2)
    there = nn.Linear(3, 2, device="sim")
    there.load_state_dict(torch.load(saved(model.state_dict()), map_location="sim", weights_only=True))
    x = torch.randn(4, 3)
    torch.testing.assert_close(there(x.to("sim")).cpu(), model(x))


def test_whole_modules_and_optimizers_travel(sim: Any) -> None:
    model = nn.Linear(3, 2).to("sim")
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3, device="sim")).sum().backward()
    optimizer.step()
    again, state = torch.load(saved((model, optimizer.state_dict())), weights_only=False)
    assert torch.equal(again.weight.cpu(), model.weight.cpu())
    assert state["state"][0]["exp_avg"].device.type == "sim"


def test_a_device_that_is_not_there_is_named(sim: Any) -> None:
    with pytest.raises(RuntimeError, match="SIM device 5"):
        torch.load(saved(torch.ones(2, device="sim")), map_location="sim:5", weights_only=True)


def test_storages_move(sim: Any) -> None:
    storage = torch.arange(4, dtype=torch.uint8).untyped_storage()
    there = storage.sim()  # pyright: ignore[reportAttributeAccessIssue]
    assert there.device == torch.device("sim", 0)
    assert there.cpu().tolist() == [0, 1, 2, 3]
