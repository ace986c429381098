"""What torch counts of writes to parameters, and what is wrapped as it does not."""

import torch
from foreach_versions import uncounted

from omnicomp._torch import parameters


def test_all_functions_on_lists_count_what_they_write_on_the_cpu() -> None:
    assert uncounted("cpu") == set()


def test_no_more_is_replaced_than_has_to_be_and_all_is_put_back() -> None:
    parameters.stop_observing()  # what other tests left
    before = {name: getattr(torch, name) for name in dir(torch)}
    data = torch.nn.Parameter.data
    parameters.observe(lambda parameter: None, lambda tensors: None)
    try:
        changed = {name for name, value in before.items() if getattr(torch, name) is not value}
        assert changed == {"_foreach_lerp_", "_foreach_zero_"}
        assert torch.nn.Parameter.data is not data
    finally:
        parameters.stop_observing()
    assert all(getattr(torch, name) is value for name, value in before.items())
    assert torch.nn.Parameter.data is data
