"""Methods of tensors that a function is given: Dynamo takes them into its graph without a guard.

`f(torch.Tensor.add, x, y)`, compiled, goes on adding when it is called with `torch.Tensor.mul`; nor is there a guard on
one in a closure, an attribute or a global. A reproducer is `tests/_torch/repairs/test_method_guards.py`.
"""

import contextlib
from types import MethodDescriptorType, WrapperDescriptorType
from typing import Final

from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.symbolic_convert import tls

from omnicomp._torch.repairs.needed import Needed

NEEDED: Final = Needed(first="2.11", issue="https://github.com/pytorch/pytorch/issues/197811")


def guard_methods() -> None:
    """While Dynamo waits for a backend: guard every method of tensors that the function reads from somewhere."""
    translator = getattr(tls, "current_tx", None)  # none where Dynamo did not capture the graph
    if translator is None or not NEEDED.here:
        return
    for source, variable in translator.output.variable_tracker_cache.items():
        # Not by its attribute, which for what the function has not read so far would make it an input of the graph.
        if isinstance(vars(variable.unwrap()).get("value"), MethodDescriptorType | WrapperDescriptorType):
            with contextlib.suppress(NotImplementedError):  # what a constant holds has no guard
                install_guard(source.make_guard(GuardBuilder.BUILTIN_MATCH))
