"""Checks of the device module, `torch.<type>`, and of what torch makes of it: generators, streams, autocast, tests."""

import contextlib
from collections.abc import Generator

import torch
from torch.utils.checkpoint import checkpoint

from omnicomp._torch.devices.torch_tests import run_generic_tests
from omnicomp.testing.conformance.base import CheckSkipped, Session, check, expect
from omnicomp.testing.conformance.contract import half_of

FUNCTIONS = (
    "current_device",
    "device",
    "device_count",
    "get_rng_state",
    "is_available",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "set_device",
    "set_rng_state",
    "synchronize",
)
"""What `torch.<type>` has by convention, beside streams, memory and autocast, which are checked apart."""
_OF_THE_HOST = ("current_device", "device_count", "is_available", "set_device", "synchronize")


@check("module.functions", "write them into the module that torch._register_device_module is given")
def _functions(session: Session) -> str:
    expect(session.module is not None, f"there is no torch.{session.type}")
    wanted = _OF_THE_HOST if session.is_host else FUNCTIONS
    lacking = [name for name in wanted if not hasattr(session.module, name)]
    expect(not lacking, f"torch.{session.type} has no {', '.join(lacking)}")
    expect(session.module.is_available() is True, f"torch.{session.type}.is_available() is not True")
    counted, told = session.module.device_count(), session.device.capabilities().device_count
    expect(counted == told, f"device_count() is {counted}, and capabilities() say {told}")
    return f"{len(wanted)} functions"


@check("module.device", "let torch.<type>.device set the current device and put it back")
def _device(session: Session) -> str:
    if session.is_host:
        raise CheckSkipped("the host is one device")
    module, before = session.module, session.module.current_device()
    for index in range(session.count):
        with module.device(index):
            expect(
                module.current_device() == index, f"current_device() is {module.current_device()} in device({index})"
            )
            made = torch.empty(1, device=session.type).device
            expect(made == torch.device(session.type, index), f"a tensor on {session.type!r} is on {made}")
        expect(module.current_device() == before, f"device({index}) leaves {module.current_device()} behind")
    try:
        module.set_device(session.count - 1)
        expect(module.current_device() == session.count - 1, "set_device() has no effect")
    finally:
        module.set_device(before)
    return f"{session.count} of them"


@check("module.methods", "call torch.utils.generate_methods_for_privateuse1_backend() after the module is registered")
def _methods(session: Session) -> str:
    x, name = torch.ones(2), session.type
    expect(getattr(x, name)().device.type == name, f"Tensor.{name}() gives another device")
    layer = torch.nn.Linear(2, 2)
    expect(getattr(layer, name)().weight.device.type == name, f"Module.{name}() gives another device")
    if session.is_host:
        return "Tensor.cpu, Module.cpu"
    expect(getattr(session.on(x), f"is_{name}") is True, f"Tensor.is_{name} is not True")
    expect(getattr(x, f"is_{name}") is False, f"Tensor.is_{name} of a tensor on the CPU is not False")
    return f"Tensor.{name}, Tensor.is_{name}, Module.{name}"


@check("module.accelerator", "write AcceleratorHooksInterface (isAvailable, deviceCount, ...) in C++")
def _accelerator(session: Session) -> str:
    if session.is_host:
        raise CheckSkipped("the host is no accelerator")
    found = torch.accelerator.current_accelerator()
    expect(found is not None and found.type == session.type, f"torch.accelerator sees {found}")
    counted = torch.accelerator.device_count()
    expect(counted == session.count, f"torch.accelerator.device_count() is {counted} instead of {session.count}")
    torch.accelerator.synchronize()
    return str(found)


@check("module.guard", "write DeviceGuardImplInterface in C++, and C10_REGISTER_GUARD_IMPL it")
def _guard(session: Session) -> str:
    """Operators run on the device of their tensors, also when another one is current."""
    if session.count < 2:
        raise CheckSkipped("there is one device")
    other = f"{session.type}:1"
    x = torch.arange(6.0, device=other)
    got = (x * 2).sum()
    expect(str(got.device) == other, f"a sum of a tensor on {other} is on {got.device}")
    expect(got.item() == 30.0, f"and it is {got.item()}")
    back = x.to(f"{session.type}:0")
    expect(
        str(back.device) == f"{session.type}:0" and torch.equal(back.cpu(), x.cpu()), "a copy between devices is wrong"
    )
    expect(session.module.current_device() == 0, "an operator left another device current")
    return f"{other} while 0 is current"


@check("module.generator", "write a generator (c10::GeneratorImpl), and give it from the hooks")
def _generator(session: Session) -> str:
    generator = torch.Generator(session.type)
    expect(generator.device.type == session.type, f"torch.Generator({session.type!r}) is of {generator.device}")

    def draw() -> torch.Tensor:
        return torch.rand(64, device=session.type, generator=generator).cpu()

    generator.manual_seed(3)
    first, second = draw(), draw()
    expect(not torch.equal(first, second), "two draws are the same")
    generator.manual_seed(3)
    expect(torch.equal(draw(), first), "the same seed gives other numbers")
    state = generator.get_state()
    third = draw()
    generator.set_state(state)
    expect(torch.equal(draw(), third), "the same state gives other numbers")
    expect(bool((first >= 0).all() and (first < 1).all()), "numbers outside of [0, 1)")
    return "seed and state"


