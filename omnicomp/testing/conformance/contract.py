"""Checks of the contract: `omnicomp.devices.Device`."""

import subprocess
import sys
from typing import Any

import torch

from omnicomp.devices import MEMORY_KEYS, Capabilities, Device, device_names, resolve_device
from omnicomp.devices.base import prepared
from omnicomp.errors import DeviceError
from omnicomp.testing.conformance.base import CheckSkipped, Session, check, expect


@check("contract.known", "declare the device in the entry-point group omnicomp.devices of its package")
def _known(session: Session) -> str:
    expect(session.type in device_names(), f"omnicomp knows no device {session.type!r} and goes by torch alone")
    for name in (session.type, f"{session.type}:0"):
        expect(resolve_device(name) is session.device, f"resolve_device({name!r}) gives another device")
    return f"{type(session.device).__module__}.{type(session.device).__qualname__}"


@check("contract.available", "let is_available() return a bool, and never raise")
def _available(session: Session) -> str:
    found = session.device.is_available()
    expect(found is True, f"is_available() returns {found!r} on a device that runs")
    reason = session.device.unavailable_reason()
    expect(reason == "", f"unavailable_reason() of a device that is there is {reason!r}", "let it be empty")
    return "available"


_ABSENT = """
from omnicomp.devices import BUILT_IN, GROUP
import importlib.metadata
classes = {{cls.type: cls for cls in BUILT_IN}}
for entry in importlib.metadata.entry_points(group=GROUP):
    if entry.name not in classes:
        classes[entry.name] = entry.load()
for cls in classes.values():
    device = cls()
    if device.type == {type!r}:
        found = device.is_available()
        assert isinstance(found, bool), f"is_available() returns {{found!r}}"
        assert found or device.unavailable_reason(), "no reason is given for what is not available"
        print("available" if found else device.unavailable_reason())
"""


@check("contract.never_raises", "catch what the driver raises in is_available(), and return False")
def _never_raises(session: Session) -> str:
    """In a process that has done nothing else, where a device that has to be enabled first is not there."""
    code = _ABSENT.format(type=session.type)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    lines = done.stderr.strip().splitlines()
    expect(done.returncode == 0, f"in a fresh process: {lines[-1] if lines else f'status {done.returncode}'}")
    return done.stdout.strip() or "not declared"


@check("contract.unknown_name", "raise DeviceError for what is not there")
def _unknown(session: Session) -> str:
    try:
        resolve_device(f"{session.type}zz")
    except DeviceError as error:
        expect("known devices are" in str(error), f"the error does not list the known devices: {error}")
        return str(error)
    raise AssertionError(f"resolve_device({session.type + 'zz'!r}) found something")


@check("contract.capabilities", "correct Device.capabilities()")
def _capabilities(session: Session) -> str:
    can = session.device.capabilities()
    expect(_is(can, Capabilities), f"it is a {type(can).__name__}")
    expect(can == session.device.capabilities(), "two calls differ")
    for wider, narrower in (("storage_dtypes", "compute_dtypes"), ("compute_dtypes", "fast_dtypes")):
        extra = [str(dtype) for dtype in getattr(can, narrower) if dtype not in getattr(can, wider)]
        expect(not extra, f"{', '.join(extra)} of {narrower} not in {wider}")
    expect(can.compute_dtypes, "it computes in no dtype at all")
    expect(can.device_count >= 1, f"device_count is {can.device_count} on a device that is available")
    for field in ("max_grid", "warp_sizes"):
        sizes = getattr(can, field)
        expect(all(_is(size, int) and size > 0 for size in sizes), f"{field} is {sizes!r}")
    expect(can.memory_bytes >= 0, f"memory_bytes is {can.memory_bytes}")
    there = "inductor" in session.device.lowerings
    expect(can.inductor == there, f"inductor is {can.inductor}, and the lowerings are {session.device.lowerings}")
    expect(not can.triton or can.inductor, "triton without inductor")
    expect(session.device.lowerings[-1] == "eager", f"lowerings end with {session.device.lowerings[-1]!r}")
    return f"{can.device_count} x {can.name or session.type}, computes in {_names(can.compute_dtypes)}"


def _is(value: Any, kind: type) -> bool:
    """Whether a device that was written elsewhere returns what its contract says."""
    return isinstance(value, kind)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


@check("contract.storage_dtypes", "leave what it can't hold out of storage_dtypes, or let copies carry it")
def _storage(session: Session) -> str:
    dtypes = session.device.capabilities().storage_dtypes
    for dtype in dtypes:
        wanted = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
        back = session.on(wanted).cpu()
        same = back.dtype == dtype and torch.equal(back.view(torch.uint8), wanted.view(torch.uint8))
        expect(same, f"{dtype} does not come back as it was sent")
    return _names(dtypes)


@check("contract.compute_dtypes", "leave what it can't multiply in out of compute_dtypes, or correct its mm")
def _compute(session: Session) -> str:
    dtypes = session.device.capabilities().compute_dtypes
    generator = torch.Generator().manual_seed(0)
    for dtype in dtypes:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        a, b = (torch.randn(17, 17, generator=generator, dtype=wide).to(dtype) for _ in range(2))
        exact = a.to(wide) @ b.to(wide)
        got = (session.on(a) @ session.on(b)).cpu()
        expect(got.dtype == dtype, f"a product of {dtype} is {got.dtype}")
        error = ((got.to(wide) - exact).abs().max() / exact.abs().max()).item()
        bound = 8 * torch.finfo(dtype).eps if dtype != torch.float32 else 2e-3  # TF32 has eps of float16
        expect(error <= bound, f"a product in {dtype} is off by {error:.1e} of its largest value")
    return _names(dtypes)


