"""Checks of tensors: copies, views, serialization, gradients."""

import copy
import io
import pickle
from typing import Any

import torch

from omnicomp.testing.conformance.base import CheckSkipped, Session, check, expect

__all__: list[str] = []


@check("tensors.copies", "write _copy_from, _copy_from_and_resize and the strided case of both")
def _copies(session: Session) -> str:
    wanted = torch.arange(60.0).reshape(3, 4, 5)
    forms = {
        "contiguous": wanted,
        "transposed": wanted.transpose(0, 2),
        "sliced": wanted[:, ::2, 1:],
        "expanded": wanted[:1].expand(3, 4, 5),
        "empty": wanted[:0],
        "a number": wanted[0, 0, 1],
        "conjugated": torch.complex(wanted, wanted + 1).conj(),
        "negated": torch.complex(wanted, wanted + 1).conj().imag,
    }
    for name, tensor in forms.items():
        there = session.on(tensor)
        expect(there.device.type == session.type, f"{name}: on {there.device}")
        expect(torch.equal(there.cpu(), tensor), f"{name}: does not come back as it was sent")
        expect(torch.equal(there.clone().cpu(), tensor), f"{name}: a clone differs")
    target = torch.zeros(4, 3, device=session.type).t()
    target.copy_(wanted[:, :, 0])
    expect(torch.equal(target.cpu(), wanted[:, :, 0]), "copy_ into a transposed tensor is wrong")
    target.copy_(torch.arange(4))
    expect(torch.equal(target.cpu(), torch.arange(4.0).expand(3, 4)), "copy_ that converts and broadcasts is wrong")
    return ", ".join(forms)


@check("tensors.views", "write as_strided, view, _reshape_alias and set_, so that views share memory")
def _views(session: Session) -> str:
    base = torch.zeros(4, 6, device=session.type)
    views = {
        "view": base.view(6, 4),
        "transpose": base.t(),
        "slice": base[1:, ::2],
        "as_strided": base.as_strided((2, 2), (6, 1), 1),
        "unfold": base.unfold(1, 2, 2),
        "detach": base.detach(),
    }
    for number, (name, view) in enumerate(views.items(), 1):
        same = view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        expect(same, f"{name} has a memory of its own")
        view.fill_(number)
        expect(base.max().item() == number, f"writing to a {name} does not change its base")
    base.zero_()
    base[1, 2] = 5.0
    base[torch.tensor([0, 3], device=session.type), 0] = 7.0
    expect(base.sum().item() == 19.0, f"after writing 5, 7 and 7 by index, the sum is {base.sum().item()}")
    base.resize_(8, 6)
    expect(base.shape == (8, 6) and base[:4].sum().item() == 19.0, "resize_ loses what was there")
    return ", ".join(views)


def _round_trip(value: Any, **arguments: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, **arguments)


@check("tensors.serialization", "torch.serialization.register_package for the device, and a storage that can be filled")
def _serialization(session: Session) -> str:
    base = session.on(torch.arange(12.0))
    given: dict[str, Any] = {"base": base, "view": base[2:8:2], "half": base.to(torch.float16), "number": 3}
    back = _round_trip(given)
    for name in ("base", "view", "half"):
        expect(back[name].device.type == session.type, f"{name} comes back on {back[name].device}")
        expect(torch.equal(back[name].cpu(), given[name].cpu()), f"{name} comes back changed")
    back["base"][2] = 77.0
    expect(back["view"][0].item() == 77.0, "a view and its base come back without shared memory")
    at_home = _round_trip(given, map_location="cpu")
    expect(at_home["view"].device.type == "cpu", f"map_location='cpu' gives {at_home['view'].device}")
    expect(torch.equal(at_home["view"], given["view"].cpu()), "with map_location='cpu' it comes back changed")
    brought = _round_trip({"x": torch.arange(3.0)}, map_location=session.type)["x"]
    expect(brought.device.type == session.type, f"map_location={session.type!r} gives {brought.device}")
    for name, other in (("pickle", pickle.loads(pickle.dumps(base))), ("deepcopy", copy.deepcopy(base))):
        same = other.device == base.device and torch.equal(other.cpu(), base.cpu())
        expect(same and other.data_ptr() != base.data_ptr(), f"{name} gives something else")
    return "torch.save, torch.load, map_location, pickle, deepcopy"


@check("tensors.state_dict", "see tensors.serialization and tensors.copies")
def _state_dict(session: Session) -> str:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    state = _round_trip(model.to(session.type).state_dict())
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    other.load_state_dict(state)
    for name, value in other.state_dict().items():
        expect(torch.equal(value, model.state_dict()[name].cpu()), f"{name} differs")
    return "a model's parameters and buffers"


@check("tensors.pinned_memory", "give a pinned allocator from the hooks (getPinnedMemoryAllocator)")
def _pinned(session: Session) -> str:
    if session.is_host:
        raise CheckSkipped("the host has no need of it")
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != session.type:
        raise CheckSkipped(f"torch pins memory for {accelerator}")
    pinned = torch.arange(8.0).pin_memory()
    expect(pinned.is_pinned(), "pin_memory() gives memory that is not pinned")
    there = pinned.to(session.type, non_blocking=True)
    session.device.synchronize()
    expect(torch.equal(there.cpu(), torch.arange(8.0)), "an asynchronous copy of pinned memory is wrong")
    return "pin_memory, a copy without waiting"


@check("tensors.printing", "write _local_scalar_dense, and see tensors.copies")
def _printing(session: Session) -> str:
    x = session.on(torch.tensor([1.5, -2.0]))
    expect("1.5" in repr(x), f"repr is {x!r}")
    expect(session.is_host or session.type in repr(x), f"repr does not tell the device: {x!r}")
    expect(x[0].item() == 1.5 and x.tolist() == [1.5, -2.0], f"tolist() is {x.tolist()}")
    return repr(x)


@check("tensors.autograd", "leave autograd to torch: register kernels for the device's key alone, not for Autograd")
def _autograd(session: Session) -> str:
    wanted = torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_()
    x = session.on(wanted).requires_grad_()
    for value in (wanted, x):
        loss = (value.exp() * value.t().contiguous().t()).tanh().sum()
        (first,) = torch.autograd.grad(loss, value, create_graph=True)
        (first * first).sum().backward()
    expect(x.grad is not None, "there is no gradient")
    assert x.grad is not None
    assert wanted.grad is not None
    expect(x.grad.device.type == session.type, f"the gradient is on {x.grad.device}")
    session.close(x.grad, wanted.grad, 1e-4)
    seen: list[str] = []
    y = session.on(torch.ones(2)).requires_grad_()
    y.register_hook(lambda gradient: seen.append(gradient.device.type))
    (y.cpu() * 2).sum().backward()
    expect(seen == [session.type], f"the gradient of a copy to the CPU comes on {seen}")
    return "first and second derivative, and through a copy"
