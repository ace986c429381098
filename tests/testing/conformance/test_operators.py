from collections.abc import Iterator

import pytest
import torch

from omnicomp.devices import resolve_device
from omnicomp.testing.conformance.base import Session
from omnicomp.testing.conformance.operators import QUICK, check_operator, operator_names


@pytest.fixture
def session(sim) -> Session:
    return Session(device=resolve_device("sim"))


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    library = torch.library.Library("aten", "IMPL")
    yield library
    library._destroy()


@pytest.mark.parametrize("name", ["add", "nn.functional.relu", "sort", "as_strided.partial_views", "bitwise_and"])
def test_right_operators_pass(session, name):
    found = check_operator(session, name)
    assert found["verdict"] == "passed", found


def test_a_wrong_kernel_is_reported(session, library):
    library.impl("relu", lambda x: x.clone(), "PrivateUse1", allow_override=True)
    found = check_operator(session, "nn.functional.relu")
    assert found["verdict"] == "failed"
    assert "sample 0: value 0: Scalars are not close" in found["found"]
    assert "nn.functional.relu" in found["todo"]


def test_a_wrong_gradient_is_reported(session, library):
    library.impl("threshold_backward", lambda grad, x, threshold: grad.clone(), "PrivateUse1", allow_override=True)
    found = check_operator(session, "nn.functional.relu")
    assert found["verdict"] == "failed"
    assert "gradient 0" in found["found"]


def test_a_result_on_another_device_is_reported(session, library):
    library.impl("relu", lambda x: x.cpu().relu(), "PrivateUse1", allow_override=True)
    found = check_operator(session, "nn.functional.relu")
    assert found["verdict"] == "failed"


def test_an_operator_that_raises_is_reported(session, library):
    def relu(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the queue is full")

    library.impl("relu", relu, "PrivateUse1", allow_override=True)
    assert "raises RuntimeError: the queue is full" in check_operator(session, "nn.functional.relu")["found"]


def test_what_is_not_compared_is_named(session):
    assert "uninitialised" not in check_operator(session, "add")["found"]
    assert "uninitialised memory" in check_operator(session, "new_empty")["found"]
    assert "may draw its own" in check_operator(session, "rand_like")["found"]
    assert check_operator(session, "to_sparse")["verdict"] == "skipped"


def test_the_quick_choice_is_in_the_database():
    assert operator_names(quick=True) == list(QUICK)
    assert len(operator_names(quick=False)) > 600
    assert operator_names(quick=True, pattern="bitwise_*,mm") != []