_BYTES = 64 << 20


@check("contract.memory", "give all of MEMORY_KEYS in memory_stats(), in bytes, and None for what is not known")
def _memory(session: Session) -> str:
    device = session.device
    device.reset_memory_stats()
    before = device.memory_stats()
    expect(tuple(before) == MEMORY_KEYS, f"the keys are {', '.join(before)} and not {', '.join(MEMORY_KEYS)}")
    held: list[torch.Tensor] = []
    after, grown = before, None
    for _ in range(3 if session.is_host else 1):  # of a host, the kernel may take other pages away meanwhile
        before = after
        held.append(torch.ones(_BYTES // 4, device=session.type))
        device.synchronize()
        after = device.memory_stats()
        for key, value in after.items():
            expect(value is None or (_is(value, int) and value >= 0), f"{key} is {value!r}")
        grown = _difference(after, before, "allocated_bytes")
        if grown is None or grown >= 0.9 * _BYTES:
            break
    expect(grown is None or grown >= 0.9 * _BYTES, f"{_BYTES} bytes more in use, and allocated_bytes grew by {grown}")
    peak, now = after["peak_bytes"], after["allocated_bytes"]
    expect(peak is None or now is None or peak >= 0.99 * now, f"peak_bytes {peak} is below allocated_bytes {now}")
    held[0].resize_(0)
    held.clear()
    device.synchronize()
    freed = _difference(after, device.memory_stats(), "allocated_bytes")
    if not session.is_host:  # the host's C library gives memory back when it pleases
        expect(freed is None or freed >= 0.9 * _BYTES, f"{_BYTES} bytes freed, and allocated_bytes fell by {freed}")
    device.reset_memory_stats()
    again = device.memory_stats()["peak_bytes"]
    expect(peak is None or again is None or again <= peak, f"after a reset, peak_bytes went from {peak} to {again}")
    return ", ".join(f"{key} {value}" for key, value in after.items())


def _difference(a: dict[str, int | None], b: dict[str, int | None], key: str) -> int | None:
    first, second = a[key], b[key]
    return None if first is None or second is None else first - second


@check("contract.available_memory", "return free bytes of the current device from available_memory(), or None")
def _available_memory(session: Session) -> str:
    free, total = session.device.available_memory(), session.device.memory_stats()["total_bytes"]
    if free is None:
        return "not told"
    expect(_is(free, int) and free > 0, f"available_memory() is {free!r}")
    expect(total is None or free <= total, f"{free} bytes free of {total}")
    return f"{free} bytes"


@check("contract.synchronize", "wait in synchronize() until what was queued is done, and return None")
def _synchronize(session: Session) -> str:
    x = session.on(torch.ones(64, 64))
    for _ in range(4):
        x = x @ x / 64
    expect(session.device.synchronize() is None, "it returns something")
    session.device.synchronize()
    torch.testing.assert_close(x.cpu(), torch.ones(64, 64))
    return "twice in a row"


@check("contract.to_device", "leave Device.to_device as it is inherited, or keep structures and other values in yours")
def _to_device(session: Session) -> str:
    given: dict[str, Any] = {"a": [torch.ones(2), torch.arange(3)], "b": (torch.nn.Linear(2, 2), "text", None, 3)}
    moved = session.device.to_device(given, dtype=torch.bfloat16)
    tensors = [*moved["a"], *moved["b"][0].parameters()]
    kinds = [(tensor.device.type, tensor.dtype) for tensor in tensors]
    expect(all(kind == session.type for kind, _ in kinds), f"devices afterwards: {kinds}")
    floats = [kinds[0][1], kinds[2][1], kinds[3][1]]
    expect(floats == [torch.bfloat16] * 3, f"floating-point values became {floats}")
    expect(kinds[1][1] == torch.int64, f"integers became {kinds[1][1]}")
    expect(moved["b"][1:] == ("text", None, 3), f"other values became {moved['b'][1:]!r}")
    tied = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    there = session.device.to_device(tied)
    expect(there[0].weight is there[1].weight, "a weight that two layers share became two weights")
    return "tensors, modules and what is no tensor"


@check("contract.prepare", "return from prepare() a module that computes what the given one does")
def _prepare(session: Session) -> str:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)).eval()
    x = torch.randn(3, 8)
    with torch.no_grad():
        wanted = model(x)
        made = prepared(session.device, model.to(session.type), {})
        expect(_is(made, torch.nn.Module), f"it returns a {type(made).__name__}")
        session.close(made(session.on(x)), wanted, 1e-3)
    return "same results"


@check("contract.compile_subgraph", "compile in compile_subgraph(), or raise NotImplementedError if nothing compiles")
def _compile_subgraph(session: Session) -> str:
    from omnicomp.testing.conformance.compiling import one_graph

    module, fakes, inputs, wanted = one_graph(session)
    try:
        compiled = session.device.compile_subgraph(module, fakes)
    except NotImplementedError as error:
        expect(type(session.device).compile_subgraph is Device.compile_subgraph, f"its own raises {error}")
        expect("inductor" not in session.device.lowerings, f"Inductor is registered, and yet: {error}")
        return f"nothing compiles for it: {error}"
    session.close(compiled(list(inputs))[0], wanted, 1e-4)
    return "a graph of three operators"


def half_of(session: Session) -> torch.dtype:
    """A dtype of 16 bits that the device multiplies in.

    Raises:
        CheckSkipped: there is none.
    """
    can = session.device.capabilities()
    for dtype in (torch.bfloat16, torch.float16):
        if dtype in can.compute_dtypes:
            return dtype
    raise CheckSkipped("it computes in no dtype of 16 bits")
