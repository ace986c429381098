import threading

import pytest
import torch
from torch.fx import symbolic_trace

from omnicomp._torch.inductor.own_context import apart


def test_modes_of_the_caller_are_left_outside():
    seen: list[bool] = []
    with torch.inference_mode(), torch.autocast("cpu"):
        apart(lambda: seen.extend((torch.is_grad_enabled(), torch.is_inference_mode_enabled())))
        assert torch.is_inference_mode_enabled()
    assert seen == [False, False]


def test_random_numbers_are_what_they_would_have_been():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with pytest.raises(ValueError, match="after it drew"):
        apart(draw_and_fail)
    assert torch.equal(torch.rand(3), expected)


def draw_and_fail() -> None:
    torch.rand(3)
    raise ValueError("after it drew")


def test_threads_that_overlap_leave_dynamo_as_it_was():
    """Entered and left in the same order, which no nesting of two contexts is."""
    inside, leave = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]

    def work(place: int) -> None:
        apart(lambda: (inside[place].set(), leave[place].wait(10)))

    threads = [threading.Thread(target=work, args=(place,)) for place in range(2)]
    for thread, entered in zip(threads, inside, strict=True):
        thread.start()
        assert entered.wait(10)
    for thread, left in zip(threads, leave, strict=True):
        left.set()
        thread.join()
    found: list[object] = []
    module = symbolic_trace(lambda x: x.sin())
    torch.compile(module, backend=lambda graph, _: found.append(graph) or graph.forward)(torch.ones(2))
    assert found
