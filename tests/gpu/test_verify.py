"""Verification on a CUDA device: under CUDA graphs, on the right device, and generators that are put back."""

import fragile
import pytest
import torch
from recorded import events
from torch import Tensor

import omnicomp
from omnicomp.analysis.random_state import generator_states
from omnicomp.timeline import Retreat, Verification

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("own_overrides"),
]


def cumsum(off: float = 0.0) -> None:
    @omnicomp.override(op=torch.ops.aten.cumsum.default, name="own_cumsum", devices=("cuda",))
    def own(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
        # Not `cumsum` itself, which would be a call of what is overridden.
        n = x.shape[dim]
        return x @ torch.ones(n, n, device=x.device, dtype=x.dtype).triu() + off


def program(x: Tensor) -> Tensor:
    return x.exp().cumsum(-1) + 1


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("off", [0.0, 0.1])
@torch.no_grad()
def test_an_override_is_verified_also_where_the_graph_is_recorded_later(mode: str, off: float) -> None:
    cumsum(off)
    x = torch.randn(64, 32, device="cuda")
    run = torch.compile(program, backend="omni", mode=mode)
    for _ in range(5):
        torch.testing.assert_close(run(x).clone(), program(x), rtol=1e-4, atol=1e-4)
    assert [e.state for e in events(Verification)] == ["wrong" if off else "right"]
    assert omnicomp.audit().mismatches == ()
    assert len(events(Retreat)) == (1 if off else 0)


@torch.no_grad()
def test_half_precision_is_judged_by_its_own_error() -> None:
    cumsum()
    x = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16)
    torch.compile(program, backend="omni")(x)
    assert [e.state for e in events(Verification)] == ["right"]


def test_the_state_of_a_generator_is_put_back() -> None:
    states = generator_states([torch.device("cuda", torch.cuda.current_device())])
    first = torch.rand(5, device="cuda"), torch.rand(3)
    assert states.changed()
    states.restore()
    assert not states.changed()
    assert torch.equal(first[0], torch.rand(5, device="cuda"))
    assert torch.equal(first[1], torch.rand(3))


failures = [0]


@torch.library.custom_op("omnicomp_gpu_tests::fails_on_request", mutates_args=())
def fails_on_request(x: Tensor) -> Tensor:
    if failures[0]:
        failures[0] -= 1
        raise RuntimeError("planted failure")
    return x * 3


fails_on_request.register_fake(lambda x: torch.empty_like(x))


@torch.no_grad()
def test_a_call_that_drew_random_numbers_and_raised_is_made_again_with_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fragile.a_compilers(monkeypatch, "omnicomp_gpu_tests")

    def noisy(x: Tensor) -> Tensor:
        return fails_on_request(x + torch.rand_like(x))

    x = torch.randn(64, device="cuda")
    torch.manual_seed(3)
    expected = [noisy(x), noisy(x), torch.rand(2, device="cuda")]
    failures[0] = 1
    with torch.compiler.config.patch(force_disable_caches=True):
        run = torch.compile(noisy, backend="omni", options={"fallback_random": True})
        torch.manual_seed(3)
        found = [run(x), run(x), torch.rand(2, device="cuda")]
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)
    assert [e.target_lowering for e in events(Retreat)] == ["eager"]


@torch.no_grad()
def test_out_of_memory_is_tried_again_when_what_the_call_held_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the free memory is held by the call that fails; without freeing it, the second could not have it."""
    fragile.a_compilers(monkeypatch, "omnicomp_gpu_tests")
    free, _ = torch.cuda.mem_get_info()
    tries: list[int] = []

    @torch.library.custom_op("omnicomp_gpu_tests::large", mutates_args=())
    def large(x: Tensor) -> Tensor:
        tries.append(torch.cuda.memory_allocated())
        held = torch.empty(int(free * 0.6), dtype=torch.uint8, device="cuda")
        if len(tries) == 1:
            raise torch.OutOfMemoryError("planted")
        return x + held[:1].float().nan_to_num() * 0

    large.register_fake(lambda x: torch.empty_like(x))
    x = torch.randn(8, device="cuda")
    with torch.compiler.config.patch(force_disable_caches=True):
        found = torch.compile(lambda x: large(x.sin()) + 1, backend="omni")(x)
    torch.testing.assert_close(found, x.sin() + 1)
    assert len(tries) == 2
    assert events(Retreat)[0].target_lowering == "inductor"