@check("module.random", "seed all generators of the device in torch.<type>.manual_seed_all()")
def _random(session: Session) -> str:
    def draw() -> torch.Tensor:
        return torch.randn(64, device=session.type).cpu()

    torch.manual_seed(5)
    first = draw()
    torch.manual_seed(5)
    expect(torch.equal(draw(), first), "torch.manual_seed does not seed the device")
    if session.is_host:
        return "torch.manual_seed"
    module = session.module
    state = module.get_rng_state()
    wanted = draw()
    module.set_rng_state(state)
    expect(torch.equal(draw(), wanted), "get_rng_state() and set_rng_state() do not bring numbers back")
    with torch.random.fork_rng(devices=range(session.count), device_type=session.type):
        torch.manual_seed(7)
        inside = draw()
    module.set_rng_state(state)
    expect(torch.equal(draw(), wanted) and not torch.equal(inside, wanted), "torch.random.fork_rng does not hold")
    return "torch.manual_seed, the state, torch.random.fork_rng"


@check("module.checkpoint", "set _initialized = True in torch.<type>, beside get_rng_state() and set_rng_state()")
def _checkpoint(session: Session) -> str:
    """What `torch.utils.checkpoint` computes again in the backward draws the numbers that the forward drew."""
    for reentrant in (False, True):
        x = session.on(torch.ones(256)).requires_grad_()
        y = checkpoint(torch.nn.functional.dropout, x, use_reentrant=reentrant)
        y.sum().backward()
        # Of ones, what dropout gives is the gradient too: 2 where it keeps an element, else 0.
        kept = x.grad is not None and torch.equal(x.grad.cpu(), y.detach().cpu())
        expect(kept, f"dropout draws other numbers in the backward (use_reentrant={reentrant})")
    return "dropout is the same in the backward"


@check("module.streams", "write streams and events in the guard (getNewStream, record, block, queryEvent, ...)")
def _streams(session: Session) -> str:
    if session.is_host:
        raise CheckSkipped("the host has no streams")
    stream, event = torch.Stream(device=session.type), torch.Event(device=session.type, enable_timing=True)
    later = torch.Event(device=session.type, enable_timing=True)
    x = session.on(torch.ones(128))
    event.record(stream)
    with _current(session, stream):
        y = x * 3
        later.record(stream)
    later.synchronize()
    expect(later.query(), "an event that was waited for is not done")
    expect(event.elapsed_time(later) >= 0, f"elapsed_time is {event.elapsed_time(later)}")
    stream.wait_event(later)
    stream.synchronize()
    expect(stream.query(), "a stream that was waited for is not done")
    expect(bool((y == 3).all()), "what ran on the stream is wrong")
    return "record, wait, query, elapsed time"


@contextlib.contextmanager
def _current(session: Session, stream: torch.Stream) -> Generator[None]:
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    try:
        yield
        expect(torch.accelerator.current_stream() == stream, "torch.accelerator.set_stream has no effect")
    finally:
        torch.accelerator.set_stream(before)


@check(
    "module.autocast", "register casts for the key Autocast<device>, and give get_amp_supported_dtype() in the module"
)
def _autocast(session: Session) -> str:
    dtype = half_of(session)
    x, weight = session.on(torch.ones(4, 4)), session.on(torch.ones(4, 4)).requires_grad_()
    with torch.autocast(session.type, dtype=dtype):
        product, softmax = x @ weight, torch.softmax(x.to(dtype), -1)
        with torch.autocast(session.type, enabled=False):
            plain = x @ weight
    expect(product.dtype == dtype, f"a product under autocast to {dtype} is {product.dtype}")
    expect(plain.dtype == torch.float32, f"a product where autocast is switched off is {plain.dtype}")
    expect(softmax.dtype == torch.float32 or session.is_host, f"a softmax under autocast is {softmax.dtype}")
    product.float().sum().backward()
    expect(weight.grad is not None and weight.grad.dtype == torch.float32, "the gradient of a parameter is not float32")
    expect((x @ weight).dtype == torch.float32, "autocast goes on behind its end")
    return f"products in {dtype}"


@check("framework.device_type_tests", "give the device a name and a module; PyTorch finds the rest by itself")
def _framework(session: Session) -> str:
    ran, wrong = run_generic_tests(session.type)
    expect(ran, f"PyTorch's framework makes no test for {session.type}")
    expect(not wrong, "; ".join(wrong))
    return f"{len(ran)} of PyTorch's generic tests made and run: {', '.join(ran)}"
