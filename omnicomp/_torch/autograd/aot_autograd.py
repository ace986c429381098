"""AOTAutograd for devices and policies without Inductor: the same callbacks, no decompositions of Inductor's."""

from collections.abc import Callable, Sequence
from typing import Any

from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from omnicomp._torch.autograd.partitioner import partition


def compile_graph(gm: GraphModule, inputs: Sequence[Any], inner_compile: Callable[..., Any]) -> Any:
    """Trace forward and backward and build each with `inner_compile(part, inputs, is_backward=…, is_inference=…)`.

    Random numbers are eager's, since nothing replaces them by Inductor's seeded ones.
    """

    def part(*, is_backward: bool = False, is_inference: bool = False) -> Callable[[GraphModule, Sequence[Any]], Any]:
        def compile_part(module: GraphModule, part_inputs: Sequence[Any]) -> Any:
            return inner_compile(module, part_inputs, is_backward=is_backward, is_inference=is_inference)

        return compile_part

    return aot_autograd(
        fw_compiler=part(),
        bw_compiler=part(is_backward=True),
        inference_compiler=part(is_inference=True),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )(gm, inputs)
